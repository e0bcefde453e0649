"""`Lock` on real servers: what is sent, what breaks, and what is noticed of it."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from celery_distlock import clock, signals
from celery_distlock.engine import acquisition, pending_releases
from celery_distlock.engine.acquisition import acquire
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.engine.pending_releases import release_later
from celery_distlock.engine.watchdog import watchdog
from celery_distlock.errors import (
    LockLostError,
    LockNotOwnedError,
    StoreError,
    StoreUnavailableError,
)
from celery_distlock.lock import Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.connections import KEPT, ConnectionFactory, ConnectionPool
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Ownership, ParkRequest, Status
from celery_distlock.telemetry import observer
from tests import servers
from tests.integration.lock.processes import Script, run_program
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_distlock.testing import EmbeddedServer

LEASE = 4.0  # seconds: a busy machine can take two of them away, and it is renewed all the same


@pytest.fixture
def lock(redis_store):
    return Lock("k", store=redis_store)


@contextmanager
def spoken(server: EmbeddedServer) -> Iterator[list[str]]:
    """What clients send to *server* in the block: names of commands, but for those in scripts."""
    names: list[str] = []
    with (
        uncounted(),
        server.client() as client,
        server.client() as listener,
        listener.monitor() as monitor,
    ):
        client.echo("begin of the block")
        while "begin of the block" not in monitor.next_command()["command"]:
            pass
        yield names
        client.echo("end of the block")
        for each in monitor.listen():
            if "end of the block" in each["command"]:
                break
            if each["client_type"] != "lua":
                names.append(each["command"].partition(" ")[0].upper())


@contextmanager
def uncounted() -> Iterator[None]:
    """Nothing is noted in the block, and what was noted before has been reported."""
    observers, signals.observers[:] = signals.observers[:], []
    reported = threading.Event()
    observer.flush()
    observer._notifier.submit(reported.set)  # its thread may be in the midst of a round
    assert reported.wait(60)
    try:
        yield
    finally:
        signals.observers[:] = observers


def elsewhere(call: Callable[[], Any]) -> Any:
    """What *call* returns, or raises, in another thread."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(90)
    (result,) = outcome
    return result


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


# What is sent


def test_an_acquisition_and_a_release_are_one_command_each(server, store):
    lock = Lock("k", store=store)
    with lock:
        pass  # the connection is made, the scripts are loaded

    with spoken(server) as acquired:
        lock.acquire()
    with spoken(server) as released:
        lock.release()

    assert (acquired, released) == (["EVALSHA"], ["EVALSHA"])


def test_a_reentry_sends_nothing(server, store):
    lock = Lock("k", store=store)

    with lock, spoken(server) as names:
        for _ in range(10):
            with lock, Lock("k", store=store):
                lock.lease.ensure_held()
                assert lock.lease.remaining

    assert names == []


def test_a_look_at_the_lock_is_one_command(server, store):
    lock = Lock("k", store=store)
    lock.locked()

    with spoken(server) as names:
        lock.locked()

    assert names == ["EVALSHA"]


def test_a_contended_acquisition_does_not_poll(server, store):
    lock = Lock("k", store=store)
    with lock:
        assert elsewhere(lambda: lock.acquire(timeout=0.01)) is False

    with lock:
        waiters = [
            threading.Thread(target=lambda: lock.acquire() and lock.release()) for _ in range(4)
        ]
        for thread in waiters:
            thread.start()
        wait_until(lambda: store.inspect("k").waiting == 4, what="the queue")
        began = time.monotonic()
        with spoken(server) as names:
            time.sleep(0.5)
        took = time.monotonic() - began
    for thread in waiters:
        thread.join(60)

    assert len(names) <= 4 * (1 + took)  # their backstops, each once a second at most


def test_waiting_for_a_lock_that_never_expires_does_not_poll(server, store):
    # An operator has made the lock persistent by hand.
    lock = Lock("k", store=store)
    with lock, server.client() as client:
        client.persist("test:{k}:lock")
        waiter = threading.Thread(target=lambda: lock.acquire(timeout=60) and lock.release())
        waiter.start()
        wait_until(lambda: store.inspect("k").waiting == 1, what="the waiter")

        with spoken(server) as names:
            time.sleep(0.4)
    waiter.join(60)

    assert len(names) <= 5


# What is wrong with a key, a URL, a server


@pytest.mark.parametrize("record", ["lock", "fence"])
def test_a_key_of_another_type_is_a_store_error_that_names_the_key(
    redis_store, redis_url, prefix, record
):
    with redis.Redis.from_url(redis_url) as client:
        client.lpush(f"{prefix}:{{order 7}}:{record}".replace(" ", "%20"), "something else")

    with pytest.raises(StoreError, match="of another type") as caught:
        Lock("order 7", store=redis_store).acquire()

    assert not isinstance(caught.value, StoreUnavailableError)
    assert "'order 7'" in str(caught.value)
    assert prefix in str(caught.value)
    assert isinstance(caught.value.__cause__, redis.ResponseError)


def test_a_server_that_is_down_is_unavailable_and_the_password_is_not_shown(server):
    url = server.url.replace("redis://", "redis://:hunter2@")
    server.stop()

    with pytest.raises(StoreUnavailableError) as caught:
        Lock("k", store=url).acquire()

    assert str(server.port) in str(caught.value)
    assert isinstance(caught.value.__cause__, redis.ConnectionError)
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__ or error.__context__


def test_a_wrong_password_is_unavailable_and_not_shown(server):
    with server.client() as client:
        client.config_set("requirepass", "secret")

    for url in (server.url, server.url.replace("redis://", "redis://:hunter2@")):
        with pytest.raises(StoreUnavailableError) as caught:
            Lock("k", store=url).acquire()
        assert "hunter2" not in str(caught.value)


