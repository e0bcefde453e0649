"""A key rests at every store alike: two processes that want it once a period get it once."""

from __future__ import annotations

import itertools
import signal
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from celery_distlock import Key, Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Status
from tests import servers
from tests.integration.lock.processes import Script

if TYPE_CHECKING:
    from celery_distlock.stores import Store

EXAMPLES = Path(__file__).parents[2] / "examples"
BUSY, GRANTED = Status.BUSY, Status.GRANTED

STORES = {
    "redis": ("celery_distlock.stores.redis.store", "RedisStore"),
    "cluster": ("celery_distlock.stores.redis.store", "RedisStore"),
    "redlock": ("celery_distlock.stores.redis.redlock", "RedlockStore"),
    "scripts=off": ("celery_distlock.stores.redis.scriptless", "ScriptlessStore"),
    "zookeeper": ("celery_distlock.stores.zookeeper", "ZooKeeperStore"),
    "sqlite": ("sqlite_store", "SQLiteStore"),
}
OPEN = """
from importlib import import_module
from celery_distlock import Key
sys.path.append(sys.argv[6])
store = getattr(import_module(sys.argv[3]), sys.argv[4])(sys.argv[5], sys.argv[2])
"""
TRIES = """
report(ready=True)
lock = Lock(Key("k", min_hold=float(sys.argv[7])), lease=10.0, store=store)
while ask() == "go":
    asked_at = time.time()
    got = lock.acquire(blocking=False)
    granted_at = time.time()
    if got:
        lock.release()
    report(got=got, asked_at=asked_at, granted_at=granted_at)
"""


class Place:
    """Where a store's locks are, for this process and for others."""

    def __init__(self, name: str, url: str) -> None:
        self.module, self.name = STORES[name]
        self.url, self.prefix = url, servers.new_prefix()

    def open(self) -> Store:
        from importlib import import_module

        made: Store = getattr(import_module(self.module), self.name)(self.url, self.prefix)
        return made

    def script(self, source: str, *arguments: str) -> Script:
        return Script(
            OPEN + source,
            "memory://",
            self.prefix,
            self.module,
            self.name,
            self.url,
            str(EXAMPLES),
            *arguments,
        )


@pytest.fixture(
    params=[
        pytest.param("scripts=off", marks=servers.needs("SET with IFEQ")),
        *(name for name in STORES if name != "scripts=off"),
    ]
)
def place(request, tmp_path, monkeypatch, patience):
    monkeypatch.syspath_prepend(EXAMPLES)
    given = request.getfixturevalue
    urls = {
        "redis": lambda: given("redis_server").url,
        "cluster": lambda: given("shared_cluster").url,
        "redlock": lambda: given("shared_masters").url,
        "scripts=off": lambda: f"{given('redis_server').url}?scripts=off",
        "zookeeper": lambda: f"{given('shared_server').url}/rests?session=30",
        "sqlite": lambda: f"sqlite://{tmp_path}/locks",
    }
    return Place(request.param, urls[request.param]())


@pytest.fixture
def store(place):
    with closing(place.open()) as opened:
        yield opened


@pytest.fixture
def two(place):
    """Two processes that try to have the key, once each time on request."""

    with ExitStack() as running:

        def start(min_hold: float) -> list[Script]:
            both = [place.script(TRIES, str(min_hold)) for _ in range(2)]
            for each in both:
                running.enter_context(each)
                assert each.received() == {"ready": True}
            return both

        yield start


def test_of_two_processes_one_has_the_key_once_in_a_period(two, store):
    both = two(600.0)
    for _ in range(3):
        for process in both:  # both at the same time
            process.say()
        facts = [process.received() for process in both]
        if any(each["got"] for each in facts):
            break
    tries = list(facts)
    for process in both * 3:
        process.say()
        tries.append(process.received())

    assert [each["got"] for each in tries].count(True) == 1
    state = store.inspect("k")
    assert state.owner.startswith("parked:resting:")
    assert 0.0 < state.remaining <= 600.0


def test_in_each_period_one_of_them_has_it(two):
    both, grants = two(0.8), []
    for process in itertools.cycle(both):
        process.say()
        facts = process.received()
        if facts["got"]:
            grants.append(facts)
        if len(grants) == 3:
            break

    gaps = [
        after["granted_at"] - before["asked_at"] for before, after in itertools.pairwise(grants)
    ]
    assert min(gaps) > 0.75  # clocks may differ a little


def test_a_key_rests_on_though_its_process_is_killed(two, store):
    one, other = two(600.0)
    one.say()
    assert one.received()["got"]

    one.signal(signal.SIGKILL)
    one.ended()

    other.say()
    assert not other.received()["got"]
    assert store.acquire(AcquireRequest("k", "o", 10.0)).status is BUSY


def test_a_waiter_for_a_resting_key_has_it_when_it_has_rested(store):
    with Lock(Key("k", min_hold=0.6), lease=10.0, store=store):
        pass
    assert store.inspect("k").owner.startswith("parked:resting:")

    waiting = Lock("k", lease=10.0, store=store)

    assert waiting.acquire(timeout=30.0)
    waiting.release()


def test_a_rest_outlasts_the_lease_that_it_follows(store):
    reply = store.acquire(AcquireRequest("k", "a", 1.0))
    assert reply.status is GRANTED
    released = store.release(ReleaseRequest("k", "a", keep_for=("resting:x", 60.0)))

    assert released.released
    assert store.inspect("k").remaining > 30.0


def test_rests_follow_each_other_and_each_ends_by_itself(store):
    """A release that comes late is not to end another one's rest."""
    for owner in "ab":
        assert store.acquire(AcquireRequest("k", owner, 10.0)).status is GRANTED
        kept = (f"resting:{owner}", 0.3 if owner == "a" else 60.0)
        assert store.release(ReleaseRequest("k", owner, keep_for=kept)).released
        if owner == "a":
            with Lock("k", lease=10.0, store=store, timeout=30.0):
                pass

    assert not store.release(ReleaseRequest("k", "a", keep_for=("resting:a", 0.1))).released
    assert store.inspect("k").owner == "parked:resting:b"
    assert store.acquire(AcquireRequest("k", "c", 10.0)).status is BUSY


def test_a_rest_is_nobodys_to_claim(store):
    store.acquire(AcquireRequest("k", "a", 10.0, run="run"))
    store.release(ReleaseRequest("k", "a", run="run", keep_for=("resting:x", 60.0)))

    for run in ("run", "another", ""):
        assert store.acquire(AcquireRequest("k", "b", 10.0, run=run)).status is BUSY
