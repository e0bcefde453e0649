"""Plays schedules to two sides at once, and finds where they differ."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import pytest

from celery_distlock import clock
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis.store import RedisStore
from tests.contract.grace import lengthen

from .model_side import ModelSide
from .schedules import LEASE, TIMES, Schedule, Step, new_schedule
from .sides import TICK, StoreSide

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DifferenceError", "Player", "play_many"]

START = 1_000_000.0  # seconds
EPOCH = 1_700_000_000.0  # seconds


class Difference(NamedTuple):
    """The first step after which two sides differ, and what they say."""

    at: int
    step: Step
    said: tuple[Any, Any]


class DifferenceError(AssertionError):
    """Two sides differ; the schedule is as short as it was made."""

    def __init__(self, seed: str, schedule: Schedule, found: Difference) -> None:
        steps = "\n  ".join(map(str, schedule[: found.at + 1]))
        super().__init__(f"seed {seed}:\n  {steps}\nsaid: {found.said[0]}\n  and {found.said[1]}")


class Player:
    """Two sides, by the names of their stores, that have one clock."""

    def __init__(self, names: tuple[str, str], url: str = "") -> None:
        self._hears, self._with_model = "server" not in names, "model" in names
        most = 3600.0 if self._with_model else TIMES[-1]  # the model forgets no end
        self._times = tuple(each for each in TIMES if each <= most) if self._hears else ()
        self._now = START
        self._number = 0
        self.stores = [self._open(name, url) for name in names]

    def _open(self, name: str, url: str) -> Any:
        if name == "model":
            return None
        if name == "server":
            return RedisStore(url, f"agreement-{uuid4().hex}")
        return MemoryStore("memory://", "agreement")

    @contextmanager
    def running(self) -> Iterator[Player]:
        """Have the clock of this process be that of the schedules."""
        with pytest.MonkeyPatch.context() as patch, closing(self):
            patch.setattr(clock, "monotonic", lambda: self._now)
            patch.setattr(clock, "wall", lambda: EPOCH + self._now)
            if not self._hears:  # a server's time passes by itself
                lengthen(patch, GRANT=LEASE, CLAIM=LEASE)
            yield self

    def close(self) -> None:
        """Close the stores."""
        for store in filter(None, self.stores):
            store.close()

    def play(self, schedule: Schedule) -> Difference | None:
        """Return where the sides differ; None: they do not."""
        self._number += 1
        self._now = START
        sides = [self._side(store) for store in self.stores]
        try:
            for at, step in enumerate(schedule):
                self._now += TICK + (step.facts[0] if step.verb == "time" else 0.0)
                one, other = [side.play(step) for side in sides]
                if one != other:
                    return Difference(at, step, (one, other))
        finally:
            for side in sides:
                side.close()
        return None

    def _side(self, store: Any) -> Any:
        if store is None:
            return ModelSide(hears=self._hears)
        if isinstance(store, MemoryStore):
            store._servers.server.keys._keys.clear()
        return StoreSide(store, self._number, hears=self._hears, with_model=self._with_model)

    def check(self, seed: str) -> None:
        """
        Play the schedule of *seed*.

        Raises:
            DifferenceError: The sides differ.
        """
        schedule = new_schedule(seed, self._times)
        found = self.play(schedule)
        if found is not None:
            schedule, found = self._shrunk(schedule[: found.at + 1], found)
            raise DifferenceError(seed, schedule, found)

    def check_many(self, seed: str, numbers: range) -> None:
        """Play schedules up to the first at which the sides differ."""
        for number in numbers:
            self.check(f"{seed}-{number}")

    def _shrunk(self, schedule: Schedule, found: Difference) -> tuple[Schedule, Difference]:
        """Leave out steps, many and then one at a time, without which the sides differ as well."""
        size = len(schedule) // 2
        while size:
            at = 0
            while at < len(schedule) - 1:
                shorter = schedule[:at] + schedule[at + size :]
                if (still := self.play(shorter)) is not None:
                    schedule, found = shorter[: still.at + 1], still
                else:
                    at += size
            size //= 2
        return schedule, found


def play_many(
    names: tuple[str, str], seed: str, numbers: range, url: str = "", *, most: int | None = None
) -> list[str]:
    """Play the schedules with these *numbers*; return the differences, the first *most* of them."""
    found: list[str] = []
    with Player(names, url).running() as player:
        for number in numbers:
            try:
                player.check(f"{seed}-{number}")
            except DifferenceError as error:
                found.append(str(error))
            if len(found) == most:
                break
    return found