def test_the_right_password_is_used(server):
    with server.client() as client:
        client.config_set("requirepass", "secret/with%40")
    url = server.url.replace("redis://", "redis://:secret%2Fwith%2540@")

    with Lock("k", store=url) as lease:
        assert lease.held


def test_a_password_for_a_server_that_has_none_is_an_outage(server):
    with pytest.raises(StoreUnavailableError) as caught:
        Lock("k", store=server.url.replace("redis://", "redis://user:hunter2@")).acquire()

    assert "hunter2" not in str(caught.value)


def driver_errors() -> list[type[redis.RedisError]]:
    found = [redis.RedisError]
    for each in found:
        found.extend(sub for sub in each.__subclasses__() if sub.__module__.startswith("redis."))
    return sorted({each for each in found if "Kafka" not in each.__name__}, key=str)


@pytest.mark.parametrize("method", ["acquire", "release", "inspect"])
def test_no_error_of_the_driver_leaves_the_store(redis_store, monkeypatch, method):
    leaked = []
    monkeypatch.setattr("celery_distlock.stores.redis.request_runner.PAUSES", (0.0,))
    asked = {
        "acquire": AcquireRequest("k", "a", 30.0),
        "release": ReleaseRequest("k", "a"),
        "inspect": "k",
    }[method]
    for kind in driver_errors():
        error = kind.__new__(kind)  # their constructors differ

        def fail(_pool, _calls, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(ConnectionPool, "exchange", fail)
            try:
                getattr(redis_store, method)(asked)
            except StoreError:
                pass
            except redis.RedisError:
                leaked.append(kind.__name__)

    assert leaked == []


def test_forgotten_scripts_are_sent_again(redis_store, redis_url):
    lock = Lock("k", store=redis_store)
    with redis.Redis.from_url(redis_url) as client:
        client.script_flush()
        lock.acquire()
        client.script_flush()
        assert elsewhere(lambda: lock.acquire(timeout=0.01)) is False
        client.script_flush()
        lock.lease.extend(60)
        client.script_flush()
        assert lock.locked()
        client.script_flush()
        lock.release()

    assert not lock.locked()


def test_one_cluster_node_runs_every_script(private_server):
    # In cluster mode a server refuses keys of several slots, and keys that are not declared.
    server = private_server(options={"cluster-enabled": "yes"})
    with server.client() as client, closing(RedisStore(server.url, "test")) as store:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        wait_until(
            lambda: b"cluster_state:ok" in _raw(client.execute_command("CLUSTER", "INFO")),
            what="the cluster",
        )
        with pytest.warns(UserWarning, match="takes the key as it is"):
            lock = Lock("{a}", store=store)
        with lock:
            assert elsewhere(lambda: lock.acquire(timeout=0.01)) is False
            lock.lease.extend(60)
            parked = store.acquire(
                AcquireRequest("{a}", "b", 30.0, queue=ParkRequest(b"e"), run="run")
            )
            assert parked.status is Status.PARKED
            store.publishers.known = (lambda wake: None,)
        assert store.inspect("{a}").owner == "parked:run"
        assert list(store.parking.sweep(0.05)) == []
        assert store.acquire(AcquireRequest("{a}", "c", 30.0, run="run")).status is Status.GRANTED
        assert store.release(ReleaseRequest("{a}", "c", run="run")).released


def _raw(info: Any) -> bytes:
    if isinstance(info, dict):
        return "\n".join(f"{name}:{value}" for name, value in info.items()).encode()
    return info if isinstance(info, bytes) else str(info).encode()


# Holding


def test_a_lock_is_held_for_many_leases(redis_store, events):
    seconds = 3.0
    lock = Lock("k", store=redis_store, lease=seconds)
    with lock as lease:
        token = lease.token
        until = clock.monotonic() + 2 * seconds
        while clock.monotonic() < until:
            assert lease.held
            assert elsewhere(lambda: lock.acquire(blocking=False)) is False
            time.sleep(0.02)

    assert len(events.of("lock_renewed")) >= 3
    assert "lock_lost" not in events.names()
    assert redis_store.acquire(AcquireRequest("k", "next", 1.0)).token > token


def test_a_lock_without_a_watchdog_ends_with_its_lease(redis_store, events):
    lock = Lock("k", store=redis_store, lease=0.3, watchdog=False)
    lock.acquire()
    lease = lock.lease

    wait_until(lambda: not lease.held, what="the lease's end")

    wait_until(lambda: not lock.locked(), what="the key to be free")
    wait_until(lambda: events.of("lock_lost"), what="the loss to be reported")
    assert events.of("lock_renewed") == []
    with pytest.raises(LockLostError) as caught:
        lock.release()
    assert (caught.value.key, caught.value.token) == ("k", lease.token)
    with pytest.raises(LockNotOwnedError):
        lock.release()


def test_a_lock_without_a_watchdog_can_be_extended(redis_store, events):
    lock = Lock("k", store=redis_store, lease=2.5, watchdog=False)
    with lock as lease:
        lease.extend(60)
        until = clock.monotonic() + 2.7
        while clock.monotonic() < until:
            assert lease.held
            time.sleep(0.02)

    assert "lock_lost" not in events.names()


def test_one_thread_keeps_200_leases(redis_store, events):
    before = set(threads_named("distlock-watchdog"))
    locks = [Lock(f"k{n}", store=redis_store, lease=6.0) for n in range(200)]
    for lock in locks:
        lock.acquire()

    wait_until(
        lambda: (
            {facts["key"] for facts in events.of("lock_renewed")} == {f"k{n}" for n in range(200)}
        ),
        what="every lease to be renewed",
    )

    assert len(set(threads_named("distlock-watchdog")) - before) == 1
    assert all(lock.lease.held for lock in locks)
    for lock in locks:
        lock.release()
    assert "lock_lost" not in events.names()


def test_renewals_share_round_trips(server, store):
    locks = [Lock(f"k{n}", store=store, lease=6.0) for n in range(50)]
    for lock in locks:
        lock.acquire()
    trips: list[int] = []
    exchange = ConnectionPool.exchange

    def count(pool, calls):
        if calls[0].script is not None and calls[0].script.name == "renew":
            trips.append(len(calls))
        return exchange(pool, calls)

    server.pause()
    all_due = clock.monotonic() + 6.0 / 3
    wait_until(lambda: clock.monotonic() > all_due, what="all to be due", timeout=60.0)
    ConnectionPool.exchange = count  # type: ignore[method-assign]
    server.resume()
    try:
        wait_until(lambda: sum(trips) >= 50, what="renewals")
    finally:
        ConnectionPool.exchange = exchange  # type: ignore[method-assign]
    for lock in locks:
        lock.release()

    assert len(trips) <= 15


def test_nothing_grows_over_many_acquisitions(server, store):
    lock = Lock("k", store=store)
    with lock:
        elsewhere(lambda: lock.acquire(timeout=0.01))
    observer.flush()  # by a connection, and into a record, of their own
    with server.client() as client:

        def counted():
            gc.collect()
            return len(client.client_list()), client.dbsize()

        before, threads_before = counted(), threading.active_count()
        for _ in range(2000):
            with lock:
                pass
        connections, keys = counted()
        assert connections <= before[0] + 1  # what is counted may be reported just now
        assert keys == before[1]
        assert threading.active_count() <= threads_before  # others' may end in between

        def work():
            for _ in range(50):
                with lock:
                    time.sleep(0)

        workers = [threading.Thread(target=work) for _ in range(4)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join(60)

        connections, keys = counted()
        assert connections <= before[0] + 5  # as many as worked at once, and the one that counts
        assert keys == before[1]
        assert threading.active_count() <= threads_before
        assert not watchdog(store)._due
        assert store.inspect("k").waiting == 0


# Losing


def delete(redis_url, prefix, key="k"):
    with redis.Redis.from_url(redis_url) as client:
        assert client.delete(f"{prefix}:{{{key}}}:lock") == 1


def test_a_deleted_lock_is_noticed_within_a_lease(redis_store, redis_url, prefix, events):
    lock = Lock("k", store=redis_store, lease=LEASE)
    lock.acquire()
    lease = lock.lease
    delete(redis_url, prefix)

    wait_until(lambda: events.of("lock_lost"), what="the loss")

    (lost,) = events.of("lock_lost")
    assert (lost["key"], lost["token"]) == ("k", lease.token)
    assert lost["sender"] is lock
    assert "no longer knows" in lost["reason"]
    assert not lease.held
    with pytest.raises(LockLostError):
        lease.ensure_held()
    with pytest.raises(LockLostError):
        lock.release()


def test_a_loss_to_another_owner_is_noticed_and_leaves_its_lock(
    redis_store, redis_url, prefix, events
):
    lock = Lock("k", store=redis_store, lease=LEASE)
    lock.acquire()
    delete(redis_url, prefix)
    redis_store.acquire(AcquireRequest("k", "other", 60.0))

    wait_until(lambda: events.of("lock_lost"), what="the loss")

    with pytest.raises(LockLostError, match="another owner holds it"):
        lock.release()
    assert redis_store.inspect("k").owner == "other"


def lose(lock, redis_url, prefix):
    delete(redis_url, prefix)
    with pytest.raises(LockLostError):
        lock.lease.extend(60)  # asks the store, as the watchdog will


def test_leaving_the_block_of_a_lost_lock_says_so(redis_store, redis_url, prefix):
    lock = Lock("k", store=redis_store)

    with pytest.raises(LockLostError, match="'k'"), lock:
        lose(lock, redis_url, prefix)

    with lock:
        pass


def test_a_loss_does_not_hide_what_the_body_raised(redis_store, redis_url, prefix):
    lock = Lock("k", store=redis_store)

    def enter():
        with lock:
            lose(lock, redis_url, prefix)
            raise LookupError("body")

    with pytest.raises(LookupError, match="body"):
        enter()

    assert lock.lease is None


def test_a_lost_lock_cannot_be_entered_again(redis_store, redis_url, prefix):
    lock = Lock("k", store=redis_store)
    lock.acquire()
    lose(lock, redis_url, prefix)

    with pytest.raises(LockLostError):
        lock.acquire()
    with pytest.raises(LockLostError), Lock("k", store=redis_store):
        raise AssertionError("entered")

    with pytest.raises(LockLostError):
        lock.release()
    with lock:
        pass


def test_every_level_of_a_lost_lock_can_be_left(redis_store, redis_url, prefix):
    lock = Lock("k", store=redis_store)

    with pytest.raises(LockLostError), lock, lock:
        lose(lock, redis_url, prefix)

    with pytest.raises(LockNotOwnedError):
        lock.release()


# Servers that break


def test_a_lock_outlives_a_crash_of_a_server_that_keeps_its_data(private_server, events):
    server = private_server(options={"appendonly": "yes", "appendfsync": "always"})
    with closing(RedisStore(server.url, "test")) as store:
        lock = Lock("k", store=store, lease=9.0)
        with lock as lease:
            server.kill()
            server.start()
            known = len(events.of("lock_renewed"))

            wait_until(lambda: len(events.of("lock_renewed")) > known, what="a renewal")

            assert lease.held
            assert store.inspect("k").token == lease.token
    assert "lock_lost" not in events.names()


def test_a_lock_is_lost_with_the_servers_data(server, store, events):
    lock = Lock("k", store=store, lease=LEASE)
    lock.acquire()
    lease = lock.lease

    server.kill()
    server.start()

    wait_until(lambda: events.of("lock_lost"), what="the loss")
    assert not lease.held
    with pytest.raises(LockLostError):
        lock.release()
    with lock as later:
        assert later.token > lease.token


def test_a_paused_server_is_believed_until_the_leases_end_and_no_longer(server, store, events):
    lock = Lock("k", store=store, lease=LEASE)
    lock.acquire()
    lease = lock.lease
    (hold,) = lease._holds
    server.pause()
    paused_at = clock.monotonic()

    try:
        wait_until(lambda: lease.suspect, what="doubts", poll=0.005)
        wait_until(lambda: not lease.held, what="the end of the belief", poll=0.005)
        stopped_at = clock.monotonic()
        assert not lease.suspect
        wait_until(lambda: events.of("lock_lost"), what="the report")
    finally:
        server.resume()

    # Not by when we saw it: a busy machine may show it late.
    assert hold.valid_until < paused_at + LEASE
    assert hold.valid_until <= stopped_at
    assert "in time" in events.of("lock_lost")[0]["reason"]
    with pytest.raises(LockLostError):
        lock.release()


def test_a_short_pause_of_the_server_does_no_harm(server, store, events, caplog):
    lock = Lock("k", store=store, lease=6.0)
    with lock as lease:
        server.pause()
        wait_until(lambda: "did not answer a renewal" in caplog.text, what="a renewal in vain")
        server.resume()

        wait_until(lambda: events.of("lock_renewed"), what="another renewal")

        assert lease.held
    assert "lock_lost" not in events.names()


def refuse_for_want_of_replicas(client):
    client.config_set("min-replicas-to-write", "1")


def refuse_as_a_replica(client):
    client.execute_command("REPLICAOF", "127.0.0.1", "1")


def refuse_as_full(client):
    client.config_set("maxmemory", "1")


def refuse_for_want_of_permission(client):
    client.execute_command("ACL", "SETUSER", "default", "-@scripting")


def refuse_for_want_of_disk(client):
    folder = Path(client.config_get("dir")["dir"])
    (folder / "dump.rdb").mkdir()  # so that nothing can be saved there
    client.config_set("save", "3600 1")
    client.bgsave()
    wait_until(
        lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err",
        what="the save to fail",
    )


@pytest.mark.parametrize(
    "refuse",
    [
        refuse_for_want_of_disk,
        refuse_for_want_of_replicas,
        refuse_as_a_replica,
        refuse_as_full,
        refuse_for_want_of_permission,
    ],
)
def test_a_refusal_that_its_operator_can_end_is_unavailability(server, store, refuse):
    lock = Lock("k", store=store)
    lock.locked()
    with server.client() as client:
        refuse(client)

    with pytest.raises(StoreUnavailableError) as caught:
        lock.acquire()

    assert isinstance(caught.value.__cause__, redis.RedisError)
    assert lock.lease is None
    server.kill()  # which a full disk would keep from stopping in an orderly way


def test_a_server_that_is_busy_with_a_script_is_unavailable(private_server):
    server = private_server(options={"lua-time-limit": "10"})
    with closing(RedisStore(server.url, "test")) as store, server.client() as client:
        lock = Lock("k", store=store)
        lock.locked()
        hog = threading.Thread(target=elsewhere, args=(lambda: client.eval("while 1 do end", 0),))
        hog.start()
        with server.client() as killer:

            def busy():
                try:
                    killer.ping()
                except redis.RedisError:
                    return True
                return False

            wait_until(busy, what="the script to run")

            with pytest.raises(StoreUnavailableError):
                lock.acquire()

            killer.script_kill()
        hog.join(60)
        with lock:
            pass


@servers.needs("load that can be slowed down")
def test_a_server_that_reads_its_data_is_unavailable_and_forgets_nothing(private_server, events):
    slow = {"key-load-delay": "20000", "loading-process-events-interval-bytes": "1024"}
    server = private_server(options={"save": "3600 1", **slow})
    with closing(RedisStore(server.url, "test")) as store:
        lock = Lock("k", store=store, lease=12.0)
        with lock as lease:
            with server.client() as client:
                client.mset({f"ballast:{n}": random.randbytes(2000) for n in range(150)})
            server.stop()  # it saves
            start = threading.Thread(target=server.start)
            start.start()
            with server.client() as client:

                def reads():
                    try:
                        client.ping()
                    except redis.BusyLoadingError:
                        return True
                    except redis.ConnectionError:
                        return False

                wait_until(reads, what="it to read", poll=0.005)
                with pytest.raises(StoreUnavailableError) as caught:
                    Lock("other", store=store).acquire(blocking=False)
            start.join(60)
            known = len(events.of("lock_renewed"))
            wait_until(lambda: len(events.of("lock_renewed")) > known, what="a renewal")
            assert lease.held
            assert store.inspect("k").token == lease.token
    assert isinstance(caught.value.__cause__, redis.BusyLoadingError)
    assert "lock_lost" not in events.names()


def test_a_full_server_grants_nothing_but_renews_and_releases(server, store, events):
    held = Lock("held", store=store, lease=LEASE)
    with server.client() as client, held as lease:
        client.config_set("maxmemory", "1")

        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            Lock("k", store=store).acquire()
        assert not store.inspect("k").token

        known = len(events.of("lock_renewed"))
        wait_until(lambda: len(events.of("lock_renewed")) > known + 1, what="renewals")
        assert lease.held
        lease.extend(30)
        held.release()
        assert not store.inspect("held").token
        client.config_set("maxmemory", "0")
        held.acquire()


def test_a_full_server_does_not_forget_waiters(server, store):
    store.acquire(AcquireRequest("k", "a", 60.0))
    store.acquire(AcquireRequest("k", "b", 60.0, queue=ParkRequest(b"envelope"), run="run"))
    with server.client() as client:
        client.config_set("maxmemory", "1")
        released = store.release(ReleaseRequest("k", "a"))
        client.config_set("maxmemory", "0")

    wakes = [released.wake] if released.wake else list(store.parking.sweep(0.05))
    assert [wake.envelope for wake in wakes] == [b"envelope"]


def test_connections_that_the_server_closed_do_not_count_as_an_outage(server, store):
    # Idle ones, cut by the server's own timeout, a proxy or a restart; as many as threads worked.
    start = threading.Barrier(8)
    threads = [
        threading.Thread(target=lambda: [(start.wait(), store.inspect("k")) for _ in range(20)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    idle = sum(len(pool._idle) for pool in store._servers._node._pools.values())
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    assert idle > 3
    with Lock("k", store=store) as lease:
        assert lease.held


@pytest.fixture
def burst(server, store, monkeypatch):
    """Has as many threads as one likes ask at once, each over a connection of its own."""
    opened = []
    connect = ConnectionFactory.__call__
    monkeypatch.setattr(
        ConnectionFactory, "__call__", lambda self: (opened.append(1), connect(self))[1]
    )

    def ask_at_once(number):
        threads = [threading.Thread(target=store.inspect, args=("k",)) for _ in range(number)]
        opened.clear()
        server.pause()
        for thread in threads:
            thread.start()
        wait_until(lambda: len(opened) >= number - 1, what="all to ask")  # one may be idle
        server.resume()
        for thread in threads:
            thread.join(60)

    return ask_at_once


def connections(server):
    with server.client() as client:
        return client.info("clients")["connected_clients"] - 1


def test_a_burst_leaves_few_connections(server, store, burst):
    burst(KEPT + 30)

    wait_until(lambda: connections(server) <= KEPT, what="the others to be given back")
    assert store.inspect("k").waiting == 0


def test_unused_connections_are_given_back(server, store, burst, monkeypatch):
    monkeypatch.setattr("celery_distlock.stores.redis.connections.UNUSED", 0.2)
    burst(10)

    def one_is_left():
        store.inspect("k")
        return connections(server) == 1

    wait_until(one_is_left, what="nine to be given back")


def test_an_answer_that_comes_after_the_lease_is_not_believed(server, store, monkeypatch):
    lock = Lock("k", store=store, lease=0.3)
    lock.locked()
    sent, send = threading.Event(), ConnectionPool.send

    def send_and_note(pool, calls):
        connection = send(pool, calls)
        if calls[0].script is not None and calls[0].script.name == "acquire":
            sent.set()
        return connection

    monkeypatch.setattr(ConnectionPool, "send", send_and_note)
    server.pause()
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(lock.acquire(blocking=False)))
    thread.start()
    assert sent.wait(60)
    time.sleep(0.6)
    server.resume()
    thread.join(60)

    assert outcome == [False]
    wait_until(lambda: not lock.locked(), what="what was granted to be given back")


def test_a_blocking_acquisition_goes_on_after_an_answer_that_came_too_late(server, store):
    lock = Lock("k", store=store, lease=0.3)
    lock.locked()

    def enter():
        taken = lock.acquire()
        with suppress(LockLostError):  # on a busy machine it may end before this
            lock.release()
        return taken

    server.pause()
    timer = threading.Timer(0.6, server.resume)
    timer.start()

    assert elsewhere(enter) is True
    timer.join()


def test_a_hanging_store_does_not_keep_the_leases_of_another_from_being_renewed(
    redis_store, server, store, events
):
    hanging = Lock("k", store=store, lease=0.6)
    hanging.acquire()
    with Lock("k", store=redis_store, lease=3.0) as lease:
        server.pause()
        try:
            release_later(store, ReleaseRequest("unanswered", "somebody"))

            until = clock.monotonic() + 3.4
            while clock.monotonic() < until:
                assert lease.held, "it waits for the store that hangs"
                time.sleep(0.02)
            assert {facts["sender"] for facts in events.of("lock_lost")} == {hanging}
        finally:
            server.resume()
    with pytest.raises(LockLostError):
        hanging.release()


def test_a_release_that_hangs_does_not_keep_a_loss_from_being_reported(server, store, events):
    lost = Lock("lost", store=store, lease=1.0)
    lost.acquire()
    server.pause()
    try:
        release_later(store, ReleaseRequest("unanswered", "somebody"))
        lease = lost.lease
        wait_until(lambda: not lease.held, what="the lease's end")

        # The release is given up after fifteen seconds.
        wait_until(lambda: events.of("lock_lost"), timeout=10.0, what="the report")
    finally:
        server.resume()
    with pytest.raises(LockLostError):
        lost.release()


def test_hundreds_of_waiters_come_back_a_few_at_a_time_to_a_server_that_forgot_them(server, store):
    holder = Lock("k", store=store)
    holder.acquire()
    served: list[int] = []

    def wait_and_note(number):
        with Lock("k", store=store):
            served.append(number)

    threads = [threading.Thread(target=wait_and_note, args=(number,)) for number in range(300)]
    for thread in threads:
        thread.start()
    wait_until(lambda: store.inspect("k").waiting == 300, what="all to wait")
    server.restart()
    for thread in threads:
        thread.join(60)

    assert sorted(served) == list(range(300))
    with server.client() as client:
        assert client.info("stats")["total_connections_received"] < 100
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] < 4 * 300
    with pytest.raises(LockLostError):
        holder.release()


def test_a_free_key_is_taken_at_once_where_nothing_may_be_pushed(server, store):
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "resetchannels")
    with Lock("k", store=store):  # another one waits, and is not notified
        assert elsewhere(lambda: Lock("k", store=store).acquire(timeout=0.1)) is False

    started = time.monotonic()
    for n in range(40):
        with Lock(f"free {n}", store=store):
            pass

    assert time.monotonic() - started < 15.0  # half a second each, if each waited to subscribe


def test_a_store_that_is_closed_during_a_wait_still_serves_the_waiter(server, store):
    held, served = Lock("k", store=store), threading.Event()
    held.acquire()

    def wait():
        with Lock("k", store=store):
            served.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: store.inspect("k").waiting, what="the waiter to queue")

    store.close()
    held.release()

    assert served.wait(60)
    waiter.join(60)


def test_waiters_that_are_torn_out_leave_a_listener(redis_store, monkeypatch):
    # redis-py leaves the socket open that it has just made when the exception comes; and it may
    # be raised in pytest's own hook, which would report that.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    # Before Python 3.13, an exception between two lines of `logging` leaves its mutex locked.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)

    class Torn(BaseException):
        pass

    done = threading.Event()
    blocker = Lock("other", store=redis_store)
    blocker.acquire()

    def wait_and_be_torn():
        while not done.is_set():
            with suppress(Torn):
                Lock("other", store=redis_store).acquire(timeout=0.05)

    victims = [threading.Thread(target=wait_and_be_torn) for _ in range(3)]
    for victim in victims:
        victim.start()
    for _ in range(300):
        victim = random.choice(victims)
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(victim.ident), ctypes.py_object(Torn))
        threading.Event().wait(random.uniform(0.001, 0.006))
    done.set()
    for victim in victims:
        with suppress(Torn):
            victim.join(60)

    took = []
    for _ in range(10):
        first, times = Lock("k", store=redis_store), []
        first.acquire()
        second = threading.Thread(
            target=lambda times=times: (
                Lock("k", store=redis_store).acquire(),
                times.append(time.monotonic()),
            )
        )
        second.start()
        wait_until(lambda: redis_store.inspect("k").waiting, what="the second to queue")
        started = time.monotonic()
        first.release()
        second.join(60)
        took.append(times[0] - started)
        redis_store.release(ReleaseRequest("k", redis_store.inspect("k").owner))
    blocker.release()
    assert min(took) < 0.3  # about 0.7 s each, without a subscriber
    # What was torn out is given back in the background; other tests count requests.
    lines = pending_releases._pending.value._threads
    wait_until(lambda: id(redis_store) not in lines, what="the errands", timeout=90.0)


