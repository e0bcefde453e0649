"""Requests and answers that are lost on the way, on a real server behind a proxy."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import redis

from celery_distlock import clock
from celery_distlock.engine.hold import believed
from celery_distlock.errors import LockLostError
from celery_distlock.lock import Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest, queue_store
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import (
    Completion,
    Ownership,
    ParkRequest,
    Route,
    Status,
)
from tests.integration.lock.proxy import Proxy
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

executed_or_not = pytest.mark.parametrize("executed", [False, True], ids=["request", "answer"])
once_or_twice = pytest.mark.parametrize("times", [1, 2])

PARK_REQUEST = ParkRequest(b"envelope")
LEASE = 6.0  # seconds: a busy machine can take some of them away


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(redis_url) as made:
        yield made


@pytest.fixture
def store(proxy: Proxy, prefix: str) -> Iterator[RedisStore]:
    """The store behind the proxy."""
    with closing(RedisStore(proxy.url, prefix)) as made:
        yield made


def begin(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call in another thread; return it, and where its result will be."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(call()))
    thread.start()
    return thread, outcome


# Acquire, renew, release


@once_or_twice
@executed_or_not
def test_an_acquisition_is_one_hold(store, redis_store, proxy, executed, times):
    lock = Lock("k", store=store)
    proxy.lose("acquire", executed=executed, times=times)

    assert lock.acquire(blocking=False) is True

    assert proxy.lost
    assert redis_store.inspect("k").token == lock.lease.token
    lock.release()
    assert not redis_store.inspect("k").token


@once_or_twice
@executed_or_not
def test_several_keys_that_are_taken_at_once_are_one_hold_each(
    store, redis_store, proxy, executed, times
):
    proxy.lose("acquire_all", executed=executed, times=times)

    replies = store.acquire_all(["k1", "k2"], ["a", "b"], 60.0)

    assert proxy.lost
    known = [redis_store.inspect(key) for key in ("k1", "k2")]
    assert [state.owner for state in known] == ["a", "b"]
    assert [state.token for state in known] == [reply.token for reply in replies]


@once_or_twice
@executed_or_not
def test_several_keys_that_are_kept_for_a_run_are_taken_at_once(
    store, redis_store, proxy, executed, times
):
    route = Route(("k1", "k2"))
    reply = queue_store.reserve_or_queue(
        redis_store, StandRequest("run", route, 0, ParkRequest(b"envelope"))
    )
    assert reply.status is Status.RESERVED
    proxy.lose("acquire_all", executed=executed, times=times)

    replies = store.acquire_all(["k1", "k2"], ["a", "b"], 60.0, run="run", redelivered=True)

    assert proxy.lost
    known = [redis_store.inspect(key) for key in ("k1", "k2")]
    assert [state.owner for state in known] == ["a", "b"]
    assert [state.token for state in known] == [reply.token for reply in replies]


@once_or_twice
@executed_or_not
def test_a_release_frees_the_key(store, redis_store, proxy, executed, times):
    lock = Lock("k", store=store)
    lock.acquire()
    proxy.lose("release", executed=executed, times=times)

    lock.release()

    assert proxy.lost
    assert not redis_store.inspect("k").token


@once_or_twice
@executed_or_not
def test_a_renewal_is_repeated_in_time(store, proxy, events, executed, times):
    lock = Lock("k", store=store, lease=4.0)
    with lock as lease:
        proxy.lose("renew", executed=executed, times=times)

        wait_until(lambda: events.of("lock_renewed"), what="a renewal")

        assert proxy.lost
        assert lease.held
    assert "lock_lost" not in events.names()


@once_or_twice
@executed_or_not
def test_a_waiter_has_one_place(store, redis_store, proxy, executed, times):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))
    lock = Lock("k", store=store)
    proxy.lose("acquire", executed=executed, times=times)
    thread, outcome = begin(lambda: lock.acquire(timeout=60) and lock.release())
    wait_until(lambda: proxy.lost and redis_store.inspect("k").waiting, what="the waiter")
    assert redis_store.inspect("k").waiting == 1

    redis_store.release(ReleaseRequest("k", "holder"))
    thread.join(60)

    assert outcome == [None]
    after = redis_store.inspect("k")
    assert (after.token, after.waiting) == (0, 0)


@executed_or_not
def test_a_waiter_that_gives_up_leaves_the_queue(store, redis_store, proxy, executed):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))
    proxy.lose("release", executed=executed)

    assert Lock("k", store=store).acquire(timeout=0.05) is False

    assert proxy.lost
    assert redis_store.inspect("k").waiting == 0


def test_a_renewal_that_comes_after_the_release_changes_nothing(store, redis_store, proxy, events):
    lock = Lock("k", store=store, lease=4.0)
    lock.acquire()
    with proxy.holding("renew", executed=False) as renewal:
        renewal.wait()
        lock.release()

        with lock as later:
            renewal.let_go()

            assert redis_store.inspect("k").token == later.token
            known = len(events.of("lock_renewed"))
            wait_until(lambda: len(events.of("lock_renewed")) > known, what="the next renewal")
            assert later.held
            assert {facts["token"] for facts in events.of("lock_renewed")[known:]} == {later.token}
    assert "lock_lost" not in events.names()
    assert not redis_store.inspect("k").token


# Park


@once_or_twice
@executed_or_not
def test_what_is_parked_is_parked_once(store, redis_store, proxy, executed, times):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))
    redis_store.acquire(
        AcquireRequest("k", "first", 60.0, queue=ParkRequest(b"first"), run="first")
    )
    proxy.lose("acquire", executed=executed, times=times)

    reply = store.acquire(AcquireRequest("k", "delivery", 60.0, queue=PARK_REQUEST, run="run"))

    assert proxy.lost
    assert (reply.status, reply.place) == (Status.PARKED, 1)
    assert redis_store.inspect("k").waiting == 2
    served = [
        redis_store.release(ReleaseRequest("k", owner)).wake for owner in ("holder", "parked:first")
    ]
    assert [wake.envelope for wake in served] == [b"first", b"envelope"]
    assert redis_store.release(ReleaseRequest("k", "parked:run")).wake is None


@once_or_twice
@executed_or_not
def test_what_is_parked_at_a_free_key_is_granted_once(store, redis_store, proxy, executed, times):
    proxy.lose("acquire", executed=executed, times=times)

    reply = store.acquire(AcquireRequest("k", "delivery", 60.0, queue=PARK_REQUEST, run="run"))

    assert proxy.lost
    assert reply.status is Status.GRANTED
    known = redis_store.inspect("k")
    assert (known.owner, known.token, known.waiting) == ("delivery", reply.token, 0)
    assert redis_store.release(ReleaseRequest("k", "delivery")).wake is None


def test_what_was_parked_and_has_run_meanwhile_does_not_run_again(store, redis_store, proxy):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))

    def run_elsewhere():
        redis_store.release(ReleaseRequest("k", "holder"))
        redis_store.acquire(AcquireRequest("k", "elsewhere", 60.0, run="run", redelivered=True))
        redis_store.release(
            ReleaseRequest(
                "k", "elsewhere", run="run", completion=Completion.YES_AND_MAY_COME_AGAIN
            )
        )

    proxy.lose("acquire", executed=True, meanwhile=run_elsewhere)

    reply = store.acquire(AcquireRequest("k", "delivery", 60.0, queue=PARK_REQUEST, run="run"))

    assert reply.status is Status.DONE
    after = redis_store.inspect("k")
    assert (after.token, after.waiting) == (0, 0)


def test_a_parked_run_that_has_started_by_then_does_not_run_twice_at_once(
    store, redis_store, proxy
):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))

    def begin_elsewhere():
        redis_store.release(ReleaseRequest("k", "holder"))
        redis_store.acquire(AcquireRequest("k", "elsewhere", 60.0, run="run", redelivered=True))

    proxy.lose("acquire", executed=True, meanwhile=begin_elsewhere)

    reply = store.acquire(AcquireRequest("k", "delivery", 60.0, queue=PARK_REQUEST, run="run"))

    assert reply.status is Status.PARKED
    ended = redis_store.release(
        ReleaseRequest("k", "elsewhere", run="run", completion=Completion.YES_AND_MAY_COME_AGAIN)
    )
    assert ended.wake is None
    assert redis_store.inspect("k").waiting == 0


# Answers that say what to wake


def swept(store: RedisStore) -> bytes:
    """The envelope that a sweep finds to be sent, within seconds."""
    wakes = wait_until(lambda: list(store.parking.sweep(0.02)), what="the sweep to find it")
    (wake,) = wakes
    envelope: bytes = wake.envelope
    return envelope


def test_a_wake_that_is_lost_with_a_releases_answer_is_found_by_the_sweep(
    store, redis_store, proxy
):
    store.acquire(AcquireRequest("k", "holder", 60.0))
    redis_store.acquire(AcquireRequest("k", "delivery", 60.0, queue=PARK_REQUEST, run="run"))
    proxy.lose("release", executed=True)

    released = store.release(ReleaseRequest("k", "holder"))

    assert (released.released, released.wake) == (True, None)
    assert swept(redis_store) == b"envelope"


def test_a_wake_that_is_lost_with_an_acquisitions_answer_is_found_by_the_sweep(
    store, redis_store, proxy, redis_url, prefix
):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))
    redis_store.acquire(AcquireRequest("k", "delivery", 60.0, queue=PARK_REQUEST, run="run"))
    expire(redis_url, prefix)
    proxy.lose("acquire", executed=True)

    reply = store.acquire(AcquireRequest("k", "newcomer", 60.0))

    assert (reply.status, reply.wake) == (Status.BUSY, None)
    assert swept(redis_store) == b"envelope"


def expire(redis_url, prefix):
    with redis.Redis.from_url(redis_url) as client:
        assert client.delete(f"{prefix}:{{k}}:lock") == 1


# A server that holds its clients back, and cuts them off


@pytest.fixture
def admin(server) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def direct(server, admin) -> Iterator[RedisStore]:
    """The store on that server, with its scripts loaded."""
    with closing(RedisStore(server.url, "test")) as made:
        made.acquire(AcquireRequest("warm", "a", 1.0, queue=ParkRequest(b""), run="run"))
        made.renew([Ownership("warm", "a", 1.0)], 5.0)
        made.release(ReleaseRequest("warm", "a", run="run"))
        yield made


def hold_back(admin: redis.Redis) -> None:
    """Keep requests that write, and no others, from being executed until `client_unpause`."""
    admin.client_pause(120_000, all=False)


def held_back(admin: redis.Redis) -> list[str]:
    """The ids of the connections whose requests are held back."""
    return [each["id"] for each in admin.client_list() if "b" in each["flags"]]


def kill_what_is_held_back(admin: redis.Redis) -> None:
    found = wait_until(lambda: held_back(admin), what="a request to be held back")
    for each in found:
        admin.client_kill_filter(_id=each)


@pytest.fixture(params=["held back", "cut off"])
def trouble(request, admin) -> Callable[[Callable[[], Any]], Any]:
    """Calls, and holds back or cuts off at the server what that sends; returns its result."""

    def make(call: Callable[[], Any]) -> Any:
        hold_back(admin)
        thread, outcome = begin(call)
        if request.param == "cut off":
            kill_what_is_held_back(admin)
        wait_until(lambda: held_back(admin), what="a request to be held back")
        admin.client_unpause()
        thread.join(60)
        (result,) = outcome
        return result

    return make


def test_an_acquisition_in_trouble_is_one_hold(direct, trouble):
    lock = Lock("k", store=direct)

    def take():
        taken = lock.acquire()
        assert direct.inspect("k").token == lock.lease.token
        lock.release()
        return taken

    assert trouble(take) is True
    assert not lock.locked()


def test_a_release_in_trouble_frees_the_key(direct, trouble):
    direct.acquire(AcquireRequest("k", "a", 60.0))

    assert trouble(lambda: direct.release(ReleaseRequest("k", "a"))).released is True

    assert not direct.inspect("k").token


def test_what_is_parked_in_trouble_is_parked_once(direct, trouble):
    direct.acquire(AcquireRequest("k", "a", 60.0))

    reply = trouble(
        lambda: direct.acquire(AcquireRequest("k", "b", 60.0, queue=PARK_REQUEST, run="run"))
    )

    assert reply.status is Status.PARKED
    assert direct.inspect("k").waiting == 1
    assert direct.release(ReleaseRequest("k", "a")).wake.envelope == b"envelope"


def test_a_renewal_in_trouble_is_repeated_in_time(direct, trouble, events):
    lock = Lock("k", store=direct, lease=LEASE)
    with lock as lease:
        trouble(lambda: None)
        known = len(events.of("lock_renewed"))

        wait_until(lambda: len(events.of("lock_renewed")) > known, what="a renewal")

        assert lease.held
    assert "lock_lost" not in events.names()


def test_the_time_for_which_an_acquisition_is_held_back_is_taken_off_the_belief(direct, admin):
    lock = Lock("k", store=direct)
    hold_back(admin)

    def take():
        with lock as lease:
            return lease.remaining

    thread, outcome = begin(take)
    wait_until(lambda: held_back(admin), what="the request to be held back")
    since = clock.monotonic()
    wait_until(lambda: clock.monotonic() > since + 0.3, what="a while")
    admin.client_unpause()
    thread.join(60)

    (remaining,) = outcome
    assert remaining < believed(30.0) - 0.3


def test_renewals_that_are_held_back_are_a_loss_within_a_lease(direct, admin, events):
    lock = Lock("k", store=direct, lease=LEASE)
    lock.acquire()
    lease = lock.lease
    (hold,) = lease._holds
    hold_back(admin)
    began = clock.monotonic()

    wait_until(lambda: events.of("lock_lost"), what="the loss", poll=0.005)

    assert hold.valid_until < began + LEASE  # not when we saw it: that may be late
    assert not lease.held
    admin.client_unpause()
    with pytest.raises(LockLostError):
        lock.release()
    with lock as later:
        assert later.token > lease.token


def test_a_waiter_whose_subscription_is_cut_gets_the_key(direct, admin):
    lock = Lock("k", store=direct)
    direct.acquire(AcquireRequest("k", "a", 60.0))
    thread, outcome = begin(lambda: lock.acquire(timeout=90) and lock.release())
    wait_until(lambda: direct.inspect("k").waiting == 1, what="the waiter")

    wait_until(lambda: admin.client_kill_filter(_type="pubsub") == 1, what="the subscription")
    direct.release(ReleaseRequest("k", "a"))
    thread.join(60)

    assert outcome == [None]
    assert direct.inspect("k").waiting == 0


def test_a_run_that_was_woken_before_it_knew_that_it_was_parked_runs_once(
    redis_store, redis_url, prefix
):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))
    wakes = []
    with Proxy(redis_url) as proxy, closing(RedisStore(proxy.url, prefix)) as far:
        proxy.lose(
            "acquire",
            executed=True,
            meanwhile=lambda: wakes.append(redis_store.release(ReleaseRequest("k", "holder")).wake),
        )
        reply = far.acquire(
            AcquireRequest("k", "delivery", 60.0, queue=ParkRequest(b"envelope"), run="run")
        )
        assert reply.status is Status.GRANTED
        far.release(ReleaseRequest("k", "delivery", run="run", completion=Completion.YES))

    (wake,) = wakes  # its message is in flight as well
    again = redis_store.acquire(AcquireRequest("k", "second", 60.0, run=wake.run, redelivered=True))
    assert again.status is Status.DONE


# A line-up is sent again, too, where a script next to it was missing on the server


def wake(store: RedisStore) -> None:
    store.release(ReleaseRequest("k", "holder"))


def wake_without_claim(store: RedisStore) -> None:
    wake(store)
    store.release(ReleaseRequest("k", "parked:run"))  # as if its reservation had lapsed


def wake_and_run(store: RedisStore) -> None:
    wake(store)
    store.acquire(AcquireRequest("k", "elsewhere", 60.0, run="run", redelivered=True))
    store.release(
        ReleaseRequest("k", "elsewhere", run="run", completion=Completion.YES_AND_MAY_COME_AGAIN)
    )


@pytest.mark.parametrize(
    ("meanwhile", "status"),
    [(wake, Status.DONE), (wake_without_claim, Status.PARKED), (wake_and_run, Status.DONE)],
)
def test_a_line_up_that_comes_twice_reports_that_the_run_is_here_or_was(
    redis_store, meanwhile, status
):
    redis_store.acquire(AcquireRequest("k", "holder", 60.0))
    assert redis_store.parking.park_if_held("k", "run", PARK_REQUEST, 10.0).status is Status.PARKED
    meanwhile(redis_store)

    assert redis_store.parking.park_if_held("k", "run", PARK_REQUEST, 10.0).status is status
