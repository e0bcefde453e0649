"""What is wrong with how several tasks had one key."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def held(site: Any, key: str) -> list[dict[str, Any]]:
    """What all tasks of this test had, in the order of their ends."""
    notes = [each for note in site.journal.read("held") for each in note]
    return [each for each in notes if each["key"].startswith(key)]


def most_used(notes: Iterable[dict[str, Any]]) -> int:
    """How many units of one key were in use at once, at most."""
    return max((sum(map(_units, holders)) for _, holders in _overlapping(notes)), default=0)


def faults(notes: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What must not be: too many units, another with an exclusive holder, a slot given twice."""
    by_key = defaultdict(list)
    for each in notes:
        by_key[each["key"]].append(each)
    for of_one in by_key.values():
        for _, holders in _overlapping(of_one):
            if len(holders) > 1 and any(each["capacity"] == 1 for each in holders):
                yield f"an exclusive holder is not alone: {holders}"
            # The last to begin may have been granted it before others, which asked with more.
            capacities = [each["capacity"] for each in holders]
            if 0 not in capacities and sum(map(_units, holders)) > max(capacities):
                yield f"more than {max(capacities)} units: {holders}"
            for lane in {each["lane"] for each in holders if each["most"]}:
                in_lane = [each for each in holders if each["lane"] == lane and each["most"]]
                if sum(map(_units, in_lane)) > max(each["most"] for each in in_lane):
                    yield f"more units of a lane than its most: {in_lane}"
            slots = [each["slot"] for each in holders if each["slot"] is not None]
            if len(slots) != len(set(slots)):
                yield f"a slot is given twice: {holders}"
            if len({each["token"] for each in holders}) > 1:
                yield f"several tokens at one time: {holders}"
        alone = sorted((each["begin"], each["token"], each["capacity"]) for each in of_one)
        for one, other in itertools.pairwise(alone):
            rises = one[1] < other[1] if 1 in (one[2], other[2]) else one[1] <= other[1]
            if not rises:
                yield f"tokens do not rise: {one} and {other}"


def _units(note: dict[str, Any]) -> int:
    most = note["capacity"] or note["units"]
    return min(note["units"], most)


def _overlapping(notes: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Each of them, with those that had the key when it came, itself included."""
    ordered = sorted(notes, key=lambda each: each["begin"])
    for number, newest in enumerate(ordered):
        earlier = ordered[: number + 1]
        yield newest, [each for each in earlier if each["end"] > newest["begin"]]
