"""The Redis store's scripts, its check and its threads, on a real server."""

from __future__ import annotations

import re
import threading
import uuid
from contextlib import closing

import pytest
import redis

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import (
    AcquireRequest,
    ReleaseRequest,
    StandRequest,
    open_store,
    queue_store,
)
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.redis import connections, sending, silence
from celery_distlock.stores.redis.connections import ConnectionPool, command, script_call
from celery_distlock.stores.redis.request_runner import PAUSES
from celery_distlock.stores.redis.scripts import Script
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import Identity, SendRequest
from celery_distlock.stores.values import (
    Action,
    Completion,
    Limit,
    OwnChannel,
    Ownership,
    ParkRequest,
    PeerChannel,
    RenewOutcome,
    Reply,
    Route,
    Want,
)
from tests import servers
from tests.losses import Losses
from tests.unit.test_lua import SCRIPTS
from tests.waiting import wait_until


def share(store):
    store.acquire(AcquireRequest("s", "f", 30.0, want=Want(1, 0)))
    store.units.upgrade("s", "f", 30.0)
    store.units.downgrade("s", "f", 30.0)
    store.units.rest("s", "f", 5.0)
    store.units.set_limit("s", Limit(3))
    store.audit.record_action("s", Action("limit", "ann@ops"))


def tick(store):
    store.timetable.note_due({"k": 5.0})
    store.timetable.claim_due("me", store.timetable.ticker_inbox("me"), 1.0)
    store.timetable.dues()


def send(store):
    """Send what goes through the store."""
    parked = ParkRequest(b"envelope")
    store.calls.send(SendRequest("p", "plain", parked))
    store.calls.send(SendRequest("q", "known", parked, identity=Identity("same")))
    store.calls.send(SendRequest("q", "silent", parked, identity=Identity("silent", silent=True)))
    store.calls.peek("q", "same")
    store.calls.inherit("q", Identity("same"), "known")
    store.calls.delayed("q")
    store.calls.bearers("q", 10)


def test_calls_hurry_at_a_server_that_has_been_silent_for_long(private_server, monkeypatch):
    for module in (sending, silence):
        monkeypatch.setattr(module, "TIMEOUT", 2.0)
    monkeypatch.setattr(silence, "LONG", 1.0)
    server = private_server()
    with closing(RedisStore(server.url, "p")) as store:
        store.calls.peek("k", "same")
        server.pause()
        with pytest.raises(StoreUnavailableError):
            store.calls.peek("k", "same")
        began = clock.monotonic()
        for run in ("one", "two", "three"):
            with pytest.raises(StoreUnavailableError):
                store.calls.send(SendRequest("k", run, ParkRequest(b"envelope")))

        assert clock.monotonic() - began < 3 * 2.0
        server.resume()


RELEASES = {("release", number) for number in (3, 5, 6)}


