from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from celery_distlock.engine import pending_releases
from celery_distlock.stores.redis import quorum, redlock
from celery_distlock.stores.redis.redlock import RedlockStore
from tests import servers
from tests.topologies import Masters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def masters(private_topology) -> Masters:
    """Five masters that the test may break."""
    made: Masters = private_topology(Masters(5))
    return made


@pytest.fixture
def open_redlock() -> Iterator[Callable[..., RedlockStore]]:
    """Opens stores, and closes them after the test."""
    opened: list[RedlockStore] = []

    def open_one(url: str, prefix: str = "test") -> RedlockStore:
        opened.append(RedlockStore(url, prefix))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(masters, open_redlock) -> RedlockStore:
    """The store on those masters."""
    made: RedlockStore = open_redlock(masters.url)
    return made


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose nodes answer, if a busy machine lets them: they may take their time."""
    for answers in (quorum.QuorumClient.ask, RedlockStore._ask):
        monkeypatch.setitem(answers.__kwdefaults__, "timeout", 4.0)
    for module in (quorum, redlock):
        monkeypatch.setattr(module, "ANSWER", 4.0)


@pytest.fixture
def shared_store(shared_masters, patience) -> Iterator[RedlockStore]:
    """A store on masters that tests share."""
    prefix = servers.new_prefix()
    with closing(RedlockStore(shared_masters.url, prefix)) as store:
        yield store
    for server in shared_masters.servers:
        servers.delete_keys(server.url, prefix)


@pytest.fixture(autouse=True)
def no_errands() -> Iterator[None]:
    """Forgets what this test left to do at servers that are gone: it would slow down others."""
    yield
    pending_releases.forget()
