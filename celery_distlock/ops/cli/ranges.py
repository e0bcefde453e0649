"""Types of command-line options: numbers, times and rates."""

import re
from typing import Any

import click

from celery_distlock.errors import ConfigurationError
from celery_distlock.key import MAX_CAPACITY
from celery_distlock.rate import Rate

DAY = 86_400.0  # seconds

PORT = click.IntRange(0, 65_535)
PLACE = click.IntRange(0, 10**9)  # longer than any queue or list
COUNT = click.IntRange(1, 10**9)
UNITS = click.IntRange(0, MAX_CAPACITY)

_PARTS = {"d": DAY, "h": 3600.0, "m": 60.0, "s": 1.0}  # seconds
_DIGITS = r"\d{1,9}(?:\.\d{1,9})?"
_NUMBER = re.compile(_DIGITS, re.ASCII)
_DURATION = re.compile("".join(rf"(?:(?P<{unit}>{_DIGITS}){unit})?" for unit in _PARTS), re.ASCII)


class Duration(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.1
    """A duration with its unit: ``0.5s``, ``90s``, ``15m``, ``1h30m`` or ``2d``; or ``0``."""

    name = "time"

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return *value* in seconds; raise :exc:`click.BadParameter` if it is not a duration."""
        text = str(value).strip().lower()
        if _NUMBER.fullmatch(text) and float(text):
            units = ", ".join(f"{text}{unit}" for unit in "smh")
            self.fail(f"{value!r} has no unit: use {units} or {text}d.", param, ctx)
        found = _DURATION.fullmatch("0s" if _NUMBER.fullmatch(text) else text)
        if not found or not text:
            self.fail(f"{value!r} is not a time such as 0.5s, 90s, 15m, 1h30m or 2d.", param, ctx)
        parts = found.groupdict().items()
        seconds = sum(float(number or 0) * _PARTS[unit] for unit, number in parts)
        if not self._least <= seconds <= self._most:
            least, most = f"{self._least:g}s", f"{self._most / DAY:g}d"
            self.fail(f"{value!r} is not between {least} and {most}.", param, ctx)
        return seconds


class StartRate(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.1
    """A rate of starts, such as ``10/s`` or ``5/10s``."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Rate:
        """Return *value* as a rate; raise :exc:`click.BadParameter` if it is not one."""
        try:
            return Rate.read(str(value))
        except ConfigurationError as error:
            self.fail(f"{error}.", param, ctx)
