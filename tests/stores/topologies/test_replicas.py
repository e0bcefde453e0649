"""Grants that count when replicas have confirmed them."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from celery_distlock import Lock
from celery_distlock.errors import ConfigurationError, QuorumError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.connections import ConnectionPool
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Ownership, ParkRequest, RenewOutcome, Status
from tests.integration.lock.proxy import Proxy
from tests.stores.topologies import drill
from tests.topologies import Cluster, Replicated
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


@pytest.fixture
def replicated(private_topology) -> Replicated:
    made: Replicated = private_topology(Replicated(replicas=2))
    return made


@pytest.fixture
def store(replicated: Replicated, prefix: str) -> Iterator[RedisStore]:
    with closing(RedisStore(f"{replicated.url}?replicas=2", prefix)) as made:
        yield made


def test_a_failover_after_a_grant_keeps_it(replicated, store, prefix):
    token = store.acquire(AcquireRequest("k", "a", 60.0)).token
    park_request = ParkRequest(b"envelope")
    assert (
        store.acquire(AcquireRequest("k", "b", 60.0, queue=park_request, run="run")).status
        is Status.PARKED
    )
    replicated.master.kill()
    replicated.promote(replicated.replicas[0])

    with closing(RedisStore(replicated.url, prefix)) as after:
        state = after.inspect("k")
        assert state.token == token
        assert state.waiting == 1
        released = after.release(ReleaseRequest("k", state.owner))
        assert released.wake.envelope == b"envelope"


def test_a_grant_that_replicas_do_not_confirm_is_undone_and_says_so(replicated, store):
    replicated.replicas[0].pause()

    with pytest.raises(QuorumError, match="1 of 2 replicas") as caught:
        Lock("k", store=store).acquire()

    assert (caught.value.votes, caught.value.nodes) == (1, 2)
    wait_until(lambda: not store.inspect("k").token, what="the key to be given back")


def test_several_keys_that_replicas_do_not_confirm_are_undone(replicated, store):
    replicated.replicas[0].pause()

    with pytest.raises(QuorumError):
        store.acquire_all(["k", "l"], ["a", "b"], 60.0)


def test_a_renewal_that_replicas_do_not_confirm_is_none(replicated, store):
    holds = [Ownership(key, "a", 60.0) for key in "kl"]
    for hold in holds:
        store.acquire(AcquireRequest(hold.key, hold.owner, 60.0))
    replicated.replicas[0].pause()

    assert [outcome for outcome, _ in store.renew(holds, 0.5)] == [RenewOutcome.UNKNOWN] * 2

    replicated.replicas[0].resume()
    wait_until(
        lambda: {o for o, _ in store.renew(holds, 5.0)} == {RenewOutcome.RENEWED},
        what="a renewal",
    )


def test_one_that_is_refused_does_not_wait_for_replicas(replicated, store):
    store.acquire(AcquireRequest("k", "a", 60.0))
    replicated.replicas[0].pause()
    for n in range(3):  # on connections whose own grants were not confirmed, too
        with pytest.raises(QuorumError):
            store.acquire(AcquireRequest(f"free {n}", "b", 60.0))
        assert store.acquire(AcquireRequest("k", "b", 60.0)).status is Status.BUSY


def test_it_costs_no_round_trip(store, monkeypatch):
    drill.hand_over(store, "k")
    trips = []
    exchange, here = ConnectionPool.exchange, threading.get_ident()

    def note(pool, calls):
        if threading.get_ident() == here:  # others report what has been counted
            trips.append(len(calls))
        return exchange(pool, calls)

    monkeypatch.setattr(ConnectionPool, "exchange", note)

    store.acquire(AcquireRequest("k", "a", 60.0))
    store.renew([Ownership("k", "a", 60.0)], 5.0)
    store.release(ReleaseRequest("k", "a"))

    assert trips == [1, 1, 1]


def test_pushes_are_those_of_the_new_master_at_an_address(replicated, prefix):
    pushed, keys = [], map(str, itertools.count())
    with (
        Proxy(replicated.url) as proxy,
        closing(RedisStore(proxy.url, prefix)) as store,
        closing(store.channels.open_channel(pushed.append)) as channel,
    ):
        drill.exclude(store, "k")
        old, (new, *_) = replicated.master, replicated.replicas
        new.ask("REPLICAOF", "NO", "ONE")
        old.ask("REPLICAOF", "127.0.0.1", 1)
        proxy.lead_to(new.url)

        def is_pushed() -> bool:
            key, queue = next(keys), ParkRequest(b"envelope", channel.address)
            store.acquire(AcquireRequest(key, "a", 60.0))
            store.acquire(AcquireRequest(key, "b", 60.0, queue=queue, run="run"))
            return store.release(ReleaseRequest(key, "a")).wake is None

        wait_until(is_pushed, what="a push", poll=0.5)
        wait_until(lambda: pushed, what="that it is heard")


def test_in_a_cluster_each_node_has_its_own(private_topology, prefix):
    cluster = private_topology(Cluster(masters=3, replicas=1))
    with closing(RedisStore(f"{cluster.url}?replicas=1", prefix)) as store:
        drill.run_all(store)
        (lame,) = cluster.replicas_of(cluster.node_of(f"{prefix}:{{k}}:lock"))
        lame.pause()
        with pytest.raises(QuorumError, match="0 of 1"):
            store.acquire(AcquireRequest("k", "a", 60.0))
        elsewhere = next(
            key
            for key in map(str, range(100))
            if cluster.node_of(f"{prefix}:{{{key}}}:lock")
            is not cluster.node_of(f"{prefix}:{{k}}:lock")
        )
        assert store.acquire(AcquireRequest(elsewhere, "a", 60.0)).status is Status.GRANTED


def test_a_suspended_replica_costs_the_other_nodes_keys_nothing(private_topology, prefix):
    cluster = private_topology(Cluster(masters=3, replicas=1))
    with closing(RedisStore(f"{cluster.url}?replicas=1", prefix)) as store:
        lame_node = cluster.node_of(f"{prefix}:{{k}}:lock")
        keys = [f"k{n}" for n in range(60)]
        holds = [Ownership(key, "a", 60.0) for key in keys]
        for hold in holds:
            store.acquire(AcquireRequest(hold.key, hold.owner, 60.0))
        (lame,) = cluster.replicas_of(lame_node)
        lame.pause()

        started = time.monotonic()
        outcomes = dict(zip(keys, store.renew(holds, 6.0), strict=True))

        assert time.monotonic() - started < 20.0
        for key, (outcome, _) in outcomes.items():
            there = cluster.node_of(f"{prefix}:{{{key}}}:lock") is lame_node
            assert outcome is (RenewOutcome.UNKNOWN if there else RenewOutcome.RENEWED)


@pytest.mark.parametrize("number", ["-1", "two", "1.5"])
def test_a_number_that_is_none_is_refused(number):
    with pytest.raises(ConfigurationError, match="redis://localhost"):
        RedisStore(f"redis://localhost?replicas={number}", "p")
