"""The services of docker-compose.yml as pytest-celery's nodes, one project a test."""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

from pytest_celery import CeleryTestContainer

from celery_distlock.testing.server import _free_ports
from tests.waiting import wait_until

ROOT = Path(__file__).parents[4]
SHOP = ROOT / "docker-compose.yml"
SUITE = Path(__file__).with_name("compose.yml")
URLS = {"redis": "redis://{}:{}/0", "rabbitmq": "amqp://guest:guest@{}:{}//"}
PORTS = {"redis": 6379, "rabbitmq": 5672}


class Project:
    """Everything that the compose files name, with two workers; on ports that are free."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self.name = f"distlock-{uuid.uuid4().hex[:8]}"
        # Not 0: the engine would choose others when a container is restarted.
        redis, rabbitmq = _free_ports()[:2]
        self._env = {**os.environ, "REDIS_PORT": str(redis), "RABBITMQ_PORT": str(rabbitmq)}

    def compose(self, *words: str) -> str:
        files = [word for file in self._files for word in ("-f", str(file))]
        return self._run("docker", "compose", "-p", self.name, *files, *words)

    def docker(self, *words: str) -> str:
        return self._run("docker", *words)

    def up(self) -> None:
        self.compose("up", "-d", "--build", "--wait", "--scale", "worker=2", "worker")

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "1")

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--all", "--no-trunc", "-q", service).split()

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()


class ServiceContainer(CeleryTestContainer):
    """One container of a project."""

    def __init__(self, project: Project, service: str, identity: str) -> None:
        self._project = project
        self._service = service
        self._id = identity

    @property
    def id(self) -> str:
        return self._id

    @property
    def name(self) -> str:
        return f"{self._service}-{self._id[:12]}"

    def worker_name(self) -> str:
        return "celery"

    @property
    def status(self) -> str:
        return self._inspect("{{.State.Status}}")

    @property
    def celeryconfig(self) -> dict[str, Any]:
        port = PORTS[self._service]
        host, _, published = self._project.compose("port", self._service, str(port)).rpartition(":")
        url = URLS[self._service]
        return {"url": url.format(self._service, port), "host_url": url.format(host, published)}

    def logs(self) -> str:
        return self._project.docker("logs", self._id)

    def ready(self, timeout: float = 60.0) -> bool:
        return wait_until(
            lambda: self._inspect("{{.State.Health.Status}}") == "healthy", timeout=timeout
        )

    def reload(self) -> None:
        """Its state is asked for each time."""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        self._project.docker("kill", "--signal", str(signal), self._id)
        wait_until(lambda: self.status == "exited")

    def restart(self, timeout: float = 10.0) -> None:
        self._project.docker("restart", "--time", str(int(timeout)), self._id)
        self.ready()

    def teardown(self) -> None:
        """The project goes as a whole."""

    def _inspect(self, template: str) -> str:
        return self._project.docker("inspect", "--format", template, self._id)