def test_refusals_before_a_release_do_not_make_it_one(redis_store, monkeypatch):
    exchange, left = ConnectionPool.exchange, [redis.exceptions.ClusterDownError("not now")]

    def refuse_once(pool, calls):
        return [left.pop()] * len(calls) if left else exchange(pool, calls)

    monkeypatch.setattr(ConnectionPool, "exchange", refuse_once)

    assert not redis_store.release(ReleaseRequest("k", "nobody")).released


def test_where_scripts_are_forbidden_the_way_out_is_named(private_server):
    without = private_server(options={"rename-command": ['EVAL ""', 'EVALSHA ""']})
    restricted = private_server()
    with restricted.client() as client:
        refuse_for_want_of_permission(client)

    for server in (without, restricted):
        with (
            closing(RedisStore(server.url, "test")) as store,
            pytest.raises(StoreError, match=r"\?scripts=off"),
        ):
            store.check()


# Answers that are lost


@pytest.fixture
def lose_answers(monkeypatch, prefix):
    """Makes that many of the next requests about this test's keys be executed, and unanswered."""
    exchange = ConnectionPool.exchange
    left = 0

    def unreliable(pool, calls):
        nonlocal left
        answers = exchange(pool, calls)
        if left > 0 and calls[0].key.startswith(prefix.encode()):
            left -= 1
            raise redis.ConnectionError("the answer was lost")
        return answers

    def arm(count):
        nonlocal left
        left = count

    monkeypatch.setattr(ConnectionPool, "exchange", unreliable)
    return arm


