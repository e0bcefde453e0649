from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import redis

from celery_distlock.engine import acquisition, pending_releases
from celery_distlock.stores.redis.store import RedisStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_distlock.testing import EmbeddedServer


class Events(list[tuple[str, dict[str, Any]]]):
    """What locks reported, in order: names and facts."""

    def names(self) -> list[str]:
        return [name for name, _ in self]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [facts for each, facts in self if each == name]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """The shared server's."""
    with redis.Redis.from_url(redis_url) as made:
        yield made


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Collects what every `Lock` of this test reports."""
    collected = Events()
    monkeypatch.setattr(
        acquisition.defaults,
        "on_event",
        lambda name, sender, _store, **facts: collected.append((name, {"sender": sender, **facts})),
    )
    return collected


@pytest.fixture
def redis_store(redis_url: str, prefix: str) -> Iterator[RedisStore]:
    with closing(RedisStore(redis_url, prefix)) as store:
        yield store


@pytest.fixture
def server(private_server) -> EmbeddedServer:
    """A server that the test may break."""
    made: EmbeddedServer = private_server()
    return made


@pytest.fixture
def store(server: EmbeddedServer) -> Iterator[RedisStore]:
    """The store on that server."""
    with closing(RedisStore(server.url, "test")) as made:
        yield made


@pytest.fixture(autouse=True)
def no_errands() -> Iterator[None]:
    """Forgets what this test left to do at servers that are gone: it would slow down others."""
    yield
    pending_releases.forget()
