"""The event loop's helpers: threads that it does not wait for, and the way back into it."""

from __future__ import annotations

import os
import threading
import time

import pytest
from kombu.asynchronous import Hub

from celery_distlock.worker.event_loop import BoundedCaller, LoopCalls
from tests.waiting import wait_until


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def helpers():
    """Makes helpers that end with the test."""
    made: list[BoundedCaller] = []

    def make(**options) -> BoundedCaller:
        made.append(BoundedCaller("test-helper", **options))
        return made[-1]

    yield make
    for helper in made:
        helper._background.finish(10.0)


def turn(hub, done):
    """Let the event loop run until something is *done*."""
    hub.call_repeatedly(0.01, lambda: None)
    loop = hub.create_loop()

    def step():
        next(loop)
        return done()

    wait_until(step, what="the event loop")


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(10.0)


# The way back


def test_what_a_thread_hands_over_is_called_in_the_loops_thread_and_in_order(hub):
    seen = []
    calls = LoopCalls(hub, None)

    def hand_over():
        for number in range(100):
            calls.put(lambda n=number: seen.append((n, threading.current_thread())))

    in_a_thread(hand_over)
    assert seen == []
    turn(hub, lambda: len(seen) == 100)
    calls.close()
    assert seen == [(number, threading.main_thread()) for number in range(100)]


def test_without_an_event_loop_calls_are_done_in_order_even_if_the_last_is_done_first():
    seen, pending = [], []
    calls = LoopCalls(None, pending.append)

    in_a_thread(lambda: [calls.put(lambda n=number: seen.append(n)) for number in range(100)])
    assert seen == []
    while pending:
        pending.pop()()

    assert seen == list(range(100))


def test_without_an_event_loop_what_was_not_called_at_the_end_is_not_called_later():
    seen, pending = [], []
    calls = LoopCalls(None, pending.append)
    calls.put(lambda: seen.append(1))

    calls.close()
    pending.pop()()

    assert seen == []


def test_one_that_goes_wrong_keeps_no_other_from_being_called(hub):
    seen = []
    calls = LoopCalls(hub, None)
    calls.put(lambda: 1 / 0)
    calls.put(lambda: seen.append(1))

    turn(hub, lambda: seen)
    calls.close()


@pytest.mark.parametrize("has_hub", [True, False])
def test_what_comes_after_the_end_is_refused_quietly(hub, has_hub):
    seen = []
    calls = LoopCalls(hub if has_hub else None, lambda call: call())
    calls.close()

    in_a_thread(lambda: calls.put(lambda: seen.append(1)))
    calls.close()

    assert seen == []


def test_what_was_not_called_at_the_end_is_not_called_later(hub):
    seen = []
    calls = LoopCalls(hub, None)
    calls.put(lambda: seen.append(1))

    calls.close()
    calls._drain()

    assert seen == []


def test_what_comes_after_the_end_writes_into_no_other_descriptor(hub):
    calls = LoopCalls(hub, None)
    numbers = set(calls._ends)
    calls.close()
    ends = os.pipe()  # of other code that gets the same numbers
    assert set(ends) == numbers
    os.set_blocking(ends[0], False)

    calls.put(lambda: None)

    with pytest.raises(BlockingIOError):
        os.read(ends[0], 1)
    for end in ends:
        os.close(end)


# The helpers


def test_what_is_done_in_time_is_waited_for(helpers):
    helper = helpers(patience=60.0)

    asked = [helper.ask(lambda n=number: n) for number in range(10)]

    assert [each.done() and each.result() for each in asked] == list(range(10))


def test_what_goes_wrong_goes_wrong_where_it_was_asked_for(helpers):
    asked = helpers(patience=60.0).ask(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        asked.result(0)


def test_what_hangs_is_waited_for_once_and_then_nothing_behind_it_is(helpers):
    helper, gate = helpers(patience=0.05), threading.Event()

    begun = time.monotonic()
    asked = [helper.ask(lambda: gate.wait(60.0)) for _ in range(200)]
    waited = time.monotonic() - begun

    assert not any(each.done() for each in asked)
    assert waited < 5.0  # of the ten that two hundred waits would take
    gate.set()
    assert all(each.result(10.0) for each in asked)


def test_after_a_wait_that_timed_out_none_waits_for_a_while(helpers):
    helper, gates = helpers(patience=0.01, pause=600.0), [threading.Event(), threading.Event()]
    first = helper.ask(lambda: gates[0].wait(60.0))
    gates[0].set()
    assert first.result(10.0)
    helper._patience = 60.0

    begun = time.monotonic()
    asked = helper.ask(lambda: gates[1].wait(120.0))

    assert time.monotonic() - begun < 30.0
    gates[1].set()
    assert asked.result(10.0)
