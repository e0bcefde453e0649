"""The model finds what is wrong in a script: here it is put in on purpose."""

from __future__ import annotations

import pytest

from .configurations import ALONE, ANY_UNIT, PACED, PAIR
from .explorer import Counterexample, explore
from .models import Model, Plan

NO_SHORT_WAY = ("    local given = hand_to_first(owner, run)", "    local given = nil")

ZADD = "    redis.call('ZADD', WOKEN, integer(at_ms), run)\n"
ZREM = "    redis.call('ZREM', QUEUE, 'p:' .. run)\n"

# What is wrong, in which model it shows, the texts of the scripts that become others, and what is
# found.
PLANTED = {
    "a run leaves the queue before it is noted as on its way": (
        Model((ALONE,) * 2, faults=1),
        [
            NO_SHORT_WAY,
            (ZADD + ZREM, ZREM + ZADD),
        ],
        "r1 is nowhere",
    ),
    "a run that only the store has is forgotten when it begins": (
        Model((ALONE,) * 2, faults=1, pushes=True),
        [("if keep and redis.call", "if false and redis.call")],
        "r1 is nowhere",
    ),
    "a unit too many is granted": (
        Model((ANY_UNIT,) * 3),
        [("in_use + needed(units, capacity) <= of", "in_use <= of")],
        "3 units of 2 are granted at a",
    ),
    "a rate is not asked": (
        Model((PACED,) * 2, ticks=True, memory=3.0),
        [("and starts_in(terms, now) == 0", "")],
        "2 start in 2.0 s",
    ),
    "who comes does not look at the queue": (
        Model((Plan(want=PAIR, how="blocks"), ALONE, Plan(want=PAIR, how="blocks"))),
        [("capacity ~= 1 and redis.call('EXISTS', QUEUE, TASKS) == 0", "capacity ~= 1")],
        "r2 has passed ['r1'] at a",
    ),
    "a release wakes nobody": (
        Model((ALONE,) * 2),
        [NO_SHORT_WAY, ("\nfree(owner)\n", "\nvacate(owner, now)\n")],
        "a sweep at a has found what nobody had woken",
    ),
    "a limit that is taken back wakes nobody": (
        Model((ALONE,) * 2, acts=frozenset(["pause"])),
        [("\n\nhand_on(now, '', 0)\n", "\n\n")],
        "a sweep at a has found what nobody had woken",
    ),
    "nobody is told when a rate lets the next one start": (
        Model((PACED,) * 2, ticks=True, sweeps=False, memory=3.0),
        [("opens_ms = math.min(opens_ms or in_ms, in_ms)", "")],
        "this does not come to its end",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_found(what):
    model, changes, wrong = PLANTED[what]
    explore(model)
    with pytest.raises(Counterexample) as found:
        explore(model._replace(changes=tuple(changes)))
    assert found.value.wrong == wrong
