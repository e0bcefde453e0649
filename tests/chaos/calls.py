"""
What must not become of calls that went through the store, and of tasks with a rate.

Like `judge`, it knows nothing of how it came about.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.broker import SOON
from tests.chaos.terms import LANED, RATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tests.chaos.judge import Fault, Run

    IsDisturbed = Callable[[float, float], bool]

CLOCKS = 0.05  # seconds that a delayed call may seem early, by rounding


class Call(NamedTuple):
    """A call that was accepted, as its caller knows."""

    id: str  # of the task whose result the caller got
    task: str
    key: str
    begin: float
    end: float
    argument: float = 0.0  # no two calls have the same
    countdown: float = 0.0
    joined: bool = False
    last: bool = False  # it was made when all others had run
    lane: str = ""


def wrong_with(
    calls: Iterable[Call], runs: Iterable[Run], is_disturbed: IsDisturbed
) -> Iterator[str]:
    """
    Report what is wrong with *calls*.

    Args:
        calls: Those that were accepted.
        runs: All that ran.
        is_disturbed: Says whether a fault may have disturbed what was from one moment to another.
    """
    by_task, by_key = _in_order(runs), defaultdict(list)
    for call in sorted(calls, key=lambda call: call.begin):
        by_key[call.task, call.key, call.lane].append(call)
    for alike in by_key.values():
        for call in alike:
            yield from _of_one(call, alike, by_task.get(call.id, []))
        for one, other in itertools.combinations(alike, 2):
            yield from _of_two(one, other, by_task, is_disturbed)


def _of_one(call: Call, alike: Iterable[Call], runs: Sequence[Run]) -> Iterator[str]:
    if call.countdown and runs and runs[0].entered < call.begin + call.countdown - CLOCKS:
        yield f"early: {call} began at {runs[0].entered:.3f}"
    if not call.joined or not runs:
        return
    after = [run for run in runs if run.entered >= call.begin]
    if not after:
        yield f"unheard: {call}, and it last began at {runs[-1].entered:.3f}"
    old = {other.argument for other in alike if other.id == call.id and other.end < call.begin}
    if call.task == "newest" and after and all(run.argument in old for run in after):
        yield f"outdated: {call}, and it began with {after[-1].argument} of an earlier call"
    if call.last:
        yield f"stuck: {call}"


def _of_two(
    one: Call, other: Call, by_task: Mapping[str, Sequence[Run]], is_disturbed: IsDisturbed
) -> Iterator[str]:
    if one.countdown or other.countdown or one.joined or other.joined:
        return
    first, second = (
        next((run.entered for run in by_task.get(call.id, [])), float("inf"))
        for call in (one, other)
    )
    is_ordered = one.task == "sent" or (one.lane and LANED[one.key] == 1)
    if is_ordered and second < first and not is_disturbed(one.begin, second):
        yield f"overtaken: {one} by {other}"
    # It stops waiting when it gets its key, which is before its body begins.
    asked = next((run.asked for run in by_task.get(one.id, [])), float("inf"))
    is_there = one.end < other.begin and other.end < asked
    if one.task == "once" and is_there and not is_disturbed(one.begin, other.end):
        yield f"sent twice: {one} and {other}"


def taken_along(
    calls: Iterable[Call], runs: Iterable[Run], faults: Iterable[Fault]
) -> Mapping[str, list[tuple[float, float]]]:
    """
    From when to when a call of each key may have been nowhere but in the store.

    A worker that is killed takes messages with it, see `broker`: sent again after a minute.
    """
    kills = [fault for fault in faults if fault.kind == "worker"]
    by_task, found = _in_order(runs), defaultdict(list)
    for call in calls:
        if any(kill.begin <= call.end + SOON and call.begin <= kill.end for kill in kills):
            begin = next((run.entered for run in by_task.get(call.id, [])), float("inf"))
            found[call.key].append((call.begin, begin))
    return found


def too_often(runs: Iterable[Run]) -> Iterator[str]:
    """Report times, as long as the rate's, in which more began than it allows, for certain."""
    by_key: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.asked):
        if run.rated:
            by_key[run.key].append(run)
    for key, starts in by_key.items():
        for number, first in enumerate(starts):
            until = first.asked + RATE.per
            within = [run for run in starts[number:] if run.entered < until]
            if len(within) > RATE.limit:
                yield f"{len(within)} starts of {key} within {RATE.per} s from {first.asked:.3f} on"


def _in_order(runs: Iterable[Run]) -> Mapping[str, list[Run]]:
    by_task: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.entered):
        by_task[run.id].append(run)
    return by_task
