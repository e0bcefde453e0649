"""What every store promises, asked of ours; see `celery_distlock.testing.StoreContract`."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from celery_distlock import clock
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.memory.server import Server
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Ability
from celery_distlock.testing import (
    CountContract,
    ListContract,
    OrderContract,
    RecallContract,
    RecogniseContract,
    SeveralContract,
    StoreContract,
)
from celery_distlock.testing.contract.actions import take, take_all
from tests import servers
from tests.contract.grace import lengthen
from tests.contract.parts.actions import work
from tests.contract.parts.bounded import Bounded
from tests.contract.parts.causes import Causes
from tests.contract.parts.delayed import Delayed
from tests.contract.parts.delivery import Delivery, Pushing
from tests.contract.parts.identities import Identities
from tests.contract.parts.lane_limits import LaneLimits
from tests.contract.parts.lanes import Lanes
from tests.contract.parts.leaving import Leaving
from tests.contract.parts.limits import Limits
from tests.contract.parts.orders import Ahead, Strict
from tests.contract.parts.parked_runs import ParkedRuns
from tests.contract.parts.parked_text import ParkedText
from tests.contract.parts.parking import Parking
from tests.contract.parts.queues import Queues
from tests.contract.parts.rate_limits import RateLimits
from tests.contract.parts.rates import Rates
from tests.contract.parts.recalls import Recalls
from tests.contract.parts.recording import Recording
from tests.contract.parts.resting import Resting
from tests.contract.parts.retaining import Retaining
from tests.contract.parts.second_deliveries import ParkedDeliveries
from tests.contract.parts.sending import Sending
from tests.contract.parts.several_keys import SeveralKeys
from tests.contract.parts.several_queues import WaitingAtSeveralKeys
from tests.contract.parts.sweeping import Sweeping
from tests.contract.parts.timing import Timing
from tests.contract.parts.units import Queued, SeveralFound, Units
from tests.contract.parts.upgrading import Upgrading


class FullContract(
    StoreContract,
    OrderContract,
    RecogniseContract,
    ListContract,
    CountContract,
    SeveralContract,
    RecallContract,
    Parking,
    Queues,
    ParkedRuns,
    ParkedText,
    Retaining,
    Pushing,
    Delivery,
    Sweeping,
    ParkedDeliveries,
    SeveralKeys,
    WaitingAtSeveralKeys,
    Units,
    Queued,
    SeveralFound,
    Upgrading,
    Resting,
    Limits,
    Rates,
    Causes,
    RateLimits,
    Timing,
    Sending,
    Lanes,
    LaneLimits,
    Ahead,
    Strict,
    Identities,
    Delayed,
    Bounded,
    Leaving,
    Recording,
    Recalls,
):
    """For a store that can do everything, and has its own clock in its tokens."""

    hands_over = True

    @pytest.fixture(autouse=True)
    def grace(self, monkeypatch):
        lengthen(monkeypatch, GRANT=3.0)

    def test_it_can_let_wait_park_and_recognise(self, store):
        assert {Ability.QUEUE, Ability.RECOGNISE} <= store.abilities

    def test_it_takes_several_keys_in_one_step(self, store):
        assert take_all(store, "klm", "abc") is not None

    def test_tokens_are_microseconds_so_they_outlive_their_record(self, store):
        token = take(store, "k", "a")

        assert abs(token / 1e6 - time.time()) < 60


class TestRedisStore(FullContract):
    @pytest.fixture
    def open_store(self, redis_url, prefix):
        return lambda name: RedisStore(redis_url, f"{prefix}-{name}")

    @pytest.fixture
    def pass_time(self, redis_url, prefix):
        return lambda seconds: servers.bring_nearer(redis_url, prefix, seconds)

    def test_it_can_push(self, store):
        with closing(store.channels.open_channel(lambda wake: None)) as channel:
            assert channel.address


class TestMemoryStore(FullContract):
    @pytest.fixture
    def open_store(self):
        servers: dict[str, Server] = {}

        def open_store(name):
            store = MemoryStore("memory://", name)
            store._servers.server = servers.setdefault(name, store._servers.server)
            return store

        return open_store

    @pytest.fixture
    def pass_time(self, monkeypatch):
        now, offset = clock.monotonic, 0.0

        def pass_by(seconds):
            nonlocal offset
            offset += seconds + 0.002  # scripts round leases up to a millisecond

        monkeypatch.setattr(clock, "monotonic", lambda: now() + offset)
        return pass_by

    def test_it_can_push(self, store):
        with closing(store.channels.open_channel(lambda wake: None)) as channel:
            assert channel.address

    def test_tokens_rise_though_this_processes_clock_stops(self, store, monkeypatch):
        monkeypatch.setattr(clock, "monotonic", lambda: 1000.0)
        first = take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert take(store, "k", "b") > first

    def test_what_has_expired_takes_no_memory_without_a_request(self, store, pass_time):
        work(store)
        assert len(store._servers.server.keys) > 1

        pass_time(3 * 3600.0)
        take(store, "other", "a")

        assert not [name for name in store._servers.server.keys if b"{k}" in name]


def test_owners_are_never_given_twice_and_fit_into_any_record():
    owners = [new_owner("label with blanks {|} \n"), new_owner("")]

    assert len({*owners, new_owner(""), new_owner("")}) == 4
    for owner in owners:
        assert len(owner.split("|")) == 4
        assert not set(owner) & set("{} \n")