def test_a_lost_answer_to_an_acquisition_is_one_hold(redis_store, lose_answers):
    lock = Lock("k", store=redis_store)
    lock.locked()
    lose_answers(2)

    lock.acquire()

    assert redis_store.inspect("k").token == lock.lease.token
    lock.release()
    assert not lock.locked()


def test_a_lost_answer_to_a_release_is_no_failure(redis_store, lose_answers):
    lock = Lock("k", store=redis_store)
    lock.acquire()
    lose_answers(1)

    lock.release()

    assert not lock.locked()


def test_a_lost_answer_to_a_release_does_not_free_the_next_holders_key(redis_store, lose_answers):
    lock = Lock("k", store=redis_store)
    lock.acquire()
    # Parked, because a blocked waiter's grant ends after a second.
    redis_store.acquire(
        AcquireRequest("k", "waiter", 60.0, queue=ParkRequest(b"envelope"), run="run")
    )
    lose_answers(2)

    lock.release()

    assert redis_store.inspect("k").owner == "parked:run"


def test_lost_answers_to_renewals_are_no_loss(redis_store, lose_answers, events):
    lock = Lock("k", store=redis_store, lease=6.0)
    with lock as lease:
        lose_answers(2)
        wait_until(lambda: events.of("lock_renewed"), what="a renewal")
        assert lease.held

    assert "lock_lost" not in events.names()


