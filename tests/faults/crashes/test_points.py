"""
A process is killed wherever it touches the outside world: no task is lost, none runs twice.

Six tasks are parked at one key, and the key is let go. `PLACES` says how often which point is
crossed on the way, so that every crossing can be the last one of its process. By default a few of
them are; with ``DISTLOCK_TEST_ALL_FAILPOINTS=1`` all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from celery_distlock.testing import die_with_parent
from tests.faults.crashes.conftest import make_scene
from tests.waiting import wait_until
from tests.workers import ROOT

ALL = os.environ.get("DISTLOCK_TEST_ALL_FAILPOINTS") == "1"
TASKS = 6

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

# How often each is crossed at least; what goes on for as long as the worker runs, `LASTING`, is not
# counted.
RUN = dict.fromkeys(["child:claim", "child:started", "child:release", "child:success"], TASKS)
PARK = ["child:acquire", "child:zadd", "child:park", "child:parked"]
BY_CHANNEL = {
    **RUN,
    **dict.fromkeys(PARK, 1),  # the first task of a worker; the others are parked on arrival
    **dict.fromkeys(["main:inspect", "main:parked", "main:line"], 1),
    "main:ack": TASKS,
    "main:acknowledge": TASKS + 1,
    "main:take": TASKS,
    "child:drop": TASKS,
    "main:drop": TASKS - 1,  # and once more when all is over
}
BY_BROKER = {
    **RUN,
    **dict.fromkeys(PARK, TASKS),
    "child:publish": TASKS - 1,
    "child:mark_sent": TASKS - 1,
    "child:drop": TASKS,
    "main:ack": 2 * TASKS,
    "main:acknowledge": 2 * TASKS,
}
LASTING = {
    *("main:sweep_lease", "main:zscan", "main:due_keys", "main:sweep", "main:index", "main:tick"),
    "main:pttl",
    *("child:renew", "child:set"),
}
BY_CLIENT = {"client:acquire": 1, "client:release": 1}
SWEPT = 2  # of what is lasting, how many are tried
MORE = {  # what is often crossed more than once, but need not be
    **dict.fromkeys(PARK, 2),
    **dict.fromkeys(["main:inspect", "main:parked", "main:line"], TASKS - 2),
    "main:drop": TASKS,
}

# By default.
FEW_BY_CHANNEL = [
    "child:park:after:1",
    "child:claim:after:2",
    "child:release:before:4",
    "child:release:after:2",
    "main:take:before:2",
    "main:line:after:1",
    "main:ack:before:3",
]
FEW_BY_BROKER = [
    "child:publish:before:1",
    "child:mark_sent:before:3",
    "child:drop:before:2",
    "main:ack:before:2",
]
FEW_BY_CLIENT = ["client:release:after:1"]
TWO_DEATHS = [
    f"client:release:after:1,main:{place}:{when}:1"
    for place in ("publish", "mark_sent")
    for when in ("before", "after")
]


def every(places: dict[str, int]) -> list[str]:
    return [
        f"{place}:{when}:{number}"
        for place, count in places.items()
        for number in range(1, count + 1)
        for when in ("before", "after")
    ]


SWEEPS = every(
    dict.fromkeys(["main:sweep_lease", "main:zscan", "main:due_keys", "main:sweep"], SWEPT)
)


# Scenes


@pytest.fixture(scope="module")
def by_channel(redis_server, tmp_path_factory):
    """Woken tasks are pushed straight to the workers, where tasks are parked on arrival."""
    yield from make_scene(redis_server.url, tmp_path_factory.mktemp("channel"), {}, 2)


@pytest.fixture(scope="module")
def by_broker(redis_server, tmp_path_factory):
    """Woken tasks go through the broker, and all are parked by the pool."""
    folder = tmp_path_factory.mktemp("broker")
    yield from make_scene(redis_server.url, folder, {"channel": False, "at_receipt": False}, 2)


class Client:
    """A process that holds a key, and is no worker."""

    def __init__(self, scene, key: str) -> None:
        self._process = subprocess.Popen(
            die_with_parent([sys.executable, "-m", "tests.apps.failing", key]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **scene.env, "DISTLOCK_TEST_ROLE": "client"},
        )
        self._process.stdout.readline()

    def release(self) -> None:
        """Let go, or be killed at it."""
        with suppress(BrokenPipeError):
            self._process.communicate(b"\n", timeout=60)


class Play:
    """The six tasks on one key, on *scene*, in which what makes the crossings *points* dies."""

    def __init__(self, scene, key: str, points: str = "", *, client: bool = False) -> None:
        self._scene = scene
        self._key = key
        self._points = points
        self._client = client
        self._results: list[Any] = []
        self._hits = len(scene.hits())
        self.crossings: dict[str, int] = {}
        self._quiet_since = time.monotonic()  # when the broker last had nothing

    def run(self) -> None:
        scene = self._scene
        scene.mend()
        scene.arm(self._points)
        holder: Any = Client(scene, self._key) if self._client else scene.lock(self._key)
        if not self._client:
            holder.acquire()
        self._results = [scene.tasks.work.delay(self._key, n) for n in range(TASKS)]
        self._wait(
            lambda: scene.look(self._key).waiting == TASKS or self.hits, "the tasks to be parked"
        )
        holder.release()
        self._wait(lambda: all(result.ready() for result in self._results), "all results")
        self._wait(lambda: not scene.left(self._key), "nothing to be left")
        if not self._points and not self._client:
            # The results are there before the last process has notified the store, and noted that.
            point = "child:drop:after"
            self._wait(lambda: scene.crossings().get(point, 0) >= TASKS, "all ends")
        self.crossings = scene.crossings()
        scene.arm("")

    @property
    def hits(self) -> list[dict[str, Any]]:
        return self._scene.hits()[self._hits :]

    def _wait(self, fact, what: str) -> None:
        """Wait for *fact*, and bring up a new worker where one has died."""

        def look() -> bool:
            self._scene.mend(wait=False)
            self._send_what_the_transport_lost()
            return fact()

        try:
            wait_until(look, timeout=90.0, what=what, poll=0.05)
        except AssertionError as error:
            states = [result.state for result in self._results]
            error.add_note(f"{states}, {self.hits}, {self._scene.left(self._key)}")
            raise

    def _send_what_the_transport_lost(self) -> None:
        """
        Send again what a worker that died had popped off the broker's list, and not yet noted.

        That is between Celery and its transport: the message was nowhere in our hands. A woken
        task's message that is lost so is sent again by the sweep, a minute later.
        """
        broker = {"messages", "unacked"} & self._scene.left(self._key).keys()
        if not self.hits or broker:
            self._quiet_since = time.monotonic()
        elif time.monotonic() > self._quiet_since + 3.0:
            arrived = set(self._scene.journal.read("arrived"))
            for number, result in enumerate(self._results):
                if result.id not in arrived and result.state == "PENDING":
                    self._scene.tasks.work.apply_async((self._key, number), task_id=result.id)
            self._quiet_since = time.monotonic()

    def check(self) -> None:
        scene = self._scene
        assert [result.get(timeout=10) for result in self._results] == list(range(TASKS))
        begun = scene.begun(self._key)
        assert [note["others"] for note in begun] == [[]] * len(begun)
        tokens = [note["token"] for note in begun]
        assert tokens == sorted(set(tokens))

        times = Counter(note["name"] for note in begun)
        assert sorted(times) == list(range(TASKS))
        twice = {name for name, count in times.items() if count > 1}
        assert twice <= self.interrupted(), "ran again though its end was known"
        assert max(times.values()) <= 2

    def interrupted(self) -> set[int]:
        """The tasks that were killed before the lock store knew of their end."""
        scene = self._scene
        victims = {pid for hit in self.hits for pid in hit["victims"]}
        last = {note["pid"]: note for note in scene.begun(self._key)}
        settled = scene.journal.read("settled")
        return {
            note["name"]
            for pid, note in last.items()
            if pid in victims and [note["id"], pid] not in settled
        }


def play(scene, key: str, points: str = "", *, client: bool = False) -> Play:
    played = Play(scene, key, points, client=client)
    played.run()
    played.check()
    if {hit["point"] for hit in played.hits} != set(filter(None, points.split(","))):
        pytest.skip("not crossed so often this time")
    return played


# No process dies: what there is to die at


def seen(played: Play) -> dict[str, int]:
    """The crossings but for the lasting ones, and those that only a new server brings about."""
    counts = {
        point.removesuffix(":after"): count
        for point, count in played.crossings.items()
        if point.endswith(":after")
    }
    return {p: n for p, n in counts.items() if p not in LASTING and not p.endswith(":load")}


PLAYS = 3  # while a process is stopped for a moment, messages come again, and that is crossings


def test_these_are_the_crossings_by_channel(by_channel, key):
    for number in range(PLAYS):
        crossed = seen(play(by_channel, f"{key}-{number}"))
        if set(crossed) == set(BY_CHANNEL):
            break

    assert set(crossed) == set(BY_CHANNEL)
    assert {place: min(crossed[place], count) for place, count in BY_CHANNEL.items()} == BY_CHANNEL


def test_these_are_the_crossings_by_broker(by_broker, key):
    for number in range(PLAYS):
        crossed = seen(play(by_broker, f"{key}-{number}"))
        if crossed == BY_BROKER:
            break

    assert crossed == BY_BROKER


# A process dies


@pytest.mark.parametrize("point", every(BY_CHANNEL | MORE) + SWEEPS if ALL else FEW_BY_CHANNEL)
def test_a_death_where_tasks_are_pushed(by_channel, key, point):
    play(by_channel, key, point)


@pytest.mark.parametrize("point", every(BY_BROKER) + SWEEPS if ALL else FEW_BY_BROKER)
def test_a_death_where_tasks_go_through_the_broker(by_broker, key, point):
    play(by_broker, key, point)


@pytest.mark.parametrize("point", every(BY_CLIENT) if ALL else ["client:release:before:1"])
def test_the_death_of_a_client_where_tasks_are_pushed(by_channel, key, point):
    play(by_channel, key, point, client=True)


@pytest.mark.parametrize(
    "point",
    every({**BY_CLIENT, "client:publish": 1, "client:mark_sent": 1}) if ALL else FEW_BY_CLIENT,
)
def test_the_death_of_a_client_where_tasks_go_through_the_broker(by_broker, key, point):
    play(by_broker, key, point, client=True)


@pytest.mark.parametrize("points", TWO_DEATHS if ALL else TWO_DEATHS[1:2])
def test_the_death_of_a_client_and_of_the_sweeper_that_finds_what_it_left(by_broker, key, points):
    play(by_broker, key, points, client=True)
