"""No two ever believe to hold one key, and tokens rise, where each step is a command of its own."""

from __future__ import annotations

import os

import pytest

from tests import servers
from tests.faults.history import history, store_actor
from tests.faults.history.test_exclusion import DURABLE, LIVES, SECONDS, Stage, seed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120 + 3 * SECONDS)]

TRANSPORT = [Stage.cut_connections, Stage.hold_answers_back]
PROCESSES = [
    Stage.stop_an_actor,
    Stage.stop_actors_that_await_answers,
    Stage.kill_an_actor,
]
SERVER = [Stage.stop_the_server, Stage.restart_the_server]
SITUATIONS = {
    "calm": [],
    "processes": PROCESSES,
    "everything": TRANSPORT + PROCESSES + SERVER,
}


class NativeStage(Stage):
    """A server, the actors, and what happens to them."""

    def _start(self) -> None:
        number = f"{self._seed}.{len(self._deaths)}.{len(self._actors)}"
        arguments = self._server.url, "history", os.fspath(self._file), number
        self._actors.append(store_actor.start(*arguments, "redis.scriptless:ScriptlessStore"))


@pytest.fixture
def stage(private_server, tmp_path):
    servers.skip_without("SET with IFEQ")
    made = NativeStage(private_server(options=DURABLE), tmp_path / "history", seed())
    yield made
    made.close()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_two_believe_at_one_time_and_tokens_rise(stage, situation):
    print(f"DISTLOCK_TEST_SEED={stage._seed}")  # noqa: T201

    beliefs = stage.play(SECONDS, SITUATIONS[situation])

    assert list(history.faults(beliefs)) == []
    assert len(beliefs) > LIVES * SECONDS / 2
    print(f"{len(beliefs)} beliefs")  # noqa: T201
