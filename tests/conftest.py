from __future__ import annotations

import importlib
import os
import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from celery import _state

from celery_distlock.errors import ConfigurationError
from celery_distlock.telemetry import observer
from celery_distlock.testing import EmbeddedServer
from tests import servers
from tests.worker.crews import SharedCrews
from tests.workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType


pytest_plugins = ["tests.topologies.fixtures"]
pytest.register_assert_rewrite("tests.contract.parts")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Skip, by name, what needs a store in memory where there is no lupa for this Python."""
    with skipped_without_lupa():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """See `pytest_runtest_setup`."""
    with skipped_without_lupa():
        return (yield)


@contextmanager
def skipped_without_lupa() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        causes = [error, error.__cause__]  # of a thread's, pytest makes a warning
        for cause in causes:
            if isinstance(cause, ConfigurationError) and "celery-distlock[memory]" in str(cause):
                pytest.skip(str(cause))
        raise


@pytest.fixture
def lupa() -> None:
    """For what opens a store in memory in another thread or process; else it is seen by itself."""
    pytest.importorskip("lupa", reason="locks in memory need lupa")


@pytest.fixture(autouse=True)
def apps_of_this_test_alone() -> Iterator[None]:
    """Celery adds a shared task to every app that there is, or is made later; not in tests."""
    declared, others = set(_state._on_app_finalizers), list(_state._get_active_apps())
    for app in others:
        _state._deregister_app(app)
    yield
    for app in others:
        _state._register_app(app)
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers.update(declared)


@pytest.fixture(autouse=True)
def nothing_to_report() -> None:
    """Forgets what locks of other tests would have counted, in the background, in this one."""
    with observer._notifier._rounds:
        observer._seen.clear()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedServer]:
    """The embedded Valkey that all tests share: never stop, pause or flush it."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="session", params=servers.SERVERS)
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A shared server. The test runs once against each there is."""
    if request.param == "given":
        yield servers.GIVEN_URL
    else:
        yield request.getfixturevalue("redis_server").url


@pytest.fixture
def prefix(redis_url: str) -> Iterator[str]:
    """What this test's keys begin with; they are deleted after it."""
    prefix = servers.new_prefix()
    yield prefix
    servers.delete_keys(redis_url, prefix)


@pytest.fixture
def private_server() -> Iterator[Callable[..., EmbeddedServer]]:
    """Starts servers that the test may break; takes the arguments of `EmbeddedServer`."""
    started: list[EmbeddedServer] = []

    def start(**arguments: Any) -> EmbeddedServer:
        server = EmbeddedServer(**arguments)
        started.append(server)
        server.start()
        return server

    yield start
    for server in reversed(started):
        server.close()


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Let threads take turns so often that anything comes between any two instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def celery_env(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What `tests.apps` read, in the environment of this process and of those it starts."""
    env = servers.environment(redis_url, prefix)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.fixture
def load_app(celery_env: dict[str, str]) -> Iterator[Callable[[str], ModuleType]]:
    """
    Imports a module of `tests.apps` again, by its full name, for this test's broker and prefix.

    To give it another environment than `celery_env`, set that before.
    """
    loaded: list[ModuleType] = []

    def load(name: str) -> ModuleType:
        sys.modules.pop(name, None)
        module = importlib.import_module(name)
        loaded.append(module)
        return module

    yield load
    for module in reversed(loaded):
        sys.modules.pop(module.__name__, None)
        # Celery 5.5 unsubscribes for ever from a server that is gone, for a result in a traceback.
        module.app.backend.result_consumer.cancel_for = lambda task_id: None
        module.app.backend.client.close()
        module.app.close()


@pytest.fixture(scope="session")
def shared_crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCrews]:
    """Workers that modules share; see `SHARED` in tests/worker/conftest.py."""
    with closing(SharedCrews(tmp_path_factory.mktemp("workers"))) as crews:
        yield crews


@pytest.fixture(scope="module")
def broker_env() -> dict[str, str]:
    """Return the variables that give an app another broker than the Redis of the tests."""
    return {}


class StartWorker(Protocol):
    """The `worker` fixture; arguments as for `WorkerProcess`."""

    def __call__(
        self, app: str = "tests.apps.basic", *, wait: bool = True, **arguments: Any
    ) -> WorkerProcess: ...


@pytest.fixture
def worker(celery_env: dict[str, str], tmp_path: Path) -> Iterator[StartWorker]:
    """
    Starts workers, and stops them after the test; fails if one leaves processes behind.

    With ``wait=False`` it returns before the worker is ready, so that several start side by side.
    """
    started: list[WorkerProcess] = []

    def start(
        app: str = "tests.apps.basic", *, wait: bool = True, **arguments: Any
    ) -> WorkerProcess:
        process = WorkerProcess(app, folder=tmp_path, **arguments)
        started.append(process)
        process.start(wait=wait)
        return process

    yield start
    errors = []
    for process in reversed(started):
        try:
            process.stop(warm=5.0)
        except AssertionError as error:
            errors.append(error)
        print(f"---- {process.name}, {os.fspath(process.log_file)}", process.log(), sep="\n")  # noqa: T201
    if errors:
        raise ExceptionGroup("workers did not stop as they should", errors)
