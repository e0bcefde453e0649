"""The master that sentinels name: its failovers, its return, the sentinels' own end."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockLostError, StoreError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Ownership, RenewOutcome, Status
from tests.contract.parts.sending import send
from tests.stores.topologies import drill
from tests.topologies import Sentinels
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Sentinels]:
    """Sentinels of this module, which its tests break and mend."""
    with Sentinels() as sentinels:
        yield sentinels


@pytest.fixture
def sentinels(shared: Sentinels) -> Iterator[Sentinels]:
    yield shared
    for server in (*shared.sentinels, *shared.servers):
        server.resume()
        server.start()
    shared.settle()


@pytest.fixture
def store(sentinels: Sentinels, prefix: str) -> Iterator[RedisStore]:
    with closing(RedisStore(sentinels.url(), prefix)) as made:
        yield made


def copied(sentinels: Sentinels) -> None:
    """Wait until the replicas have what the master has."""
    with sentinels.master.client() as client:
        client.set("the last of it", 1)
        assert client.wait(2, 30_000) == 2


def copied_by_all(sentinels: Sentinels) -> None:
    """The same, of one that takes no writes now."""
    offset = sentinels.master.info("replication")["master_repl_offset"]
    for replica in sentinels.replicas:
        wait_until(
            lambda replica=replica: replica.info("replication")["slave_repl_offset"] >= offset,
            what=f"{replica!r} to have it all",
        )


def extended(lock: Lock) -> bool:
    """Whether it could be: a request is not repeated, and sentinels may be slow to answer."""
    try:
        lock.lease.extend(60.0)
    except LockLostError:
        raise
    except StoreError:
        return False
    return True


def test_a_lock_goes_on_at_the_new_master(sentinels, store):
    lock = Lock("k", store=store, lease=60.0)
    with lock as lease:
        copied(sentinels)
        sentinels.fail_over()

        wait_until(lambda: extended(lock), what="the new master")
        assert store.inspect("k").token == lease.token
    assert not lock.locked()


def test_tokens_rise_over_a_failover_that_forgets_all(sentinels, store):
    tokens = drill.exclude(store, "k")
    sentinels.fail_over().ask("FLUSHALL")

    assert min(drill.exclude(store, "k")) > max(tokens)


def test_a_killed_master_is_survived(sentinels, store):
    lock = Lock("k", store=store, lease=60.0)
    lock.acquire()
    copied(sentinels)
    old = sentinels.master
    old.kill()
    sentinels.wait_for_new_master(old)

    wait_until(lambda: extended(lock), what="the new master")
    lock.release()
    assert not lock.locked()


def test_waiters_outlast_a_failover(sentinels, store):
    lock, served = Lock("k", store=store, lease=60.0), threading.Event()
    lock.acquire()
    waiter = threading.Thread(target=drill.take_once, args=[store, "k", served])
    waiter.start()
    wait_until(lambda: store.inspect("k").waiting, what="the waiter to queue")
    copied(sentinels)
    old = sentinels.master
    old.kill()
    sentinels.wait_for_new_master(old)
    lock.release()

    assert served.wait(60)
    waiter.join(60)


def test_what_was_parked_is_found_after_a_failover(sentinels, store):
    keys = [f"k{n}" for n in range(5)]
    found = set()

    def fail_over_and_look() -> None:
        found.update(drill.park_and_sweep(store, keys, lease=1.0))

    looker = threading.Thread(target=fail_over_and_look)
    looker.start()
    wait_until(lambda: store.inspect("k4").waiting or found, what="the last to be parked")
    copied(sentinels)
    sentinels.fail_over()
    looker.join(60)

    assert found == {f"run {key}" for key in keys}


@pytest.mark.parametrize(("replicas", "paused"), [(2, False), (0, True)], ids=["all", "paused"])
def test_a_living_master_is_replaced_without_a_loss(sentinels, prefix, replicas, paused):
    # One that is not stopped takes calls until the sentinels make it a replica.
    sent: list[str] = []
    ends = threading.Event()

    def go_on(store: RedisStore) -> None:
        for number in range(10**6):
            if ends.is_set():
                return
            with suppress(StoreError):
                send(store, f"k{number}", "run", delay=600.0)
                sent.append(f"k{number}")

    with closing(RedisStore(f"{sentinels.url()}&replicas={replicas}", prefix)) as store:
        sender = threading.Thread(target=go_on, args=[store])
        sender.start()
        try:
            wait_until(lambda: len(sent) > 10, what="calls")
            if paused:
                sentinels.master.ask("CLIENT", "PAUSE", 10_000, "WRITE")
                copied_by_all(sentinels)
            sentinels.fail_over()
            before = len(sent)
            wait_until(lambda: len(sent) > before, what="calls at the new master")
        finally:
            ends.set()
            sender.join(60)

        assert [key for key in sent if not store.inspect(key).later] == []


def test_a_demoted_master_is_noticed_by_clients_that_still_talk_to_it(sentinels, store):
    store.acquire(AcquireRequest("k", "a", 60.0))
    copied(sentinels)
    old = sentinels.master
    sentinels.fail_over()
    assert old.ask("ROLE")[0] == "slave"

    assert store.acquire(AcquireRequest("k", "b", 60.0)).status is Status.BUSY
    assert store.renew([Ownership("k", "a", 60.0)], 5.0)[0][0] is RenewOutcome.RENEWED


def test_no_holder_believes_in_a_lock_at_a_master_that_was_cut_off(sentinels, store, prefix):
    # It is stopped, another one takes its place, and it comes back as what it was.
    old = sentinels.master
    late = Lock("k", store=store, lease=3.0)
    late.acquire()
    lease = late.lease
    old.pause()
    new = sentinels.wait_for_new_master(old)
    new.ask("DEL", f"{prefix}:{{k}}:lock")  # as if it had not heard of it
    with closing(RedisStore(sentinels.url(), prefix)) as elsewhere:
        taken = wait_until(lambda: _taken(elsewhere), what="the key at the new master")
        (hold,) = lease._holds
        until = hold.valid_until
        old.resume()
        # The old master would renew it, until it learns that it is none. It is not asked.
        wait_until(lambda: not lease.held, what="the end of the belief")
        assert hold.valid_until == until
        assert taken > lease.token
        assert elsewhere.inspect("k").owner == "other"
    with pytest.raises(LockLostError):
        late.release()


def _taken(store: RedisStore) -> int:
    try:
        return store.acquire(AcquireRequest("k", "other", 60.0)).token
    except StoreUnavailableError:
        return 0


def test_without_any_sentinel_the_last_master_serves(sentinels, store):
    lock = Lock("k", store=store)
    lock.acquire()
    for sentinel in sentinels.sentinels:
        sentinel.kill()

    lock.release()
    drill.exclude(store, "k", threads=2, times=3)

    with (
        closing(RedisStore(sentinels.url(), "other")) as stranger,
        pytest.raises(StoreUnavailableError, match="no sentinel names a master 'locks'"),
    ):
        stranger.acquire(AcquireRequest("k", "a", 30.0))


def test_a_silent_sentinel_costs_little_and_is_named(sentinels, store):
    sentinels.sentinels[0].pause()

    drill.exclude(store, "k", threads=2, times=3)

    assert [found for found in store.check() if str(sentinels.sentinels[0].port) in found.message]


def test_sentinels_that_all_hang_cost_no_lock(sentinels, store):
    lock = Lock("k", store=store, lease=6.0)
    lock.acquire()
    for sentinel in sentinels.sentinels:
        sentinel.pause()

    (hold,) = lock.lease._holds
    until = hold.valid_until
    wait_until(lambda: hold.valid_until > until, what="a renewal")
    token = lock.lease.token
    wait_until(lambda: store.inspect("k").remaining > 4.5, what="another")
    assert lock.lease.held
    assert lock.lease.token == token
    lock.release()


def test_a_service_that_there_is_not_is_named(sentinels):
    url = sentinels.url().replace("service=locks", "service=lockz")
    with (
        closing(RedisStore(url, "p")) as store,
        pytest.raises(StoreUnavailableError, match="'lockz'"),
    ):
        store.acquire(AcquireRequest("k", "a", 30.0))


@pytest.mark.parametrize("database", [0, 1])
def test_a_sentinel_used_as_a_server_is_reported_as_one(sentinels, database):
    url = f"redis://{sentinels.sentinels[0].address}/{database}"
    with closing(RedisStore(url, "p")) as store, pytest.raises(StoreError, match="sentinel://"):
        store.acquire(AcquireRequest("k", "a", 30.0))


def test_passwords_of_servers_and_of_sentinels(private_topology, prefix):
    sentinels = private_topology(
        Sentinels(replicas=1, password="s3cret/@:", sentinel_password="0ther&pw")
    )
    with closing(RedisStore(sentinels.url(), prefix)) as store:
        assert [found for found in store.check() if found.subject != "persistence"] == []
        drill.hand_over(store, "k")
        assert "s3cret" not in store.identity
