"""
Which process believed to hold how much of which key, and when: many locks, and what is wrong in
it.

The clock of all processes of one machine is the same, so what one believed can be compared with
what another one did.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class Belief(NamedTuple):
    """One holder's belief, from its acquisition to its release, its loss or its death."""

    key: str
    begin: float  # seconds, by `celery_distlock.clock`
    end: float
    token: int
    owner: str
    units: int = 1  # more than the capacity count as all of it
    capacity: int = 1  # with which it was asked for; 1: alone, 0: any number
    lane: str = ""
    most: int = 0  # units of its lane at once; 0: any number


def read(path: Path, deaths: dict[int, float]) -> list[Belief]:
    """
    The beliefs in *path*, of one process after another.

    *deaths* says when those processes that were killed were still alive for the last time: their
    last beliefs have no end of their own. They end then, or with the lease if that was over before:
    a process that was stopped for longer, and killed before it looked, believed in nothing then.
    """
    begun: dict[str, dict] = {}
    beliefs = []
    for line in path.read_text().splitlines():
        note = json.loads(line)
        if "end" in note:
            first = begun.pop(note["owner"])
            beliefs.append(Belief(first["key"], first["begin"], note["end"], *_holder(first)))
        elif "begin" in note:
            begun[note["owner"]] = note
        elif note["owner"] in begun:  # its lease was renewed
            begun[note["owner"]]["until"] = note["until"]
    for note in begun.values():
        end = max(note["begin"], min(deaths[note["pid"]], note["until"]))
        beliefs.append(Belief(note["key"], note["begin"], end, *_holder(note)))
    return beliefs


def _holder(note: dict) -> tuple[int, str, int, int]:
    return note["token"], note["owner"], note.get("units", 1), note.get("capacity", 1)


def faults(beliefs: Iterable[Belief]) -> Iterator[str]:
    """
    What must not be.

    Another holder during an exclusive belief; more units in use than the largest capacity of
    those that believed at that time, or of a lane than its cap; tokens that do not rise, but for
    those that share the key.
    """
    by_key = defaultdict(list)
    for belief in beliefs:
        by_key[belief.key].append(belief)
    for of_one in by_key.values():
        of_one.sort(key=lambda belief: belief.begin)
        for one, other in itertools.pairwise(of_one):
            alone = 1 in (one.capacity, other.capacity)
            if one.token > other.token or (alone and one.token == other.token):
                yield f"tokens do not rise: {one} and {other}"
        yield from _overlaps(of_one)


def _overlaps(beliefs: Iterable[Belief]) -> Iterator[str]:
    """What is wrong with beliefs of one key that overlap; in order of begins."""
    inside: list[Belief] = []
    for newest in beliefs:
        others = [each for each in inside if each.end > newest.begin]
        inside = [*others, newest]
        for one in others:
            if 1 in (one.capacity, newest.capacity):
                yield f"{1e3 * (one.end - newest.begin):.1f} ms too long: {one} and {newest}"
            elif one.token != newest.token:
                yield f"two tokens at one time: {one} and {newest}"
        if all(each.capacity > 1 for each in inside):
            yield from _too_many(inside, max(each.capacity for each in inside))
        of_lane = [each for each in inside if each.lane == newest.lane and each.most]
        if newest.most:
            yield from _too_many(of_lane, max(each.most for each in of_lane))


def _too_many(inside: list[Belief], most: int) -> Iterator[str]:
    used = sum(min(each.units, each.capacity) for each in inside)
    if used > most:
        yield f"{used} of {most} units: {inside}"
