"""The judge has to find what is wrong, and nothing else."""

from __future__ import annotations

import datetime
from typing import ClassVar

import pytest

from celery_distlock import clock
from tests.chaos import broker
from tests.chaos.calls import Call
from tests.chaos.judge import Fault, History, Look, Run, judge


def run(task: str, begin: float, end: float, **other: object) -> Run:
    facts = {
        "id": task,
        "key": "key",
        "begin": begin,
        "end": end,
        "token": int(begin * 1000),
        "owner": f"{task} {begin}",
        "run": f"{task}:0:0:0",
        "execution": f"{task} {begin}",
        "outcome": "done",
        **other,
    }
    return Run(**facts)  # type: ignore[arg-type]


def history(*runs: Run, **more: object) -> History:
    return History(sent={each.id for each in runs}, runs=[*runs], **more)  # type: ignore[arg-type]


def looks(first: float, last: float, *queue: str, wanted: int = 1) -> list[Look]:
    """One every quarter of a second."""
    count = int((last - first) * 4) + 1
    times = [first + n / 4 for n in range(count)]
    return [Look("key", time, time + 0.01, wanted, tuple(queue)) for time in times]


FAULT = [Fault("worker", 10.0, 10.5)]


def test_nothing_is_wrong_with_one_after_the_other():
    seen = history(run("a", 1, 2), run("b", 2, 3), run("c", 3.5, 4))
    seen.looks = looks(1.5, 3.5, "b:0:0:0", "c:0:0:0")[:2]

    verdict = judge(seen)

    assert verdict.broken() == []
    assert (verdict.tasks, verdict.pairs, verdict.twice) == (3, 1, 0)


def test_a_task_that_did_not_run_is_lost():
    seen = history(run("a", 1, 2))
    seen.sent.add("b")

    assert judge(seen).lost == ["b"]


def test_a_task_that_lost_its_lock_and_did_not_run_again_is_lost():
    assert judge(history(run("a", 1, 2, outcome="lost"))).lost == ["a"]


def test_a_task_whose_lost_lock_ended_it_is_not_lost():
    seen = history(run("a", 1, 2, outcome="lost"), failed={"a"})

    assert judge(seen).broken() == []


def test_what_the_broker_lost_is_counted_apart():
    seen = history(run("a", 1, 2), dropped={"b"})
    seen.sent.add("b")

    verdict = judge(seen)

    assert verdict.broken() == []
    assert verdict.dropped == 1


def test_two_at_one_time_overlap_even_under_a_fault():
    seen = history(run("a", 9, 11), run("b", 10.9, 12), faults=FAULT)

    assert len(judge(seen).overlaps) == 1


def test_two_on_two_keys_do_not_overlap():
    assert judge(history(run("a", 1, 3), run("b", 2, 4, key="other"))).broken() == []


def test_a_token_that_is_not_higher_has_fallen():
    assert len(judge(history(run("a", 1, 2, token=7), run("b", 3, 4, token=7))).fallen) == 1


def test_one_that_began_before_its_elder_is_out_of_order():
    seen = history(run("b", 3, 4), run("a", 5, 6), looks=looks(1, 2, "a:0:0:0", "b:0:0:0"))

    assert len(judge(seen).disordered) == 1


def test_blocked_waiters_have_their_order_too():
    seen = history(run("b", 3, 4), run("a", 5, 6), looks=looks(1, 2, "a 5", "b:0:0:0"))
    seen.runs[1] = seen.runs[1]._replace(owner="a 5")

    assert len(judge(seen).disordered) == 1


def test_a_fault_excuses_the_overtaken_task_and_no_later_one():
    queue = looks(9, 10, "a:0:0:0", "b:0:0:0")
    seen = history(run("b", 11, 12), run("a", 13, 14), looks=queue, faults=FAULT)
    assert judge(seen).disordered == []

    late = [look._replace(at=look.at + 5) for look in queue]
    seen = history(run("b", 16, 17), run("a", 18, 19), looks=late, faults=FAULT)
    assert len(judge(seen).disordered) == 1


def test_a_second_delivery_that_is_queued_later_is_not_the_started_one():
    queue = [Look("key", 4.9, 5.1, 1, ("b:0:0:0", "a:0:0:0"))]
    seen = history(run("a", 5, 6), run("b", 7, 8), looks=queue)

    assert judge(seen).disordered == []


