"""Who comes after the unfinished tasks of a key."""

from __future__ import annotations

import pytest
from celery.worker import state

from celery_distlock.worker.in_flight import MAX_POLL, POLL, DeferredCalls, in_flight


class Request:
    """Celery's, as far as it is looked at: it has not begun."""


class Timer:
    """Celery's, as far as it is used; a test makes the time pass."""

    def __init__(self) -> None:
        self.calls: list = []
        self.pauses: list = []

    def call_after(self, seconds, call) -> None:
        self.calls.append(call)
        self.pauses.append(seconds)

    def tick(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@pytest.fixture
def timer():
    return Timer()


@pytest.fixture
def turns(timer):
    return DeferredCalls(timer, in_flight.has)


@pytest.fixture
def begin(monkeypatch):
    """Has a task begin; it ends when it is taken out of what this returns."""
    unfinished: dict = {}
    monkeypatch.setattr(state, "requests", unfinished)

    def begin(identity: str) -> None:
        unfinished[identity] = Request()
        in_flight.add("k", identity)

    begin.unfinished = unfinished
    return begin


def test_a_task_is_a_neighbour_until_it_has_finished(begin):
    assert not in_flight.has("k")
    begin("a")
    assert in_flight.has("k")
    assert in_flight.has_queued("k")
    assert not in_flight.has_queued("k", but="a")
    assert not in_flight.has("other")

    del begin.unfinished["a"]

    assert not in_flight.has("k")


def test_calls_are_made_one_after_the_other_each_when_those_before_it_have_finished(
    begin, turns, timer
):
    called = []

    def call(identity):
        def call():
            called.append(identity)
            begin(identity)

        return call

    begin("a")
    for identity in ("b", "c"):
        turns.put("k", call(identity))
    timer.tick()
    assert (called, turns.has("k")) == ([], True)

    del begin.unfinished["a"]
    timer.tick()
    timer.tick()
    assert called == ["b"]

    del begin.unfinished["b"]
    timer.tick()
    assert (called, turns.has("k"), timer.calls) == (["b", "c"], False, [])

    turns.put("k", call("d"))
    del begin.unfinished["c"]
    timer.tick()
    assert called == ["b", "c", "d"]


def test_a_call_that_fails_holds_nobody_up(turns, timer, caplog):
    called = []
    turns.put("k", lambda: 1 / 0)
    turns.put("k", lambda: called.append(1))

    timer.tick()
    timer.tick()

    assert called == [1]
    assert "the sweeper sends it" in caplog.text


def test_nothing_is_called_after_the_end(turns, timer):
    called = []
    turns.put("k", lambda: called.append(1))

    turns.close()
    timer.tick()

    assert (called, timer.calls) == ([], [])


def test_looks_are_rarer_while_nothing_ends(begin, turns, timer):
    begin("a")
    turns.put("k", lambda: None)
    for _ in range(10):
        timer.tick()
    assert timer.pauses[0] == POLL
    assert timer.pauses == sorted(timer.pauses)
    assert timer.pauses[-1] == MAX_POLL

    turns.put("k", lambda: None)
    timer.tick()
    timer.tick()

    assert POLL < timer.pauses[-1] < MAX_POLL
