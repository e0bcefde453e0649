"""Stores agree with each other and with a model in random schedules, if they are not wrong."""

from __future__ import annotations

import pytest

from celery_distlock.rate import Rate
from celery_distlock.stores.values import ALONE, Completion, Want
from tests.rewriting import RewrittenServer

from .player import DifferenceError, Player, play_many
from .schedules import Step

SIDES = {
    ("memory", "server"): 600,
    ("memory", "model"): 600,
    ("server", "model"): 300,
}
TWO = Want(1, 2)
ANY_NUMBER = Want(1, 0, (Rate(3, per=600.0),))
ONE_OF_TWO = Want(1, 2, (Rate(3, per=600.0),))
RATED = Want(1, 1, (Rate(2, per=600.0, burst=2),))

# Shortened schedules that once showed a fault.
FOUND = {
    "what a second delivery learns while the result is stored": (
        Step("wait", ("b", "o1", "r3", ALONE, False)),
        Step("release", ("o1", Completion.UNSETTLED, "r3", True)),
        Step("park", ("b", "o3", "r3", ALONE, True)),
    ),
    "a start that is taken back after its end, while the key rests": (
        Step("park", ("a", "o1", "r2", RATED, False)),
        Step("rest", ("o1",)),
        Step("release", ("o1", Completion.YES, "", True)),
        Step("release", ("o1", Completion.NO, "", False)),
        Step("look", ("a",)),
    ),
    "a key that is kept for a run that had stepped back": (
        Step("line", ("a", "r1", ONE_OF_TWO)),
        Step("send", ("a", "r3", ANY_NUMBER, 0.0, None, False)),
        Step("time", (601.0,)),
        Step("wait", ("a", "o8", "", ALONE, False)),
        Step("claim", ("a", "o9", "r1", False)),
        Step("release", ("o9", Completion.NO, "r3", True)),
        Step("look", ("a",)),
    ),
    "a retry whose kept unit is one of more than it counts": (
        Step("acquire", ("a", "o1", "", TWO, False, False)),
        Step("acquire", ("a", "o2", "", TWO, False, False)),
        Step("release", ("o1", Completion.NO, "r2", False)),
        Step("acquire", ("a", "o3", "", Want(1, 3), False, False)),
        Step("acquire", ("a", "o4", "r2", TWO, False, False)),
    ),
}
# Few random schedules have two holders that wait to hold the key exclusively.
TWO_UPGRADES = (
    Step("acquire", ("a", "o1", "", TWO, False, False)),
    Step("acquire", ("a", "o2", "", TWO, False, False)),
    Step("change", ("o1", "upgrade", True)),
    Step("change", ("o2", "upgrade", True)),
)
DEADLOCKS = ("elseif key.up and F.upgrading() ~= owner then", "elseif false then")

# Texts of the scripts, and what they become.
PLANTED = {
    "order": ("'NX', place, member)", "'NX', -place, member)"),
    "units": ("+ F.needed(want) > of", "> of"),
    "tokens": ("local token = clock", "local token = string.format('%d', 3e15 - now)"),
    "wakes": ("    F.free(grant)\nend\n", "    F.vacate(grant)\nend\n"),
    "overtaking": ("turn == 'closed' or F.opens(want)", "F.opens(want)"),
    "rates": ("or F.too_soon(want, mine)", ""),
}
# What the model knows of them, and more.
FOUND_BY_MODEL = {
    **PLANTED,
    "second deliveries": ("other = not key.alone and F.held_by(run)", "other = nil"),
    "ends": (
        "    if ended then\n        return F.reply({ status = 'done' })\n    elseif",
        "    if",
    ),
    "pauses": ("closed = is_right and F.claim_opens(reserved, want)", "closed = nil"),
    "resends": ("        F.resend(run, of)\n", ""),
    "delays": ("if of and of.s == 'later' then", "if false then"),
    "identities": ("where == 'waiting' and not request.beside", "not request.beside"),
    "replaced messages": (
        "replaces == run and other == run and where == 'waiting'",
        "replaces == run and other == run",
    ),
    "recalls": ("F.recall(F.inside(before, true) or before)", "local _ = nil"),
    "recalls of fixed calls": ("request.recalls == 'all' or not is_fixed", "true"),
    "second deliveries of recalled runs": (
        "    if recalled and not F.held_by(run) then",
        "    if false then",
    ),
    "upgrades": ("    if key.count == 1 then\n", "    if true then\n"),
    "downgrades": ("'x', F.row_of(grant), 'was', was)", "'x', F.row_of(grant))"),
    "several keys": ("redis.call('EXISTS', QUEUE) > 0 or F.opens", "F.opens"),
    "kept keys": ("if not keep_ms or F.put_first() then", "if not keep_ms then"),
    "kept messages": ("if keep and of and not of.b then", "if false then"),
    "forgotten ends": ("if was_parked or ended == '2' or again", "if ended == '2' or again"),
    "starts that were none": ("    F.refund(owner)\n", ""),
    "turns of lanes": ("(tag + math.ceil(", "(tag + 0 * math.ceil("),
    "lanes at their most": ("used > 0 and used + F.needed(want) > most", "false"),
    "those ahead": ("place - 1000 * ahead_ms)", "place)"),
    "those not passed": ("F.lengthen(F.grant_for(run), STRICT_MS)", ""),
    "an operator's rates": ("    local rates = F.limit_now().rates\n", "    local rates = nil\n"),
}


@pytest.mark.parametrize("names", SIDES, ids="+".join)
def test_the_sides_agree(names, redis_url):
    assert play_many(names, "ci", range(SIDES[names]), redis_url) == []


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what):
    with Player(("memory", "model")).running() as player:
        assert player.play(FOUND[what]) is None


@pytest.mark.parametrize("what", PLANTED)
def test_a_script_that_is_wrong_is_found(what):
    _find(PLANTED[what], ("memory", "memory"))


@pytest.mark.parametrize("what", FOUND_BY_MODEL)
def test_the_model_finds_a_script_that_is_wrong(what):
    _find(FOUND_BY_MODEL[what], ("memory", "model"))


def test_the_model_finds_a_deadlock_that_is_not_reported():
    with Player(("memory", "model")).running() as player:
        assert player.play(TWO_UPGRADES) is None
        server = player.stores[0]._servers.server = RewrittenServer(DEADLOCKS)
        assert player.play(TWO_UPGRADES) is not None
    server.check()


def _find(texts, names):
    with Player(names).running() as player:
        server = player.stores[0]._servers.server = RewrittenServer(texts)
        with pytest.raises(DifferenceError):
            player.check_many("planted", range(5000))
    server.check()
