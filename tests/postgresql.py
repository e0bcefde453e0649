"""A PostgreSQL of the tests' own, where one is installed (Debian's package `postgresql`)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

import psycopg

from celery_distlock.testing import die_with_parent
from celery_distlock.testing.server import _free_ports
from tests.waiting import wait_until

# Debian has the programs of each version in a folder of its own.
_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
_PLACES = os.pathsep.join([*map(str, reversed(_FOLDERS)), os.environ.get("PATH", os.defpath)])
SERVER = shutil.which("postgres", path=_PLACES)
INITDB = shutil.which("initdb", path=_PLACES)

_START_TIMEOUT = 60.0  # seconds; one where nothing else runs
_STOP_TIMEOUT = 30.0
_USER = "postgres"  # it refuses to run as root
_OPTIONS = {
    "fsync": "off",
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "16MB",
    "unix_socket_directories": "",
}


class PostgresServer:
    """A server on loopback and a free port, with its data in a temporary folder."""

    def __init__(self) -> None:
        self.port = 0
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        assert SERVER, "there is no postgres here"
        assert INITDB, "there is no initdb here"
        self._folder = Path(tempfile.mkdtemp(prefix="celery-distlock-postgresql-"))
        if os.geteuid() == 0:
            shutil.chown(self._folder, _USER, _USER)
        data = str(self._folder / "data")
        make = [INITDB, "--pgdata", data, "--username", _USER, "--auth", "trust", "--no-sync"]
        subprocess.run(_unprivileged(make), check=True, capture_output=True, cwd=self._folder)
        for self.port in _free_ports():
            options = {**_OPTIONS, "port": str(self.port)}
            named = [f"--{name}={value}" for name, value in options.items()]
            with (self._folder / "server.log").open("wb") as log:
                self._process = subprocess.Popen(
                    die_with_parent(_unprivileged([SERVER, "-D", data, *named])),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    start_new_session=True,
                )
            wait_until(self._answers, timeout=_START_TIMEOUT, what="PostgreSQL to answer")
            if self._process.poll() is None:
                return self
        raise RuntimeError((self._folder / "server.log").read_text())

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)  # ends the connections
        try:
            self._process.wait(_STOP_TIMEOUT)
        finally:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self._folder)

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(host="127.0.0.1", port=self.port, user=_USER, dbname="postgres")

    def _answers(self) -> bool:
        """Whether it answers, or never will."""
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        with suppress(psycopg.OperationalError), self.connect():
            return True
        return False


def _unprivileged(command: list[str]) -> list[str]:
    """Return *command* as another user's, if this one is root; it still dies with its parent."""
    if os.geteuid() != 0:
        return command
    become = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
    return [*become, "--pdeathsig=KILL", *command]
