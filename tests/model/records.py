"""What the model knows of records: queues, leftovers, and the canonical form of a state."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from celery_distlock.stores.memory.commands import number
from celery_distlock.stores.memory.keyspace import Hash, SortedSet, _Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "ROUNDING",
    "Data",
    "canonical",
    "copied",
    "instants",
    "is_due",
    "is_known",
    "is_paused",
    "leftovers",
    "limit",
    "places",
    "queue",
]

Data = dict[bytes, _Key]

# What may be left when all executions have ended: tokens, ends that are remembered, what rates
# count, the index of names, and what the ticker knows. So may an operator's limit.
LASTING = re.compile(rb"p:\{\w\}:(fence|done|rate)|p:\{ticker\}:\w+|p::?parked")
LIMIT = b"limit"
DUE = b"p:{ticker}:due"
KEPT = re.compile(rb"p:\{\w\}:(fence|done)|p::?parked")  # their times in the past are not compared

ROUNDING = 5_000  # µs that two times may differ and be one
PRESENT = 1_000  # µs after now: tokens and places may be that much greater
HORIZON = 200_000_000  # µs from now: later changes are not waited for

_NAMES = re.compile(rb"\b([ro])(\d)(?:\.(\d+))?\b")  # of executions, and their owners
_TIMES = re.compile(rb"(?<!\d)\d{13}(?:\d{3})?(?:\.\d+)?(?!\d)")  # ms or µs


def copied(data: Data) -> Data:
    """Return a copy of a server's keys."""
    return {name: _Key(_copied(key.value), key.expires_ms) for name, key in data.items()}


def _copied(value: object) -> object:
    if isinstance(value, Hash):
        return Hash(value)
    if isinstance(value, SortedSet):
        other = SortedSet()
        other.scores, other._order = dict(value.scores), list(value.order())
        return other
    return value


def queue(data: Data, key: str) -> list[tuple[float, str]]:
    """Return the waiters of *key*: places, and runs or the owners of blocked ones."""
    waiting = data.get(b"p:{%b}:queue" % key.encode())
    if waiting is None:
        return []
    order = waiting.value.order()
    return [(at, each.decode().removeprefix("p:").rpartition(" ")[2]) for at, each in order]


def places(data: Data, run: str, envelope: bytes) -> set[bytes]:
    """Return the sorted sets that have a run, if the store has its envelope, too."""
    members = run.encode(), b"p:" + run.encode()
    found, is_kept = set(), False
    for name, key in data.items():
        if type(key.value) is Hash:
            is_kept = is_kept or envelope in key.value.values()
        elif type(key.value) is SortedSet and not key.value.scores.keys().isdisjoint(members):
            found.add(name)
    return {name for name in found if is_kept and not LASTING.fullmatch(name)}


def limit(data: Data, key: str) -> bytes:
    """Return what an operator has set for *key*; empty: nothing."""
    stem = b"p:{%b}:" % key.encode()
    hashes = (each.value for name, each in data.items() if name.startswith(stem))
    return next((each[LIMIT] for each in hashes if type(each) is Hash and LIMIT in each), b"")


def is_paused(data: Data, key: str, now: int) -> bool:
    """Say whether an operator has paused *key*."""
    capacity, ends, *_ = limit(data, key).split() or (b"", b"")
    return capacity == b"0" and (ends == b"0" or _micros(ends) > now)


def is_due(data: Data, key: str, now: int) -> bool:
    """Say whether the ticker has to look at *key*: its times are in ms, and some a little early."""
    due = data.get(DUE)
    at = due.value.scores.get(key.encode()) if due else None
    return at is not None and at * 1000 <= now + PRESENT


def is_known(data: Data, owner: str) -> bool:
    """Say whether some record names *owner*."""
    return owner.encode() in b"\n".join(_lines(data))


def leftovers(data: Data) -> list[bytes]:
    """Return the records that should not be left when all executions have ended."""
    left = {name: key.value for name, key in data.items() if not LASTING.fullmatch(name)}
    return [name for name, value in left.items() if type(value) is not Hash or {*value} != {LIMIT}]


def instants(data: Data, now: int) -> Iterator[int]:
    """Yield the times (µs) in the records that are soon after *now*."""
    for each in set(_TIMES.findall(b"\n".join(_lines(data)))):
        if now + PRESENT < (at := _micros(each)) < now + HORIZON:
            yield at


def _lines(data: Data, now: int | None = None) -> Iterator[bytes]:
    """Yield what is in the records, a line each; without past times that are not compared."""
    for name, key in data.items():
        value = key.value
        if key.expires_ms < math.inf:
            yield b"%b @%d" % (name, math.ceil(key.expires_ms))
        past = now if now is not None and KEPT.fullmatch(name) else 0
        if type(value) is Hash:
            yield from [b"%b %b %b" % (name, field, said) for field, said in value.items()]
        elif type(value) is SortedSet:
            for each, score in value.scores.items():
                said = number(score) if score * 1000 > past else b"past"
                yield b"%b %b %b" % (name, each, said)
        else:
            yield b"%b = %b" % (name, value if not past or int(value) > past else b"past")


def _micros(time: bytes) -> int:
    whole = time.partition(b".")[0]
    return int(whole) * (1 if len(whole) > 13 else 1000)


def canonical(
    data: Data, now: int, more: Iterable[bytes], order: Sequence[int], memory: int
) -> bytes:
    """
    Return the canonical form of a state: two states with the same one are one.

    Executions are numbered as *order* says, and owners in their order. A time that is to come is
    written as the time until then, a past one as its rank, and within *memory* by both.

    Args:
        data: The records.
        now: The time, µs.
        more: Lines that belong to the state, too.
        order: The new number of each execution.
        memory: µs.
    """
    text = b"\n".join((*_lines(data, now), *more))
    lines = _renamed(text, order).split(b"\n")
    lines.sort()
    text = b"\n".join(lines)
    said: dict[bytes, bytes] = {}
    ranks = {True: 0, False: 0}
    for each in sorted({*_TIMES.findall(text)}):
        ahead, is_exact = _micros(each) - now, len(each) > 15
        if ahead > PRESENT:
            said[each] = b"+%d" % round(ahead / ROUNDING) if ahead < HORIZON else b"+far"
            continue
        ranks[is_exact] += 1
        said[each] = b"#%d" % ranks[is_exact]
        if -ahead < memory:
            said[each] += b"%d" % round(ahead / ROUNDING)
    return _TIMES.sub(lambda found: said[found[0]], text)


def _renamed(text: bytes, order: Sequence[int]) -> bytes:
    owners = sorted({each[1:] for each in _NAMES.findall(text) if each[2]}, key=_by_number)
    ranks: dict[tuple[bytes, bytes], int] = {}
    for one in owners:
        ranks[one] = sum(other[0] == one[0] for other in ranks)
    if list(order) == sorted(order) and all(int(each[1]) == ranks[each] for each in owners):
        return text

    def rename(found: re.Match[bytes]) -> bytes:
        kind, which, count = found.groups()
        name = b"%b%d" % (kind, order[int(which)])
        return name if count is None else b"%b.%d" % (name, ranks[which, count])

    return _NAMES.sub(rename, text)


def _by_number(owner: tuple[bytes, bytes]) -> tuple[int, int]:
    return int(owner[0]), int(owner[1])
