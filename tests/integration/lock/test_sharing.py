"""Several `Lock`s of one key at once, exclusive after having shared, and rests."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_distlock import Key, Lock, LockedTask
from celery_distlock.engine import acquisition
from celery_distlock.errors import (
    ConfigurationError,
    LockConflictError,
    LockLostError,
    StoreError,
    StoreUnavailableError,
)
from celery_distlock.stores import ReleaseRequest, Store
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis.scriptless import ScriptlessStore
from celery_distlock.stores.redis.store import RedisStore
from tests import servers
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=["redis", "memory"])
def store(request: pytest.FixtureRequest, redis_url: str, prefix: str) -> Iterator[Store]:
    made = RedisStore(redis_url, prefix) if request.param == "redis" else None
    with closing(made or MemoryStore("memory://", prefix)) as store:
        yield store


@pytest.fixture
def new_lock(store) -> Callable[..., Lock]:
    return lambda key="k", **options: Lock(key, store=store, **options)


class Other(threading.Thread):
    """Another thread that takes a lock, and keeps it until it is asked to let go."""

    def __init__(self, lock: Lock, *, upgrades: bool = False) -> None:
        super().__init__(daemon=True)
        self._lock = lock
        self._upgrades = upgrades
        self.has, self.may_go = threading.Event(), threading.Event()
        self.lease: Any = None
        self.error: BaseException | None = None
        self.tokens: list[int] = []

    def run(self) -> None:
        try:
            with self._lock as self.lease:
                self.tokens.append(self.lease.token)
                self.has.set()
                if self._upgrades:
                    self.lease.upgrade(timeout=30)
                    self.tokens.append(self.lease.token)
                self.may_go.wait(30)
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def leave(self) -> None:
        self.may_go.set()
        self.join(30)
        assert not self.is_alive()


@contextmanager
def another(lock: Lock, **how: bool) -> Iterator[Other]:
    """Another thread has *lock* in this block."""
    thread = Other(lock, **how)
    thread.start()
    assert thread.has.wait(30)
    try:
        yield thread
    finally:
        thread.leave()


def lose(lock: Lock, store: Store) -> None:
    """Release what this thread has of *lock* behind its back."""
    (hold,) = lock.lease._holds
    store.release(ReleaseRequest("k", hold.owner))


def is_free(store: Store) -> bool:
    state = store.inspect("k")
    return not (state.token or state.waiting or state.used)


# Shared


def test_as_many_have_it_as_there_are_units(new_lock, store):
    three = {"capacity": 3}
    with ExitStack() as others:
        both = [others.enter_context(another(new_lock(**three))) for _ in range(2)]
        with new_lock(**three) as lease:
            leases = [lease, *(each.lease for each in both)]
            assert {each.slot for each in leases} == {0, 1, 2}
            assert len({each.token for each in leases}) == 1
            assert [each.units for each in leases] == [1, 1, 1]
            assert all(each.shared for each in leases)
            thread = Other(new_lock(timeout=0.1, **three))
            thread.start()
            thread.join(30)
            assert isinstance(thread.error, LockConflictError)
    assert is_free(store)


def test_a_key_object_says_the_same(new_lock):
    with another(new_lock(Key("k", capacity=3, weight=2))) as other:
        assert other.lease.units == 2
        assert other.lease.slot is None
        assert not new_lock(Key("k", capacity=3, weight=2)).acquire(blocking=False)
        with new_lock(capacity=3) as lease:
            assert lease.held


def test_more_than_the_capacity_is_all_of_it(new_lock):
    with new_lock(capacity=3, weight=7) as lease:
        assert lease.units == 3
        assert not new_lock_elsewhere(new_lock(capacity=3))


def test_an_exclusive_holder_has_no_others(new_lock):
    with new_lock() as lease:
        assert (lease.shared, lease.units, lease.slot) == (False, 1, None)
        thread = Other(new_lock(shared=True, timeout=0.05))
        thread.start()
        thread.join(30)
    assert isinstance(thread.error, LockConflictError)


def test_readers_do_not_pass_a_writer_that_waits(new_lock, store):
    with another(new_lock(shared=True)):
        writer = Other(new_lock())
        writer.start()
        wait_until(lambda: store.inspect("k").waiting == 1, what="the writer to wait")
        assert not new_lock(shared=True).acquire(blocking=False)
    assert writer.has.wait(30)
    writer.leave()


def test_a_holder_that_leaves_admits_as_many_as_fit(new_lock, store):
    readers = [Other(new_lock(shared=True)) for _ in range(10)]
    with another(new_lock()):
        for thread in readers:
            thread.start()
        wait_until(lambda: store.inspect("k").waiting == 10, what="ten to wait")
    for thread in readers:
        assert thread.has.wait(10)
    assert store.inspect("k").used == 10
    for thread in readers:
        thread.leave()
    assert is_free(store)


def test_a_re_entry_takes_no_further_units(new_lock, store):
    with new_lock(capacity=3, weight=2) as lease:
        with new_lock(capacity=3, weight=3) as again, new_lock(shared=True):
            assert again.token == lease.token
            assert store.inspect("k").used == 2
        assert lease.held
    assert is_free(store)


def test_a_reader_that_reads_again_behind_a_writer_does_not_wait(new_lock, store):
    writer = Other(new_lock())
    with new_lock(shared=True):
        writer.start()
        wait_until(lambda: store.inspect("k").waiting == 1, what="the writer to wait")
        with new_lock(shared=True, timeout=0.0) as again:
            assert again.held
    assert writer.has.wait(30)
    writer.leave()


def test_one_that_is_lost_does_not_take_the_others_along(new_lock, store):
    with another(new_lock(capacity=2, lease=1.0)) as other:
        lock = new_lock(capacity=2, lease=1.0)
        lock.acquire()
        lose(lock, store)
        wait_until(lambda: not lock.lease.held, what="the loss to be noticed")
        assert other.lease.held
        with pytest.raises(LockLostError):
            lock.release()
    assert other.error is None
    assert is_free(store)


# Alone after having shared


def test_the_only_one_that_shares_is_alone_at_once(new_lock, store):
    with new_lock(shared=True) as lease:
        before = lease.token
        lease.upgrade(timeout=0)
        assert not lease.shared
        assert lease.token > before
        assert lease.token == store.inspect("k").token
        assert not new_lock_elsewhere(new_lock(shared=True))
        alone = lease.token
        lease.downgrade()
        assert lease.shared
        assert lease.token > alone
        assert new_lock_elsewhere(new_lock(shared=True))
    assert is_free(store)


def new_lock_elsewhere(lock: Lock) -> bool:
    """Whether another thread gets *lock* at once."""
    found: list[bool] = []

    def run() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return found[0]


def test_an_upgrade_waits_for_the_others_and_no_request_is_granted_until_then(new_lock, store):
    with another(new_lock(shared=True)) as other, new_lock(shared=True) as lease:
        upgraded = threading.Event()

        def upgrade() -> None:
            wait_until(lambda: not new_lock_elsewhere(new_lock(shared=True)), what="a closed door")
            assert not upgraded.is_set()
            other.may_go.set()

        thread = threading.Thread(target=upgrade)
        thread.start()
        lease.upgrade(timeout=30)
        upgraded.set()
        thread.join(30)
        assert not lease.shared
        assert not other.lease.held
    assert is_free(store)


def test_an_upgrade_and_a_downgrade_are_reported(new_lock, events):
    with new_lock(shared=True) as lease:
        lease.upgrade(timeout=5)
        lease.downgrade()

    reported = [(name, facts.get("units"), facts.get("capacity")) for name, facts in events]
    assert reported == [
        ("lock_acquired", 1, 0),
        ("lock_changed", 1, 1),
        ("lock_changed", 1, 0),
        ("lock_released", None, None),
    ]


def test_an_upgrade_goes_before_the_queue(new_lock, store):
    with another(new_lock(shared=True)) as other, new_lock(shared=True) as lease:
        writer = Other(new_lock())
        writer.start()
        wait_until(lambda: store.inspect("k").waiting == 1, what="the writer to wait")
        threading.Timer(0.2, other.may_go.set).start()
        lease.upgrade(timeout=30)
        assert not writer.has.is_set()
    assert writer.has.wait(30)
    writer.leave()
    assert is_free(store)


def test_an_upgrade_that_takes_too_long_leaves_the_share(new_lock, store):
    with another(new_lock(shared=True)), new_lock(shared=True) as lease:
        token = lease.token
        begin = time.monotonic()
        with pytest.raises(LockConflictError):
            lease.upgrade(timeout=0.3)
        assert 0.25 < time.monotonic() - begin < 5
        assert lease.held
        assert lease.shared
        assert lease.token == token
        assert new_lock_elsewhere(new_lock(shared=True))  # the door is open again
    assert is_free(store)


def test_of_two_upgrades_the_second_is_refused_at_once(new_lock, store):
    with another(new_lock(shared=True), upgrades=False), new_lock(shared=True) as lease:
        first = Other(new_lock(shared=True), upgrades=True)
        first.start()
        assert first.has.wait(30)
        wait_until(lambda: not new_lock_elsewhere(new_lock(shared=True)), what="a closed door")
        begin = time.monotonic()
        with pytest.raises(LockConflictError) as caught:
            lease.upgrade()
        assert time.monotonic() - begin < 5
        assert "wait for each other" in str(caught.value.__notes__)
        assert lease.held
        assert lease.shared
        with pytest.raises(LockConflictError):
            new_lock().acquire()  # which would wait for ever
        assert not new_lock().acquire(timeout=5)
        assert lease.held
    wait_until(lambda: len(first.tokens) == 2, what="the first to be alone")
    assert first.tokens[0] < first.tokens[1]
    first.leave()
    assert first.error is None
    assert is_free(store)


def test_a_lock_that_is_alone_inside_one_that_shares_upgrades_it_for_its_block(new_lock, store):
    with new_lock(shared=True) as lease:
        tokens = [lease.token]
        with new_lock() as inner:
            tokens.append(inner.token)
            assert not lease.shared
            with new_lock():
                assert not new_lock_elsewhere(new_lock(shared=True))
            assert not lease.shared
        assert lease.shared
        tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
        assert new_lock_elsewhere(new_lock(shared=True))
    assert is_free(store)


def test_one_that_is_alone_stays_so_though_the_one_that_shares_is_released_first(new_lock, store):
    shares, alone = new_lock(shared=True), new_lock()
    shares.acquire()
    alone.acquire()

    shares.release()

    assert not alone.lease.shared
    assert not new_lock_elsewhere(new_lock(shared=True))
    alone.release()
    assert is_free(store)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_lock_inside_one_that_was_alone_and_shares_now_is_alone_for_its_block(
    new_lock, store, is_same
):
    outer = new_lock()
    inner = outer if is_same else new_lock()
    with outer as lease:
        lease.downgrade()
        for _ in range(2):
            with inner:
                assert not lease.shared
                assert not new_lock_elsewhere(new_lock(shared=True))
            assert lease.shared
            assert new_lock_elsewhere(new_lock(shared=True))
        lease.upgrade()
        with inner:
            assert not lease.shared
        assert not lease.shared
    assert is_free(store)


def test_one_that_is_alone_stays_so_though_one_that_shares_now_is_released_first(new_lock, store):
    outer, inner = new_lock(), new_lock()
    outer.acquire()
    inner.acquire()
    outer.lease.downgrade()
    inner.release()
    assert outer.lease.shared
    inner.acquire()

    outer.release()

    assert not inner.lease.shared
    inner.release()
    assert is_free(store)


def test_one_that_cannot_be_alone_inside_a_share_leaves_that_as_it_was(new_lock, store):
    with another(new_lock(shared=True)), new_lock(shared=True) as lease:
        with pytest.raises(LockConflictError), new_lock(timeout=0.05):
            pytest.fail("it has it alone")
        assert not new_lock().acquire(blocking=False)
        assert lease.held
        (hold,) = lease._holds
        assert hold.depth == 1
    assert is_free(store)


def test_what_an_upgrade_lets_in_when_it_ends_is_called(new_lock, store):
    reader = Other(new_lock(shared=True))
    with new_lock(shared=True), new_lock():
        reader.start()
        wait_until(lambda: store.inspect("k").waiting == 1, what="the reader to wait")
        with pytest.raises(AssertionError, match="waited"):
            wait_until(reader.has.is_set, timeout=0.1)
        # At the end of the inner block
    assert reader.has.wait(30)
    reader.leave()


def test_a_time_limit_in_an_upgrade_leaves_the_door_open(new_lock, store, monkeypatch):
    class TimeLimitError(BaseException):
        pass

    with another(new_lock(shared=True)), new_lock(shared=True) as lease:

        def interrupt(*_: Any) -> None:
            raise TimeLimitError

        with monkeypatch.context() as patch:
            patch.setattr(type(store.inbox("k", "x")), "wait", interrupt)
            with pytest.raises(TimeLimitError):
                lease.upgrade()
        wait_until(lambda: new_lock_elsewhere(new_lock(shared=True)), what="an open door")
        assert lease.held
        assert lease.shared
    assert is_free(store)


def test_an_upgrade_of_a_lost_lock_says_that_it_is_lost(new_lock, store):
    lock = new_lock(shared=True)
    lock.acquire()
    lose(lock, store)
    with pytest.raises(LockLostError):
        lock.lease.upgrade()
    with pytest.raises(LockLostError):
        lock.release()


@pytest.mark.parametrize("wrong", [-1, "1", True, float("nan")])
def test_a_wrong_timeout_is_refused(new_lock, wrong):
    with new_lock(shared=True) as lease, pytest.raises(ValueError, match="timeout"):
        lease.upgrade(wrong)


# Rests


def test_a_key_stays_taken_for_its_min_hold(new_lock, store):
    begin = time.monotonic()
    with new_lock(Key("k", min_hold=0.6)):
        pass
    assert store.inspect("k").owner.startswith("parked:resting:")
    assert not new_lock().acquire(blocking=False)

    with new_lock():
        assert 0.6 <= time.monotonic() - begin < 10


def test_a_min_hold_that_is_over_costs_nothing(new_lock, store):
    with new_lock(Key("k", min_hold=0.05)):
        time.sleep(0.06)
    assert is_free(store)


def test_a_key_cools_down_after_a_block_without_an_error(new_lock, store):
    with new_lock(Key("k", cooldown=0.4)):
        pass
    assert store.inspect("k").owner.startswith("parked:resting:")
    begin = time.monotonic()
    with suppress(KeyError), new_lock(Key("k", cooldown=60)):
        assert time.monotonic() - begin > 0.3
        raise KeyError
    assert is_free(store)


def test_one_of_several_rests_and_the_others_go_on(new_lock, store):
    with another(new_lock(capacity=2)) as other:
        with new_lock(Key("k", capacity=2, min_hold=60)):
            pass
        assert store.inspect("k").used == 2
        assert not new_lock_elsewhere(new_lock(capacity=2))
        assert new_lock_elsewhere(new_lock(capacity=3))
        assert other.lease.held


def test_only_the_outermost_lock_rests(new_lock, store):
    with new_lock(), new_lock(Key("k", min_hold=60, cooldown=60)):
        pass
    assert is_free(store)


def test_the_whole_key_cools_down_while_it_is_held_and_after(new_lock, store):
    with another(new_lock(capacity=3)) as other, new_lock(capacity=3) as lease:
        lease.cool_down(0.8)
        begin = time.monotonic()
        assert store.inspect("k").rest > 0
        assert not new_lock_elsewhere(new_lock(capacity=3))
        assert other.lease.held
        other.leave()
    with new_lock(capacity=3):
        assert time.monotonic() - begin > 0.7


def test_a_key_that_is_held_alone_cools_down_too(new_lock, store):
    with new_lock() as lease:
        lease.cool_down(0.5)
        begin = time.monotonic()
        assert lease.held
    assert not new_lock().acquire(blocking=False)
    with new_lock():
        assert time.monotonic() - begin > 0.4
    assert is_free(store)


@pytest.mark.parametrize("wrong", [0, -1, "1", True, float("nan"), 1e9])
def test_a_wrong_rest_is_refused(new_lock, wrong):
    with new_lock() as lease, pytest.raises(ValueError, match="cool_down"):
        lease.cool_down(wrong)


def test_a_rest_is_kept_though_the_store_is_unreachable_when_the_key_is_given_up(
    new_lock, store, monkeypatch
):
    asked: list[Any] = []
    real = store.release

    def fail_once(request: ReleaseRequest) -> Any:
        asked.append(request)
        if len(asked) == 1:
            raise StoreUnavailableError("away")
        return real(request)

    monkeypatch.setattr(store, "release", fail_once)
    with new_lock(Key("k", min_hold=60)):
        pass

    wait_until(lambda: len(asked) > 1, what="a second release")
    wait_until(
        lambda: store.inspect("k").owner.startswith("parked:resting:"), what="the key to rest"
    )
    assert store.inspect("k").remaining > 50


# What a store cannot


@pytest.fixture
def plain_store(redis_url, prefix):
    with closing(ScriptlessStore(redis_url, prefix)) as store:
        yield store


@pytest.mark.parametrize("terms", [{"capacity": 2}, {"shared": True}, {"capacity": 2, "weight": 2}])
def test_a_store_that_cannot_share_is_named_when_the_lock_is_used(plain_store, terms):
    lock = Lock("k", store=plain_store, **terms)

    with pytest.raises(
        ConfigurationError, match=r"needs a store that can (let several|keep tasks)"
    ) as caught:
        lock.acquire()

    assert plain_store.address in str(caught.value)
    assert not plain_store.inspect("k").token


def test_a_key_that_a_callable_returns_is_refused_by_name_when_it_is_called(redis_url, prefix):
    with Celery("scriptless", broker="memory://", set_as_current=False) as app:
        app.conf.update(distlock_url=f"{redis_url}?scripts=off", distlock_prefix=prefix)

        @app.task(base=LockedTask, name="read", lock_key=lambda: Key("k", shared=True))
        def read():
            pytest.fail("it must not run")

        with pytest.raises(ConfigurationError, match=r"task read: Key\('k', shared=True\) needs"):
            read()


def test_a_key_cools_down_in_a_store_that_does_not_count(plain_store):
    servers.skip_without("SET with IFEQ")
    with Lock("k", store=plain_store) as lease:
        lease.cool_down(60)
        assert lease.held
        with pytest.raises(StoreError, match="count its units"):
            lease.downgrade()
    assert plain_store.inspect("k").owner.startswith("parked:resting:")


# Arguments


@pytest.mark.parametrize("terms", [{"capacity": 2}, {"weight": 2}, {"shared": True}])
def test_a_key_object_and_arguments_are_not_both_given(terms):
    with pytest.raises(ConfigurationError, match="go with a text"):
        Lock(Key("k", capacity=3), store="memory://", **terms)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"capacity": 0}, "capacity is 1 or more"),
        ({"capacity": 2, "shared": True}, "give one of them"),
        ({"weight": 2}, "needs a capacity"),
        ({"shared": 1}, "True or False"),
    ],
)
def test_wrong_terms_are_refused_when_the_lock_is_made(terms, words):
    with pytest.raises(ConfigurationError, match=words):
        Lock("k", store="memory://", **terms)


def test_a_wrong_key_is_refused():
    with pytest.raises(ConfigurationError, match="or a Key"):
        Lock(7, store="memory://")


def test_the_holds_of_this_thread_are_gone(new_lock):
    before = dict(acquisition.held_here())
    with new_lock(shared=True), new_lock():
        assert acquisition.held_here() != before
    assert acquisition.held_here() == before
