"""A locked app with two prefork workers, shared by the tests of a module."""

from __future__ import annotations

import importlib
import os
import sys
import uuid
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis
from celery import signals as celery_signals
from celery.utils.dispatch import Signal

from celery_distlock import Lock, signals
from celery_distlock.runtime.app import Runtime
from tests import parked_runs, servers
from tests.waiting import wait_until
from tests.worker.crews import Crew, SharedCrews
from tests.workers import WorkerProcess, stop_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

    from celery import Celery

    from celery_distlock.stores import Store
    from celery_distlock.stores.values import KeyState
    from tests.apps.journal import Journal

TWO_PREFORK_WORKERS: list[dict[str, Any]] = [{"concurrency": 2}, {"concurrency": 2}]


class Locks:
    """The locks of one app, as this process sees them."""

    def __init__(self, app: Celery) -> None:
        self.app = app

    @property
    def store(self) -> Store:
        return Runtime.of(self.app).store

    def lock(self, key: str, *, lease: float = 30.0) -> Lock:
        return Lock(key, lease=lease, store=self.store)

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Hold *key* in this process, as web code might, and let go at the end."""
        lock = self.lock(key)
        assert lock.acquire(timeout=30)
        try:
            yield
        finally:
            lock.release()

    def look(self, key: str) -> KeyState:
        return self.store.inspect(key)

    def wait_free(self, key: str, timeout: float = 30.0) -> None:
        wait_until(lambda: not self.look(key).token, timeout=timeout, what=f"{key} to be free")

    def wait_held(self, key: str, timeout: float = 30.0) -> KeyState:
        wait_until(lambda: self.look(key).token, timeout=timeout, what=f"{key} to be held")
        return self.look(key)

    def wait_queued(self, key: str, count: int = 1, timeout: float = 30.0) -> None:
        wait_until(
            lambda: self.look(key).waiting == count,
            timeout=timeout,
            what=f"{count} to wait for {key}",
        )

    def record(self, key: str, name: str = "lock") -> str:
        """Return the name of a Redis record of *key*: the hash that is the lock, or another one."""
        return f"{Runtime.of(self.app).settings.prefix}:{{{key}}}:{name}"

    def forget(self, key: str) -> None:
        """Delete the lock behind its holder's back."""
        with redis.Redis.from_url(self.app.conf.result_backend) as client:
            assert client.delete(self.record(key)) == 1

    def wait_settled(self, key: str, task_id: str) -> None:
        """Wait until the store knows that all is done about *task_id*."""
        record = self.record(key, "done")
        with redis.Redis.from_url(self.app.conf.result_backend) as client:
            wait_until(
                lambda: client.zscore(record, f"{task_id}:0:0:0"), what=f"the end of {task_id}"
            )

    def forget_channel(self, key: str) -> None:
        """Make what is parked come by the broker, as if no worker could take it by its channel."""
        tasks = self.record(key, "tasks")
        with redis.Redis.from_url(self.app.conf.result_backend) as client:
            for run, of in parked_runs.records(client, tasks).items():
                of.pop("q", None)
                parked_runs.write(client, tasks, run, {**of, "h": "", "d": 1000})


class Site(Locks):
    """
    An app that is loaded here, and the workers that run it.

    Attributes:
        tasks: The module with the app.
        workers: Empty for a site without workers.
    """

    def __init__(self, tasks: ModuleType, env: dict[str, str]) -> None:
        super().__init__(tasks.app)
        self.tasks: Any = tasks
        self.env = env
        self.workers: list[WorkerProcess] = []

    @property
    def journal(self) -> Journal:
        return self.tasks.journal

    def unread(self) -> int:
        """How many messages are in the broker's queue."""
        with redis.Redis.from_url(self.env["DISTLOCK_TEST_BROKER"]) as client:
            return client.llen(f"{self.env['DISTLOCK_TEST_PREFIX']}:broker:celery")

    def log(self) -> str:
        return "".join(worker.log() for worker in self.workers)


def disconnect(module: str) -> None:
    """Take away the receivers of signals that *module* has connected in this process."""
    every = [*vars(celery_signals).values(), *vars(signals).values()]
    for signal in (each for each in every if isinstance(each, Signal)):
        for _, receiver in list(signal.receivers or ()):
            function = receiver() if isinstance(receiver, weakref.ref) else receiver
            if getattr(function, "__module__", "") == module:
                assert signal.disconnect(function)


