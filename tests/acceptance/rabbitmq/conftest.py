"""Sites as in `tests.worker`, whose broker is a RabbitMQ; locks and results stay in Redis."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests import fidelity, rabbitmq, servers
from tests.rabbitmq import RabbitServer
from tests.worker.conftest import TWO_PREFORK_WORKERS, _show_logs, bare_site, key, site
from tests.worker.crews import Crew

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["_show_logs", "bare_site", "key", "site"]

WANTED = os.environ.get("CI") and os.environ.get("DISTLOCK_TEST_RABBITMQ") != "skip"


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """
    The RabbitMQ that all tests share.

    Where none is installed the tests are skipped; but in CI that is a failure, unless
    ``DISTLOCK_TEST_RABBITMQ=skip`` says that it could not be installed.
    """
    if not (rabbitmq.SERVER and rabbitmq.EPMD):
        reason = "NOTHING IS TESTED WITH RABBITMQ: there is no rabbitmq-server (or no epmd) here"
        (pytest.fail if WANTED else pytest.skip)(reason)
    with RabbitServer() as server:
        yield server


@pytest.fixture(scope="module")
def crew(
    request: pytest.FixtureRequest,
    redis_url: str,
    rabbit_server: RabbitServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Crew]:
    """The same as in `tests.worker`, on RabbitMQ."""
    module = request.module
    env = {
        **getattr(module, "ENV", {}),
        "DISTLOCK_TEST_AMQP": rabbit_server.url,
        **servers.environment(redis_url, servers.new_prefix()),
    }
    workers = getattr(module, "WORKERS", TWO_PREFORK_WORKERS)
    app = getattr(module, "APP", "tests.apps.locked")
    crew = Crew(app, env, tmp_path_factory.mktemp("workers"), workers)
    yield crew
    crew.stop()
    servers.delete_keys(redis_url, env["DISTLOCK_TEST_PREFIX"])
    rabbit_server.delete("celery", "stock", fidelity.NOBODYS)
