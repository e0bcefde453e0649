"""What becomes of locks when other software deletes or changes their records, or they expire."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import redis

from celery_distlock import clock
from celery_distlock.errors import LockLostError
from celery_distlock.lock import Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Ownership, ParkRequest, RenewOutcome, Status
from tests.servers import grant
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE = 6.0  # seconds: a busy machine can take some of them away


@pytest.fixture
def record(prefix: str) -> str:
    """Where the lock of the key ``k`` is, on the shared server."""
    return f"{prefix}:{{k}}:lock"


def begin(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call in another thread; return it, and where its result will be."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(call()))
    thread.start()
    return thread, outcome


# All records gone


def flush(server):
    with server.client() as client:
        client.flushall()


def flush_the_database(server):
    with server.client() as client:
        client.flushdb()


def swap_databases(server):
    with server.client() as client:
        client.swapdb(0, 1)


def rename_the_record(server):
    with server.client() as client:
        client.rename("test:{k}:lock", "elsewhere")


def restart(server):
    server.kill()
    server.start()


every_way = pytest.mark.parametrize(
    "forget", [flush, flush_the_database, swap_databases, rename_the_record, restart]
)


@every_way
def test_the_holder_is_notified_within_a_lease_and_tokens_rise(server, store, events, forget):
    lock = Lock("k", store=store, lease=LEASE)
    lock.acquire()
    lease = lock.lease
    forget(server)
    forgotten_at = clock.monotonic()

    wait_until(lambda: events.of("lock_lost"), what="the loss", poll=0.005)

    assert clock.monotonic() - forgotten_at < LEASE
    assert not lease.held
    with pytest.raises(LockLostError):
        lock.release()
    with lock as later:
        assert later.token > lease.token


@every_way
def test_waiters_go_on_one_after_the_other(server, store, forget):
    store.acquire(AcquireRequest("k", "holder", 3600.0))
    lock = Lock("k", store=store)
    tokens: list[int] = []
    inside = []

    def work():
        with lock as lease:
            inside.append(1)
            tokens.append(lease.token)
            assert sum(inside) == 1
            inside.pop()

    threads = [begin(work)[0] for _ in range(3)]
    wait_until(lambda: store.inspect("k").waiting == 3, what="the waiters")

    forget(server)
    for thread in threads:
        thread.join(60)

    assert len(tokens) == 3
    assert tokens == sorted(set(tokens))
    assert (store.inspect("k").token, store.inspect("k").waiting) == (0, 0)


# A lock that never expires, by hand


def test_a_renewal_gives_a_persistent_lock_its_end_back(redis_store, client, record, events):
    lock = Lock("k", store=redis_store, lease=4.0)
    with lock:
        assert client.persist(record)

        wait_until(lambda: events.of("lock_renewed"), what="a renewal")

        assert 0 < client.pttl(record) <= 4000


def test_an_acquisition_of_the_holders_gives_a_persistent_lock_its_end_back(
    redis_store, client, record
):
    redis_store.acquire(AcquireRequest("k", "a", 60.0))
    client.persist(record)

    redis_store.acquire(AcquireRequest("k", "a", 60.0))

    assert 0 < client.pttl(record) <= 60_001  # rounded up twice


def test_waiting_for_a_persistent_lock_ends_in_time(redis_store, client, record):
    redis_store.acquire(AcquireRequest("k", "dead", 60.0))
    client.persist(record)
    began = clock.monotonic()

    assert Lock("k", store=redis_store).acquire(timeout=0.3) is False

    assert 0.3 <= clock.monotonic() - began < 10
    assert redis_store.inspect("k").waiting == 0


def test_a_waiter_for_a_persistent_lock_gets_it_when_it_is_deleted(redis_store, client, record):
    redis_store.acquire(AcquireRequest("k", "dead", 60.0))
    client.persist(record)
    lock = Lock("k", store=redis_store)
    thread, outcome = begin(lambda: lock.acquire(timeout=60) and lock.release())
    wait_until(lambda: redis_store.inspect("k").waiting == 1, what="the waiter")

    client.delete(record)
    thread.join(30)

    assert outcome == [None]


def test_the_release_of_a_persistent_lock_serves_the_next(redis_store, client, record):
    redis_store.acquire(AcquireRequest("k", "a", 60.0))
    client.persist(record)
    redis_store.acquire(AcquireRequest("k", "b", 60.0, queue=ParkRequest(b"envelope"), run="run"))

    wake = redis_store.release(ReleaseRequest("k", "a")).wake

    assert wake is not None
    assert wake.envelope == b"envelope"
    assert client.pttl(record) > 0


# A lease's very end

LEASES = 1000


def renew_across_the_end(
    store: RedisStore, client: redis.Redis, prefix: str, ahead_ms: int
) -> tuple[list[Ownership], list[RenewOutcome]]:
    """Renew, in one batch that begins *ahead_ms* before, leases that end in one millisecond."""

    def now_ms() -> int:
        seconds, microseconds = client.time()
        return int(seconds * 1000 + microseconds // 1000)

    holds = [Ownership(f"{ahead_ms}-{n}", "a", 60.0) for n in range(LEASES)]
    end_ms = now_ms() + 700
    with client.pipeline(transaction=False) as pipeline:
        for hold in holds:
            name = f"{prefix}:{{{hold.key}}}:lock"
            pipeline.hset(name, mapping={"x": grant("a", end_ms), "token": "1"})
            pipeline.pexpireat(name, end_ms)
        pipeline.execute()
    wait_until(lambda: now_ms() >= end_ms - ahead_ms, what="the end to come near", poll=0.001)
    return holds, [outcome for outcome, _ in store.renew(holds, 5.0)]


@pytest.mark.timeout(300)  # a hundred attempts, of a second each, if the clock does not tick
def test_a_renewal_at_a_leases_last_millisecond_either_holds_or_is_a_loss(
    redis_store, client, prefix
):
    for ahead_ms in (*range(8, 120, 4), *range(1, 60)):
        holds, outcomes = renew_across_the_end(redis_store, client, prefix, ahead_ms)
        if len(set(outcomes)) > 1:
            break
    else:
        pytest.skip("the server's clock never ticked in the middle of them")
    kept = outcomes.count(RenewOutcome.RENEWED)

    assert 0 < kept < LEASES
    assert outcomes == [RenewOutcome.RENEWED] * kept + [RenewOutcome.LOST] * (LEASES - kept)
    for hold in holds[:kept]:
        assert client.pttl(f"{prefix}:{{{hold.key}}}:lock") > 30_000
    assert not any(client.exists(f"{prefix}:{{{hold.key}}}:lock") for hold in holds[kept:])
    assert redis_store.acquire(AcquireRequest(holds[kept - 1].key, "b", 1.0)).status is Status.BUSY
    assert redis_store.acquire(AcquireRequest(holds[kept].key, "b", 1.0)).status is Status.GRANTED