@contextmanager
def opened(name: str, env: dict[str, str]) -> Iterator[Site]:
    """As `loaded`; deletes the prefix's keys at the end."""
    with loaded(name, env) as site:
        yield site
    servers.delete_keys(env["DISTLOCK_TEST_BROKER"], env["DISTLOCK_TEST_PREFIX"])


@contextmanager
def loaded(name: str, env: dict[str, str]) -> Iterator[Site]:
    """The app module *name*, imported again for the broker and prefix that *env* names."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in env.items():
            patch.setenv(variable, value)
        sys.modules.pop(name, None)
        tasks = importlib.import_module(name)
    yield Site(tasks, env)
    if hasattr(tasks, "journal"):
        tasks.journal.close()
    # A result that outlives the server (in the traceback of a failed test) would unsubscribe, and
    # Celery 5.5 tries that for ever.
    tasks.app.backend.result_consumer.cancel_for = lambda task_id: None
    tasks.app.backend.client.close()
    tasks.app.close()
    disconnect(name)
    sys.modules.pop(name, None)


@contextmanager
def staffed(site: Site, folder: Path, workers: list[dict[str, Any]]) -> Iterator[Site]:
    """*site* with running workers; each item of *workers* is the arguments of `WorkerProcess`."""
    crew = Crew(site.tasks.__name__, site.env, folder, workers)
    try:
        site.workers = crew.start()
        yield site
    finally:
        crew.workers = site.workers or crew.workers  # a test may have put others in their place
        crew.stop()


@pytest.fixture(scope="module")
def crew(
    request: pytest.FixtureRequest,
    redis_url: str,
    broker_env: dict[str, str],
    shared_crews: SharedCrews,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Crew]:
    """
    The workers that a module wants, not started yet: two prefork workers of two processes each.

    A module that wants others says so by `WORKERS`, a list of arguments of `WorkerProcess`; one
    that wants another app names it by `APP`, and by `ENV` what its environment lacks. `SHARED` is
    true where the workers may be those of other modules: none there stops or reconfigures them.
    """
    module = request.module
    app = getattr(module, "APP", "tests.apps.locked")
    env = {**getattr(module, "ENV", {}), **broker_env}
    workers = getattr(module, "WORKERS", TWO_PREFORK_WORKERS)
    if getattr(module, "SHARED", False):
        yield shared_crews.find(app, env, redis_url, workers)
        return
    env = {**env, **servers.environment(redis_url, servers.new_prefix())}
    crew = Crew(app, env, tmp_path_factory.mktemp("workers"), workers)
    yield crew
    crew.stop()
    servers.delete_keys(redis_url, env["DISTLOCK_TEST_PREFIX"])


@pytest.fixture(scope="module")
def bare_site(crew: Crew) -> Iterator[Site]:
    """The app of `crew` in this process, without workers."""
    with loaded(crew.app, crew.env) as site:
        yield site


@pytest.fixture(scope="module")
def site(bare_site: Site, crew: Crew) -> Site:
    """`bare_site` with the workers of `crew`."""
    bare_site.workers = crew.start()
    return bare_site


@pytest.fixture
def start(bare_site: Site, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """A function that starts a worker of the site; all of them are gone after the test."""
    app, started = bare_site.tasks.__name__, list[WorkerProcess]()

    def begin(**arguments: Any) -> WorkerProcess:
        env = {**bare_site.env, **arguments.pop("env", {})}
        worker = WorkerProcess(app, folder=tmp_path, env=env, **arguments)
        started.append(worker)
        worker.start()
        return worker

    yield begin
    stop_all(started, warm=2.0, cold=5.0)
    bare_site.tasks.app.control.purge()
    for worker in started:
        print(f"---- {worker.name}\n{worker.log()[-3000:]}")  # noqa: T201


@pytest.fixture(autouse=True)
def _show_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a test that fails, show what its module's workers logged."""
    workers: list[WorkerProcess] = []
    if "site" in request.fixturenames:
        workers = request.getfixturevalue("site").workers
    seen = {worker: len(worker.log()) for worker in workers}
    yield
    for worker, length in seen.items():
        print(f"---- {worker.name}, {os.fspath(worker.log_file)}")  # noqa: T201
        print(worker.log()[length:])  # noqa: T201


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return f"key-{uuid.uuid4().hex[:8]}"
