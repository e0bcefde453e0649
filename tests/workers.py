"""Celery workers as users run them: processes of their own, with real pools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from celery_distlock.testing import die_with_parent
from tests import processes
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).parent.parent


class WorkerProcess:
    """
    ``celery -A app worker`` as a session of its own, so that nothing of it can be overlooked.

    Args:
        app: A module of `tests.apps`, by its full name.
        folder: Where its log goes.
        env: Additions to this process's environment.
        args: Additions to the command line.
    """

    def __init__(
        self,
        app: str,
        *,
        folder: Path,
        pool: str = "prefork",
        concurrency: int = 1,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.name = f"worker-{uuid.uuid4().hex[:8]}@test"
        self.concurrency = concurrency
        self.command = [
            *(sys.executable, "-m", "celery", "-A", app, "worker"),
            *("--pool", pool, "--concurrency", str(concurrency), "--hostname", self.name),
            *("--loglevel", "INFO", "--without-gossip", "--without-mingle"),
            *args,
        ]
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
            ),
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        self.log_file = folder / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name}>"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the worker was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def children(self) -> list[int]:
        """The pids of the prefork pool's processes."""
        return processes.children(self.pid)

    def wait_whole(self) -> None:
        """
        Wait until the prefork pool has replaced its dead processes.

        Before, Celery may still give one of them a task, which is lost with early acknowledgement.
        """
        wait_until(
            lambda: not self.running or len(self.children()) == self.concurrency,
            timeout=60.0,
            what=f"{self!r} to have all of its processes",
        )

    def start(self, *, wait: bool = True) -> None:
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                die_with_parent(self.command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self.env,
                start_new_session=True,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout: float = 60.0) -> None:
        self.wait_log(f"{self.name} ready.", timeout)

    def wait_log(self, text: str, timeout: float = 30.0) -> None:
        """Wait until *text* is in the log; fail, with the log, if the worker ends before."""

        def logged() -> bool:
            running = self.running
            if text in self.log():
                return True
            assert running, f"{self!r} ended with status {self.process.poll()}:\n{self.log()}"
            return False

        try:
            wait_until(logged, timeout=timeout, what=f"{text!r} in the log of {self!r}")
        except AssertionError as error:
            error.add_note(self.log())
            raise

    def stop(self, warm: float = 15.0, cold: float = 10.0) -> int:
        """
        Stop as an operator does: warm (SIGTERM), then cold (SIGQUIT), then by force.

        Returns the exit status; fails if an orderly end has left processes behind. Does nothing
        to a worker that has ended already, but for taking away what it left.

        Args:
            warm: Seconds for running tasks to finish.
            cold: Seconds for the pool to go away after that.
        """
        if self.running:
            self.resume()
        for signum, patience in ((signal.SIGTERM, warm), (signal.SIGQUIT, cold)):
            if not self.running:
                break
            self.process.send_signal(signum)
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self._killed = signum is signal.SIGQUIT
        left = [] if self._killed else self._wait_gone()
        self.kill(whole=True)
        assert not left, f"{self!r} left processes behind: {left}\n{self.log()}"
        return self.process.returncode

    def kill(self, *, whole: bool = False) -> None:
        """
        SIGKILL the main process, as the OOM killer does; return once it is gone.

        With *whole*, all of its processes, as when the machine vanishes. Without, pool processes
        may live on as orphans, until `stop`.
        """
        self._killed = True
        if self.running:
            self.process.kill()
        self.process.wait()
        if whole:
            processes.signal_session(self.pid, signal.SIGKILL)
            wait_until(lambda: not processes.session(self.pid), what=f"the end of all of {self!r}")

    def pause(self) -> None:
        """Freeze all of the worker's processes, as when the machine stalls; return once it has."""
        processes.signal_session(self.pid, signal.SIGSTOP)
        wait_until(
            lambda: {process.state for process in processes.session(self.pid)} <= {"T"},
            what=f"{self!r} to be stopped",
        )

    def resume(self) -> None:
        processes.signal_session(self.pid, signal.SIGCONT)

    def _wait_gone(self) -> list[processes.Process]:
        try:
            wait_until(lambda: not processes.session(self.pid), timeout=20.0)
        except AssertionError:
            return processes.session(self.pid)
        return []


def stop_all(workers: Iterable[WorkerProcess], warm: float, cold: float = 10.0) -> None:
    """Stop *workers* as `WorkerProcess.stop` does, all at the same time."""
    workers = list(workers)
    for worker in workers:
        if worker.running:
            worker.process.terminate()
    for worker in workers:
        worker.stop(warm, cold)