def test_the_store_sends_what_the_headers_name(  # noqa: PLR0915  # one request after the other
    redis_url, prefix, monkeypatch
):
    sent = []
    exchange = ConnectionPool.exchange

    def record(pool, calls):
        sent.extend(calls)
        return exchange(pool, calls)

    monkeypatch.setattr(ConnectionPool, "exchange", record)
    store = RedisStore(redis_url, prefix)
    store.acquire(AcquireRequest("k", "a", 30.0))
    store.renew([Ownership("k", "a", 30.0)], 5.0)
    store.acquire(AcquireRequest("k", "b", 30.0, queue=store.inbox("k", "b")))
    store.release(ReleaseRequest("k", "b", inbox=store.inbox("k", "b")))
    parked = ParkRequest(b"envelope", leaves=60.0)
    store.acquire(AcquireRequest("k", "c", 30.0, queue=parked, run="run"))
    wake = store.release(ReleaseRequest("k", "a", completion=Completion.YES, run="other")).wake
    store.parking.mark_published(wake)
    peer = PeerChannel(store.channels.open_channel(lambda wake: None).address, 1)
    store.channels.register_channel(["celery"], peer, 5.0)
    store.channels.push(wake, [each.address for each in store.channels.find_channels(["celery"])])
    store.parking.keep_reserved([wake], 5.0)
    store.parking.mark_returned(wake)
    store.drop(wake._replace(run="another"))
    list(store.parking.sweep(0.05))
    store.inspect("k")
    store.waiters("k")
    store.parking.lanes("k")
    store.parking.destinations(["k"])
    store.parking.cancel("k", "another")
    list(store.parking.wake_again("k"))
    store.count({"what": 1.0})
    store.retry_delay("k", 0.5, (0.1, 60.0), 5.0)
    store.acquire(AcquireRequest("k", "c", 30.0, run="run", redelivered=True))
    store.release(
        ReleaseRequest("k", "c", run="run", completion=Completion.YES, keep_for=("run", 0.05))
    )
    store.release(ReleaseRequest("k", "c", own_channel=OwnChannel(peer.address, " celery")))
    store.acquire_all(["l", "m"], ["d", "e"], 30.0)
    standing = StandRequest("standing", Route(("n", "o")), park_request=ParkRequest(b"envelope"))
    queue_store.reserve_or_queue(store, standing)
    store.parking.try_one(standing, 1, 1, counts=False)
    share(store)
    tick(store)
    send(store)
    store.parking.leave_one("o", "standing", first=False, at="n")
    store.parking.reserve_one("o", "standing", first=False, comes=False)
    store.recall("k", "a")
    list(store.parking.wake_next("quiet"))
    store.check()

    seen, numbers = set(), set()
    for call in sent:
        if call.script is not None:
            _, _, count, *keys = call.head.split(b"\r\n")[1::2]
            times = 2 if call.script.name in {"acquire_all", "try_keys"} else 1
            assert int(count) == len(keys)
            number, script = len(call.arguments), call.script
            assert script.required <= number <= len(script.arguments), script.name
            numbers.add((script.name, number))
            records = [key.rpartition(b":")[2].decode() for key in keys]
            assert records == times * list(call.script.keys)
            seen.add(call.script.name)
    assert seen == set(SCRIPTS) - {"vote"}  # which is the majority's
    assert {("acquire", 4), ("acquire", 7), ("send", 4), ("send", 5), *RELEASES} <= numbers


@pytest.mark.parametrize("failure", [None, redis.TimeoutError("no answer"), redis.ConnectionError])
def test_a_refused_renewal_is_known_without_the_record_of_operators(
    redis_url, prefix, monkeypatch, failure
):
    exchange = ConnectionPool.exchange
    looks = []

    def fail(pool, calls):
        if calls[0].script is None and b"ZRANGE" in calls[0].head:
            looks.append(calls)
            if failure is not None:
                raise failure
        return exchange(pool, calls)

    with closing(RedisStore(redis_url, prefix)) as store:
        with redis.Redis.from_url(redis_url) as client:
            client.set(f"{prefix}:{{k}}:actions", "of another type")
        store.acquire(AcquireRequest("k", "a", 30.0))
        monkeypatch.setattr(ConnectionPool, "exchange", fail)

        outcomes = store.renew([Ownership("k", "a", 30.0), Ownership("k", "b", 30.0)], 5.0)

        assert [outcome for outcome, _ in outcomes] == [RenewOutcome.RENEWED, RenewOutcome.HELD]
        assert len(looks) == 1
        assert len(looks[0]) == 1  # of what was refused alone
        assert store.audit.why_lost("k", "b") == ""


@pytest.mark.parametrize("completion", [Completion.YES, Completion.YES_AND_MAY_COME_AGAIN])
def test_a_release_pushes_what_was_sent_to_the_worker_that_asks(redis_url, prefix, completion):
    store, received = RedisStore(redis_url, prefix), []
    channel = OwnChannel(store.channels.open_channel(received.append).address, "{} celery")
    store.acquire(AcquireRequest("k", "a", 30.0, run="before"))
    store.calls.send(SendRequest("k", "run", ParkRequest(b"e", destination="{} celery")))

    release = ReleaseRequest("k", "a", "before", completion, own_channel=channel)

    assert store.release(release) == (True, None)
    (wake,) = wait_until(lambda: received, what="the push")
    assert (wake.name, wake.run, wake.envelope, wake.givers) == ("k", "run", b"e", ("before",))
    store.close()


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_done_before_a_script_that_the_server_lacks_is_not_done_again(
    redis_url, prefix, place
):
    source = f"return 'known' -- {prefix}"
    unknown = Script("unknown", ("list",), (), 0, source, uuid.uuid4().hex)
    calls = [command(f"{prefix}:done".encode(), "INCR", f"{prefix}:done")]
    calls.insert(place, script_call(unknown, (f"{prefix}:",)))
    with closing(RedisStore(redis_url, prefix)) as store:
        answers = store._servers.exchange(calls, 5.0)

    assert answers.pop(place) == b"known"
    assert answers == [1 if place == 1 else 2]  # what comes after may depend on it


