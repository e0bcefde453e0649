"""
What must not be in a history of tasks, faults and queues; knows nothing of how it came about.

All times are those of `celery_distlock.clock`, which is one for all processes of a machine.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos import calls, turns
from tests.chaos.calls import Call
from tests.chaos.terms import SWEEP
from tests.faults.history import history
from tests.faults.history.history import Belief

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

AFTERMATH = 2.0  # seconds after its end in which a fault explains what is out of the ordinary
SETTLING = 1.0  # seconds after a body's end in which its result is stored and its message acked
LONG = 5.0  # seconds that a key with waiters should not stay idle, outside of faults
# Seconds that it must not: a worker that is killed may have been handed a key just before, which is
# kept for it for five seconds, and then found by a sweep; the next one has to get to a free slot.
PATIENCE = 5.0 + 2 * SWEEP + 2.0
BLINK = 1.0  # seconds; between looks that are further apart, anything may have happened


class Fault(NamedTuple):
    """What happened to workers or servers, and until when: by then all is as it was before."""

    kind: str
    begin: float
    end: float


class Run(NamedTuple):
    """One execution of a task, as far as it held one key; of several keys there are several."""

    id: str
    key: str
    begin: float
    end: float
    token: int
    owner: str
    run: str
    execution: str
    outcome: str  # done; lost: it lost its lock; broken off; killed; "?": unknown
    units: int = 1  # of the key; more than the capacity count as all of it
    capacity: int = 1  # 1: exclusive; 0: with any number
    asked: float = 0.0  # when the request was sent that got it the key, at the earliest
    entered: float = 0.0  # when its body began
    rated: bool = False
    argument: float = 0.0
    lane: str = ""
    most: int = 0


class Look(NamedTuple):
    """What one look at a key saw: how many want it, and what is in its queue, in order."""

    key: str
    at: float  # when it was asked for
    until: float  # when it was answered
    wanted: int
    queue: tuple[str, ...]  # runs, or owners of blocked waiters


@dataclass
class History:
    """
    Everything that is known.

    Attributes:
        sent: The ids of the tasks.
        dropped: Those of them that the broker's driver lost, see `broker`.
        failed: Tasks that ended without another run, where a lost lock ends a task.
        calls: Those that went through the store.
    """

    sent: set[str] = field(default_factory=set)
    runs: list[Run] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    sent_at: Mapping[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> set[str]:
        """Tasks that have not run to an end."""
        return self.sent - self.failed - {run.id for run in self.runs if run.outcome == "done"}


class Standstill(NamedTuple):
    """For how long a key that was wanted had no task at work."""

    seconds: float
    key: str = ""
    since: float = 0.0


@dataclass
class Verdict:
    """What is wrong, in words; and what is worth a number."""

    tasks: int
    lost: list[str]
    dropped: int
    overlaps: list[str]
    fallen: list[str]
    disordered: list[str]
    repeated: list[str]
    standstill: Standstill  # the longest
    long_standstills: int
    pairs: int  # of waiters whose order was judged
    twice: int  # tasks that ran more than once, for a reason or not
    locks_lost: int
    calls: int = 0
    joined: int = 0
    wrong_calls: list[str] = field(default_factory=list)
    too_often: list[str] = field(default_factory=list)
    out_of_turn: list[str] = field(default_factory=list)
    turns: int = 0  # starts of lanes that were judged

    def broken(self, patience: float = PATIENCE) -> list[str]:
        """Return all that must not be; *patience* is for a key that is idle, in seconds."""
        idle = self.standstill
        still = [f"{idle.key} stood still for {idle.seconds:.1f} s from {idle.since:.1f} on"]
        return [
            *(f"lost: {each}" for each in self.lost),
            *(f"overlap: {each}" for each in self.overlaps),
            *(f"fallen: {each}" for each in self.fallen),
            *(f"out of order: {each}" for each in self.disordered),
            *(f"twice: {each}" for each in self.repeated),
            *self.wrong_calls,
            *(f"too often: {each}" for each in self.too_often),
            *(f"out of turn: {each}" for each in self.out_of_turn),
            *(still if idle.seconds > patience else []),
        ]


def judge(seen: History) -> Verdict:
    beliefs = [Belief(*run[1:6], run.units, run.capacity, run.lane, run.most) for run in seen.runs]
    wrong = list(history.faults(beliefs))
    fallen = [each for each in wrong if each.startswith("tokens")]
    disordered, pairs = _disordered(seen)
    executions = _executions(seen.runs)
    standstills = list(_standstills(seen))
    is_disturbed = partial(_is_disturbed, seen.faults)
    out_of_turn, judged = turns.out_of_turn(seen.calls, seen.runs, is_disturbed)
    return Verdict(
        tasks=len(seen.sent),
        lost=sorted(seen.missing - seen.dropped),
        dropped=len(seen.missing & seen.dropped),
        overlaps=[each for each in wrong if each not in fallen],
        fallen=fallen,
        disordered=disordered,
        repeated=list(_repeated(executions, seen.faults)),
        standstill=max(standstills, default=Standstill(0.0)),
        long_standstills=sum(each.seconds > LONG for each in standstills),
        pairs=pairs,
        twice=sum(len(each) > 1 for each in executions.values()),
        locks_lost=sum(run.outcome == "lost" for run in seen.runs),
        calls=len(seen.calls),
        joined=sum(call.joined for call in seen.calls),
        wrong_calls=list(calls.wrong_with(seen.calls, seen.runs, is_disturbed)),
        too_often=list(calls.too_often(seen.runs)),
        out_of_turn=out_of_turn,
        turns=judged,
    )


# Once


def _executions(runs: Iterable[Run]) -> Mapping[str, list[Run]]:
    """The executions of each task, in order: of several keys, the last one taken counts."""
    found: dict[str, dict[str, Run]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: run.begin):
        found[run.id][run.execution] = run
    return {task: list(executions.values()) for task, executions in found.items()}


def _repeated(executions: Mapping[str, list[Run]], faults: list[Fault]) -> Iterator[str]:
    """Tasks that ran again though nothing had come between their first run and its end."""
    for task, runs in executions.items():
        for one, other in itertools.pairwise(runs):
            disturbed = _is_disturbed(faults, one.begin, one.end + SETTLING)
            if one.outcome == "done" and not disturbed:
                yield f"{task}: {one} and {other}"


# In order


def _disordered(seen: History) -> tuple[list[str], int]:
    """
    Which began before one ahead of it in the queue, with no fault in between; how many pairs.

    Two are compared that were seen in one queue together, from when they were so for the last time;
    unless both may have been admitted at once, sharing the key.
    """
    begins, sharing = defaultdict(list), set()
    for run in seen.runs:
        for name in (run.run, run.owner):
            begins[run.key, name].append(run.begin)
            if run.capacity != 1:
                sharing.add((run.key, name))
    found, pairs = [], 0
    for (key, one, other), look in _last_seen_together(seen.looks).items():
        if {(key, one), (key, other)} <= sharing:
            continue
        first, second = (_next(begins[key, name], look.at) for name in (one, other))
        if first is None or second is None or _is_disturbed(seen.faults, look.at, second):
            continue
        if min(first, second) < look.until:
            continue  # it may have been a second delivery that waited there, of one that had begun
        pairs += 1
        if second < first:
            found.append(f"{key}: {other} began {first - second:.2f} s before {one}")
    return found, pairs


def _last_seen_together(looks: Iterable[Look]) -> Mapping[tuple[str, str, str], Look]:
    seen: dict[tuple[str, str, str], Look] = {}
    for look in sorted(looks, key=lambda look: look.at):
        for one, other in itertools.combinations(look.queue, 2):
            seen[look.key, one, other] = look
            seen.pop((look.key, other, one), None)  # one of them has joined the queue again
    return seen


def _next(times: list[float], after: float) -> float | None:
    return min((time for time in times if time > after), default=None)


# On the move


def _standstills(seen: History) -> Iterator[Standstill]:
    work = defaultdict(list)
    for run in seen.runs:
        work[run.key].append((run.begin, run.end))
    away = [(fault.begin, fault.end) for fault in seen.faults]
    for key, times in _wanted(_without_lost(seen)).items():
        for begin, end in times:
            for since, until in _without(begin, end, work[key] + away):
                yield Standstill(until - since, key, since)


def _without_lost(seen: History) -> Iterator[Look]:
    """The looks, without what the driver may have lost: nothing shows that it is gone."""
    away = calls.taken_along(seen.calls, seen.runs, seen.faults)
    for look in seen.looks:
        lost = sum(begin <= look.at < end for begin, end in away.get(look.key, ()))
        yield look._replace(wanted=max(0, look.wanted - lost))


def _wanted(looks: Iterable[Look]) -> Mapping[str, list[tuple[float, float]]]:
    """From when to when each key was wanted, by all looks in between."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    by_key = defaultdict(list)
    for look in sorted(looks, key=lambda look: look.at):
        by_key[look.key].append(look)
    for key, of_one in by_key.items():
        for one, other in itertools.pairwise(of_one):
            if not (one.wanted and other.wanted and other.at - one.at < BLINK):
                continue
            if times[key] and times[key][-1][1] == one.at:
                times[key][-1] = (times[key][-1][0], other.at)
            else:
                times[key].append((one.at, other.at))
    return times


def _without(
    begin: float, end: float, others: list[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """What is left of a time without those *others*."""
    for first, last in sorted(others):
        if last <= begin or first >= end:
            continue
        if first > begin:
            yield begin, first
        begin = max(begin, last)
    if begin < end:
        yield begin, end


def _is_disturbed(faults: Iterable[Fault], begin: float, end: float) -> bool:
    return any(fault.begin <= end and begin <= fault.end + AFTERMATH for fault in faults)


def counted(faults: Iterable[Fault]) -> str:
    """How many there were of each kind."""
    kinds = Counter(fault.kind for fault in faults)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)) or "none"
