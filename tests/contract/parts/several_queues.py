"""Runs that wait for several keys."""

from collections.abc import Callable, Sequence

from celery_distlock.stores import ReleaseRequest, StandRequest, queue_store
from celery_distlock.stores.queue_store import QueueStore, ready
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    ParkRequest,
    Release,
    Route,
    Status,
    Want,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    AGAIN,
    DONE,
    GRANTED,
    TWO,
    all_of,
    ask,
    holder,
    runs_of,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import (
    PARKED,
    RESERVED,
    goes_on,
    park,
    reserve_or_queue,
    swept,
)

__all__ = ["WaitingAtSeveralKeys"]

TURNS = 8  # that come to nothing, after which the keys that it could have are kept for a run


def frees(store: QueueStore, key: str, owner: str, **more: object) -> list[WokenTask]:
    """Give a key up, and have all that this wakes go on; return what must be sent."""
    released = store.release(ReleaseRequest(key, owner, **more))  # type: ignore[arg-type]
    assert released.released
    return [sent for wake in all_of(released.wake) for sent in ready(store, wake)]


def wants(store: QueueStore, keys: Sequence[str], run: str = "run", **more: object) -> Status:
    """Have a run wait for its keys, or be sent; return which."""
    reply = reserve_or_queue(store, keys, run, **more)  # type: ignore[arg-type]
    for wake in all_of(reply.wake):
        list(ready(store, wake))
    return reply.status


def queue(store: QueueStore, key: str) -> list[str]:
    """Return the runs that wait at a key."""
    return [waiter.run for waiter in store.waiters(key) if not waiter.woken]


def turned_away(store: QueueStore, first: str, second: str, times: int) -> None:
    """Have a run that waits at the first of two keys be turned away, at one after the other."""
    for number in range(times):
        at, other = (first, second) if number % 2 == 0 else (second, first)
        take(store, other, f"{other}{number}")
        assert frees(store, at, f"{at}{number - 1}") == []
        assert queue(store, other) == ["run"]