def test_an_update_that_is_repeated_is_answered_as_before(redis_url, prefix):
    """It has let its run go, which is not one that came too late for it."""
    same = Identity("same", "started")
    update = SendRequest("k", "run", ParkRequest(b"new"), identity=same._replace(replaces="run"))
    with closing(RedisStore(redis_url, prefix)) as store:
        old = SendRequest("k", "run", ParkRequest(b"old"), delay=60.0, identity=same)
        assert store.calls.send(old).sent is Sent.LATER

        answers = [store.calls._ask_to_send("k", update, repeated=again) for again in (False, True)]
        newer = update._replace(park_request=ParkRequest(b"newer"))
        another = store.calls._ask_to_send("k", newer, repeated=False)

    assert answers == [b"go", b"go"]
    assert another == b"changed"


def test_a_send_that_is_repeated_after_its_run_has_ended_reserves_nothing(redis_url, prefix):
    call = SendRequest("k", "run", ParkRequest(b"e"))
    with closing(RedisStore(redis_url, prefix)) as store:
        first = store.calls._ask_to_send("k", call, repeated=False)
        store.acquire(AcquireRequest("k", "a", 30.0, run="run"))
        store.release(ReleaseRequest("k", "a", "run", Completion.YES_AND_MAY_COME_AGAIN))

        again = store.calls._ask_to_send("k", call, repeated=True)

        assert (first, again) == (b"go", b"queued")
        assert store.inspect("k").owner == ""


def test_a_store_can_be_used_again_after_it_was_closed(redis_url, prefix):
    store = RedisStore(redis_url, prefix)
    store.acquire(AcquireRequest("k", "a", 30.0))
    store.close()
    store.close()

    assert store.release(ReleaseRequest("k", "a")).released
    store.close()


def test_nothing_is_asked_by_a_connection_that_the_server_has_closed(private_server, monkeypatch):
    monkeypatch.setattr(connections, "RESTED", 0.0)
    server = private_server()
    with closing(RedisStore(server.url, "p")) as store, server.client() as client:
        assert store.time(1.0)  # in one attempt
        client.client_kill_filter(_type="normal", skipme=True)

        assert store.time(1.0)


def test_a_healthy_server_passes_the_check_except_for_its_findings(redis_url, prefix):
    store = RedisStore(redis_url, prefix)

    doubts = store.check()

    assert all(doubt.message and doubt.remedy for doubt in doubts)
    assert not any("older" in doubt.message or "replica" in doubt.message for doubt in doubts)
    store.close()


def test_the_check_doubts_a_server_that_may_evict_locks(private_server):
    server = private_server(options={"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"})
    store = RedisStore(server.url, servers.new_prefix())

    assert any("maxmemory-policy is allkeys-lru" in doubt.message for doubt in store.check())
    with server.client() as client:
        client.set("somebody's", "x")
        client.config_set("maxmemory", "1mb")
        with pytest.raises(redis.OutOfMemoryError):  # when there is nothing left to evict
            client.set("more", "x")
        client.config_set("maxmemory", "64mb")
    assert any(re.search(r"; \d+ records were, since", doubt.message) for doubt in store.check())
    store.close()


def test_a_closed_channel_has_no_listener(redis_url, prefix):
    store, others = open_store(redis_url, prefix), threading.enumerate()
    channel = store.channels.open_channel(lambda wake: None)
    begun = [each for each in threading.enumerate() if each not in others]
    (listener,) = [each for each in begun if each.name == "distlock-delivery"]

    channel.close()

    assert not listener.is_alive()
    store.close()


def acquire(store: RedisStore) -> Reply:
    return store.acquire(AcquireRequest("k", "a", 30.0))


def reserve_or_queue(store: RedisStore) -> Reply:
    park_request = ParkRequest(b"envelope")
    request = StandRequest("run", Route(("k", "l")), park_request=park_request)
    return queue_store.reserve_or_queue(store, request)


@pytest.mark.parametrize(("ask", "script"), [(acquire, "acquire"), (reserve_or_queue, "try_keys")])
def test_what_is_granted_counts_from_the_attempt_that_was_answered(
    monkeypatch, redis_url, prefix, ask, script
):
    losses = Losses(monkeypatch)
    with closing(RedisStore(redis_url, prefix)) as store:
        losses.lose(script, executed=False, times=1)
        begin = clock.monotonic()

        reply = ask(store)

    assert losses.lost
    assert reply.asked_at >= begin + PAUSES[1] / 2