def test_a_run_that_was_queued_again_has_its_new_place():
    queue = [*looks(1, 2, "a:0:0:0", "b:0:0:0"), *looks(3, 4, "b:0:0:0", "a:0:0:0")]
    seen = history(run("b", 5, 6), run("a", 7, 8), looks=queue)

    assert judge(seen).disordered == []


@pytest.mark.parametrize(
    ("faults", "outcome", "times"),
    [([], "done", 1), (FAULT, "done", 0), ([], "killed", 0), ([], "lost", 0)],
)
def test_a_task_runs_again_for_a_reason_only(faults, outcome, times):
    seen = history(run("a", 9, 10, outcome=outcome), run("a", 20, 21), faults=faults)

    verdict = judge(seen)

    assert len(verdict.repeated) == times
    assert verdict.twice == 1


def test_one_run_with_two_keys_is_one():
    one, other = run("a", 1, 3), run("a", 2, 3, key="other", owner="another", execution="a 1")

    assert judge(history(one, other)).twice == 0


def test_a_key_that_is_wanted_and_at_rest_is_idle():
    seen = history(run("a", 1, 2), run("b", 12, 13), looks=looks(1, 13))

    verdict = judge(seen)

    assert verdict.standstill.seconds == pytest.approx(10)
    assert verdict.long_standstills == 1
    assert len(verdict.broken()) == 1


def test_a_standstill_that_a_killed_worker_may_cause_is_counted_and_borne():
    verdict = judge(history(run("a", 1, 2), run("b", 9, 10), looks=looks(1, 10)))

    assert verdict.standstill.seconds == pytest.approx(7)
    assert verdict.long_standstills == 1
    assert verdict.broken() == []


def test_a_key_that_no_task_wants_does_not_count_as_stuck():
    seen = history(run("a", 1, 2), run("b", 9, 10), looks=looks(1, 10, wanted=0))

    assert judge(seen).broken() == []


def test_a_key_may_be_idle_while_a_fault_lasts():
    fault = [Fault("restart", 3, 8.5)]
    seen = history(run("a", 1, 2), run("b", 9, 10), looks=looks(1, 10), faults=fault)

    assert judge(seen).standstill.seconds == pytest.approx(1)


def test_between_looks_far_apart_nothing_is_known():
    seen = history(run("a", 1, 2), run("b", 9, 10))
    seen.looks = [*looks(1, 3), *looks(8, 10)]

    assert judge(seen).standstill.seconds == pytest.approx(1)


class TestBroker:
    """What a worker that is killed takes with it."""

    @staticmethod
    def kill(ago: float) -> list[Fault]:
        return [Fault("worker", clock.monotonic() - ago, clock.monotonic() - ago + 0.1)]

    @staticmethod
    def line(ago: float, words: str) -> str:
        when = datetime.datetime.now().astimezone() - datetime.timedelta(seconds=ago)
        at = f"{when:%Y-%m-%d %H:%M:%S},{when.microsecond // 1000:03}"
        return f"[{at}: INFO/MainProcess] {words}\n"

    def test_a_task_that_was_never_received_and_was_sent_just_before_a_kill(self):
        missing = {"a": clock.monotonic() - 11, "b": clock.monotonic() - 30}

        assert broker.dropped(missing, self.kill(10), ["... b ..."]) == {"a"}

    def test_a_task_that_was_sent_just_after_a_kill_to_a_broker_that_has_not_noticed(self):
        now = clock.monotonic()
        missing = {"a": now - 9.4, "b": now - 8.0}

        assert broker.dropped(missing, self.kill(10), []) == {"a"}

    def test_a_task_that_was_received_is_not_among_them(self):
        missing = {"a": clock.monotonic() - 11}
        log = self.line(10.5, "Task chaos.retry[a] received")

        assert broker.dropped(missing, self.kill(10), [log]) == set()

    def test_a_task_that_was_sent_again_just_before_a_kill_is(self):
        missing = {"a": clock.monotonic() - 60}
        log = self.line(60, "Task chaos.retry[a] received")
        log += self.line(13, "chaos.retry[a] is sent again in 1.0 s: 'key' is held by x")
        log += self.line(13, "Task chaos.retry[a] ignored")

        assert broker.dropped(missing, self.kill(10), [log]) == {"a"}
        assert broker.dropped(missing, self.kill(30), [log]) == set()

    def test_a_task_that_was_delivered_again_just_before_a_kill_is(self):
        missing = {"a": clock.monotonic() - 60}
        log = self.line(16, "Task chaos.requeue[a] received")
        child = Fault("child", clock.monotonic() - 15.9, clock.monotonic() - 15.8)

        assert broker.dropped(missing, [child, *self.kill(10)], [log]) == {"a"}
        assert broker.dropped(missing, [child, *self.kill(7)], [log]) == {"a"}
        assert broker.dropped(missing, [child, *self.kill(13)], [log]) == set()
        assert broker.dropped(missing, self.kill(10), [log]) == set()


