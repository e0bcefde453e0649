"""What comes after the unfinished tasks of a key."""

from __future__ import annotations

import pytest
from celery.worker import state

from celery_distlock import clock
from celery_distlock.stores.values import ALONE, Want
from celery_distlock.worker.in_flight import ASKS_WITHIN, MAX_POLL, POLL, DeferredCalls, in_flight


class Request:
    """Celery's, as far as it is looked at: it came as the fifth, and begins when it is made."""

    arrival = 5

    def __init__(self) -> None:
        self.time_start = clock.wall()


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


def busy() -> bool:
    return in_flight.has("k")


@pytest.fixture
def turns(timer):
    return DeferredCalls(timer)


@pytest.fixture
def begin(monkeypatch):
    """Has a task begin; it ends when it is taken out of what this returns."""
    unfinished: dict = {}
    monkeypatch.setattr(state, "requests", unfinished)

    def begin(identity: str, want: Want = ALONE) -> None:
        with in_flight.entering({"k": want}, identity):
            unfinished[identity] = Request()

    begin.unfinished = unfinished
    return begin


def test_a_task_is_a_neighbour_until_it_has_finished(begin):
    assert not in_flight.has("k")
    begin("a")
    assert in_flight.has("k")
    assert in_flight.has_earlier("k", "b", 0)
    assert not in_flight.has_earlier("k", "a", 0)
    assert not in_flight.has("other")

    del begin.unfinished["a"]

    assert not in_flight.has("k")


def test_of_two_that_wait_for_a_slot_the_earlier_one_goes_first(begin):
    begin("a")
    came = begin.unfinished["a"].arrival

    assert in_flight.has_earlier("k", "b", came + 1)
    assert not in_flight.has_earlier("k", "b", came - 1)


def test_a_task_is_a_neighbour_before_celery_knows_it(begin):
    with in_flight.entering({"k": ALONE}, "a"):
        assert in_flight.has("k")
        assert in_flight.has_earlier("k", "b", 0)
        begin.unfinished["a"] = Request()

    assert in_flight.has("k")


def test_a_task_that_celery_did_not_take_is_no_neighbour(begin):
    with in_flight.entering({"k": ALONE}, "a"), in_flight.entering({"k": ALONE}, "a"):
        pass

    assert not in_flight.has("k")


def test_one_that_has_begun_and_may_not_have_asked_goes_before_later_ones(begin, monkeypatch):
    begin("a")
    monkeypatch.setattr(state, "active_requests", {begin.unfinished["a"]})

    assert in_flight.has_earlier("k", "b", 6)
    assert not in_flight.has_earlier("k", "b", 4)
    assert not in_flight.has_earlier("k", "b", 0)

    begin.unfinished["a"].time_start -= 2 * ASKS_WITHIN

    assert not in_flight.has_earlier("k", "b", 6)

    begin.unfinished["a"].time_start += 2 * ASKS_WITHIN
    in_flight.note_served("a")

    assert not in_flight.has_earlier("k", "b", 6)


def test_one_that_has_released_the_key_is_not_waited_for_though_its_begin_is_not_known_yet(begin):
    begin("a")
    assert in_flight.has_earlier("k", "b", 6)

    in_flight.note_served("a")

    assert not in_flight.has_earlier("k", "b", 6)


def test_a_repeated_request_has_not_asked_again(begin, monkeypatch):
    begin("a")
    in_flight.note_served("a")
    begin("a")
    monkeypatch.setattr(state, "active_requests", {begin.unfinished["a"]})

    assert in_flight.has_earlier("k", "b", 6)


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
        turns.put("k", busy, call(identity))
    timer.tick()
    assert (called, turns.has("k")) == ([], True)

    del begin.unfinished["a"]
    timer.tick()
    timer.tick()
    assert called == ["b"]

    del begin.unfinished["b"]
    timer.tick()
    assert (called, turns.has("k"), timer.calls) == (["b", "c"], False, [])

    turns.put("k", busy, call("d"))
    del begin.unfinished["c"]
    timer.tick()
    assert called == ["b", "c", "d"]


def test_a_call_that_fails_delays_no_other(turns, timer, caplog):
    called = []
    turns.put("k", busy, lambda: 1 / 0)
    turns.put("k", busy, lambda: called.append(1))

    timer.tick()
    timer.tick()

    assert called == [1]
    assert "the sweeper sends it" in caplog.text


def test_nothing_is_called_after_the_end(turns, timer):
    called = []
    turns.put("k", busy, lambda: called.append(1))

    turns.close()
    timer.tick()

    assert (called, timer.calls) == ([], [])


def test_looks_are_rarer_while_nothing_ends(begin, turns, timer):
    begin("a")
    turns.put("k", busy, lambda: None)
    for _ in range(10):
        timer.tick()
    assert timer.pauses[0] == POLL
    assert timer.pauses == sorted(timer.pauses)
    assert timer.pauses[-1] == MAX_POLL

    turns.put("k", busy, lambda: None)
    timer.tick()
    timer.tick()

    assert POLL < timer.pauses[-1] < MAX_POLL


# What fits with them

ANY, THREE = Want(1, 0), Want(1, 3)


@pytest.mark.parametrize(
    ("others", "want", "fits"),
    [
        ([], ALONE, True),
        ([], THREE, True),
        ([ALONE], ALONE, False),
        ([ALONE], ANY, False),
        ([ALONE], THREE, False),
        ([ANY], ALONE, False),
        ([THREE], ALONE, False),
        (5 * [ANY], ANY, True),
        (2 * [THREE], THREE, True),
        (3 * [THREE], THREE, False),
        (3 * [THREE], Want(1, 4), True),
        (3 * [ANY], THREE, False),
        ([THREE], Want(2, 3), True),
        ([THREE], Want(3, 3), False),
        ([], Want(7, 3), True),
        ([Want(7, 3)], THREE, False),
        ([Want(7, 3)], Want(1, 4), True),
    ],
)
def test_there_is_room_for_what_fits_with_the_unfinished_ones(begin, others, want, fits):
    for number, other in enumerate(others):
        begin(str(number), other)

    assert in_flight.has_room("k", want) is fits


def test_a_finished_task_takes_no_room(begin):
    for identity in "abc":
        begin(identity, THREE)
    assert not in_flight.has_room("k", THREE)

    del begin.unfinished["b"]

    assert in_flight.has_room("k", THREE)
