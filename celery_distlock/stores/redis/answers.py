"""What is read from servers' answers: texts, tokens, times, and whom a script has woken."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from celery_distlock.naming import shown
from celery_distlock.stores.values import ALONE, FIRST, UNREADABLE, Route, Want, WokenTask

__all__ = [
    "EXACT",
    "each_woken",
    "is_ours",
    "micros_of",
    "opens_in",
    "seconds_of",
    "since_of",
    "sum_counters",
    "text",
    "together",
    "token_of",
    "unreadable",
    "wake_of",
    "wakes_of",
    "want_of",
]

EXACT = 2**53  # microseconds; no number beyond it is a time or a token of ours


def text(value: bytes | None) -> str:
    """
    Return what a server says as text; of nothing, the empty one.

    What is no UTF-8 was written by somebody else. It goes back as it came, so that it can be
    released and dropped.
    """
    return value.decode("utf-8", "surrogateescape") if value else ""


def is_ours(name: str) -> bool:
    """Whether *name*, as `text` has read it, is UTF-8."""
    return name.isascii() or not any("\ud800" <= character < "\ue000" for character in name)


def token_of(value: bytes | None) -> int:
    """Return the token that a record tells; 0 if it tells none, `UNREADABLE` if it is spoilt."""
    if not value:
        return 0
    if value.isdigit() and len(value) <= len(str(EXACT)) and (token := int(value)) < EXACT:
        return token
    return UNREADABLE


def since_of(value: bytes | float | None) -> float:
    """Return the seconds of a time in microseconds; 0: there is none that is one of anything."""
    try:
        micros = float(value or 0)
    except ValueError:
        return 0.0
    return micros / 1e6 if FIRST < micros < EXACT else 0.0


def micros_of(now: Sequence[bytes]) -> int:
    """Return the time that a server tells (``TIME``), in µs."""
    seconds, rest = now
    return int(seconds) * 1_000_000 + int(rest)


def seconds_of(now: Sequence[bytes]) -> float:
    """Return the time that a server tells, in seconds."""
    return micros_of(now) / 1e6


def want_of(written: bytes | None) -> Want:
    """Return how much one wants that waits, as units.lua has written it."""
    return Want.read(text(written)) or ALONE


def wake_of(name: str, run: bytes, envelope: bytes | list[bytes]) -> WokenTask:
    """
    Return whom a script has woken.

    One that needs several keys comes with their names; others with letters, as sweep.lua has them.
    """
    if isinstance(envelope, list):
        told, *letters = envelope
        if letters:
            returned, published = (letter in letters[0] for letter in (b"r", b"b"))
            return WokenTask(name, text(run), told, returned=returned, published=published)
        return WokenTask(name, text(run), b"", Route.read(text(told)))
    return WokenTask(name, text(run), envelope)


def each_woken(name: str, woken: Sequence[Any]) -> list[WokenTask]:
    """Return all whom a script has woken at one key: a run, what is to be sent of it, and so on."""
    pairs = zip(woken[::2], woken[1::2], strict=True)
    return [wake_of(name, run, envelope) for run, envelope in pairs if run]


def wakes_of(name: str, woken: Sequence[Any]) -> WokenTask | None:
    """Return those of `each_woken` as one."""
    return together(each_woken(name, woken))


def together(wakes: Sequence[WokenTask]) -> WokenTask | None:
    """Return those who were woken as one."""
    return wakes[0]._replace(also=tuple(wakes[1:])) if wakes else None


def opens_in(woken: Sequence[Any]) -> float | None:
    """Return in how many seconds time alone lets somebody enter, if a script has told so."""
    told = [said for run, said in zip(woken[::2], woken[1::2], strict=True) if not run and said]
    return min(told) / 1000 if told else None


def sum_counters(found: Sequence[bytes]) -> dict[str, float]:
    """Return what the record of counters says; what is no number of ours is left out."""
    sums = {}
    for what, by in zip(found[::2], found[1::2], strict=True):
        with contextlib.suppress(ValueError):
            if is_ours(name := text(what)) and math.isfinite(number := float(by)):
                sums[name] = number
    return sums


def unreadable(address: str, key: str, token: bytes | None) -> str:
    """Say that a lock's token cannot be read, and what to do."""
    return (
        f"{address}: the record of lock {shown(key)!r} is spoilt: its token is"
        f" {shown(text(token))!r}; `celery locks release --force` frees the key"
    )