def test_several_sharers_are_no_overlap_and_may_begin_in_any_order():
    share = {"capacity": 2, "token": 7}
    one, other = run("a", 1.3, 2.0, **share), run("b", 1.2, 2.0, **share)
    seen = history(one, other, looks=looks(0.0, 1.0, "a:0:0:0", "b:0:0:0"))

    assert judge(seen).broken() == []


def test_one_too_many_is_found():
    share = {"capacity": 2, "token": 7}
    runs = [run(name, 1.0, 2.0, **share) for name in "abc"]

    assert len(judge(history(*runs)).overlaps) == 1


def test_more_of_a_lane_than_its_most_is_found():
    share = {"capacity": 4, "token": 7, "most": 2}
    runs = [run(name, 1.0, 2.0, lane="slow", **share) for name in "ab"]
    runs += [run(name, 1.5, 2.0, lane="fast", **share) for name in "cd"]

    assert judge(history(*runs)).broken() == []
    assert len(judge(history(*runs[:3], runs[3]._replace(lane="slow"))).overlaps) == 1


def test_a_sharer_with_an_exclusive_holder_is_found():
    runs = [run("a", 1.0, 2.0), run("b", 1.5, 2.0, capacity=0)]

    assert len(judge(history(*runs)).overlaps) == 1


def test_two_tokens_at_one_time_are_found():
    runs = [run("a", 1.0, 2.0, capacity=0), run("b", 1.5, 2.0, capacity=0)]

    assert len(judge(history(*runs)).overlaps) == 1


class TestCalls:
    """Calls that went through the store."""

    @staticmethod
    def call(task: str, begin: float, *, name: str = "once", **other: object) -> Call:
        return Call(task, name, "key", begin, begin + 0.1, **other)  # type: ignore[arg-type]

    @staticmethod
    def start(task: str, at: float, **other: object) -> Run:
        return run(task, at, at + 0.5, **{"asked": at, "entered": at, **other})

    def test_a_call_that_joins_one_that_begins_later_is_heard(self):
        calls = [self.call("a", 1), self.call("a", 2, joined=True)]

        assert judge(history(self.start("a", 3), calls=calls)).broken() == []

    def test_a_call_that_joins_one_that_has_begun_is_unheard(self):
        calls = [self.call("a", 1), self.call("a", 4, joined=True)]

        (wrong,) = judge(history(self.start("a", 3), calls=calls)).broken()

        assert wrong.startswith("unheard")

    def test_none_is_there_to_be_joined_when_all_have_run(self):
        calls = [self.call("a", 1), self.call("a", 2, joined=True, last=True)]

        (wrong,) = judge(history(self.start("a", 3), calls=calls)).broken()

        assert wrong.startswith("stuck")

    def test_one_that_begins_before_its_time_is_early(self):
        calls = [self.call("a", 1, name="sent", countdown=2.0)]

        assert judge(history(self.start("a", 3.0), calls=calls)).broken() == []
        (wrong,) = judge(history(self.start("a", 2.9), calls=calls)).broken()
        assert wrong.startswith("early")

    def test_a_later_call_begins_later(self):
        calls = [self.call("a", 1, name="sent"), self.call("b", 2, name="sent")]
        runs = [self.start("b", 3), self.start("a", 4)]

        (wrong,) = judge(history(*runs, calls=calls)).broken()
        assert wrong.startswith("overtaken")
        assert judge(history(*runs, calls=calls, faults=[Fault("cut", 2, 2)])).broken() == []

    def test_one_is_sent_while_another_one_waits(self):
        calls = [self.call("a", 1), self.call("b", 2)]

        (wrong,) = judge(history(self.start("a", 3), self.start("b", 4), calls=calls)).broken()
        assert wrong.startswith("sent twice")
        assert judge(history(self.start("a", 1.5), self.start("b", 4), calls=calls)).broken() == []
        about_to_begin = self.start("a", 3, asked=1.5)
        assert judge(history(about_to_begin, self.start("b", 4), calls=calls)).broken() == []

    @pytest.mark.parametrize(("argument", "count"), [(0.1, 1), (0.2, 0), (0.3, 0)])
    def test_an_updated_call_begins_with_the_newest_arguments(self, argument, count):
        calls = [
            self.call("a", 1, name="newest", argument=0.1),
            self.call("a", 2, name="newest", argument=0.2, joined=True),
        ]
        seen = history(self.start("a", 3, argument=argument), calls=calls)

        assert len(judge(seen).broken()) == count

    def test_a_call_that_a_killed_worker_took_along_is_not_to_be_had(self):
        seen = history(run("a", 1, 2), self.start("b", 30), looks=looks(12, 30), faults=FAULT)
        seen.calls = [self.call("b", 8)]
        assert judge(seen).broken() == []

        seen.looks = looks(12, 30, wanted=2)
        assert len(judge(seen).broken()) == 1
        seen.calls = [self.call("b", 2)]
        seen.looks = looks(12, 30)
        assert len(judge(seen).broken()) == 1


