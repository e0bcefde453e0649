"""Sites as in `tests.worker`, whose broker is a RabbitMQ; locks and results stay in Redis."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests import fidelity, rabbitmq
from tests.rabbitmq import RabbitServer
from tests.worker.conftest import _show_logs, bare_site, crew, key, site

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["_show_logs", "bare_site", "crew", "key", "site"]

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
def broker_env(rabbit_server: RabbitServer) -> Iterator[dict[str, str]]:
    """Yield the URL of the RabbitMQ for `crew`; delete the queues after its workers have ended."""
    yield {"DISTLOCK_TEST_AMQP": rabbit_server.url}
    rabbit_server.delete("celery", "stock", fidelity.UNREAD)
