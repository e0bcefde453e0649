"""Searches all that may happen in a world, breadth first, and what does not come to its end."""

from __future__ import annotations

import time
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from .world import Event, Fault, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .world import Model

__all__ = ["Counterexample", "Report", "Step", "explore"]

# Events that need no fault, no operator and no new execution.
BY_ITSELF = {"asks", "ends", "goes_on", "sweeps", "ticks", "time_passes", "lifts"}


class Step(NamedTuple):
    """An event, and what befell it."""

    event: Event
    fault: Fault | None = None
    dies: bool = False  # the caller, then; else it goes on

    def __str__(self) -> str:
        died = " and its caller died" if self.dies else ""
        return f"{self.event}{f': {self.fault}' if self.fault else ''}{died}"


class Report(NamedTuple):
    """
    What was explored.

    Attributes:
        states: How many were found.
        transitions: How many led from one to another.
        depth: Events to the farthest.
        is_whole: Whether there are no others.
        seconds: How long the processor took.
    """

    states: int
    transitions: int
    depth: int
    is_whole: bool
    seconds: float

    def __str__(self) -> str:
        of = "all" if self.is_whole else "the first"
        rate = self.transitions / self.seconds
        return (
            f"{of} {self.states} states, {self.transitions} transitions, depth {self.depth},"
            f" {self.seconds:.1f} s ({rate:.0f}/s)"
        )


class Counterexample(AssertionError):  # noqa: N818
    """What must not be, and the shortest way to it."""

    def __init__(self, wrong: str, steps: list[Step]) -> None:
        self.wrong, self.steps = wrong, steps
        super().__init__("\n".join([wrong, *map("{:3} {}".format, range(1, 1000), steps)]))


class _Search:
    def __init__(self, model: Model) -> None:
        self.world = World(model)
        self.known: dict[bytes, int] = {}
        self.found_by: list[tuple[int, Step | None]] = []  # from which state, and how
        self.sources: list[list[int]] = []  # the states that become this one by themselves
        self.resting: list[int] = []
        self.to_do: deque[tuple[int, int, Any]] = deque()
        self.depth = self.transitions = 0

    def run(self, most: int) -> None:
        self._arrive(0, None, 0)
        while self.to_do and len(self.known) < most:
            number, self.depth, saved = self.to_do.popleft()
            for event in self._events(saved):
                self._try(number, saved, event)
        self._look_for_dead_ends()

    def _events(self, saved: Any) -> list[Event]:
        self.world.restore(saved)
        return list(self.world.events())

    def _try(self, number: int, saved: Any, event: Event) -> None:
        """Let *event* happen, and then with each fault that may befall it."""
        self._take(number, saved, Step(event))
        written = self.world.server.written
        if not self.world.faults_left(saved):
            return
        for request, many in enumerate(written):
            for write in range(many):
                fault = Fault(request, write)
                broken = self._take(number, saved, Step(event, fault))
                if event.place is not None:
                    self._take(number, broken, Step(event, fault, dies=True))

    def _take(self, number: int, saved: Any, step: Step) -> Any:
        """Take *step* and return what has become of the world."""
        world = self.world
        world.restore(saved)
        try:
            if step.dies:
                world.caller_dies(step.event)
            else:
                world.do(step.event, step.fault)
        except AssertionError as error:
            raise Counterexample(str(error), [*self._path(number), step]) from error
        self.transitions += 1
        return self._arrive(number, step, self.depth + 1)

    def _arrive(self, source: int, step: Step | None, depth: int) -> Any:
        world = self.world
        digest = blake2b(world.digest(), digest_size=12).digest()
        number, saved = self.known.setdefault(digest, len(self.known)), world.save()
        if number == len(self.found_by):
            self.found_by.append((source, step))
            self.sources.append([])
            self.to_do.append((number, depth, saved))
            if world.is_at_rest():
                self.resting.append(number)
        if step and step.fault is None and step.event.verb in BY_ITSELF:
            self.sources[number].append(source)
        return saved

    def _path(self, number: int) -> list[Step]:
        return list(self._steps_back(number))[::-1]

    def _steps_back(self, number: int) -> Iterator[Step]:
        while number:
            number, step = self.found_by[number]
            assert step is not None
            yield step

    def _look_for_dead_ends(self) -> None:
        """See that each state may come to rest by itself; what was not looked at does."""
        good = [*self.resting, *(number for number, *_ in self.to_do)]
        seen = set(good)
        while good:
            new = set(self.sources[good.pop()]) - seen
            seen |= new
            good += new
        for number in range(len(self.known)):
            if number not in seen:
                raise Counterexample("this does not come to its end", self._path(number))


def explore(model: Model, most: int = 10**9) -> Report:
    """
    Explore *model*, up to *most* states.

    Raises:
        Counterexample: Something is wrong.
    """
    search, began = _Search(model), time.process_time()
    search.run(most)
    search.world.server.check()
    seconds = time.process_time() - began
    return Report(len(search.known), search.transitions, search.depth, not search.to_do, seconds)
