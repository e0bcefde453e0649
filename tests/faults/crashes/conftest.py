"""Workers that are killed and stopped, over `tests.apps.failing`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import redis

from celery_distlock import Lock
from celery_distlock.runtime.app import Runtime
from tests import processes, servers
from tests.waiting import wait_until
from tests.workers import WorkerProcess, stop_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from celery_distlock.stores.values import KeyState
    from tests.apps.journal import Journal

APP = "tests.apps.failing"


class Scene:
    """
    The app in this process, and the workers that run it.

    Attributes:
        tasks: The module with the app.
        workers: Those that are to run; the dead ones are replaced by `mend`.
    """

    def __init__(self, tasks: ModuleType, env: dict[str, str], folder: Path) -> None:
        self.tasks: Any = tasks
        self.env = env
        self.workers: list[WorkerProcess] = []
        self._folder = folder
        self._dead: list[WorkerProcess] = []
        self._redis = redis.Redis.from_url(env["DISTLOCK_TEST_BROKER"], decode_responses=True)

    @property
    def journal(self) -> Journal:
        return self.tasks.journal

    @property
    def store(self) -> Any:
        return Runtime.of(self.tasks.app).store

    # Workers

    def start(self, *, concurrency: int = 2, wait: bool = True) -> WorkerProcess:
        worker = WorkerProcess(APP, folder=self._folder, concurrency=concurrency, env=self.env)
        worker.start(wait=wait)
        self.workers.append(worker)
        return worker

    def mend(self, *, wait: bool = True) -> None:
        """Replace the workers that have died."""
        for worker in list(self.workers):
            if not worker.running:
                self.workers.remove(worker)
                self._dead.append(worker)
                worker.kill(whole=True)
                self.start(wait=False)
        if wait:
            for worker in self.workers:
                worker.wait_ready()

    def worker_of(self, pid: int) -> WorkerProcess:
        """The worker whose pool's process *pid* is."""
        return next(each for each in self.workers if each.running and pid in each.children())

    def wait_whole(self) -> None:
        """Wait until no pool has a process that is dying, or dead and not noticed yet."""
        wait_until(lambda: not any(map(processes.alive, self.killed_at_a_point())), timeout=60.0)
        for worker in self.workers:
            worker.wait_whole()

    def cut_off(self, worker: WorkerProcess) -> None:
        """Close all of *worker*'s connections to the broker, at the broker's end."""
        theirs = self._connections(worker)
        assert theirs
        for each in theirs:
            self._redis.client_kill_filter(_id=each["id"])

    def consumes(self, worker: WorkerProcess) -> bool:
        """Whether *worker* waits for a message; a stopped one may do so for a second more."""
        return any("b" in each["flags"] for each in self._connections(worker))

    def _connections(self, worker: WorkerProcess) -> list[dict[str, Any]]:
        name = f"{self.env['DISTLOCK_TEST_PREFIX']}:broker:{worker.pid}"
        return [each for each in self._redis.client_list() if each["name"] == name]

    def log(self) -> str:
        return "\n".join(
            f"---- {worker.name}, {os.fspath(worker.log_file)}\n{worker.log()}"
            for worker in self._dead + self.workers
        )

    def close(self) -> None:
        stop_all(self.workers, warm=5.0)
        self._redis.close()

    # Locks

    def lock(self, key: str, *, lease: float = 5.0) -> Lock:
        return Lock(key, lease=lease, store=self.store)

    def look(self, key: str) -> KeyState:
        return self.store.inspect(key)

    def wait_queued(self, key: str, count: int) -> None:
        wait_until(
            lambda: self.look(key).waiting == count, what=f"{count} to wait for {key}", timeout=60.0
        )

    def begun(self, key: str) -> list[dict[str, Any]]:
        """The beginnings of the tasks on *key*, in order."""
        return [note for note in self.journal.read(key) if note["what"] == "begin"]

    def wait_begun(self, key: str, count: int = 1, timeout: float = 60.0) -> list[dict[str, Any]]:
        def enough() -> bool:
            return len(self.begun(key)) >= count

        wait_until(enough, timeout=timeout, what=f"{count} beginnings on {key}")
        return self.begun(key)

    def channels(self) -> int:
        """How many workers take woken tasks."""
        return len(
            self._redis.pubsub_channels(f"{self.env['DISTLOCK_TEST_PREFIX']}:lock:channel:*")
        )

    def left(self, key: str) -> dict[str, Any]:
        """What broker and lock store have yet to do, but for other keys' parked tasks."""
        prefix = self.env["DISTLOCK_TEST_PREFIX"]
        records = f"{prefix}:lock:{{{key}}}"
        with self._redis.pipeline() as pipeline:
            pipeline.llen(f"{prefix}:broker:celery")
            pipeline.hlen(f"{prefix}:broker:unacked")
            pipeline.hgetall(f"{records}:lock")
            pipeline.zrange(f"{records}:queue", 0, -1)
            pipeline.hkeys(f"{records}:tasks")
            pipeline.zrange(f"{records}:woken", 0, -1, withscores=True)
            names = ("messages", "unacked", "lock", "queue", "tasks", "woken")
            found = dict(zip(names, pipeline.execute(), strict=True))
        return {name: what for name, what in found.items() if what}

    def let_pass(self, key: str, seconds: float) -> None:
        """Make *seconds* pass for the tasks that were woken for *key*."""
        woken = f"{self.env['DISTLOCK_TEST_PREFIX']}:lock:{{{key}}}:woken"
        for run in self._redis.zrange(woken, 0, -1):
            self._redis.zincrby(woken, -1000 * seconds, run)

    # Points

    def arm(self, points: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """
        Count crossings from 0; a process that makes one of *points* gets the signal there and then.

        A point is named as in ``child:park:after:2``; several are separated by commas.
        """
        stem = f"{self.env['DISTLOCK_TEST_PREFIX']}:points"
        with self._redis.pipeline() as pipeline:
            pipeline.delete(f"{stem}:counts")
            pipeline.mset({f"{stem}:armed": points, f"{stem}:signal": int(signum)})
            pipeline.execute()

    def crossings(self) -> dict[str, int]:
        """How often each point has been crossed since `arm`."""
        stem = f"{self.env['DISTLOCK_TEST_PREFIX']}:points"
        return {point: int(n) for point, n in self._redis.hgetall(f"{stem}:counts").items()}

    def killed_at_a_point(self) -> list[int]:
        """The pools' processes that got a signal at a point."""
        hits = [each for each in self.hits() if each["point"].startswith("child:")]
        return [each["victims"][0] for each in hits]

    def hits(self) -> list[dict[str, Any]]:
        return self.journal.read("hits")


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, redis_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """
    Two workers of two processes each, for the tests of a module.

    A module says by `OPTIONS` how the app is made, and by `WORKERS` how many there are.
    """
    yield from make_scene(
        redis_server.url,
        tmp_path_factory.mktemp("workers"),
        getattr(request.module, "OPTIONS", {}),
        getattr(request.module, "WORKERS", 2),
    )


def make_scene(url: str, folder: Path, options: dict[str, Any], workers: int) -> Iterator[Scene]:
    prefix = servers.new_prefix()
    env = {
        "DISTLOCK_TEST_FAILING": json.dumps(options),
        **servers.environment(url, prefix),
    }
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in env.items():
            patch.setenv(variable, value)
        patch.setenv("DISTLOCK_TEST_ROLE", "test")
        sys.modules.pop(APP, None)
        undo = _wrapped()
        tasks = importlib.import_module(APP)
    for owner, name, original in undo:
        setattr(owner, name, original)  # this process is not to count
    scene = Scene(tasks, env, folder)
    try:
        for _ in range(workers):
            scene.start(wait=False)
        for worker in scene.workers:
            worker.wait_ready()
        yield scene
    finally:
        scene.close()
        tasks.journal.close()
        tasks.app.backend.result_consumer.cancel_for = lambda task_id: None
        tasks.app.backend.client.close()
        tasks.app.close()
        sys.modules.pop(APP, None)
        servers.delete_keys(url, prefix)


def _wrapped() -> list[tuple[Any, str, Any]]:
    """What `tests.apps.failing` puts something else in place of, and what it is now."""
    from celery.backends.base import Backend
    from celery.worker.request import Request
    from kombu.message import Message
    from kombu.transport.redis import QoS

    from celery_distlock.runtime import app, requeueing, store_producer
    from celery_distlock.stores.redis import connections
    from celery_distlock.worker import delivery

    places = [
        (connections.ConnectionPool, "exchange"),
        (app, "publish"),
        (requeueing, "publish"),
        (store_producer.StoreProducer, "_publish"),
        (delivery.DeliveryStep, "_take"),
        (Message, "ack"),
        (QoS, "append"),
        (Request, "acknowledge"),
        (Request, "reject"),
        (Backend, "store_result"),
    ]
    return [(owner, name, getattr(owner, name)) for owner, name in places]


@pytest.fixture(autouse=True)
def _show_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a test that fails, show what its workers logged."""
    scene = next((request.getfixturevalue(n) for n in SCENES if n in request.fixturenames), None)
    before = scene.log() if scene else ""
    yield
    if scene:
        print(scene.log().removeprefix(before))  # noqa: T201


@pytest.fixture(autouse=True)
def _whole_pools(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no pool behind with a process that is dying, or dead and not noticed yet."""
    yield
    for name in SCENES:
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_whole()


SCENES = ("scene", "by_channel", "by_broker")


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return f"key-{uuid.uuid4().hex[:8]}"
