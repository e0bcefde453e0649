"""
A model of rates, in plain Python: in how many µs the next start of a key is allowed.

Starts are a little farther apart than a rate says, and count for a little longer; those of a 64th
of the period count as the last of them. All times are in µs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from celery_distlock.stores.values import Starts as Counted

if TYPE_CHECKING:
    from celery_distlock.rate import Rate

__all__ = ["Starts", "Terms", "counts_for"]

PARTS = 64
CATCH_UP, COMING, SPARE = 25_000, 1_000_000, 60_000_000


class Terms(NamedTuple):
    """What one start costs, and the rates that it has to keep."""

    cost: int
    rates: tuple[Rate, ...]


@dataclass
class Series:
    """The starts of the last period, and when the next one is due if they are evenly spaced."""

    limit: int
    due: float = 0.0
    parts: list[tuple[int, int]] = field(default_factory=list)  # time of the last one, how many


def counts_for(per: int) -> int:
    return per + min(per // 200, 5_000)


def _distance(per: int, limit: int) -> float:
    return (per + min(per * 3 // 100, 30_000) * (limit - 1) / limit) / limit


def _counting(parts: list[tuple[int, int]], per: int, now: int) -> list[tuple[int, int]]:
    return [each for each in parts if each[0] + counts_for(per) > now]


class Starts:
    """The starts of a key: those that were made, by period, and how many are reserved."""

    def __init__(self) -> None:
        self._series: dict[int, Series] = {}
        self._known_until = 0
        self.reserved = 0

    def begin(self, now: int) -> None:
        """Forget all of it if there has been no start for long."""
        if now > self._known_until:
            self._series.clear()

    def reserve(self, terms: Terms, now: int, came: int) -> None:
        """Reserve a start for a request that came then."""
        self.space(terms, now, came)
        self.reserved += terms.cost
        self._keep(now)

    def _keep(self, now: int) -> None:
        self._known_until = now + max(self._series) + SPARE

    def opens_in(self, terms: Terms, now: int) -> float:
        """Return in how many µs the next start is allowed; 0: now."""
        return max((self._opens_in(rate, terms.cost, now) for rate in terms.rates), default=0)

    def _opens_in(self, rate: Rate, cost: int, now: int) -> float:
        series = self._of(rate, now)
        distance = _distance(rate.microseconds, max(rate.limit, series.limit))
        due = self._due(rate, series, now) if rate.limit > series.limit else series.due
        over = sum(count for _, count in series.parts) + self.reserved + cost - rate.limit
        opens = now
        for last, count in series.parts if over > 0 else ():
            over -= count
            opens = last + counts_for(rate.microseconds)
            if over <= 0:
                break
        opens = now + COMING if over > 0 else opens
        return max(0, due - (rate.burst - 1) * distance - now, opens - now)

    def _of(self, rate: Rate, now: int) -> Series:
        """Return the starts in the period of a rate; of a new one, as another one knows them."""
        for per, each in self._series.items():
            each.parts = _counting(each.parts, per, now)
        per, known = rate.microseconds, sorted(self._series)
        if per in known or not known:
            return self._series.get(per) or Series(rate.limit)
        source = next((each for each in known if each >= per), known[-1])
        return Series(rate.limit, parts=_counting(self._series[source].parts, per, now))

    def _due(self, rate: Rate, series: Series, now: int) -> float:
        """Return when the next start is due if the series had another limit."""
        if rate.limit <= series.limit:
            ahead = max(0, series.due - now) * series.limit / rate.limit
            return min(series.due, now) + ahead
        due, distance = 0.0, _distance(rate.microseconds, rate.limit)
        for last, count in series.parts:
            due = max(due, last) + count * distance
        if self.reserved:
            due = max(due, now) + self.reserved * distance
        return min(series.due, due)

    def space(self, terms: Terms, now: int, came: int) -> None:
        """Place the next start behind this one, of a request that came then."""
        since = max(min(came, now), now - CATCH_UP)
        for rate in terms.rates:
            series = self._series.setdefault(rate.microseconds, self._of(rate, now))
            distance = _distance(rate.microseconds, rate.limit)
            series.due = max(self._due(rate, series, now), since) + terms.cost * distance
            series.limit = rate.limit

    def count(self, terms: Terms, now: int) -> None:
        """Count a start now, in every period."""
        for per, series in self._series.items():
            last, count = series.parts[-1] if series.parts else (-per, 0)
            if last * PARTS // per == now * PARTS // per:
                series.parts[-1] = now, count + terms.cost
            else:
                series.parts.append((now, terms.cost))
        self._keep(now)

    def take_back(self, terms: Terms, at: int = 0) -> None:
        """Forget a reserved start, or one that was counted at this time."""
        for series in self._series.values() if at else ():
            for number, (last, count) in enumerate(series.parts):
                if last >= at:
                    left = count - terms.cost
                    series.parts[number : number + 1] = [(last, left)] if left > 0 else []
                    break
        for rate in terms.rates:
            if series := self._series.get(rate.microseconds):
                distance = _distance(rate.microseconds, series.limit)
                series.due = max(0, series.due - terms.cost * distance)

    def counted(self, now: int) -> tuple[Counted, ...]:
        """Return how many starts each period has had."""
        counts = [
            Counted(
                series.limit, per / 1e6, sum(many for at, many in series.parts if at + per > now)
            )
            for per, series in sorted(self._series.items())
        ]
        return tuple(each for each in counts if each.begun)
