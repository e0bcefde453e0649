"""What every store promises, asked of the store that uses no scripts."""

from __future__ import annotations

import pytest
import redis

from celery_distlock.stores.redis.scriptless import ScriptlessStore
from celery_distlock.stores.values import Ability
from celery_distlock.testing import (
    CountContract,
    ListContract,
    RecogniseContract,
    StoreContract,
)
from tests import servers


@servers.needs("SET with IFEQ")
class NativeContract(StoreContract, RecogniseContract, ListContract, CountContract):
    def test_it_says_what_it_can_do(self, store):
        assert store.abilities == set(Ability) - {Ability.SEVERAL, Ability.QUEUE}


class TestNativeStore(NativeContract):
    @pytest.fixture
    def open_store(self, redis_server):
        prefix = servers.new_prefix()
        yield lambda name: ScriptlessStore(f"{redis_server.url}?scripts=off", f"{prefix}-{name}")
        servers.delete_keys(redis_server.url, prefix)

    @pytest.fixture
    def pass_time(self, redis_server, store):
        def pass_by(seconds):
            with redis.Redis.from_url(redis_server.url) as client:
                for record in servers.keys(redis_server.url, store._prefix):
                    if not record.endswith(b":fence"):  # less than 1: it is deleted
                        client.pexpire(record, client.pttl(record) - int(1000 * seconds))

        return pass_by


class TestNativeStoreOnACluster(NativeContract):
    shortest_lease = 0.5

    @pytest.fixture
    def open_store(self, shared_cluster):
        prefix = servers.new_prefix()
        return lambda name: ScriptlessStore(f"{shared_cluster.url}?scripts=off", f"{prefix}-{name}")
