from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from celery_distlock.engine import pending_releases
from celery_distlock.stores.zookeeper import ZooKeeperStore
from tests import servers, zookeeper_server
from tests.zookeeper_server import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUIRED = os.environ.get("DISTLOCK_TEST_ZOOKEEPER") == "require"


def _needs_zookeeper() -> None:
    if zookeeper_server.MISSING:
        reason = f"NO ZOOKEEPER: there is no {zookeeper_server.MISSING} here"
        (pytest.fail if REQUIRED else pytest.skip)(reason)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ZooKeeperServer]:
    """The server that all tests share: never stop or pause it."""
    _needs_zookeeper()
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """A server that this module's tests may break, if they mend it again."""
    _needs_zookeeper()
    with ZooKeeperServer() as made:
        yield made


@pytest.fixture
def prefix() -> str:
    return servers.new_prefix()


@pytest.fixture
def url(shared_server: ZooKeeperServer) -> str:
    return f"{shared_server.url}/chroot?session=30"


@pytest.fixture
def open_store(url: str, prefix: str) -> Iterator[Callable[..., ZooKeeperStore]]:
    """Opens stores at one place, each with a session of its own, and closes them after the test."""
    opened: list[ZooKeeperStore] = []

    def open_one(name: str = "", *, at: str = url) -> ZooKeeperStore:
        opened.append(ZooKeeperStore(at, prefix + name))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., ZooKeeperStore]) -> ZooKeeperStore:
    return open_store()


@pytest.fixture
def brief_store(shared_server: ZooKeeperServer, prefix: str) -> Iterator[ZooKeeperStore]:
    """A store whose session ends soon after its process."""
    with closing(ZooKeeperStore(f"{shared_server.url}?session=0.6", prefix)) as made:
        yield made


@pytest.fixture(autouse=True)
def no_errands() -> Iterator[None]:
    """Forgets what this test left to do at servers that are gone: it would slow down others."""
    yield
    pending_releases.forget()
