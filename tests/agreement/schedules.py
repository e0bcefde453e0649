"""Random schedules: sequences of requests to a store and of time that passes."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_distlock.rate import Rate
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.values import ALONE, Completion, Limit, Want

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IDENTITY", "LEASE", "TIMES", "Schedule", "Step", "new_schedule"]

LEASE = 600.0  # seconds
KEYS = "aaab"
RUNS = ("r1", "r2", "r3")
ORDERS: tuple[tuple[dict[str, Any], ...], ...] = (  # of these runs
    ({"lane": "a"}, {"lane": "b", "share": 3000}, {}),
    ({"lane": "a", "most": 1}, {"lane": "a", "most": 2}, {"lane": "b", "most": 3}),
    ({"ahead": 600_000}, {"strict": True}, {}),
    ({"lane": "a", "ahead": 300_000}, {"lane": "a"}, {"lane": "b", "strict": True}),
)
IDENTITY = "same"
TWO, FIVE = Rate(2, per=LEASE, burst=2), Rate(5, per=2 * LEASE, burst=5)
PLAIN_WANTS = (ALONE, ALONE, Want(1, 0), Want(1, 2), Want(2, 3), Want(9, 3))
RATED_WANTS = (
    *(Want(1, 0, (TWO,)), Want(1, 3, (FIVE,)), Want(1, 1, (TWO, FIVE)), Want(2, 3, (FIVE,), 2)),
)
# Not for a server, where time passes by itself: a period with two limits may open within ms.
SPACED_WANTS = (Want(1, 0, (Rate(3, per=LEASE),)), Want(1, 2, (Rate(3, per=LEASE),)))
RATES = ((), (), (TWO,), (FIVE, TWO))  # of an operator
TIMES = (0.5, 1.5, 3.0, 6.0, LEASE / 2, LEASE + 1.0, 4000.0)
STEPS = 16
VERBS = (  # with how often each is used
    *(("acquire", 8), ("park", 10), ("line", 4), ("wait", 8), ("send", 8), ("both", 3)),
    *(("claim", 9), ("release", 15), ("again", 3), ("renew", 2), ("change", 4), ("rest", 2)),
    *(("limit", 4), ("woken", 6), ("cancel", 2), ("time", 6), ("sweep", 4), ("look", 7)),
    *(("recall", 1),),
)


class Step(NamedTuple):
    """A request by its name, with all that it says; it depends on no step that may be removed."""

    verb: str
    facts: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.verb}{self.facts}"


Schedule = tuple[Step, ...]


class _Draw:
    """What is drawn for one schedule: few wants, so that requests meet."""

    def __init__(
        self,
        chance: random.Random,
        times: tuple[float, ...],
        orders: tuple[dict[str, Any], ...],
    ) -> None:
        self.chance = chance
        self.times = times
        wants = PLAIN_WANTS + RATED_WANTS + (SPACED_WANTS if times else ())
        self.wants = chance.choices(wants, k=chance.randint(1, 3))
        self.orders = dict(zip(RUNS, orders, strict=False))
        self.owners: list[str] = []

    def key(self) -> str:
        return self.chance.choice(KEYS)

    def run(self, or_none: float = 0.0) -> str:
        return "" if self.chance.random() < or_none else self.chance.choice(RUNS)

    def flag(self, often: float = 0.5) -> bool:
        return self.chance.random() < often

    def want(self) -> Want:
        return self.chance.choice(self.wants)

    def most(self) -> int:
        """Draw how many may wait; 0: any number."""
        return self.chance.choice((0, 0, 0, 1, 2))

    def asks(self, or_none: float = 0.0) -> tuple[str, Want]:
        """Draw a run, and what it wants."""
        run, want = self.run(or_none), self.want()
        return run, want._replace(**self.orders.get(run, {}))

    def owner(self) -> str:
        self.owners.append(f"o{len(self.owners) + 1}")
        return self.owners[-1]

    def one(self) -> str:
        return self.chance.choice(self.owners[-5:])

    def given_up(self) -> tuple[str, Completion, str]:
        """Draw an owner, what became of its run, and the run for which its key is kept."""
        owner, run = self.one(), self.run() if self.flag(0.15) else ""
        ends = (Completion.NO, *Completion)
        return owner, self.chance.choice(ends), run

    def identity(self) -> Identity | None:
        if self.flag(0.7):
            return None
        choice = self.chance.choice
        until, most = choice(("started", "finished", LEASE)), choice((None, LEASE))
        replaces = choice(("", "*", *RUNS))
        ends, marks = choice((math.inf, LEASE)), (self.flag(), self.flag(), self.flag())
        return Identity(IDENTITY, until, replaces, most, ends, *marks, choice(("", "free", "all")))

    def limit(self) -> tuple[Limit | None, str | None]:
        """Draw an operator's limit, and the lane that it is for."""
        choice, lane = (
            self.chance.choice,
            self.chance.choice(("a", "b", None) if self.orders else (None,)),
        )
        capacity, rates = choice((None, 0, 1, 2, 3)), choice(RATES)
        if self.flag() or (lane and capacity is None):
            return None, lane
        return Limit(capacity, 0.0, "x", rates=() if lane else rates), lane


