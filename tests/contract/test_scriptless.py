"""What every store promises, asked of the store that uses no scripts."""

from __future__ import annotations

from contextlib import closing

import pytest

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
    @pytest.fixture
    def pass_time(self, masters, store):
        def pass_by(seconds):
            for master in masters:
                with closing(master.client()) as client:
                    for record in servers.keys(master.url, store._prefix):
                        if not record.endswith(b":fence"):  # less than 1: it is deleted
                            client.pexpire(record, client.pttl(record) - int(1000 * seconds))

        return pass_by

    def test_it_says_what_it_can_do(self, store):
        assert store.abilities == set(Ability) - {Ability.SEVERAL, Ability.QUEUE, Ability.RECALL}


class TestNativeStore(NativeContract):
    @pytest.fixture
    def masters(self, redis_server):
        return [redis_server]

    @pytest.fixture
    def open_store(self, redis_server):
        prefix = servers.new_prefix()
        yield lambda name: ScriptlessStore(f"{redis_server.url}?scripts=off", f"{prefix}-{name}")
        servers.delete_keys(redis_server.url, prefix)


class TestNativeStoreOnACluster(NativeContract):
    shortest_lease = 0.5

    @pytest.fixture
    def masters(self, shared_cluster):
        return shared_cluster.masters

    @pytest.fixture
    def open_store(self, shared_cluster):
        prefix = servers.new_prefix()
        return lambda name: ScriptlessStore(f"{shared_cluster.url}?scripts=off", f"{prefix}-{name}")
