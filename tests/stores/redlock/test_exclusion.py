"""
No two ever believe to hold one key, and tokens rise, while nodes die, hang and come back empty.

A node that comes back empty stays away for longer than the longest lease;
see docs/reference/redlock.md.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock import clock
from tests.faults.history import history, store_actor
from tests.faults.history.actor import LEASES
from tests.faults.history.test_exclusion import SECONDS, Stage, seed
from tests.integration.lock.processes import Script

if TYPE_CHECKING:
    from collections.abc import Callable

AWAY = 2.5 * max(LEASES)  # seconds; an extension asks for at most as long
MOST = 2  # nodes that are broken at once

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120 + 3 * SECONDS)]


class MastersStage(Stage):
    """Several masters, the actors, and what happens to them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._away: dict[Any, float] = {}  # until when each node has to stay away

    def _start(self) -> None:
        number = f"{self._seed}.{len(self._deaths)}.{len(self._actors)}"
        arguments = self._server.url, "history", os.fspath(self._file), number
        self._actors.append(store_actor.start(*arguments, "redis.redlock:RedlockStore"))

    def _broken(self) -> list[Any]:
        return [node for node in self._server.servers if not node.answers]

    def _sound(self) -> Any:
        """A node to break, if one more may be broken."""
        for node, until in list(self._away.items()):
            if clock.monotonic() > until:
                del self._away[node]
                node.start()
        if len(self._broken()) >= MOST:
            return None
        return self._choose.choice([node for node in self._server.servers if node.answers])

    def hang_a_node(self) -> None:
        if (node := self._sound()) is not None:
            node.pause()

    def resume_nodes(self) -> None:
        for node in self._server.servers:
            node.resume()

    def kill_a_node(self) -> None:
        if (node := self._sound()) is not None:
            node.kill()
            self._away[node] = clock.monotonic() + AWAY

    def cut_connections(self) -> None:
        if (node := self._sound()) is not None:
            node.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def forget_scripts(self) -> None:
        if (node := self._sound()) is not None:
            node.ask("SCRIPT", "FLUSH")

    def play(self, seconds: float, faults: list[Callable[[Stage], None]]) -> list[history.Belief]:
        try:
            return super().play(seconds, faults)
        finally:
            self.resume_nodes()


NODES = [
    MastersStage.hang_a_node,
    MastersStage.resume_nodes,
    MastersStage.kill_a_node,
    MastersStage.cut_connections,
    MastersStage.forget_scripts,
]
PROCESSES = [MastersStage.stop_an_actor, MastersStage.kill_an_actor]
SITUATIONS = {
    "calm": [],
    "nodes": NODES,
    "processes": PROCESSES,
    "everything": NODES + PROCESSES,
}


@pytest.fixture
def stage(masters, tmp_path):
    made = MastersStage(masters, tmp_path / "history", seed())
    yield made
    made.close()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_two_believe_at_one_time_and_tokens_rise(stage, situation):
    print(f"DISTLOCK_TEST_SEED={stage._seed}")  # noqa: T201

    beliefs = stage.play(SECONDS, SITUATIONS[situation])

    assert list(history.faults(beliefs)) == []
    assert len(beliefs) > 4 * SECONDS
    print(f"{len(beliefs)} beliefs")  # noqa: T201


COUNTING = """
from celery_distlock.stores.redis.redlock import RedlockStore
store = RedlockStore(sys.argv[3], "contention")
file, rounds = sys.argv[4], int(sys.argv[5])
report(ready=True)
ask()
tokens = []
for n in range(rounds):
    with Lock("k", lease=10.0, store=store) as lease:
        tokens.append(lease.token)
        with open(file, "r+") as counter:
            number = int(counter.read() or 0)
            time.sleep(0.001)
            counter.seek(0)
            counter.write(str(number + 1))
report(tokens=tokens)
"""


def test_many_processes_that_split_the_votes_get_on(shared_masters, tmp_path):
    """Eight at once: each time several begin together, and none may be left out."""
    counter = tmp_path / "counter"
    counter.write_text("")
    arguments = shared_masters.url, os.fspath(counter), "15"
    with ExitStack() as stack:
        scripts = [
            stack.enter_context(Script(COUNTING, "memory://", "none", *arguments)) for _ in range(8)
        ]
        for script in scripts:
            script.received()
        for script in scripts:
            script.say()
        tokens = [script.received()["tokens"] for script in scripts]

    assert counter.read_text() == "120"
    assert len({token for each in tokens for token in each}) == 120
    assert all(each == sorted(each) for each in tokens)
