"""`Rate`: how often a key may be taken."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from .errors import ConfigurationError

__all__ = ["MAX_RATES", "Rate", "RateLike", "rates_in"]

MAX_LIMIT = 1_000_000
SHORTEST, LONGEST = 0.001, 30 * 86400.0  # seconds
MAX_RATES = 4  # of one key

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT = re.compile(r"([0-9]{1,12})/([0-9]*(?:\.[0-9]+)?)([smhd])")
_FORMS = "'100/m', '5/10s', or Rate(5, per=10)"


@dataclass(frozen=True, slots=True, repr=False)
class Rate:
    """
    How often a key may be taken: at most *limit* times in *per* seconds.

    No interval of that length, by the store's clock, has more starts than that, wherever it begins.
    Fixed windows or a token bucket would allow up to twice as many. A start occupies its place from
    the grant of the key until *per*, and at most 5 ms more, after its task has claimed the key.

    Args:
        limit: The number of starts.
        per: Seconds.
        burst: The number of starts that are allowed at once after a pause. With 1, starts are
            evenly spaced, except that up to 25 ms of a worker's delay is made up for. The spacing
            is up to 3 % longer than *per* / *limit*, but at most 30 ms over all of *per*: otherwise
            one late start would delay others again and again, each time that it leaves the
            interval.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range.
    """

    limit: int
    per: float = 60.0
    burst: int = 1

    def __post_init__(self) -> None:
        if type(self.limit) is not int or not 1 <= self.limit <= MAX_LIMIT:
            raise ConfigurationError(
                f"Rate({self.limit!r}): limit is a whole number from 1 to {MAX_LIMIT}, the"
                " number of starts; `celery locks pause` stops all new grants"
            )
        if type(self.per) not in (int, float) or not SHORTEST <= self.per <= LONGEST:
            raise ConfigurationError(
                f"Rate({self.limit}, per={self.per!r}): per is from {SHORTEST:g} to {LONGEST:.0f}"
                " seconds"
            )
        if type(self.burst) is not int or not 1 <= self.burst <= self.limit:
            raise ConfigurationError(
                f"Rate({self.limit}, burst={self.burst!r}): burst is a whole number from 1 to the"
                f" limit, {self.limit}: the starts that are allowed at once"
            )
        object.__setattr__(self, "per", float(self.per))

    @property
    def microseconds(self) -> int:
        """The length of *per*, as a store keeps it."""
        return round(self.per * 1e6)

    @classmethod
    def read(cls, text: str) -> Self:
        """
        Parse *text*: a number of starts, a slash, and a time: ``"100/m"``, ``"5/10s"``.

        Raises:
            ConfigurationError: *text* has another form.
        """
        parts = _TEXT.fullmatch(text.strip())
        if parts is None:
            raise ConfigurationError(
                f"rate {text!r} is not a number of starts, a slash and a time in s, m, h or d;"
                f" write {_FORMS}"
            )
        limit, times, unit = parts.groups()
        return cls(int(limit), float(times or 1) * _UNITS[unit])

    def __str__(self) -> str:
        for unit in ("d", "h", "m", "s"):
            times = self.per / _UNITS[unit]
            if times >= 1 and times == int(times):
                return f"{self.limit}/{'' if times == 1 else int(times)}{unit}"
        return f"{self.limit}/{self.per:g}s"

    def __repr__(self) -> str:
        burst = "" if self.burst == 1 else f", burst={self.burst}"
        return f"Rate({self.limit}, per={self.per:g}{burst})"


RateLike: TypeAlias = str | Rate | Iterable[str | Rate]


def rates_in(given: RateLike | None, where: str) -> tuple[Rate, ...]:
    """
    Return the rates of a declaration: one as a text or a `Rate`, or several.

    Raises:
        ConfigurationError: It is something else, or has too many; *where* names the declaration.
    """
    if given is None:
        return ()
    many: Any = (given,) if isinstance(given, str | Rate) else given
    if not isinstance(many, list | tuple) or not all(isinstance(rate, str | Rate) for rate in many):
        raise ConfigurationError(f"{where}: rate is {_FORMS}, or a list of them, not {given!r}")
    if not 1 <= len(many) <= MAX_RATES:
        raise ConfigurationError(
            f"{where}: rate gives {len(many)} rates; it is 1 to {MAX_RATES}, all of which count"
        )
    try:
        rates = [Rate.read(rate) if isinstance(rate, str) else rate for rate in many]
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    if len({rate.microseconds for rate in rates}) < len(rates):
        raise ConfigurationError(
            f"{where}: rate gives two limits for one time, {', '.join(map(str, rates))}; give the"
            " lower one"
        )
    return tuple(sorted(rates, key=lambda rate: rate.per))
