"""What every store promises, asked of a store over five masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from celery_distlock.stores.redis.redlock import RedlockStore
from celery_distlock.stores.values import Ability
from celery_distlock.testing import (
    CountContract,
    ListContract,
    RecogniseContract,
    StoreContract,
)
from tests import servers

if TYPE_CHECKING:
    from celery_distlock.testing import EmbeddedServer


@pytest.mark.usefixtures("patience")
class TestRedlockStore(StoreContract, RecogniseContract, ListContract, CountContract):
    shortest_lease = 0.5

    @pytest.fixture
    def open_store(self, shared_masters):
        prefix = servers.new_prefix()
        yield lambda name: RedlockStore(shared_masters.url, f"{prefix}-{name}")
        for server in shared_masters.servers:
            servers.delete_keys(server.url, prefix)

    @pytest.fixture
    def pass_time(self, shared_masters, store):
        def pass_by(seconds):
            for server in shared_masters.servers:
                pass_by_at(server, store._prefix, seconds)

        return pass_by

    def test_it_says_what_it_can_do(self, store):
        assert store.abilities == set(Ability) - {Ability.SEVERAL, Ability.QUEUE, Ability.RECALL}


def pass_by_at(server: EmbeddedServer, prefix: str, seconds: float) -> None:
    with redis.Redis.from_url(server.url) as client:
        for record in servers.keys(server.url, prefix):
            if record.endswith(b":done"):
                for run in client.zrange(record, 0, -1):
                    client.zincrby(record, -1000 * seconds, run)
            elif record.endswith(b":lock"):
                client.pexpire(record, client.pttl(record) - int(1000 * seconds))
