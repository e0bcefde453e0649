"""A series of tasks: sending it, waiting for its end, and judging what it wrote down."""

from __future__ import annotations

import itertools
import random
import time
import uuid
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from celery.exceptions import TimeoutError as ResultTimeoutError

from celery_distlock.errors import LockConflictError
from tests.faults.history import history
from tests.faults.history.history import Belief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery.result import AsyncResult

    from tests.worker.conftest import Site

    Keys = Callable[[int], list[str]]
    Options = Callable[[int], Mapping[str, Any]]


# Which keys the task of a number gets


def one_of(count: int) -> Keys:
    return lambda number: [f"key-{number % count}"]


def some_of(count: int, width: int) -> Keys:
    """*width* different ones of *count* keys, in any order; the same choice each time."""
    keys = [f"key-{number}" for number in range(count)]
    return lambda number: random.Random(number).sample(keys, width)


def one_inside_another(outer: int, inner: int) -> Keys:
    return lambda number: [f"outer-{number % outer}", f"inner-{number % inner}"]


class Series:
    """
    Tasks of one purpose.

    Args:
        site: Where they are sent.
        tasks: The names of tasks that take turns.
        keys: Returns which keys each needs.
        options: Returns what else `apply_async` is given.
    """

    def __init__(
        self,
        site: Site,
        tasks: Sequence[str],
        keys: Keys,
        options: Options = lambda number: {},
    ) -> None:
        self.name = f"series-{uuid.uuid4().hex[:8]}"
        self.results: list[AsyncResult] = []
        self._site = site
        self._tasks = itertools.cycle([getattr(site.tasks, name) for name in tasks])
        self._keys = keys
        self._options = options
        self._begun_at = time.monotonic()

    def send(self, count: int) -> None:
        for _ in range(count):
            number = len(self.results)
            sent = next(self._tasks).apply_async(
                (self.name, number, self._keys(number)), **self._options(number)
            )
            self.results.append(sent)

    def ended(self, limit: float) -> list[str]:
        """Wait for all; return what became of each: ``ran``, ``left`` or ``refused``."""
        return [self._end(result, self._begun_at + limit) for result in self.results]

    def _end(self, result: AsyncResult, deadline: float) -> str:
        try:
            return result.get(timeout=max(0.1, deadline - time.monotonic()), interval=0.02)
        except LockConflictError:
            return "refused"
        except ResultTimeoutError:
            states = Counter(result.state for result in self.results)
            pytest.fail(f"not all ended in time: {dict(states)}")

    # What they wrote down

    def attempts(self) -> list[int]:
        """How often each has begun."""
        begun = Counter(note["task"] for note in self._read("begun"))
        return [begun[result.id] for result in self.results]

    def order(self) -> dict[str, list[int]]:
        """For each key, the numbers of those that had it, as they began."""
        order = defaultdict(list)
        for note in self._read("begun"):
            for key in note["tokens"]:
                order[key].append(note["number"])
        return order

    def faults(self, ends: Mapping[str, float]) -> list[str]:
        """
        What must not be, see :func:`tests.faults.history.history.faults`.

        *ends* says until when, at the least, those worked whose workers did not let them end.
        """
        return list(history.faults([*self._beliefs("begun", "ended", ends)])) + list(
            history.faults([*self._beliefs("inside:begun", "inside:ended", ends)])
        )

    def _beliefs(self, begun: str, ended: str, ends: Mapping[str, float]) -> Iterator[Belief]:
        ends_by_execution = {note["execution"]: note["at"] for note in self._read(ended)}
        seen = set()
        for note in self._read(begun):
            begin, execution = note["at"], note["execution"]
            end = ends_by_execution.get(execution) or max(begin, ends.get(note["worker"], 0.0))
            for key, token in note["tokens"].items():
                if (key, token, execution) not in seen:
                    seen.add((key, token, execution))
                    yield Belief(key, begin, end, token, execution)

    def _read(self, what: str) -> list[dict[str, Any]]:
        return self._site.journal.read(f"{self.name}:{what}")