def starts(*times: float) -> History:
    facts = {"capacity": 0, "rated": True, "token": 1}
    return history(
        *(run(f"{at}", at, at + 0.5, asked=at, entered=at + 0.1, **facts) for at in times)
    )


def test_more_starts_than_the_rate_allows_are_found():
    assert judge(starts(1.0, 1.1, 1.2, 1.3, 3.11)).broken() == []
    assert len(judge(starts(1.0, 1.1, 1.2, 1.3, 2.8)).too_often) == 1


class TestTurns:
    """
    The starts of an exclusive key with lanes.

    That `make chaos` finds lanes that are not served in turn, or beyond their cap:
    ``--break 'serves by arrival'``, ``--break 'caps no lane'``.
    """

    LANES: ClassVar = {"s": "slow", "e": "even", "f": "fast"}  # with shares 1, 1 and 3

    def turns(self, order: str, *, begin: float = 0.1, **late: float) -> History:
        """Return a history of starts in this order, whose calls were all there before, but some."""
        seen = history(run("0", 0.0, 1.5, key="laned-0"))
        for number, letter in enumerate(order, 2):
            task, lane, at = f"{number}", self.LANES[letter], late.get(letter, begin)
            call = Call(task, "laned", "laned-0", at, at + 0.1, lane=lane)
            facts = {"key": "laned-0", "lane": lane, "entered": number}
            seen.calls.append(call._replace(begin=call.begin + number / 1e3))
            seen.runs.append(run(task, number, number + 0.5, **facts))
        return seen

    @pytest.mark.parametrize(
        "order", ["seseseee", "fsfffsfffss", "ffffsfffs", "eessee", "fesfffse"]
    )
    def test_turns_by_shares_are_right(self, order):
        verdict = judge(self.turns(order))

        assert verdict.broken() == []
        assert verdict.turns > 2

    @pytest.mark.parametrize("order", ["sssee", "sesseeess", "ssff", "fffffs", "sfffsssff"])
    def test_more_turns_than_a_share_are_found(self, order):
        assert judge(self.turns(order)).out_of_turn

    def test_a_lane_that_comes_later_has_not_waited(self):
        assert judge(self.turns("sssee", e=4.5)).out_of_turn == []
        assert judge(self.turns("ssssee", e=2.3)).out_of_turn

    def test_a_fault_excuses_turns(self):
        seen = self.turns("sssee", begin=1.0)
        seen.faults = [Fault("cut", 0.5, 0.5)]

        verdict = judge(seen)

        assert (verdict.out_of_turn, verdict.turns) == ([], 0)

    def test_a_key_with_a_capacity_has_no_order_of_starts(self):
        seen = self.turns("sssee")
        seen.runs = [each._replace(capacity=2, token=1) for each in seen.runs]

        assert judge(seen).turns == 0

    def test_a_lanes_order_is_that_of_its_calls(self):
        seen = self.turns("ss")
        seen.calls[0] = seen.calls[0]._replace(begin=1.3, end=1.4)

        (wrong,) = judge(seen).broken()

        assert wrong.startswith("overtaken")
