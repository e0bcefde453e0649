"""
No two ever believe to hold one key, and tokens rise, whatever happens around them.

Some processes live random lives of locks while they, their connections and the server are stopped,
cut off and killed. ``DISTLOCK_TEST_HISTORY`` says for how many seconds, a few by default.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from celery_distlock import clock
from celery_distlock.testing import die_with_parent
from tests.faults.history import history
from tests.faults.history.actor import BREAKAGES
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = float(os.environ.get("DISTLOCK_TEST_HISTORY", "3"))
ACTORS = 4
LIVES = 8  # a second; fewer make a history that shows nothing
DURABLE = {"appendonly": "yes", "appendfsync": "always"}
ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120 + 3 * SECONDS)]


class Stage:
    """A server, the actors, and what happens to them."""

    def __init__(self, server: Any, file: Path, seed: str, breakage: str = "") -> None:
        self._server = server
        self._file = file
        self._seed = seed
        self._breakage = [breakage] if breakage else []
        self._actors: list[subprocess.Popen[bytes]] = []
        self._deaths: dict[int, float] = {}
        self._choose = random.Random(seed)
        self._waiting = threading.Event()  # never set

    def play(self, seconds: float, faults: list[Callable[[Stage], None]]) -> list[history.Belief]:
        """Let *faults* happen, one after the other at random, for *seconds*; return the history."""
        for _ in range(ACTORS):
            self._start()
        wait_until(lambda: self._begun() > ACTORS, what="the actors to begin")
        until = clock.monotonic() + seconds
        while clock.monotonic() < until or self._shows_too_little(seconds, until):
            self.pause(0.05, 0.4)
            if faults:
                self._choose.choice(faults)(self)
        for actor in self._actors:
            actor.communicate(b"\n", timeout=60)
            assert actor.returncode == 0
        self._actors = []
        return history.read(self._file, self._deaths)

    def close(self) -> None:
        for actor in self._actors:
            actor.kill()
            actor.communicate()

    def pause(self, least: float, most: float) -> None:
        self._waiting.wait(self._choose.uniform(least, most))

    def _start(self) -> None:
        seed = f"{self._seed}.{len(self._deaths)}.{len(self._actors)}"
        command = [sys.executable, "-m", "tests.faults.history.actor"]
        command += [self._server.url, "history", os.fspath(self._file), seed, *self._breakage]
        actor = subprocess.Popen(
            die_with_parent(command),
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        )
        self._actors.append(actor)

    def _shows_too_little(self, seconds: float, until: float) -> bool:
        """Whether to go on because the machine is busy."""
        too_little = self._begun() <= LIVES * seconds
        return too_little and clock.monotonic() < until + 30.0

    def _begun(self) -> int:
        return self._file.read_bytes().count(b'"begin"') if self._file.exists() else 0

    def _admin(self, *command: Any) -> None:
        with suppress(redis.RedisError), self._server.client(socket_timeout=1.0) as client:
            client.execute_command(*command)

    # What happens

    def stop_an_actor(self) -> None:
        self._stop(1)

    def _stop(self, count: int) -> None:
        stopped = self._choose.sample(self._actors, count)
        for actor in stopped:
            actor.send_signal(signal.SIGSTOP)
        self.pause(0.1, 1.0)
        for actor in stopped:
            actor.send_signal(signal.SIGCONT)

    def stop_actors_that_await_answers(self) -> None:
        """They come while it is stopped: when it goes on they may be older than a lease."""
        self._admin("CLIENT", "PAUSE", 200, "ALL")
        self.pause(0.05, 0.1)
        self._stop(ACTORS - 1)

    def kill_an_actor(self) -> None:
        actor = self._actors.pop(self._choose.randrange(ACTORS))
        self._deaths[actor.pid] = clock.monotonic()
        actor.kill()
        actor.communicate()
        self._start()

    def cut_connections(self) -> None:
        kind = self._choose.choice(["normal", "pubsub"])
        self._admin("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def forget_scripts(self) -> None:
        self._admin("SCRIPT", "FLUSH")

    def hold_answers_back(self) -> None:
        # Requests are taken and answered late; also longer than a lease.
        self._admin("CLIENT", "PAUSE", self._choose.randrange(50, 900), "ALL")
        self.pause(0.1, 0.5)

    def stop_the_server(self) -> None:
        self._server.pause()
        self.pause(0.1, 1.0)
        self._server.resume()

    def restart_the_server(self) -> None:
        self._server.restart()


TRANSPORT = [Stage.cut_connections, Stage.forget_scripts, Stage.hold_answers_back]
PROCESSES = [
    Stage.stop_an_actor,
    Stage.stop_actors_that_await_answers,
    Stage.kill_an_actor,
]
SERVER = [Stage.stop_the_server, Stage.restart_the_server]
SITUATIONS = {
    "calm": [],
    "transport": TRANSPORT,
    "processes": PROCESSES,
    "server": SERVER,
    "everything": TRANSPORT + PROCESSES + SERVER,
}


@pytest.fixture
def stage(private_server, tmp_path):
    """Makes stages; takes their seed, and what is broken."""
    stages = []

    def make(seed: str, breakage: str = "") -> Stage:
        server = private_server(options=DURABLE)
        stages.append(Stage(server, tmp_path / "history", seed, breakage))
        return stages[-1]

    yield make
    for each in stages:
        each.close()


def seed() -> str:
    return os.environ.get("DISTLOCK_TEST_SEED") or f"{random.SystemRandom().randrange(10**9)}"


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_two_believe_at_one_time_and_tokens_rise(stage, situation):
    chosen = seed()
    print(f"DISTLOCK_TEST_SEED={chosen}")  # noqa: T201

    beliefs = stage(chosen).play(SECONDS, SITUATIONS[situation])

    assert list(history.faults(beliefs)) == []
    assert len(beliefs) > LIVES * SECONDS
    print(f"{len(beliefs)} beliefs")  # noqa: T201


@pytest.mark.timeout(600)
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_lock_is_found(stage, breakage):
    stage = stage("1", breakage)

    for _ in range(50):  # one or two do, but on a machine that is too busy
        beliefs = stage.play(4.0, [Stage.stop_actors_that_await_answers])
        if list(history.faults(beliefs)):
            return
    pytest.fail("not noticed")
