"""Broker, backend and two workers: processes, or containers with ``DISTLOCK_SMOKE=compose``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
)

from celery_distlock.testing import EmbeddedServer
from tests.acceptance.smoke.suite.containers import SHOP, SUITE, Project, ServiceContainer
from tests.acceptance.smoke.suite.processes import ServerContainer, WorkerContainer
from tests.workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from celery import Celery
    from pytest_celery import CeleryTestContainer

WORKERS = 2
DURABLE = {"appendonly": "yes", "appendfsync": "always"}  # what is parked outlives a restart


class Setup(CeleryTestSetup):
    def teardown(self) -> None:
        self.app.backend.result_consumer.stop()
        self.app.backend.client.close()
        self.app.close()


class Site(NamedTuple):
    """Where the nodes come from."""

    broker: CeleryTestContainer
    backend: CeleryTestContainer
    workers: Callable[[dict[str, str]], list[CeleryTestContainer]]  # given their environment


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    return Setup


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if os.environ.get("DISTLOCK_SMOKE") == "compose":
        yield from _containers()
    else:
        yield from _processes(tmp_path)


def _processes(folder: Path) -> Iterator[Site]:
    def workers(env: dict[str, str]) -> list[CeleryTestContainer]:
        app = "tests.acceptance.smoke.suite.app"
        processes = [WorkerProcess(app, folder=folder, env=env) for _ in range(WORKERS)]
        for process in processes:
            process.start(wait=False)
        return [WorkerContainer(process) for process in processes]

    with EmbeddedServer(options=DURABLE) as server:
        container = ServerContainer(server)
        yield Site(container, container, workers)


def _containers() -> Iterator[Site]:
    project = Project(SHOP, SUITE)

    def only(service: str) -> CeleryTestContainer:
        (identity,) = project.containers(service)
        return ServiceContainer(project, service, identity)

    def workers(env: dict[str, str]) -> list[CeleryTestContainer]:
        found = project.containers("worker")
        return [ServiceContainer(project, "worker", identity) for identity in found]

    try:
        project.up()
        yield Site(only("rabbitmq"), only("redis"), workers)
    finally:
        project.down()


@pytest.fixture
def celery_broker_cluster(site: Site) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(CeleryTestBroker(site.broker))


@pytest.fixture
def celery_backend_cluster(site: Site) -> CeleryBackendCluster:
    return CeleryBackendCluster(CeleryTestBackend(site.backend))


@pytest.fixture
def celery_worker_cluster(
    site: Site, celery_setup_app: Celery, celery_worker_cluster_config: dict[str, Any]
) -> Iterator[CeleryWorkerCluster]:
    config = celery_worker_cluster_config
    env = {
        "CELERY_BROKER_URL": config["celery_broker_cluster_config"]["urls"][0],
        "CELERY_RESULT_BACKEND": config["celery_backend_cluster_config"]["urls"][0],
    }
    nodes = [CeleryTestWorker(worker, celery_setup_app) for worker in site.workers(env)]
    cluster = CeleryWorkerCluster(*nodes)
    try:
        assert cluster.ready()
        yield cluster
    finally:
        for node in nodes:
            print(f"---- {node.name()}", node.logs(), sep="\n")  # noqa: T201
            node.teardown()
