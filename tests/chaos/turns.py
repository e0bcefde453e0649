"""
Whether lanes have their turns: a sweep line over the starts of each key that is exclusive.

Of two lanes that both wait, each has starts in proportion to its share, to within one start each.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from tests.chaos.terms import SHARES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.chaos.calls import Call, IsDisturbed
    from tests.chaos.judge import Run

LEVEL = (0.0, 0.0, 0.0)  # how far a lane is ahead of another one: now, at least, at most


def out_of_turn(
    calls: Iterable[Call], runs: Iterable[Run], is_disturbed: IsDisturbed
) -> tuple[list[str], int]:
    """Return which starts a lane was not entitled to, and how many starts were judged."""
    starts, sent = defaultdict(list), defaultdict(list)
    for run in sorted(runs, key=lambda run: run.token):
        starts[run.key].append(run)
    for call in sorted(calls, key=lambda call: call.end):
        sent[call.key].append(call)
    found, judged = [], 0
    for key, of_key in starts.items():
        if all(start.capacity == 1 for start in of_key) and any(start.lane for start in of_key):
            ahead: dict[tuple[str, str], tuple[float, float, float]] = {}
            for start, lanes in _waiting(of_key, sent[key], is_disturbed):
                pairs = list(itertools.combinations(sorted(lanes), 2))
                ahead = {pair: _moved(pair, ahead.get(pair, LEVEL), start.lane) for pair in pairs}
                judged += bool(pairs)
                if unfair := [pair for pair in pairs if _is_unfair(pair, ahead[pair])]:
                    found.append(f"{start}, of {unfair}")
                    ahead = {}
    return found, judged


def _waiting(
    starts: Sequence[Run], sent: Iterable[Call], is_disturbed: IsDisturbed
) -> Iterator[tuple[Run, set[str]]]:
    """Give each start, and the lanes that waited for certain when the key was given to it."""
    first = {start.id: start for start in reversed(starts)}
    calls, present = deque(call for call in sent if call.id in first), {}
    for before, start in itertools.pairwise(starts):
        while calls and calls[0].end < before.end:
            call = calls.popleft()
            present[call.id] = call
        present = {task: call for task, call in present.items() if first[task].token > before.token}
        is_known = not is_disturbed(before.begin, start.begin)
        certain = [call for call in present.values() if not is_disturbed(call.begin, start.begin)]
        yield start, {call.lane for call in certain if is_known}


def _moved(
    pair: tuple[str, str], ahead: tuple[float, float, float], lane: str
) -> tuple[float, float, float]:
    now, least, most = ahead
    one, other = pair
    now += (lane == one) / SHARES[one] - (lane == other) / SHARES[other]
    return now, min(least, now), max(most, now)


def _is_unfair(pair: tuple[str, str], ahead: tuple[float, float, float]) -> bool:
    _, least, most = ahead
    return most - least > sum(1 / SHARES[lane] for lane in pair) + 1e-9
