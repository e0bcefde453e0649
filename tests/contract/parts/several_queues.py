"""Runs that wait for several keys."""

from collections.abc import Callable

from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import (
    ParkRequest,
    Release,
    Route,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    AGAIN,
    BUSY,
    DONE,
    expire,
    holder,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import PARKED, RESERVED, goes_on, park, stand, swept

__all__ = ["WaitingAtSeveralKeys"]


class WaitingAtSeveralKeys(Given):
    """A run that needs several keys keeps what it has, and waits for the next."""

    def test_it_is_sent_when_it_has_all_its_keys_and_not_before(self, store: QueueStore) -> None:
        first, second = take(store, "k", "a"), take(store, "l", "b")

        assert [reply.status for reply in stand(store, "kl")] == [PARKED]
        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == []
        assert holder(store, "k") == "parked:run"
        (wake,) = goes_on(store, store.release(ReleaseRequest("l", "b")).wake)

        assert wake == WokenTask("k", "run", b"run")
        assert holder(store, "l") == "parked:run"
        assert take(store, "k", "c", run="run", redelivered=True) > first
        assert take(store, "l", "d", run="run", redelivered=True) > second
        for key, owner in (("k", "c"), ("l", "d")):
            assert store.release(
                ReleaseRequest(key, owner, run="run", completion=AGAIN)
            ) == Release(True, None)
            state = store.inspect(key)
            assert (state.waiting, state.oldest, state.woken, state.task) == (0, 0.0, 0, "")

    def test_the_order_of_the_keys_is_the_runs_own(self, store: QueueStore) -> None:
        take(store, "k", "a")
        take(store, "m", "b")
        stand(store, "mkl")

        assert goes_on(store, store.release(ReleaseRequest("m", "b")).wake) == []
        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == [
            WokenTask("m", "run", b"run")
        ]
        assert holder(store, "l") == "parked:run"

    def test_free_keys_are_all_kept_for_it(self, store: QueueStore) -> None:
        replies = stand(store, "kl")

        assert [reply.status for reply in replies] == [RESERVED, RESERVED]
        assert len({reply.arrival for reply in replies}) == 1
        for key in "kl":
            assert holder(store, key) == "parked:run"
            assert store.acquire(AcquireRequest(key, "newcomer", 30.0)).status is BUSY
            take(store, key, f"{key}'s", run="run")

    def test_it_is_dispatched_as_any_other(self, store: QueueStore) -> None:
        sent: list[WokenTask] = []
        store.publishers.known = (sent.append,)
        take(store, "k", "a")
        take(store, "l", "b")
        stand(store, "kl")

        store.dispatch(store.release(ReleaseRequest("l", "b")).wake)
        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: sent, "its way")
        assert sent == [WokenTask("k", "run", b"run")]

    def test_who_has_no_publisher_lets_it_go_on_too(self, store: QueueStore) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        stand(store, "kl")

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: store.inspect("l").waiting, "the next key")
        assert holder(store, "k") == "parked:run"

    def test_it_has_the_same_place_in_all_queues(self, store: QueueStore) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        (reply,) = stand(store, "kl")
        park(store, "l", "later")
        goes_on(store, store.release(ReleaseRequest("k", "a")).wake)

        wake = store.release(ReleaseRequest("l", "b")).wake

        assert wake is not None
        assert wake.run == "run"
        assert stand(store, "kl")[-1].arrival == reply.arrival
        assert [waiter.run for waiter in store.waiters("l")] == ["run", "later"]

    def test_what_is_kept_for_a_later_one_that_still_waits_goes_to_an_earlier_one(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        take(store, "m", "b")
        stand(store, "kl", "first")
        assert [reply.status for reply in stand(store, "lm", "second")] == [RESERVED, PARKED]

        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == [
            WokenTask("k", "first", b"first")
        ]

        assert holder(store, "l") == "parked:first"
        assert goes_on(store, store.release(ReleaseRequest("m", "b")).wake) == []
        take(store, "k", "c", run="first")
        take(store, "l", "d", run="first")
        wake = store.release(ReleaseRequest("l", "d", run="first", completion=AGAIN)).wake
        assert goes_on(store, wake) == [WokenTask("l", "second", b"second")]

    def test_what_is_kept_for_a_later_one_that_has_all_stays_his(self, store: QueueStore) -> None:
        take(store, "k", "a")
        stand(store, "kl", "first")
        take(store, "l", "b")
        stand(store, "lm", "second")
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("l", "second", b"second")
        ]

        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == []

        assert holder(store, "l") == "parked:second"
        assert [waiter.run for waiter in store.waiters("l") if not waiter.woken] == ["first"]

    def test_a_key_that_was_taken_for_it_is_kept(self, store: QueueStore) -> None:
        take(store, "l", "b")
        token = take(store, "k", "a", run="run")
        route = Route(("k", "l"))

        reply = store.parking.stand(StandRequest("k", "run", route, 0, ParkRequest(b"run"), "a"))

        assert reply.status is RESERVED
        assert reply.token > token
        assert not store.release(ReleaseRequest("k", "a")).released
        assert store.parking.stand(StandRequest("l", "run", route, reply.arrival)).status is PARKED
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("k", "run", b"run")
        ]

    def test_a_key_that_was_taken_for_it_goes_to_who_stands_before_it(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a", run="run")
        stand(store, "kl", "first")

        (reply,) = stand(store, "kl", "run", owner="a")

        assert reply.status is PARKED
        assert goes_on(store, reply.wake) == [WokenTask("k", "first", b"first")]

    def test_one_that_comes_again_has_its_old_place(self, store: QueueStore) -> None:
        take(store, "k", "a")
        (before,) = stand(store, "kl")
        (wake,) = goes_on(store, store.release(ReleaseRequest("k", "a")).wake)
        stand(store, "kl", "later")
        take(store, "k", "b", run=wake.run, redelivered=True)

        replies = stand(store, "kl", owner="b")

        assert [reply.arrival for reply in replies] == [before.arrival] * 2
        assert [reply.status for reply in replies] == [RESERVED, RESERVED]

    def test_repeating_changes_nothing(self, store: QueueStore) -> None:
        take(store, "l", "b")

        told = [[reply[:1] + reply[2:5] for reply in stand(store, "kl")] for _ in range(2)]
        store.release(ReleaseRequest("l", "b"))
        departed = [store.parking.depart(key, "run", first=key == "k") for key in "llkk"]

        assert told[0] == told[1]
        assert [each.released for each in departed] == [True] * 4
        assert [each.wake for each in departed[:2]] == [None, None]
        assert departed[2].wake == WokenTask("k", "run", b"run")
        assert (store.inspect("k").waiting, store.inspect("l").waiting) == (0, 0)

    def test_one_that_is_on_its_way_is_left_alone(self, store: QueueStore) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        stand(store, "kl")
        before = store.release(ReleaseRequest("k", "a")).wake
        assert goes_on(store, before) == []
        late = store.release(ReleaseRequest("l", "b")).wake
        assert goes_on(store, late) == [WokenTask("k", "run", b"run")]

        assert goes_on(store, before) == goes_on(store, late) == []

        assert (holder(store, "k"), holder(store, "l")) == ("parked:run", "parked:run")
        take(store, "k", "c", run="run", redelivered=True)
        assert goes_on(store, late) == []
        take(store, "l", "d", run="run", redelivered=True)

    def test_it_does_not_depart_from_what_is_not_kept_for_it(self, store: QueueStore) -> None:
        take(store, "k", "a")
        stand(store, "kl")

        assert not store.parking.depart("k", "run", first=True).released
        assert not store.parking.depart("l", "run", first=False).released
        assert [waiter.run for waiter in store.waiters("k")] == ["run"]

    def test_one_that_has_ended_stands_nowhere(self, store: QueueStore) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert [reply.status for reply in stand(store, "kl")] == [DONE]
        assert not store.inspect("k").token

    def test_one_that_is_cancelled_at_its_first_key_is_soon_gone_everywhere(
        self, store: QueueStore
    ) -> None:
        take(store, "l", "b")
        stand(store, "kl")
        park(store, "l", "next", b"next")

        assert store.parking.cancel("k", "run").released

        assert not store.inspect("k").token
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("l", "next", b"next")
        ]
        assert [at for at, _ in store.parking.find_parked("run")] == []

    def test_where_it_stands_is_known(self, store: QueueStore) -> None:
        take(store, "l", "b")
        stand(store, "kl", "task:0:0:0")

        assert sorted(store.parking.find_parked("task")) == [
            ("k", "task:0:0:0"),
            ("l", "task:0:0:0"),
        ]
        here, there = (
            store.parking.parked("k", "task:0:0:0"),
            store.parking.parked("l", "task:0:0:0"),
        )
        assert here is not None
        assert there is not None
        assert (here.envelope, there.envelope) == (b"task:0:0:0", b"")
        assert here.route == there.route == Route(("k", "l"), "shop.move")
        assert (here.task, there.task) == ("shop.move", "shop.move")
        assert store.inspect("k").task == "shop.move"

    def test_what_lapses_while_it_waits_elsewhere_is_kept_for_it_again(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "l", "b", 60.0)
        stand(store, "kl")
        pass_time(6.0)
        expire(store, "k", "parked:run")

        (wake,) = wait_until(lambda: swept(store), "a sweep")

        assert goes_on(store, wake) == []
        assert holder(store, "k") == "parked:run"
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("k", "run", b"run")
        ]

    def test_one_whose_waker_has_died_goes_on_soon(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        stand(store, "kl")
        store.release(ReleaseRequest("k", "a"))
        pass_time(2.5)
        expire(store, "k", "parked:run")

        (wake,) = wait_until(lambda: swept(store), "a sweep")

        assert goes_on(store, wake) == [WokenTask("k", "run", b"run")]

    def test_who_is_blocked_where_it_waits_for_him_goes_before_it_once(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "l", "b", 60.0)
        stand(store, "kl")
        waiter = wait_for(store, "k", "b2", 60.0)
        pass_time(6.0)
        expire(store, "k", "parked:run")

        assert swept(store) == []

        take(store, "k", "b2", 60.0, queue=waiter.inbox)
        store.release(ReleaseRequest("l", "b"))
        wake = store.release(ReleaseRequest("k", "b2")).wake
        assert goes_on(store, wake) == [WokenTask("k", "run", b"run")]
