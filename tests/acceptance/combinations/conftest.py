"""Sites as in `tests.worker`, each with a crew that all combinations with it share."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests import servers
from tests.acceptance.combinations.crews import CREWS, Crew
from tests.acceptance.rabbitmq.conftest import rabbit_server
from tests.worker.conftest import Site, _show_logs, opened, staffed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from celery_distlock.testing import EmbeddedServer
    from tests.rabbitmq import RabbitServer

    Broker = tuple[str, dict[str, Any]]

__all__ = ["_show_logs", "rabbit_server"]


@pytest.fixture(scope="module")
def crew(request: pytest.FixtureRequest) -> Crew:
    if "gevent" in request.param:
        pytest.importorskip("gevent")
    return CREWS[request.param]


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest,
    crew: Crew,
    redis_server: EmbeddedServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """`tests.apps.combined` with the workers of `crew`."""
    env = {
        **servers.environment(redis_server.url, servers.new_prefix()),
        "DISTLOCK_TEST_CONF": json.dumps(crew.settings),
    }
    if crew.store:
        env["DISTLOCK_TEST_STORE"] = _url(request, crew.store)
    transport = crew.transport
    if crew.broker:
        env["DISTLOCK_TEST_AMQP"], options = request.getfixturevalue(crew.broker)
        transport = {**transport, **options}
    env["DISTLOCK_TEST_TRANSPORT"] = json.dumps(transport)
    folder = tmp_path_factory.mktemp("workers")
    with (
        opened("tests.apps.combined", env) as site,
        staffed(site, folder, [*map(dict, crew.workers)]),
    ):
        yield site


# Brokers: the URL, and options of the transport.


@pytest.fixture(scope="session")
def rabbitmq(rabbit_server: RabbitServer) -> Broker:
    return rabbit_server.url, {}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Broker:
    messages, control = (str(tmp_path_factory.mktemp(name)) for name in ("messages", "control"))
    folders = {"data_folder_in": messages, "data_folder_out": messages, "control_folder": control}
    return "filesystem://", folders


@pytest.fixture(scope="session")
def sqs() -> Iterator[Broker]:
    """An SQS of the tests' own."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("pycurl")
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    # Asks often, and is answered at once: kombu would wait for ten seconds at the server otherwise.
    at_once = {"region": "eu-west-1", "wait_time_seconds": 0, "polling_interval": 0.05}
    with pytest.MonkeyPatch.context() as patch:
        # FIFO queues alone have groups. It reads them from a set that its other threads change:
        # then it answers with an error, and kombu ends the worker.
        patch.setattr("moto.sqs.models.Queue.pending_message_groups", frozenset())
        server.start()
        _, port = server.get_host_and_port()
        yield f"sqs://key:secret@127.0.0.1:{port}", at_once
        server.stop()


@pytest.fixture(scope="session")
def pgmq() -> Iterator[Broker]:
    """A PostgreSQL of the tests' own, with PGMQ's SQL and without its extension."""
    pytest.importorskip("kombu.transport.pgmq", reason="kombu has this broker since 5.7")
    package = pytest.importorskip("pgmq")
    from tests import postgresql

    if not (postgresql.SERVER and postgresql.INITDB):
        wanted = os.environ.get("DISTLOCK_TEST_POSTGRESQL") == "require"
        reason = "there is no PostgreSQL here (Debian's package postgresql)"
        (pytest.fail if wanted else pytest.skip)(reason)
    with postgresql.PostgresServer() as server:
        with server.connect() as connection:
            package.install_pgmq_from_sql(conn=connection)
        # Asks often, and is answered at once: kombu would wait for a second between two polls.
        at_once = {"init_extension": False, "wait_time_seconds": 0, "polling_interval": 0.05}
        yield f"pgmq://postgres:any@127.0.0.1:{server.port}/postgres", at_once


def _url(request: pytest.FixtureRequest, store: str) -> str:
    if "://" in store:
        return store
    place = request.getfixturevalue(store)
    return place.url() if callable(place.url) else place.url
