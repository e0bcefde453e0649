"""Which worker a woken run is pushed to, and what records of other software make of that."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from celery import Celery
from redis import Redis

from celery_distlock.runtime.message_facts import HEADER
from celery_distlock.runtime.relay import Relay, by_room
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import ParkRequest, PeerChannel
from tests.waiting import wait_until

MESSAGE = {"exchange": "", "routing_key": "celery", "headers": {}}


@pytest.fixture
def store(redis_url, prefix):
    with closing(RedisStore(redis_url, prefix)) as opened:
        yield opened


@pytest.fixture
def client(redis_url):
    with Redis.from_url(redis_url) as opened:
        yield opened


@pytest.fixture
def relay(store):
    with Celery("channels", set_as_current=False) as app:
        yield Relay(app, lambda: store)


@pytest.fixture
def staff(store):
    """Open a channel, and note it for a queue; return its address and what comes to it."""

    def begin(*, free=1, queue="celery"):
        came = []
        channel = store.channels.open_channel(came.append)
        begin.channels[channel.address] = channel
        store.channels.register_channel([queue], PeerChannel(channel.address, free), 60.0)
        return channel.address, came

    begin.channels = {}
    yield begin
    for channel in begin.channels.values():
        channel.close()


def wake(store, run="run"):
    key = f"k {run}"
    store.acquire(AcquireRequest(key, "a", 60.0))
    store.acquire(AcquireRequest(key, "b", 60.0, queue=ParkRequest(b"envelope"), run=run))
    return store.release(ReleaseRequest(key, "a")).wake


@pytest.fixture
def requests(store, monkeypatch):
    """The requests to the store from now on: what is sent together is one."""
    sent, exchange = [], store._servers.exchange
    note = lambda calls, *how: sent.append(calls) or exchange(calls, *how)  # noqa: E731
    monkeypatch.setattr(store._servers, "exchange", note)
    return sent


def records(prefix, queue="celery"):
    return [f"{prefix}:channels:{{{queue}}}:{name}" for name in ("until", "free")]


def test_its_own_worker_has_it_first_though_it_is_full(store, relay, staff):
    own, came = staff(free=0)
    staff(free=100)
    relay.own_address = own

    assert relay.push(wake(store), MESSAGE)

    wait_until(lambda: came, what="the push")


def test_the_worker_of_a_main_process_has_what_that_wakes_while_it_has_room(store, relay, staff):
    own, came = staff(free=2)
    _, others = staff(free=1_000_000)
    relay.main_address = own

    for number in range(5):
        assert relay.push(wake(store, f"run {number}"), MESSAGE)

    wait_until(lambda: len(came) + len(others) == 5, what="the pushes")
    assert [woken.run for woken in came] == ["run 0", "run 1"]


def test_the_full_worker_of_a_main_process_leaves_what_that_wakes_to_another(store, relay, staff):
    relay.main_address, _ = staff(free=0)
    _, came = staff()

    assert relay.push(wake(store), MESSAGE)

    wait_until(lambda: came, what="the push")


def test_its_own_worker_does_not_have_it_if_it_does_not_consume_the_queue(store, relay, staff):
    own, _ = staff(queue="other")
    _, came = staff()
    relay.own_address = own

    assert relay.push(wake(store), MESSAGE)

    wait_until(lambda: came, what="the push")


def test_without_a_consumer_of_the_queue_the_broker_has_it(store, relay, staff):
    staff(queue="other")

    assert not relay.push(wake(store), MESSAGE)


def test_each_push_is_one_request_while_the_workers_are_remembered(store, relay, staff, requests):
    _, came = staff()
    assert relay.push(wake(store, "run 0"), MESSAGE)
    for number in range(1, 4):
        woken = wake(store, f"run {number}")
        requests.clear()

        assert relay.push(woken, MESSAGE)

        assert len(requests) == 1
    wait_until(lambda: len(came) == 4, what="the pushes")


def test_workers_are_looked_up_once_for_all_threads(store, relay, staff, requests, monkeypatch):
    _, came = staff(free=8)
    woken = [wake(store, f"run {number}") for number in range(8)]
    remembered, all_know_none = relay._remembered, threading.Barrier(8)
    seen = threading.local()

    def wait_at_first(asked):
        peers = remembered(asked)
        if not hasattr(seen, "peers"):
            seen.peers = peers
            all_know_none.wait(30.0)
        return peers

    monkeypatch.setattr(relay, "_remembered", wait_at_first)
    requests.clear()
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda each: relay.push(each, MESSAGE), woken))

    assert len(requests) == 8 + 1
    wait_until(lambda: len(came) == 8, what="the pushes")


def test_all_that_is_woken_together_is_pushed_in_one_request(store, relay, staff, requests):
    _, came = staff(free=8)
    assert relay.push(wake(store, "before"), MESSAGE)
    woken = [(wake(store, f"run {number}"), MESSAGE) for number in range(8)]
    requests.clear()

    assert relay.push_together(woken) == {f"run {number}" for number in range(8)}

    assert len(requests) == 1
    wait_until(lambda: len(came) == 9, what="the pushes")


def test_calls_that_are_woken_together_are_no_more_than_there_is_room_for(store, relay, staff):
    _, came = staff(free=2)
    call = {**MESSAGE, "headers": {HEADER: {"sent": True, "id": None, "retries": 0}}}
    woken = [(wake(store, f"run {number}"), call) for number in range(4)]

    assert relay.push_together(woken) == {"run 0", "run 1"}

    wait_until(lambda: len(came) == 2, what="the pushes")


def test_a_remembered_worker_that_is_gone_is_replaced_by_another(store, relay, staff):
    first, before = staff()
    assert relay.push(wake(store, "before"), MESSAGE)
    wait_until(lambda: before, what="the push")
    _, came = staff()
    store.channels.register_channel(["celery"], PeerChannel(first, 0), 0.0)
    staff.channels[first].close()

    woken = wake(store, "after")

    wait_until(lambda: relay.push(woken, MESSAGE) and came, what="the other push")


def test_a_worker_that_was_not_found_is_looked_for_again(store, relay, staff):
    assert not relay.push(wake(store, "before"), MESSAGE)
    _, came = staff()

    assert relay.push(wake(store, "after"), MESSAGE)

    wait_until(lambda: came, what="the push")


def test_a_worker_is_chosen_by_how_many_tasks_it_could_begin():
    peers = [
        PeerChannel("full", 0),
        PeerChannel("small", 1),
        *(PeerChannel(f"big {n}", 40) for n in range(50)),
    ]

    chosen = Counter(by_room(peers)[0].address for _ in range(2000))

    assert not chosen["full"]
    assert chosen["small"] < 20
    assert len(chosen) > 40
    assert by_room(peers)[-1].address == "full"


def test_records_of_another_type_send_it_by_the_broker_and_are_reported_once(
    store, relay, staff, client, prefix, caplog
):
    staff()
    for record in records(prefix):
        client.delete(record)
        client.set(record, "no channels")

    for number in range(3):
        woken = wake(store, f"run {number}")
        assert not relay.push(woken, MESSAGE)
        store.drop(woken)
    staff()

    logged = [each for each in caplog.records if "woken tasks may go by the broker" in each.message]
    assert len(logged) == 1


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300", "-5"])
def test_what_is_no_channel_gets_no_message(store, relay, staff, client, prefix, score):
    _, came = staff()
    hostile = [f"{prefix}:inbox:{'a' * 32}", f"{prefix}:channel:{'A' * 32}", "x", "", b"\xff", "{}"]
    hostile += [f"elsewhere:channel:{'a' * 32}", f"{prefix}:channel:{'a' * 32}\n", "news * x"]
    ear = client.pubsub(ignore_subscribe_messages=True)
    for address in hostile:
        ear.subscribe(address)
        for record in records(prefix):
            client.zadd(record, {address: "inf" if record.endswith("until") else score})
    while ear.get_message(timeout=0.2) is not None:
        pass

    relay.push(wake(store), MESSAGE)
    found = store.channels.find_channels(["celery"])

    assert all(peer.address.startswith(f"{prefix}:channel:") for peer in found)
    assert ear.get_message(timeout=0.2) is None
    ear.close()
    del came


def test_so_many_free_slots_are_not_believed(store, staff, client, prefix):
    address, _ = staff()
    client.zadd(records(prefix)[1], {address: "inf"})

    (found,) = store.channels.find_channels(["celery"])

    assert found.free <= 10_000


def test_nothing_is_left_of_channels_that_are_gone(store, staff, client, prefix):
    address, _ = staff()
    assert all(0 < client.pttl(record) <= 60_000 for record in records(prefix))

    store.channels.register_channel(["celery"], PeerChannel(address, 0), 0.0)

    assert not client.exists(*records(prefix))