def test_an_acquisition_without_any_answer_is_given_back(redis_store, lose_answers):
    lock = Lock("k", store=redis_store, lease=60.0)
    lock.locked()
    lose_answers(3)

    with pytest.raises(StoreUnavailableError):
        lock.acquire()

    assert lock.lease is None
    wait_until(lambda: not lock.locked(), timeout=20.0, what="the key to be given back")


def test_a_release_without_any_answer_goes_on_in_the_background(server, store, monkeypatch):
    lock = Lock("k", store=store, lease=60.0)
    lock.acquire()
    exchange = ConnectionPool.exchange
    dead = threading.Event()
    dead.set()

    def cut_off(pool, calls):
        if dead.is_set():
            raise redis.ConnectionError("cut off")
        return exchange(pool, calls)

    monkeypatch.setattr(ConnectionPool, "exchange", cut_off)
    lock.release()
    dead.clear()

    wait_until(lambda: not lock.locked(), what="the release")


# Several processes


def test_two_processes_exclude_each_other(redis_url, prefix, tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    source = f"""
path = {os.fspath(counter)!r}
tokens = []
report(ready=True)
ask()
for _ in range(50):
    with Lock("k", store=store) as lease:
        seen = int(open(path).read())
        time.sleep(0.001)
        open(path, "w").write(str(seen + 1))
        tokens.append((seen, lease.token))
report(tokens=tokens)
"""
    with (
        Script(source, redis_url, prefix) as one,
        Script(source, redis_url, prefix) as other,
    ):
        for each in (one, other):
            each.received()
        for each in (one, other):
            each.say()
        grants = sorted(one.received()["tokens"] + other.received()["tokens"])

    assert counter.read_text() == "100"
    assert [seen for seen, _ in grants] == list(range(100))
    tokens = [token for _, token in grants]
    assert tokens == sorted(set(tokens))


WAITER = """
lock = Lock("k", store=store, lease=60.0)
report(ready=True)
try:
    with lock:
        report(got=True)
        ask()
except KeyboardInterrupt:
    report(interrupted=True)
    ask()
"""


def test_a_waiter_in_another_process_is_notified_of_the_release(redis_store, redis_url, prefix):
    lock = Lock("k", store=redis_store, lease=60.0)
    lock.acquire()
    with Script(WAITER, redis_url, prefix) as waiter:
        waiter.received()
        wait_until(lambda: redis_store.inspect("k").waiting == 1, what="it to queue")

        released_at = time.monotonic()
        lock.release()

        assert waiter.received() == {"got": True}
        assert time.monotonic() - released_at < 30.0


def test_an_interrupted_waiter_leaves_the_queue(redis_store, redis_url, prefix):
    lock = Lock("k", store=redis_store, lease=60.0)
    lock.acquire()
    with Script(WAITER, redis_url, prefix) as waiter:
        waiter.received()
        wait_until(lambda: redis_store.inspect("k").waiting == 1, what="it to queue")

        waiter.signal(signal.SIGINT)

        assert waiter.received() == {"interrupted": True}
        wait_until(lambda: redis_store.inspect("k").waiting == 0, what="it to leave")
        lock.release()
        assert elsewhere(lambda: Lock("k", store=redis_store).acquire(timeout=10)) is True


def test_a_key_granted_to_a_waiter_that_is_killed_goes_to_the_next(redis_store, redis_url, prefix):
    lock = Lock("k", store=redis_store, lease=60.0)
    lock.acquire()
    with Script(WAITER, redis_url, prefix) as waiter:
        waiter.received()
        wait_until(lambda: redis_store.inspect("k").waiting == 1, what="it to queue")
        waiter.pause()
        released_at = clock.monotonic()
        lock.release()
        granted = redis_store.inspect("k").owner
        assert granted or clock.monotonic() > released_at + 1.0

        assert lock.acquire(timeout=20) is True  # its grant was short, for it to confirm

    lock.release()


def test_an_exception_thrown_into_a_waiting_thread_leaves_the_key_to_others(redis_store):
    class StopWaitingError(Exception):
        pass

    lock = Lock("k", store=redis_store)
    lock.acquire()
    outcome: list[Any] = []

    def wait():
        try:
            lock.acquire()
        except StopWaitingError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: redis_store.inspect("k").waiting == 1, what="it to queue")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(StopWaitingError)
    )
    thread.join(60)  # it comes when the wait ends, at the backstop

    assert len(outcome) == 1
    wait_until(lambda: redis_store.inspect("k").waiting == 0, what="it to leave")
    lock.release()
    assert elsewhere(lambda: lock.acquire(timeout=10)) is True


