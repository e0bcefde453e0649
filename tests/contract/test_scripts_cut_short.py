"""What a script that was cut short has left keeps neither a key nor a unit from its waiters."""

from __future__ import annotations

import pytest

from celery_distlock.rate import Rate
from celery_distlock.stores import ReleaseRequest, SendRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis import request_runner
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.values import (
    Completion,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Status,
    Want,
)
from celery_distlock.testing.contract.actions import BUSY, all_of, ask, runs_of, take, wait_for
from tests.breaking import BreakingServer, Fault, Mishap
from tests.contract.parts.actions import park

THREE = Want(1, 3)
NEWEST = Identity("same", recalls="all")
EACH_COMMAND = range(36)  # of the longest script here


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(request_runner.time, "sleep", lambda _: None)
    store = MemoryStore("memory://", "p")
    store._servers.server = BreakingServer(None)
    return store


def cut_short(store, command):
    """Have the script of the next request end before one of its commands; it is repeated then."""
    server = store._servers.server
    server.fault = Fault(Mishap.ENDED, len(server.requests), command)


@pytest.mark.parametrize("command", EACH_COMMAND)
def test_sharers_enter_after_an_exclusive_holder(store, command):
    runs = ["r1", "r2", "r3"]
    take(store, "k", "a")
    for run in runs:
        park(store, "k", run, want=THREE)

    cut_short(store, command)
    store.release(ReleaseRequest("k", "a"))
    list(store.parking.wake_next("k"))

    for run in runs:
        take(store, "k", f"o-{run}", run=run, redelivered=True, want=THREE)
    outcomes = store.renew([Ownership("k", f"o-{run}", 30.0) for run in runs], 1.0)
    assert [outcome for outcome, _ in outcomes] == [RenewOutcome.RENEWED] * 3
    assert ask(store, "k", "newcomer", want=THREE).status is BUSY
    store.release(ReleaseRequest("k", "o-r1", run="r1"))
    take(store, "k", "newcomer", want=THREE)


@pytest.mark.parametrize("change", ["upgrade", "downgrade"])
@pytest.mark.parametrize("command", EACH_COMMAND)
def test_a_key_is_free_after_its_holder_has_left(store, change, command):
    take(store, "k", "a", want=THREE, run="run")
    if change == "downgrade":
        store.units.upgrade("k", "a", 30.0)
    cut_short(store, command)
    getattr(store.units, change)("k", "a", 30.0)
    park(store, "k", "next")

    wake = store.release(ReleaseRequest("k", "a", run="run")).wake

    assert runs_of(all_of(wake)) == ["next"]


@pytest.mark.parametrize("command", EACH_COMMAND)
def test_a_start_is_counted(store, command):
    want = Want(rates=(Rate(1, per=60.0),))

    cut_short(store, command)
    take(store, "k", "a", want=want)
    store.release(ReleaseRequest("k", "a"))

    assert ask(store, "k", "b", want=want).status is BUSY


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("command", range(48))
def test_lanes_have_their_turns(store, command, number):
    take(store, "k", "o-", run="")
    for each in range(8):
        want = Want(1, 1, (), 1, "ab"[each % 2])
        if each == number:
            cut_short(store, command)
        store.calls.send(SendRequest("k", f"{each}", ParkRequest(b"m"), want=want))
    order, run = [], ""
    while True:
        if len(order) == number:
            cut_short(store, command)
        store.release(ReleaseRequest("k", f"o-{run}", run=run, completion=Completion.YES))
        list(store.parking.wake_next("k"))
        if not store.inspect("k").owner:
            break
        run = store.inspect("k").owner.removeprefix("parked:")
        want = Want(1, 1, (), 1, "ab"[int(run) % 2])
        take(store, "k", f"o-{run}", run=run, redelivered=True, want=want)
        order.append(int(run))

    assert sorted(order) == list(range(8))
    for lane in (0, 1):
        assert [each for each in order if each % 2 == lane] == list(range(lane, 8, 2))
        for begin in range(6):
            assert {each % 2 for each in order[begin : begin + 3]} == {0, 1}


@pytest.mark.parametrize("command", range(48))
def test_one_that_waits_blocked_has_its_turn(store, command):
    take(store, "k", "holder")
    for run in ("a1", "a2"):
        want = Want(1, 1, (), 1, "a")
        store.calls.send(SendRequest("k", run, ParkRequest(b"m"), want=want))

    cut_short(store, command)
    waiter = wait_for(store, "k", "blocked")
    store.release(ReleaseRequest("k", "holder"))

    take(store, "k", "blocked", queue=waiter.inbox)
    assert runs_of(all_of(store.release(ReleaseRequest("k", "blocked")).wake)) == ["a1"]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("command", range(48))
def test_a_lane_never_has_more_than_its_most(store, command, number):
    want = Want(1, 9, (), 1, "a", 1000, 2)
    ready, holds, ended = [], [], []
    for each in range(6):
        if each == number + 2:
            cut_short(store, command)
        store.calls.send(SendRequest("k", f"r{each}", ParkRequest(b"m"), want=want))
    while len(ended) < 6:
        ready = [
            each.run for each in store.inspect("k").holders if each.owner.startswith("parked:")
        ]
        if len(ended) == number:
            cut_short(store, command)
        for run in ready:
            take(store, "k", f"o-{run}", run=run, redelivered=True, want=want)
            holds.append(run)
        assert store.inspect("k").used <= 2
        assert holds, "a unit is idle"
        if len(ended) == number + 1:
            cut_short(store, command)
        run = holds.pop(0)
        ended.append(run)
        store.release(ReleaseRequest("k", f"o-{run}", run=run, completion=Completion.YES))
        list(store.parking.wake_next("k"))

    assert sorted(ended) == [f"r{each}" for each in range(6)]


@pytest.mark.parametrize("cut", ["call", "claim"])
@pytest.mark.parametrize("command", range(48))
def test_a_newer_call_asks_the_one_before_to_leave(store, command, cut):
    def send(run, **more):
        identity = NEWEST._replace(**more)
        store.calls.send(SendRequest("k", run, ParkRequest(b"m"), identity=identity))

    send("first")
    if cut == "call":
        take(store, "k", "a", run="first", redelivered=True)
        cut_short(store, command)
        send("second")
    else:
        send("second", replaces="first")
        cut_short(store, command)
        take(store, "k", "a", run="first", redelivered=True)

    def is_asked(owner):
        return store.renew([Ownership("k", owner, 30.0)], 1.0)[0][0] is RenewOutcome.RECALLED

    assert is_asked("a")
    assert runs_of(all_of(store.release(ReleaseRequest("k", "a", run="first")).wake)) == ["second"]
    again = ask(store, "k", "b", run="first", redelivered=True).status
    if again is Status.GRANTED:  # a claim that was cut short and repeated is not noted as begun
        assert cut == "claim"
        assert is_asked("b")
        store.release(ReleaseRequest("k", "b", run="first", completion=Completion.YES))
    else:
        assert again is Status.RECALLED
    take(store, "k", "c", run="second", redelivered=True)
