"""A ZooKeeper of the tests' own, where one is installed (Debian's package `zookeeper`)."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from kazoo.client import KazooClient

from celery_distlock.testing import die_with_parent
from tests.waiting import wait_until

JAVA = shutil.which("java")
_FOLDER = Path(os.environ.get("DISTLOCK_TEST_ZOOKEEPER_JARS", "/usr/share/java"))
_JAR = _FOLDER / "zookeeper.jar"  # its manifest names the others
MISSING = ", ".join(
    what for what, there in (("java", JAVA), (str(_JAR), _JAR.exists())) if not there
)

_PORTS = range(20000, 32000)  # below those that outgoing connections get
_ATTEMPTS = 5  # at free ports, which another process may take first
_START_TIMEOUT = 60.0  # seconds; one where nothing else runs
_STOP_TIMEOUT = 15.0
_OPTIONS = {
    "tickTime": "200",  # the shortest session is two of them
    "minSessionTimeout": "400",
    "maxSessionTimeout": "40000",
    "maxClientCnxns": "0",
    "admin.enableServer": "false",
}
_JVM = (
    *("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    "-Dzookeeper.fsync.warningthresholdms=20000",
    "-Dznode.container.checkIntervalMs=200",
)


class ZooKeeperServer:
    """
    One server: on loopback and a free port, with its data in a temporary folder.

    The port and the data stay the same for the life of the object.
    """

    def __init__(self, **options: str) -> None:
        self._options = {**_OPTIONS, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.folder = Path()

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="celery-distlock-zookeeper-"))
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def __repr__(self) -> str:
        return f"<ZooKeeperServer, port {self.port}>"

    @property
    def url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")

    def client(self, **arguments: object) -> KazooClient:
        """A new client, not started."""
        return KazooClient(f"127.0.0.1:{self.port}", **arguments)

    def start(self) -> None:
        """
        Start it, with the data that it had, and return once it answers.

        Raises:
            RuntimeError: It did not come up; the message ends with its log.
        """
        for _ in range(1 if self.port else _ATTEMPTS):
            port = self.port or _free_port()
            self._spawn(port)
            with suppress(AssertionError):
                wait_until(
                    lambda port=port: self._ended() or _answers(port),
                    timeout=_START_TIMEOUT,
                    what=f"{self!r} to answer",
                )
            if not self._ended() and _answers(port):
                self.port = port
                return
            self.kill()
        raise RuntimeError(f"no ZooKeeper came up; its log:\n{self.log()}")

    def stop(self) -> None:
        """Shut it down in an orderly way, and by force if it takes too long."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT)
            self.kill()

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Freeze it until `resume`; return once it is stopped."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def start_again(self) -> None:
        """Start it unless it runs."""
        if self._ended():
            self.start()

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _spawn(self, port: int) -> None:
        options = {
            **self._options,
            "dataDir": str(self.folder / "data"),
            "clientPort": str(port),
            "clientPortAddress": "127.0.0.1",
        }
        configuration = self.folder / "zoo.cfg"
        configuration.write_text("".join(f"{k}={v}\n" for k, v in options.items()))
        classes = os.pathsep.join([str(_JAR), str(_FOLDER / "slf4j-simple.jar")])
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        command = [JAVA or "", *_JVM, "-cp", classes, main, str(configuration)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                die_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )


def _answers(port: int) -> bool:
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port), 5.0) as connection,
    ):
        connection.sendall(b"srvr")
        return b"Mode: " in connection.makefile("rb").read()
    return False


def _free_port() -> int:
    while True:
        port = secrets.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
