"""Two stores agree in random schedules; and where one is wrong, they do not."""

from __future__ import annotations

import pytest

from tests.rewriting import RewrittenServer

from .player import DifferenceError, Player, play_many

SCHEDULES = 600
# Texts of the scripts, and what they become.
PLANTED = {
    "order": ("'NX', of.p, 'p:' .. run)", "'NX', -of.p, 'p:' .. run)"),
    "units": ("+ F_grants.needed(want) > of", "> of"),
    "tokens": ("local token = F.integer(now)", "local token = F.integer(3e15 - now)"),
    "wakes": ("    F_queue.free(grant)\nend\n", "    F_grants.vacate(grant)\nend\n"),
    "overtaking": ("turn == 'closed' or F_gates.opens(want)", "F_gates.opens(want)"),
    "rates": ("or F_gates.too_soon(want, mine)", ""),
}


@pytest.mark.parametrize("names", [("memory", "old"), ("memory", "server")], ids="+".join)
def test_the_stores_agree(names, redis_url):
    assert play_many(names, "ci", range(SCHEDULES), redis_url) == []


@pytest.mark.parametrize("what", PLANTED)
def test_a_script_that_is_wrong_is_found(what):
    with Player(("memory", "memory")).running() as player:
        server = player.stores[0]._servers.server = RewrittenServer(PLANTED[what])
        with pytest.raises(DifferenceError):
            player.check_many("planted", range(2000))
    server.check()
