"""How often a key of a store in memory is taken: as rates.lua counts it, which this mirrors."""

from collections.abc import Callable
from dataclasses import dataclass, field

from celery_distlock.rate import Rate
from celery_distlock.stores.values import Starts, Want

__all__ = ["StartLog"]

MOST_SERIES = 8
PARTS = 64
CATCH_UP = 25_000  # µs
COMING = 1_000_000  # µs
KEPT = 60_000_000  # µs


def distance_of(per: int, limit: int) -> float:
    """Return how far starts are from one another, in µs."""
    more = min(per * 3 // 100, 30_000)
    return (per + more * (limit - 1) / limit) / limit


def counts_for(per: int) -> int:
    """Return for how many µs a start counts."""
    return per + min(per // 200, 5_000)


@dataclass
class Series:
    """The starts of the last *per* (µs), in parts of it: when the last one was, and how many."""

    per: int
    limit: int = 1  # by which the next one is due
    next: float = 0.0
    asked: int = 0
    parts: list[list[int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(count for _, count in self.parts)

    def next_by(self, limit: int, now: int, reserved: int) -> float:
        """When the next one is due, if another limit was asked for before."""
        if limit <= self.limit:
            return min(self.next, now) + max(0.0, self.next - now) * self.limit / limit
        due, distance = 0.0, distance_of(self.per, limit)  # as if it had been so all the time
        for last, count in self.parts:
            due = max(due, last) + count * distance
        if reserved:
            due = max(due, now) + reserved * distance
        return min(self.next, due)

    def forget(self, now: int) -> None:
        """Forget what is over."""
        if self.next > now + 2 * self.per:
            self.next = now + self.per
        for part in self.parts:
            part[0] = min(part[0], now)
        self.parts = [part for part in self.parts if part[0] + counts_for(self.per) > now]


@dataclass
class StartLog:
    """The starts at one key. Times are in µs."""

    series: dict[int, Series] = field(default_factory=dict)  # by the time that they are counted for
    reserved: dict[str, Want] = field(default_factory=dict)  # by owner, who has to come
    started: dict[str, tuple[int, Want]] = field(default_factory=dict)  # of who has not left yet
    looks: tuple[str, float] = ("", 0.0)  # who is blocked and the first, and when he looks again
    until: int = 0  # it tells something, with what is on its way

    def prune(self, now: int, has_something: Callable[[str], bool]) -> None:
        """Forget what is over, and who has the key no more."""
        if now >= self.until:
            self.series.clear()
        for series in self.series.values():
            series.forget(now)
        for owner in [owner for owner in self.reserved if not has_something(owner)]:
            self.leave(owner)
        for owner in [owner for owner in self.started if not has_something(owner)]:
            del self.started[owner]

    @property
    def in_use(self) -> bool:
        """Whether it tells anything that matters."""
        return bool(self.reserved or self.series)

    def counted(self) -> tuple[Starts, ...]:
        """Return what somebody sees who looks."""
        known = sorted(self.series.values(), key=lambda series: series.per)
        counts = (Starts(each.limit, each.per / 1e6, each.count) for each in known)
        return tuple(starts for starts in counts if starts.begun)

    def starts_in(self, want: Want, now: int) -> float:
        """Return in how many µs one may start; 0: now."""
        return max((self._opens_for(rate, want.cost, now) for rate in want.rates), default=0.0)

    def _opens_for(self, rate: Rate, cost: int, now: int) -> float:
        series, reserved = self._series(rate, now), self._reserved
        if rate.limit > series.limit:
            due = series.next_by(rate.limit, now, reserved)
            spaced = due - (rate.burst - 1) * distance_of(series.per, rate.limit) - now
        else:  # by which factor a lower limit stretches, nearly cancels out
            spaced = series.next - (rate.burst - 1) * distance_of(series.per, series.limit) - now
        over, at = series.count + reserved + cost - rate.limit, now
        for last, count in series.parts:
            if over <= 0:
                break
            over, at = over - count, last + counts_for(series.per)
        if over > 0:
            at = now + COMING
        return max(0.0, spaced, at - now)

    @property
    def _reserved(self) -> int:
        """How many starts are kept for those who have to come."""
        return sum(want.cost for want in self.reserved.values())

    def _series(self, rate: Rate, now: int) -> Series:
        per = rate.microseconds
        if per in self.series:
            return self.series[per]
        made = Series(per, rate.limit, asked=now)
        known = sorted(self.series.values(), key=lambda series: series.per)
        last = known[-1] if known else None
        source = next((series for series in known if series.per >= per), last)
        if source is not None:
            made.parts = [list(part) for part in source.parts if part[0] + counts_for(per) > now]
        return made

    def _space(self, want: Want, now: int, came: int) -> None:
        for rate in want.rates:
            series = self.series[rate.microseconds] = self._series(rate, now)
            since = max(min(came, now), now - CATCH_UP)
            due = max(series.next_by(rate.limit, now, self._reserved), since)
            series.next = due + want.cost * distance_of(series.per, rate.limit)
            series.asked, series.limit = now, rate.limit
            if len(self.series) > MOST_SERIES:
                known = sorted(self.series.values(), key=lambda series: series.per)
                del self.series[min(known, key=lambda series: series.asked).per]

    def _keep(self, now: int) -> None:
        self.until = now + max(self.series, default=0) + KEPT

    def _count(self, owner: str, want: Want, now: int) -> None:
        for series in self.series.values():
            width, last = series.per / PARTS, series.parts[-1] if series.parts else None
            if last is not None and last[0] // width == now // width:
                last[0], last[1] = now, last[1] + want.cost
            else:
                series.parts.append([now, want.cost])
        self._keep(now)
        self.started[owner] = now, want

    def start(self, owner: str, want: Want, now: int, came: int) -> None:
        """Let one start at once."""
        if want.rates:
            self._space(want, now, came)
            self._count(owner, want, now)

    def reserve(self, owner: str, want: Want, now: int, came: int) -> None:
        """Keep a start for one who has to come for it."""
        if want.rates:
            self._space(want, now, came)
            self.reserved[owner] = want
            self._keep(now)

    def begin(self, owner: str, another: str, now: int) -> bool:
        """Let one start who has come; false: nothing was kept for it."""
        want = self.reserved.pop(owner, None)
        if want is None:
            return False
        self._count(another, want, now)
        return True

    def leave(self, owner: str) -> None:
        """Keep a start no longer for one who does not come."""
        want = self.reserved.pop(owner, None)
        if want is not None:
            self._put_forward(want)

    def refund(self, owner: str) -> None:
        """Count a start no more that has come to nothing."""
        at, want = self.started.pop(owner, (0, None))
        if want is None:
            return
        for series in self.series.values():
            part = next((part for part in series.parts if part[0] >= at), None)
            if part is not None:
                part[1] -= min(want.cost, part[1])
                series.parts = [part for part in series.parts if part[1]]
        self._put_forward(want)

    def _put_forward(self, want: Want) -> None:
        for rate in want.rates:
            series = self.series.get(rate.microseconds)
            if series is not None:
                earlier = want.cost * distance_of(series.per, series.limit)
                series.next = max(0.0, series.next - earlier)