HOLDER = """
lock = Lock("k", store=store, lease=1.0)
try:
    with lock as lease:
        report(held=lease.held, token=lease.token)
        ask()
        report(held=lease.held)
except LockLostError as error:
    report(lost=error.key, token=error.token)
"""


def test_the_key_of_a_killed_process_is_free_after_its_lease(redis_store, redis_url, prefix):
    with Script(HOLDER, redis_url, prefix) as holder:
        token = holder.received()["token"]
        holder.signal(signal.SIGKILL)

        with Lock("k", store=redis_store) as lease:
            assert lease.token > token


def test_a_process_that_was_suspended_for_longer_than_its_lease_knows_it(
    redis_store, redis_url, prefix
):
    with Script(HOLDER, redis_url, prefix) as holder:
        token = holder.received()["token"]
        holder.pause()
        with Lock("k", store=redis_store) as lease:
            assert lease.token > token
            holder.say()
            holder.signal(signal.SIGCONT)

            assert holder.received() == {"held": False}
            assert holder.received() == {"lost": "k", "token": token}
            assert redis_store.inspect("k").token == lease.token


def test_a_forked_child_does_not_hold_what_its_parent_holds(redis_url, prefix):
    source = """
import celery_distlock.engine.acquisition
renewed = threading.Event()
celery_distlock.engine.acquisition.defaults.on_event = lambda name, *_, **__: (
    name == "lock_renewed" and renewed.set()
)
lock = Lock("k", store=store, lease=4.0)
lock.acquire()
token = lock.lease.token
child = os.fork()
if not child:
    facts = {"lease": lock.lease is not None}
    try:
        lock.release()
    except LockNotOwnedError:
        facts["release"] = "refused"
    facts["acquired"] = lock.acquire(blocking=False)
    facts["waited"] = lock.acquire(timeout=0.1)
    with Lock("other", store=store) as lease:
        facts["other"] = lease.held
    report(**facts)
    sys.exit()
_, status = os.waitpid(child, 0)
renewed.clear()
renewed.wait(30)  # is it still renewed?
report(status=status, held=renewed.is_set() and lock.lease.held, same=lock.lease.token == token)
assert store.inspect("k").token == token
lock.release()
report(locked=lock.locked())
"""
    with Script(source, redis_url, prefix) as script:
        assert script.received() == {
            "lease": False,
            "release": "refused",
            "acquired": False,
            "waited": False,
            "other": True,
        }
        assert script.received() == {"status": 0, "held": True, "same": True}
        assert script.received() == {"locked": False}
        assert script.ended() == 0


