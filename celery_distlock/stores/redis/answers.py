"""Parse servers' answers: named fields, texts, times, and woken executions."""

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any

from celery_distlock.stores.values import ALONE, FIRST, Route, Want, WokenTask

EXACT = 2**53  # microseconds; no time or token of ours is above it
DIGITS = len(str(EXACT))


def text(value: bytes | None) -> str:
    """
    Return a server's answer as text; an empty one for None.

    Text that is not UTF-8 was written by other software. It is sent back unchanged, so that it can
    be released and dropped.
    """
    return value.decode("utf-8", "surrogateescape") if value else ""


def is_ours(name: str) -> bool:
    """Whether *name*, as `text` has read it, is UTF-8."""
    return name.isascii() or not any("\ud800" <= character < "\ue000" for character in name)


def since_of(value: bytes | float | None) -> float:
    """Return a time in microseconds as seconds; 0 if it is missing or cannot be a time of ours."""
    try:
        micros = float(value or 0)
    except ValueError:
        return 0.0
    return micros / 1e6 if FIRST < micros < EXACT else 0.0


def micros_of(now: Sequence[bytes]) -> int:
    """Return a server's time (``TIME``) in µs."""
    seconds, rest = now
    return int(seconds) * 1_000_000 + int(rest)


def seconds_of(now: Sequence[bytes]) -> float:
    """Return a server's time (``TIME``) in seconds."""
    return micros_of(now) / 1e6


def want_of(written: bytes | None) -> Want:
    """Return the amount that a waiter wants, as units.lua has written it."""
    return Want.read(text(written)) or ALONE


class Fields:
    """
    Named fields of a script's answer; a missing field is empty, or 0.

    A value of another type than requested raises an error, as `Reading` expects.
    """

    __slots__ = ("_found",)

    def __init__(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise TypeError(f"no fields: {found!r}")
        self._found = found

    @classmethod
    def read(cls, written: bytes) -> "Fields":
        """Return the fields of an answer that consists only of fields."""
        return Fields(json.loads(text(written)))

    def text(self, name: str) -> str:
        """Return a text, as :func:`text` does."""
        value = self._found.get(name) or ""  # Lua has false for a field that a record lacks
        if not isinstance(value, str):
            raise TypeError(f"{name} is no text: {value!r}")
        return value

    def raw(self, name: str) -> bytes:
        """Return a text as its original bytes."""
        return self.text(name).encode("utf-8", "surrogateescape")

    def number(self, name: str) -> int:
        """Return a whole number; a script writes one above 10**14 as a text."""
        value = self._found.get(name, 0)
        if type(value) not in (int, float, str):
            raise TypeError(f"{name} is no number: {value!r}")
        return int(value)

    def seconds(self, name: str) -> float | None:
        """Return the seconds of a time in milliseconds; None if the field is missing."""
        return self.number(name) / 1000 if name in self._found else None

    def flag(self, name: str) -> bool:
        """Whether a field is true."""
        return self._found.get(name) is True

    def texts(self, name: str) -> list[str]:
        """Return the texts of a list."""
        found = list(self._found.get(name, ()))  # Lua writes an empty list as an empty object
        if not all(isinstance(each, str) for each in found):
            raise TypeError(f"{name} has what is no text: {found!r}")
        return found

    def each(self, name: str) -> "list[Fields]":
        """Return the items of a list, each with its own fields."""
        return list(map(Fields, self._found.get(name, ())))


class Answer(Fields):
    """The fields of a whole answer: a JSON object, then the envelopes of woken executions."""

    __slots__ = ("_envelopes",)

    def __init__(self, answer: Sequence[Any]) -> None:
        fields, *self._envelopes = answer
        super().__init__(json.loads(text(fields)))

    @property
    def opens(self) -> float | None:
        """The seconds until time alone admits a request; None: it does not."""
        return self.seconds("opens_ms")

    def wakes(self, *names: str) -> list[WokenTask]:
        """Return the executions that were woken at the keys of these names."""
        return [
            _woken(names[each.number("key") - 1], each, envelope)
            for each, envelope in zip(self.each("woken"), self._envelopes, strict=True)
        ]


def _woken(name: str, fields: Fields, envelope: bytes) -> WokenTask:
    route = fields.text("route")
    return WokenTask(
        name,
        fields.text("run"),
        envelope,
        Route.read(route) if route else None,
        givers=tuple(filter(None, fields.text("givers").split("\n"))),
        returned=fields.flag("returned"),
        published=fields.flag("published"),
    )


def together(wakes: Sequence[WokenTask]) -> WokenTask | None:
    """Combine woken executions into one value; None if there are none."""
    return wakes[0]._replace(also=tuple(wakes[1:])) if wakes else None


def sum_counters(found: Sequence[bytes]) -> dict[str, float]:
    """Return the values of the record of counters, without any that are not numbers of ours."""
    sums = {}
    for what, by in zip(found[::2], found[1::2], strict=True):
        with contextlib.suppress(ValueError):
            if is_ours(name := text(what)) and math.isfinite(number := float(by)):
                sums[name] = number
    return sums
