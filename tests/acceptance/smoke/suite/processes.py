"""pytest-celery's nodes without Docker: an embedded server and workers, as plain processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_celery import CeleryTestContainer

if TYPE_CHECKING:
    from celery_distlock.testing import EmbeddedServer
    from tests.workers import WorkerProcess


class ServerContainer(CeleryTestContainer):
    """A server that can be asked what a container can be asked."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    @property
    def id(self) -> str:
        return str(self._server.port)

    @property
    def name(self) -> str:
        return repr(self._server)

    @property
    def status(self) -> str:
        return "running" if self._server.running else "exited"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {"url": self._server.url, "host_url": self._server.url}

    def logs(self) -> str:
        return self._server.log()

    def ready(self, timeout: float = 0) -> bool:
        return self._server.running

    def reload(self) -> None:
        """There is no copy of its state."""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        assert signal == "SIGKILL"
        self._server.kill()

    def restart(self, timeout: float = 0) -> None:
        self._server.restart()

    def teardown(self) -> None:
        self._server.close()


class WorkerContainer(CeleryTestContainer):
    """The same of a worker with all of its processes."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    @property
    def id(self) -> str:
        return self._process.name.partition("@")[2]

    @property
    def name(self) -> str:
        return self._process.name

    def worker_name(self) -> str:
        return self._process.name.partition("@")[0]

    @property
    def status(self) -> str:
        return "running" if self._process.running else "exited"

    def logs(self) -> str:
        return self._process.log()

    def ready(self, timeout: float = 60.0) -> bool:
        self._process.wait_ready(timeout)
        return True

    def reload(self) -> None:
        """There is no copy of its state."""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        assert signal == "SIGKILL"
        self._process.kill(whole=True)

    def restart(self, timeout: float = 10.0) -> None:
        self._process.stop(warm=timeout)
        self._process.start()

    def teardown(self) -> None:
        self._process.stop(warm=5.0)