_FACTS: dict[str, Callable[[_Draw], tuple[Any, ...]]] = {
    "acquire": lambda d: (d.key(), d.owner(), *d.asks(0.4), d.flag(0.3), d.flag(0.3)),
    "park": lambda d: (d.key(), d.owner(), *d.asks(), d.flag(0.3), d.most()),
    "line": lambda d: (d.key(), *d.asks(), d.most()),
    "wait": lambda d: (d.key(), d.owner(), *d.asks(0.6), d.flag(0.3)),
    "send": lambda d: (
        *(d.key(), *d.asks(), LEASE * d.flag(0.3), d.identity(), d.flag(0.2), d.most()),
    ),
    "both": lambda d: (d.owner(), d.owner(), d.run(0.5), (d.want(), d.want()), d.flag(), d.flag()),
    "claim": lambda d: (d.key(), d.owner(), d.run(), d.flag(0.3)),
    "release": lambda d: (
        *d.given_up(),
        d.flag(0.7),
    ),
    "again": lambda d: (d.one(),),
    "renew": lambda d: (d.one(),),
    "change": lambda d: (d.one(), d.chance.choice(("upgrade", "downgrade")), d.flag()),
    "rest": lambda d: (d.one(),),
    "recall": lambda d: (d.one(),),
    "limit": lambda d: (d.key(), *d.limit()),
    "woken": lambda d: (
        d.key(),
        d.run(),
        d.chance.choice(("mark_published", "mark_returned", "drop")),
        d.flag(),
    ),
    "cancel": lambda d: (d.key(), d.run()),
    "time": lambda d: (d.chance.choice(d.times),),
    "sweep": lambda d: (d.key(),),
    "look": lambda d: (d.key(),),
}
_OF_OWNERS = ("release", "again", "renew", "change", "rest", "recall")


def new_schedule(seed: str, times: tuple[float, ...]) -> Schedule:
    """
    Return the schedule of a *seed*; some requests are repeated, as if an answer was lost.

    Args:
        seed: Any text.
        times: The seconds that may pass; none where time passes by itself.
    """
    orders = random.Random(f"{seed}: lanes").choice((*[()] * len(ORDERS), *ORDERS))
    draw = _Draw(random.Random(seed), times, orders)
    verbs = [each for each in VERBS if times or each[0] not in ("time", "sweep")]
    names, weights = zip(*verbs, strict=True)
    steps: list[Step] = []
    while len(steps) < STEPS:
        if steps and draw.flag(0.06):
            steps.append(steps[-1])
            continue
        (verb,) = draw.chance.choices(names, weights)
        if draw.owners or verb not in _OF_OWNERS:
            steps.append(Step(verb, _FACTS[verb](draw)))
    return (*steps, Step("look", ("a",)), Step("look", ("b",)))
