"""When "retry" sends a task again, by what is known of the conflict."""

from __future__ import annotations

import dataclasses
import math

import pytest

from celery_distlock.errors import ConfigurationError
from celery_distlock.policies import (
    Answer,
    Conflict,
    Park,
    Refuse,
    Requeue,
    Resend,
    Retry,
    Skip,
    Wait,
    may_refuse,
)

SETTLED = Retry(jitter=False)


def conflict(attempts: int = 0, remaining: float = 0.0) -> Conflict:
    return Conflict("k", "h", remaining, attempts)


def decided(policy: Retry, *facts: float) -> Resend:
    decision = policy.decide(conflict(*facts))
    assert isinstance(decision, Resend)
    return decision


@pytest.mark.parametrize(
    ("attempts", "delay"), [(0, 1.0), (1, 2.0), (3, 8.0), (6, 60.0), (10**9, 60.0)]
)
def test_by_the_clock_each_delay_is_twice_the_last_up_to_the_most(attempts, delay):
    assert decided(SETTLED, attempts).delay == delay


@pytest.mark.parametrize(("attempts", "delay"), [(0, 1.0), (4, 13.0), (6, 13.0)])
def test_by_the_clock_it_comes_soon_after_the_end_of_the_holders_lease(attempts, delay):
    assert decided(SETTLED, attempts, 12.0).delay == delay


def test_a_lease_without_an_end_bounds_nothing():
    assert decided(SETTLED, 6, float("inf")).delay == 60.0


@pytest.mark.parametrize(
    ("attempts", "least"), [(0, 0.05), (1, 0.1), (3, 0.4), (5, 1.0), (10**9, 1.0)]
)
def test_a_late_holder_is_left_alone_for_longer_each_time(attempts, least):
    assert decided(SETTLED, attempts).within == (least, 60.0)


def test_what_is_longer_than_the_most_is_not_waited():
    assert decided(Retry(delay=1.5, max_delay=2.0, jitter=False), 9) == Resend(2.0, (1.5, 2.0))


def test_jitter_is_between_half_and_all():
    delays = [decided(Retry(), 3).delay for _ in range(200)]

    assert 4.0 <= min(delays) < 5.0
    assert 7.0 < max(delays) <= 8.0


@pytest.mark.parametrize(
    ("policy", "how", "said"),
    [
        (Retry, {"delay": -1.0}, "Retry(delay) must be a number from 0 to 2592000"),
        (Retry, {"delay": 10**400}, "Retry(delay) must be a number"),
        (Retry, {"delay": math.nan}, "Retry(delay) must be a number"),
        (Retry, {"delay": True}, "Retry(delay) must be a number"),
        (Retry, {"max_delay": 0.5}, "Retry(delay) is 1 s, more than Retry(max_delay), 0.5 s"),
        (Retry, {"max_delay": math.inf}, "Retry(max_delay) must be a number"),
        (Retry, {"factor": 0.5}, "Retry(factor) must be a number from 1 to 1000"),
        (Retry, {"factor": 1e200}, "Retry(factor) must be a number"),  # no float has its square
        (Retry, {"jitter": "no"}, "Retry(jitter) must be True or False, not 'no'"),
        (Retry, {"turns": None}, "Retry(turns) must be True or False"),
        (Wait, {"timeout": 10**400}, "Wait(timeout) must be a number from 0 to 2592000"),
        *(
            (policy, {"max_waiting": most}, "(max_waiting) must be a whole number from 1")
            for policy in (Requeue, Park)
            for most in (0, -1, True, 2.0, math.nan, "5", 10**10)
        ),
        (Requeue, {"max_waiting": 5, "then": "drop"}, "Requeue(then): no policy 'drop'"),
        (Requeue, {"max_waiting": 5, "then": None}, "Requeue(then) must be one of"),
        (Requeue, {"max_waiting": 5, "then": "requeue"}, "the task would wait again"),
        (Requeue, {"max_waiting": 5, "then": Wait(then="fail")}, "the task would wait again"),
        (Requeue, {"then": "skip"}, "Requeue(then=Skip(result=None)) has no effect without"),
        *(
            (policy, {"timeout": timeout}, "(timeout) must be a number from 0.001 to")
            for policy in (Requeue, Park)
            for timeout in (0, -1.0, True, math.nan, math.inf, "5", 10**10)
        ),
        (Park, {"max_waiting": 0}, "Park(max_waiting)"),
        (Resend, {"delay": -1.0}, "Resend(delay) must be a number from 0 to 2592000"),
        (Resend, {"delay": None}, "Resend(delay) must be a number"),
    ],
)
def test_what_no_delay_can_be_made_of_is_refused_at_once(policy, how, said):
    with pytest.raises(ConfigurationError) as raised:
        policy(**how)

    assert said in str(raised.value)


def test_the_widest_delay_is_one():
    widest = Retry(delay=2592000, factor=1000, max_delay=2592000, jitter=False)

    assert decided(widest, 10**9).delay == 2592000


def test_without_turns_the_store_is_not_asked():
    assert decided(Retry(turns=False, jitter=False)) == Resend(1.0, None)


def test_the_first_waiter_asks_the_store_then():
    decision = Wait(then="retry").decide(conflict())

    assert isinstance(decision, Resend)
    assert decision.within is not None
    assert not isinstance(Wait(then=Requeue()).decide(conflict()), Resend)


@pytest.mark.parametrize(
    ("then", "decision"),
    [("fail", Refuse()), (Skip(7), Answer(7)), (Retry(turns=False, jitter=False), Resend(1.0))],
)
def test_a_full_queue_gets_what_then_says(then, decision):
    policy = Requeue(max_waiting=2, then=then)

    assert policy.decide(conflict()) == Park(2)
    assert policy.decide(dataclasses.replace(conflict(), full=True)) == decision


@pytest.mark.parametrize(
    ("then", "decision"),
    [("fail", Refuse()), (Skip(7), Answer(7)), (Retry(turns=False, jitter=False), Resend(1.0))],
)
def test_a_task_that_has_waited_for_long_enough_gets_what_then_says(then, decision):
    policy = Requeue(timeout=60, then=then)

    for waited, decided in ((0.0, Park(None, 60)), (59.9, Park(None, 60)), (60.0, decision)):
        assert policy.decide(dataclasses.replace(conflict(), waited=waited)) == decided
        first = Wait(then=policy).decide(dataclasses.replace(conflict(), waited=waited))
        assert first == decided


def test_a_requeue_is_written_as_it_was_declared():
    assert repr(Requeue()) == "Requeue()"
    assert repr(Requeue(max_waiting=5)) == "Requeue(max_waiting=5)"
    assert repr(Requeue(timeout=60.0)) == "Requeue(timeout=60.0)"
    assert repr(Requeue(max_waiting=5, then="skip")) == (
        "Requeue(max_waiting=5, then=Skip(result=None))"
    )


@pytest.mark.parametrize(
    ("policy", "refuses"),
    [
        (Requeue(), False),
        (Requeue(max_waiting=5), True),
        (Requeue(max_waiting=5, then="skip"), False),
        (Wait(then=Requeue(max_waiting=5)), True),
        (Requeue(timeout=5), True),
    ],
)
def test_a_bound_may_fail_a_task(policy, refuses):
    assert may_refuse(policy) is refuses
