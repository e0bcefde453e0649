from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from celery_distlock.engine import pending_releases
from celery_distlock.stores.redis.scriptless import ScriptlessStore
from tests import servers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def prefix(redis_server) -> Iterator[str]:
    prefix = servers.new_prefix()
    yield prefix
    servers.delete_keys(redis_server.url, prefix)


@pytest.fixture
def store(redis_server, prefix) -> Iterator[ScriptlessStore]:
    servers.skip_without("SET with IFEQ")
    with closing(ScriptlessStore(f"{redis_server.url}?scripts=off", prefix)) as made:
        yield made


@pytest.fixture(autouse=True)
def no_errands() -> Iterator[None]:
    """Forgets what this test left to do at servers that are gone: it would slow down others."""
    yield
    pending_releases.forget()