class WaitingAtSeveralKeys(Given):
    """A run that needs several keys has none of them while it waits."""

    def test_it_is_sent_when_it_can_have_all_its_keys(self, store: QueueStore) -> None:
        first, second = take(store, "k", "a"), take(store, "l", "b")

        reply = reserve_or_queue(store, "kl")
        assert (reply.status, reply.at, reply.holder) == (PARKED, "k", "a")
        assert frees(store, "k", "a") == []
        assert (queue(store, "k"), queue(store, "l")) == ([], ["run"])
        (wake,) = frees(store, "l", "b")

        assert wake == WokenTask("k", "run", b"run")
        assert [holder(store, key) for key in "kl"] == ["parked:run"] * 2
        assert take(store, "k", "c", run="run", redelivered=True) > first
        assert take(store, "l", "d", run="run", redelivered=True) > second
        for key, owner in (("k", "c"), ("l", "d")):
            release = ReleaseRequest(key, owner, run="run", completion=AGAIN)
            assert store.release(release) == Release(True, None)
            state = store.inspect(key)
            assert (state.waiting, state.oldest, state.woken, state.task) == (0, 0.0, 0, "")

    def test_others_may_use_what_it_cannot_have_yet(self, store: QueueStore) -> None:
        take(store, "l", "b")
        assert wants(store, "kl") is PARKED

        take(store, "k", "c")
        assert frees(store, "k", "c") == []
        take(store, "k", "d")

        assert frees(store, "l", "b") == []
        assert queue(store, "k") == ["run"]
        assert runs_of(frees(store, "k", "d")) == ["run"]

    def test_free_keys_are_reserved_for_it_at_once(self, store: QueueStore) -> None:
        reply = reserve_or_queue(store, "kl")

        assert reply.status is RESERVED
        assert all_of(reply.wake) == [WokenTask("k", "run", b"run")]
        for key in "kl":
            assert holder(store, key) == "parked:run"
            assert ask(store, key, "newcomer").status is not GRANTED
            take(store, key, f"{key}'s", run="run")

    def test_one_that_is_here_takes_them_itself(self, store: QueueStore) -> None:
        reply = reserve_or_queue(store, "kl", comes=True)

        assert (reply.status, reply.wake) == (RESERVED, None)
        for key in "kl":
            take(store, key, f"{key}'s", run="run")
        assert store.parking.parked("k", "run") is None

    def test_one_that_is_here_and_dies_is_sent(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        assert reserve_or_queue(store, "kl", comes=True).status is RESERVED
        pass_time(3.0)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run"]

    def test_it_is_dispatched_as_any_other(self, store: QueueStore) -> None:
        sent: list[WokenTask] = []
        store.publishers.add(sent.append)
        take(store, "k", "a")
        take(store, "l", "b")
        reserve_or_queue(store, "kl")

        store.dispatch(store.release(ReleaseRequest("l", "b")).wake)
        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: sent, "its way")
        assert sent == [WokenTask("k", "run", b"run")]

    def test_a_process_without_a_publisher_lets_it_go_on_too(self, store: QueueStore) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        reserve_or_queue(store, "kl")

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: queue(store, "l"), "the next key")
        assert not holder(store, "k")

    def test_it_has_the_same_place_in_all_queues(self, store: QueueStore) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        reply = reserve_or_queue(store, "kl")
        park(store, "l", "later")
        frees(store, "k", "a")

        assert queue(store, "l") == ["run", "later"]
        assert reserve_or_queue(store, "kl").arrival == reply.arrival
        wake = store.release(ReleaseRequest("l", "b")).wake
        assert wake is not None
        assert wake.run == "run"

    def test_one_that_came_later_does_not_pass_it_where_it_waits(self, store: QueueStore) -> None:
        take(store, "k", "a")
        wants(store, "kl", "first")
        wants(store, "kl", "second")
        park(store, "k", "third")

        assert runs_of(frees(store, "k", "a")) == ["first"]
        assert queue(store, "k") == ["second", "third"]

    def test_no_unit_is_kept_for_one_that_waits_elsewhere(self, store: QueueStore) -> None:
        three = Want(1, 3)
        take(store, "hot", "a")
        for number in range(5):
            route = Route(("api", "hot"), "", (three, ALONE))
            request = StandRequest(f"hot{number}", route, park_request=ParkRequest(b"e"))
            assert queue_store.reserve_or_queue(store, request).status is PARKED

        for name in "xyz":
            route = Route(("api", name), "", (three, ALONE))
            request = StandRequest(name, route, park_request=ParkRequest(b"e"))
            assert queue_store.reserve_or_queue(store, request).status is RESERVED

    def test_one_that_was_turned_away_often_has_the_others_kept(self, store: QueueStore) -> None:
        take(store, "k", "k-1")
        wants(store, "kl")
        turned_away(store, "k", "l", TURNS + 1)

        # It waits at "l", as the first: from now on "k", which comes before that, is kept for it.
        assert holder(store, "k") == "parked:run"
        assert ask(store, "k", "newcomer").status is not GRANTED
        assert runs_of(frees(store, "l", f"l{TURNS}")) == ["run"]

    def test_what_is_kept_goes_to_one_that_came_before_it(self, store: QueueStore) -> None:
        take(store, "m", "b")
        wants(store, "mk", "eldest")
        take(store, "k", "k-1")
        wants(store, "kl")
        turned_away(store, "k", "l", TURNS + 1)
        assert holder(store, "k") == "parked:run"

        assert runs_of(frees(store, "m", "b")) == ["eldest"]

        assert holder(store, "k") == "parked:eldest"
        assert frees(store, "l", f"l{TURNS}") == []
        for key, owner in ("mc", "kd"):
            take(store, key, owner, run="eldest", redelivered=True)
        assert frees(store, "m", "c", run="eldest", completion=AGAIN) == []
        assert runs_of(frees(store, "k", "d", run="eldest", completion=AGAIN)) == ["run"]

    def test_what_was_kept_for_seconds_goes_to_one_that_is_blocked(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "k-1")
        wants(store, "kl")
        turned_away(store, "k", "l", TURNS + 1)
        waiter = wait_for(store, "k", "b")  # the holder of "l", perhaps
        pass_time(9.0)

        def is_handed_over() -> bool:
            assert [sent for wake in swept(store) for sent in ready(store, wake)] == []
            return holder(store, "k") == "b"

        wait_until(is_handed_over, "the key")
        take(store, "k", "b", queue=waiter.inbox)
        assert frees(store, "l", f"l{TURNS}") == []
        assert runs_of(frees(store, "k", "b")) == ["run"]

    def test_what_is_kept_holds_up_no_upgrade(self, store: QueueStore) -> None:
        take(store, "k", "k-1")
        wants(store, "kl", wants=(TWO, TWO))
        turned_away(store, "k", "l", TURNS + 1)
        take(store, "k", "a", want=TWO)

        assert store.units.upgrade("k", "a", 30.0).status is GRANTED
        assert frees(store, "l", f"l{TURNS}") == []
        assert runs_of(frees(store, "k", "a")) == ["run"]

    def test_a_key_that_was_taken_for_it_is_given_up(self, store: QueueStore) -> None:
        take(store, "l", "b")
        take(store, "k", "a", run="run")

        reply = reserve_or_queue(store, "kl", owners=["a", ""])

        assert (reply.status, reply.at) == (PARKED, "l")
        assert not store.release(ReleaseRequest("k", "a")).released
        assert not holder(store, "k")
        assert runs_of(frees(store, "l", "b")) == ["run"]

    def test_a_key_that_is_given_up_goes_to_the_next(self, store: QueueStore) -> None:
        take(store, "l", "b")
        take(store, "k", "a", run="run")
        park(store, "k", "next")

        reply = reserve_or_queue(store, "kl", owners=["a", ""])

        assert reply.status is PARKED
        assert runs_of(all_of(reply.wake)) == ["next"]

    def test_one_that_comes_again_has_its_old_place(self, store: QueueStore) -> None:
        take(store, "k", "a")
        before = reserve_or_queue(store, "kl")
        (wake,) = frees(store, "k", "a")
        reserve_or_queue(store, "kl", "later")
        take(store, "k", "b", run=wake.run, redelivered=True)

        reply = reserve_or_queue(store, "kl", owners=["b", ""])

        assert reply.arrival == before.arrival
        assert reply.status is RESERVED

    def test_repeating_changes_nothing(self, store: QueueStore) -> None:
        take(store, "l", "b")

        answers = [
            (reply.status, reply.at, reply.holder)
            for reply in map(reserve_or_queue, [store] * 2, ["kl"] * 2)
        ]

        assert answers[0] == answers[1]
        assert (queue(store, "k"), queue(store, "l")) == ([], ["run"])

    def test_one_that_is_in_flight_is_left_alone(self, store: QueueStore) -> None:
        take(store, "k", "a")
        reserve_or_queue(store, "kl")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert runs_of(goes_on(store, wake)) == ["run"]

        assert goes_on(store, wake) == []

        assert (holder(store, "k"), holder(store, "l")) == ("parked:run", "parked:run")
        take(store, "k", "c", run="run", redelivered=True)
        assert goes_on(store, wake) == []
        take(store, "l", "d", run="run", redelivered=True)

    def test_one_that_has_ended_waits_nowhere(self, store: QueueStore) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert reserve_or_queue(store, "kl").status is DONE
        assert not store.inspect("k").token

    def test_one_that_is_cancelled_is_soon_gone_everywhere(self, store: QueueStore) -> None:
        for key, names in (("k", "kl"), ("m", "km")):
            take(store, names[1], "b")
            run = f"task-{key}:0:0:0"
            assert wants(store, names, run) is PARKED
            park(store, names[1], f"next-{key}")
            (where,) = store.parking.find_parked(run.partition(":")[0])
            assert where == (names[1], run)

            released = store.parking.cancel(names[1], run)

            assert released.released
            assert [sent for wake in all_of(released.wake) for sent in ready(store, wake)] == []
            assert queue(store, names[1]) == [f"next-{key}"]
            assert store.parking.parked(names[0], run) is None
            assert runs_of(frees(store, names[1], "b")) == [f"next-{key}"]
            take(store, names[1], "c", run=f"next-{key}")
            frees(store, names[1], "c", run=f"next-{key}", completion=Completion.YES)

    def test_where_it_waits_is_known(self, store: QueueStore) -> None:
        take(store, "l", "b")
        reserve_or_queue(store, "kl", "task:0:0:0")

        assert list(store.parking.find_parked("task")) == [("l", "task:0:0:0")]
        here, there = (
            store.parking.parked("k", "task:0:0:0"),
            store.parking.parked("l", "task:0:0:0"),
        )
        assert here is not None
        assert there is not None
        assert (here.envelope, there.envelope) == (b"task:0:0:0", b"")
        assert (here.at, there.at) == ("l", "")
        assert here.route == there.route == Route(("k", "l"), "shop.move")
        assert (here.task, there.task) == ("shop.move", "shop.move")

    def test_one_whose_waker_has_died_goes_on_soon(self, store: QueueStore) -> None:
        take(store, "k", "a")
        reserve_or_queue(store, "kl")
        store.release(ReleaseRequest("k", "a"))

        (wake,) = wait_until(lambda: swept(store), "a sweep")

        assert goes_on(store, wake) == [WokenTask("k", "run", b"run")]
