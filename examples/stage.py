"""What the examples share: a folder, a server, real worker processes, and an orderly end."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from books import open_books

from celery_distlock.testing import EmbeddedServer, die_with_parent

HERE = Path(__file__).parent
STOP_TIMEOUT = 10.0  # seconds for a warm shutdown
STALL_TIMEOUT = 60.0  # seconds until something that has to happen is given up


class StalledError(Exception):
    """What had to happen did not."""


def perform(story) -> int:
    """
    Play *story*, a function that returns whether all was as it should be; return the exit status.

    It gets a folder of its own, and a server that its workers and this process
    find where Celery looks. All of that is gone afterwards.
    """
    clean_up_on_sigterm()
    try:
        with work_folder() as folder:
            return 0 if play(story, folder) else 1
    except KeyboardInterrupt:
        return stopped()


def play(story, folder: Path) -> bool:
    """Do so in *folder*; return whether all was as it should be."""
    with EmbeddedServer() as server:
        os.environ["CELERY_BROKER_URL"] = os.environ["CELERY_RESULT_BACKEND"] = server.url
        os.environ["EXAMPLE_DB"] = str(folder / "example.sqlite")
        try:
            return story(folder)
        except StalledError as error:
            show(f"It went wrong: {error}\n{last_lines(folder)}")
            return False
        finally:
            logging.disable()  # a process that misses the server, which goes now, need not say so


def show(line: str = "") -> None:
    """Print at once, so that the story can be followed through a pipe as well."""
    print(line, flush=True)


def wait_until(fact, what: str):
    """Call *fact* until it returns something true, and return that."""
    deadline = time.monotonic() + STALL_TIMEOUT
    while not (value := fact()):
        if time.monotonic() > deadline:
            raise StalledError(f"waited {STALL_TIMEOUT:g} s for {what}")
        time.sleep(0.01)
    return value


def open_database():
    """Open the example's database, in any of its processes."""
    return open_books(os.environ["EXAMPLE_DB"])


def make_database(schema: str):
    """Open the example's database for the first time."""
    db = open_database()
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(schema)
    return db


def clean_up_on_sigterm() -> None:
    """Let a supervisor's SIGTERM clean up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def stopped() -> int:
    show("Stopped; nothing is left running.")
    return 128 + signal.SIGINT


@contextmanager
def work_folder(keep: bool = False):
    """A new folder, removed at the end unless it shall be kept."""
    if keep:
        yield Path(tempfile.mkdtemp(prefix="celery-distlock-"))
    else:
        with tempfile.TemporaryDirectory(prefix="celery-distlock-") as folder:
            yield Path(folder)


@contextmanager
def workers(app: str, names, folder: Path, *, processes: int, environment=None, arguments=()):
    """
    Real `celery worker` processes by their names, stopped in the end.

    Each consumes the common queue and one of its own name.
    """
    started = {}
    try:
        for name in names:
            # Not in one expression: a failure has to find those that did start.
            started[name] = start_worker(app, name, folder, processes, environment or {}, arguments)
        yield started
        stop_workers(started.values())
    finally:
        kill_workers(started.values())


def start_worker(app, name, folder, processes, environment, arguments) -> subprocess.Popen:
    command = [
        *(sys.executable, "-m", "celery", "-A", app, "worker"),
        *("--pool", "prefork", "--concurrency", str(processes)),
        *("--hostname", f"{name}@%h", "--queues", f"celery,{name}", "--loglevel", "WARNING"),
        *arguments,
    ]
    # A killed worker leaves files behind.
    environment = os.environ | {"TMPDIR": str(folder)} | environment
    with (folder / f"{name}.log").open("wb") as log:
        # A session of its own keeps the terminal's Ctrl-C from the worker: it
        # is ours to stop, with its children, in an orderly way.
        return subprocess.Popen(
            die_with_parent(command),
            cwd=HERE,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_workers(started) -> None:
    """Let the workers finish what they are at, in a warm shutdown."""
    for worker in started:
        worker.terminate()
    for worker in started:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(STOP_TIMEOUT)


def kill_workers(started) -> None:
    for worker in started:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            wait_until_gone(worker.pid)


def wait_until_gone(session: int, timeout: float = 1.0) -> None:
    """Wait for the children of a killed worker, which may be writing to the folder."""
    deadline = time.monotonic() + timeout
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(session, 0)
            time.sleep(0.01)


def last_lines(folder: Path, count: int = 15) -> str:
    return "\n".join(
        f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-count:])
        for log in sorted(folder.glob("*.log"))
    )
