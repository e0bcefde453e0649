"""The ticker alone, with a server of its own: what it costs, what it bears, and how late it is."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock.process import dispatcher
from celery_distlock.stores import AcquireRequest, ParkRequest, ReleaseRequest, Status
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.worker import ticker
from celery_distlock.worker.ticker import Ticker
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_distlock.stores.values import WokenTask

MANY = 1000
IDLE = 6.0  # seconds


@pytest.fixture
def server(private_server: Callable[..., Any]) -> Any:
    return private_server()


@pytest.fixture
def store(server: Any, prefix: str) -> Iterator[RedisStore]:
    opened = RedisStore(server.url, prefix)
    yield opened
    opened.close()


@pytest.fixture
def tickers(server: Any) -> Iterator[Callable[[RedisStore], Ticker]]:
    running: list[Ticker] = []

    def start(store: RedisStore) -> Ticker:
        running.append(Ticker(store))
        running[-1].start()
        wait_until(lambda: store.timetable.dues().ticker, what="a ticker")
        return running[-1]

    yield start
    for each in running:
        each.stop()
    with server.client() as client:  # one of them may wait for minutes
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    for each in running:
        each._thread.join(30.0)
        assert not each._thread.is_alive()


def rest(store: RedisStore, key: str, seconds: float) -> None:
    """Park a run at a key that then rests for *seconds*."""
    assert store.acquire(AcquireRequest(key, "a", 60.0)).status is Status.GRANTED
    park = AcquireRequest(key, "", 60.0, queue=ParkRequest(b"e"), run=f"run-{key}")
    assert store.acquire(park).status is Status.PARKED
    assert store.release(ReleaseRequest(key, "a", keep_for=("resting:1", seconds))).released


def calls(server: Any, *sent: str) -> int:
    """Return how many of these commands the server was sent."""
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in sent)


def test_those_that_wait_for_the_role_ask_no_script(
    server: Any, store: RedisStore, tickers: Callable[[RedisStore], Ticker]
) -> None:
    tickers(store)
    tickers(store)
    time.sleep(0.5)  # for the subscription
    scripts, looks = ("evalsha", "eval"), ("pttl", "ping", "subscribe")
    before, began = (calls(server, *scripts), calls(server, *looks)), time.monotonic()

    time.sleep(IDLE)  # there is nothing to wait for

    passed = time.monotonic() - began
    assert calls(server, *scripts) - before[0] <= passed / ticker.RENEWAL + 2
    # One that looks once a second, and a script of the other one, with a PTTL in it.
    assert calls(server, *looks) - before[1] <= passed + passed / ticker.RENEWAL + 2


def test_one_that_waits_takes_over_when_the_lease_of_a_dead_one_ends(
    server: Any, store: RedisStore, tickers: Callable[[RedisStore], Ticker]
) -> None:
    with server.client() as client, closing(store.timetable.ticker_inbox("dead")) as inbox:
        assert store.timetable.claim_due("dead", inbox, 3600.0).leads
        waits = tickers(store)
        wait_until(lambda: waits._is_led, what="it to wait")
        assert store.timetable.led_for() > 3000.0
        client.pexpire(f"{store._records.times}ticker", 1)

        wait_until(lambda: store.timetable.dues().ticker == waits._process, what="the other ticker")


def test_it_is_woken_for_what_is_due_before_its_next_look(
    store: RedisStore, tickers: Callable[[RedisStore], Ticker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticker, "RENEWAL", 600.0)
    monkeypatch.setattr(ticker, "VALID_FOR", 3000.0)
    sent = threading.Event()
    store.publishers.add(lambda wake: sent.set() or True)  # type: ignore[func-returns-value]
    tickers(store)

    rest(store, "k", 0.2)

    assert sent.wait(30.0)


def test_many_keys_that_are_due_within_a_second_are_all_served(
    store: RedisStore, tickers: Callable[[RedisStore], Ticker]
) -> None:
    served: list[str] = []

    def publish(wake: WokenTask) -> bool:
        served.append(wake.run)
        return True

    store.publishers.add(publish)
    tickers(store)
    for number in range(MANY):
        rest(store, f"k{number}", 1.0 + number / MANY)

    wait_until(lambda: len(served) == MANY, timeout=60.0, what="all of them")

    assert sorted(served) == sorted(f"run-k{number}" for number in range(MANY))
    wait_until(lambda: not store.timetable.dues().many, what="the notes to be removed")


def test_it_goes_on_after_an_outage(
    server: Any, store: RedisStore, tickers: Callable[[RedisStore], Ticker]
) -> None:
    served: list[str] = []
    store.publishers.add(lambda wake: served.append(wake.run) or True)  # type: ignore[func-returns-value]
    tickers(store)
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        client.execute_command("CLIENT", "KILL", "TYPE", "normal")

    for number in itertools.count():
        rest(store, f"k{number}", 0.01)
        if number == 2:
            break

    wait_until(lambda: len(served) == 3, what="all of them")


def test_one_that_sends_slowly_goes_on(
    store: RedisStore, tickers: Callable[[RedisStore], Ticker]
) -> None:
    served: list[float] = []

    def publish(wake: WokenTask) -> bool:
        time.sleep(2 * dispatcher.PATIENCE)  # a broker, or a store, that is far away
        served.append(time.monotonic())
        return True

    store.publishers.add(publish)
    tickers(store)
    for number in range(4):
        rest(store, f"k{number}", 0.3)

    wait_until(lambda: len(served) == 4, what="all of them")
    assert served[-1] - served[0] < ticker.AFTER_YOU


def test_one_that_sends_slowly_says_in_time_that_it_goes_on(
    store: RedisStore, tickers: Callable[[RedisStore], Ticker], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[bytes] = []
    said: list[float] = []
    claim_due = store.timetable.claim_due

    def claim(*args: Any) -> Any:
        said.append(time.monotonic())
        return claim_due(*args)

    def publish(wake: WokenTask) -> bool:
        time.sleep(0.4)
        served.append(wake.envelope)
        return True

    store.publishers.add(publish)
    monkeypatch.setattr(store.timetable, "claim_due", claim)
    for number in range(16):
        rest(store, f"k{number}", 1.0)
    tickers(store)

    wait_until(lambda: len(served) == 16, what="all of them")
    assert max(later - sooner for sooner, later in itertools.pairwise(said)) < 5.0


def test_one_that_cannot_send_leaves_it_to_another_one(
    store: RedisStore, tickers: Callable[[RedisStore], Ticker]
) -> None:
    hangs = threading.Event()
    store.publishers.add(lambda wake: hangs.wait(30.0))
    first = tickers(store)
    assert store.timetable.dues().ticker == first._process

    rest(store, "k", 0.01)

    try:
        wait_until(
            lambda: store.timetable.dues().ticker != first._process, what="it to be given up"
        )
    finally:
        hangs.set()


def test_an_error_while_it_waits_does_not_end_it(
    store: RedisStore, tickers: Callable[[RedisStore], Ticker], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(seconds: float) -> None:
        failed.set()
        raise TypeError("planted")

    runs = tickers(store)
    monkeypatch.setattr(runs._inbox, "wait", fail)
    rest(store, "k", 0.01)
    assert failed.wait(30.0)
    monkeypatch.undo()

    wait_until(lambda: not store.timetable.dues().many, what="the ticker attended to the key")
