"""The model finds what is wrong in a script: here it is put in on purpose."""

from __future__ import annotations

import pytest

from .configurations import ALONE, ANY_UNIT, NEWEST, PACED, PAIR
from .explorer import Counterexample, explore
from .models import Model, Plan

IN_QUEUE = "    if state == 'waiting' then\n"
LEAVES = "    if was == 'waiting' then redis.call('ZREM', QUEUE, 'p:' .. run) end\n"

# What is wrong, in which model it shows, the texts of the scripts that become others, and what is
# found.
PLANTED = {
    "a run leaves the queue before it is noted as in flight": (
        Model((ALONE,) * 2, faults=1),
        [(IN_QUEUE, LEAVES + IN_QUEUE)],
        "r1 is nowhere",
    ),
    "a run that only the store has is forgotten when it begins": (
        Model((ALONE,) * 2, faults=1, pushes=True),
        [("if keep and of and", "if false and of and")],
        "r1 is nowhere",
    ),
    "a unit too many is granted": (
        Model((ANY_UNIT,) * 3),
        [("+ F.needed(want) > of", "> of")],
        "3 units of 2 are granted at a",
    ),
    "a rate is not asked": (
        Model((PACED,) * 2, ticks=True, memory=3.0),
        [("or F.too_soon(want, mine)", "")],
        "2 start in 2.0 s",
    ),
    "a new request does not look at the queue": (
        Model((Plan(want=PAIR, how="blocks"), ALONE, Plan(want=PAIR, how="blocks"))),
        [("turn == 'closed' or F.opens(want)", "F.opens(want)")],
        "r2 has passed ['r1'] at a",
    ),
    "a release wakes no waiter": (
        Model((ALONE,) * 2),
        [("    F.free(grant)\nend\n", "    F.vacate(grant)\nend\n")],
        "a sweep at a has found what was not woken",
    ),
    "a limit that is taken back wakes no waiter": (
        Model((ALONE,) * 2, acts=frozenset(["pause"])),
        [("F.free()\nreturn F.answer(1)", "return F.answer(1)")],
        "a sweep at a has found what was not woken",
    ),
    "a newer call does not ask the one that runs to leave": (
        Model((NEWEST,) * 2),
        [("F.flag(grant, ('c'), 'n' .. clock)", "")],
        "o0.0 does not learn of a newer call",
    ),
    "nothing notes when a rate lets the next one start": (
        Model((PACED,) * 2, ticks=True, sweeps=False, memory=3.0),
        [("key.opens_ms = math.ceil(math.min(key.opens_ms or (1 / 0), ms))", "")],
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
