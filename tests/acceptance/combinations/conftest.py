"""Sites as in `tests.worker`, each with a crew that all combinations with it share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import servers
from tests.acceptance.combinations.crews import CREWS, Crew
from tests.acceptance.rabbitmq.conftest import rabbit_server
from tests.worker.conftest import Site, _show_logs, opened, staffed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from celery_distlock.testing import EmbeddedServer
    from tests.rabbitmq import RabbitServer

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
        "DISTLOCK_TEST_BROKER": redis_server.url,
        "DISTLOCK_TEST_BACKEND": redis_server.url,
        "DISTLOCK_TEST_PREFIX": servers.new_prefix(),
        "DISTLOCK_TEST_CONF": json.dumps(crew.settings),
        "DISTLOCK_TEST_TRANSPORT": json.dumps(crew.transport),
    }
    if crew.store:
        env["DISTLOCK_TEST_STORE"] = _url(request, crew.store)
    folder = tmp_path_factory.mktemp("workers")
    if crew.broker:
        env["DISTLOCK_TEST_AMQP"] = request.getfixturevalue(crew.broker)
    if crew.broker == "files":
        env["DISTLOCK_TEST_TRANSPORT"] = json.dumps(file_transport(folder))
    with (
        opened("tests.apps.combined", env) as site,
        staffed(site, folder, [*map(dict, crew.workers)]),
    ):
        yield site


@pytest.fixture(scope="session")
def rabbitmq(rabbit_server: RabbitServer) -> str:
    return rabbit_server.url


@pytest.fixture(scope="session")
def files() -> str:
    return "filesystem://"


def file_transport(folder: Path) -> dict[str, str]:
    """Options by which all processes read and write messages in *folder*."""
    messages = folder / "messages"
    for name in ("in", "control"):
        (messages / name).mkdir(parents=True)
    both = str(messages / "in")
    control = str(messages / "control")
    return {"data_folder_in": both, "data_folder_out": both, "control_folder": control}


@pytest.fixture(scope="session")
def sqs() -> Iterator[str]:
    """An SQS of the tests' own."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("pycurl")
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"sqs://key:secret@127.0.0.1:{port}"
    server.stop()


def _url(request: pytest.FixtureRequest, store: str) -> str:
    if "://" in store:
        return store
    place = request.getfixturevalue(store)
    return place.url() if callable(place.url) else place.url