def test_a_parents_waiter_is_still_notified_after_a_fork(redis_store, redis_url, prefix):
    source = """
lock = Lock("k", store=store, lease=60.0)
thread = threading.Thread(target=lambda: lock.acquire() and report(got=True))
thread.start()
while not store.inspect("k").waiting:
    time.sleep(0.01)
for _ in range(3):
    child = os.fork()
    if not child:
        sys.exit()
    os.waitpid(child, 0)
report(forked=True)
thread.join()
"""
    lock = Lock("k", store=redis_store, lease=60.0)
    lock.acquire()
    with Script(source, redis_url, prefix) as script:
        script.received()

        lock.release()

        assert script.received() == {"got": True}


def test_parent_and_child_contend(redis_url, prefix):
    source = """
lock = Lock("k", store=store)
with lock:
    pass
child = os.fork()
for _ in range(30):
    with lock as lease:
        report(token=lease.token)
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""
    with Script(source, redis_url, prefix) as script:
        tokens = [script.received()["token"] for _ in range(60)]

    assert tokens == sorted(set(tokens))


def test_a_lock_may_be_left_to_the_end_of_the_process(redis_url, prefix):
    with Script('Lock("k", store=store).acquire(); report(got=True)', redis_url, prefix) as script:
        script.received()

        assert script.ended() == 0


def test_what_is_held_here_is_known_by_store_and_key(redis_store):
    name = (redis_store.identity, "k")
    with Lock("k", store=redis_store):
        assert name in acquisition.held_here()
        assert elsewhere(acquisition.held_here) == {}
    assert name not in acquisition.held_here()


def test_a_renewal_that_comes_late_does_not_shorten_an_extended_lease(store):
    store.acquire(AcquireRequest("k", "a", 30.0))
    store.renew([Ownership("k", "a", 300.0)], 5.0)

    store.renew([Ownership("k", "a", 30.0)], 5.0)

    assert store.inspect("k").remaining > 100


def test_a_user_that_may_not_publish_is_served_nevertheless(private_server, prefix):
    server = private_server()
    with server.client() as client:
        client.execute_command(
            *("ACL", "SETUSER", "quiet", "on", ">secret", "~*", "+@all", "resetchannels")
        )
    url = server.url.replace("redis://", "redis://quiet:secret@")
    with closing(RedisStore(url, prefix)) as store:
        store.acquire(AcquireRequest("k", "a", 30.0))
        store.acquire(
            AcquireRequest("k", "b", 1.0, queue=ParkRequest(b"envelope", "channel"), run="run")
        )

        wake = store.release(ReleaseRequest("k", "a")).wake

        assert wake is not None
        assert wake.envelope == b"envelope"
        assert any(found.subject == "publish" for found in store.check())


def test_a_hold_without_a_holder_is_not_renewed(store):
    hold = Hold(store, "k", Terms(0.4), label="test")
    acquire(hold)
    del hold

    wait_until(lambda: not store.inspect("k").token, what="the end of the lease")


FORK_IN_A_TASK = """
import os, sys
from celery import Celery
from celery_distlock import LockedTask
from celery_distlock.stores import open_store

