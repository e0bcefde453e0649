"""
Who believed to hold which key, and when: a history of many locks, and what is wrong in it.

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


def read(path: Path, deaths: dict[int, float]) -> list[Belief]:
    """
    The beliefs in *path*, of one process after another.

    *deaths* says when those processes that were killed were still alive for the last time: their
    last beliefs have no end of their own.
    """
    begun: dict[str, dict] = {}
    beliefs = []
    for line in path.read_text().splitlines():
        note = json.loads(line)
        if "end" in note:
            first = begun.pop(note["owner"])
            beliefs.append(Belief(first["key"], first["begin"], note["end"], *_who(first)))
        else:
            begun[note["owner"]] = note
    for note in begun.values():
        end = max(note["begin"], deaths[note["pid"]])
        beliefs.append(Belief(note["key"], note["begin"], end, *_who(note)))
    return beliefs


def _who(note: dict) -> tuple[int, str]:
    return note["token"], note["owner"]


def faults(beliefs: Iterable[Belief]) -> Iterator[str]:
    """What must not be: two that believed at one time, and tokens that do not rise."""
    by_key = defaultdict(list)
    for belief in beliefs:
        by_key[belief.key].append(belief)
    for of_one in by_key.values():
        of_one.sort(key=lambda belief: belief.begin)
        for one, other in itertools.pairwise(of_one):
            if one.end > other.begin:
                yield f"{1e3 * (one.end - other.begin):.1f} ms too long: {one} and {other}"
            if one.token >= other.token:
                yield f"tokens do not rise: {one} and {other}"