app = Celery("fork")
app.conf.update(distlock_url=sys.argv[1], distlock_prefix=sys.argv[2])

@app.task(base=LockedTask, lock_key="k", bind=True)
def forks(self):
    pid = os.fork()
    if pid == 0:
        raise SystemExit(0)
    os.waitpid(pid, 0)
    stored = open_store(sys.argv[1], sys.argv[2]).inspect("k")
    return self.lock.held and stored.token == self.lock.token

held = forks()
assert held is True
"""


def test_a_child_that_a_task_forks_does_not_release_its_lock(redis_url, prefix):
    run_program(FORK_IN_A_TASK, redis_url, prefix)


def test_a_lease_that_a_forked_child_has_from_its_parent_is_not_held_there(redis_url, prefix):
    source = """
lock = Lock("k", store=store)
with lock as lease:
    child = os.fork()
    if not child:
        try:
            lease.ensure_held()
        except LockLostError as error:
            report(held=lease.held, remaining=lease.remaining, error=str(error))
        os._exit(0)
    os.waitpid(child, 0)
    report(held=lease.held)
"""
    with Script(source, redis_url, prefix) as script:
        said = script.received()
        assert "the process that forked this one has it" in said.pop("error")
        assert said == {"held": False, "remaining": 0.0}
        assert script.received() == {"held": True}
        assert script.ended() == 0


@pytest.mark.parametrize("taken", [False, True], ids=["forgotten", "of another owner"])
def test_the_release_of_a_lock_that_is_not_ours_any_more_says_so(
    redis_store, redis_url, prefix, events, taken
):
    lock = Lock("k", store=redis_store)
    lock.acquire()
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"{prefix}:{{k}}:lock")
    if taken:
        assert redis_store.acquire(AcquireRequest("k", "other", 60.0)).status is Status.GRANTED

    with pytest.raises(LockLostError):
        lock.release()

    assert events.names()[-1] == "lock_lost"
    assert bool(redis_store.inspect("k").token) == taken
