"""What operators set for one lane of a key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.requests import Identity, ReleaseRequest
from celery_distlock.stores.values import Completion, Limit, ParkRequest, Status, Want
from celery_distlock.testing.contract.actions import (
    BUSY,
    all_of,
    ask,
    found_keys,
    leave,
    runs_of,
    take,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import swept
from tests.contract.parts.lanes import ODD, Line, lane
from tests.contract.parts.sending import send
from tests.contract.parts.timing import claimed, wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.queue_store import QueueStore

__all__ = ["LaneLimits"]

BOTH = pytest.mark.parametrize("capacity", [1, 5])


def limited(
    store: QueueStore, capacity: int | None, name: str = "a", until: float = 0.0
) -> list[str]:
    """Limit a lane of the key, or remove its limit; return the runs that are woken by that."""
    limit = None if capacity is None else Limit(capacity, until)
    return runs_of(all_of(store.units.set_limit("k", limit, name).wake))


class LaneLimits(Given):
    """An operator's limit of a lane replaces the most that its requests name."""

    def test_a_lane_has_no_more_than_an_operator_allows(self, store: QueueStore) -> None:
        line = Line(store)
        limited(store, 1)
        line.send("a", lane("a", capacity=5, most=3), 4)
        line.send("b", lane("b", capacity=5), 6)

        assert line.running() == "abbbb"
        assert sorted(line.to_the_end()) == list("aaaabbbbbb")
        assert line.most_of("a") == 1

    def test_it_may_be_more_than_the_most_that_requests_name(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a", capacity=5, most=1), 4)
        assert line.running() == "a"

        line.ready += limited(store, 3)

        assert line.running() == "aaa"

    def test_those_that_were_granted_before_count(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a", capacity=5), 3)
        assert line.running() == "aaa"

        assert limited(store, 2) == []
        line.send("b", lane("a", capacity=5), 3)

        for expected in ("aa", "ab", "bb", "bb", "b", ""):
            line.end()
            assert line.running() == expected

    def test_a_weight_above_it_counts_as_all_of_it(self, store: QueueStore) -> None:
        line = Line(store)
        limited(store, 2)
        line.send("a", lane("a", units=3, capacity=5), 2)
        line.send("b", lane("b", capacity=5))

        assert line.running() == "ab"
        assert line.to_the_end() == "aba"

    @BOTH
    def test_a_paused_lane_waits_and_leaves_no_unit_idle(
        self, store: QueueStore, capacity: int
    ) -> None:
        line = Line(store)
        limited(store, 0)
        for name in "abab":
            line.send(name, lane(name, capacity=capacity))

        assert line.to_the_end() == "bb"

        line.send("b", lane("b", capacity=capacity))
        assert line.to_the_end() == "bbb"
        assert store.inspect("k").waiting == 2
        line.ready += limited(store, None)
        assert line.to_the_end() == "bbbaa"

    @BOTH
    def test_one_of_a_paused_lane_that_does_not_queue_is_refused(
        self, store: QueueStore, capacity: int
    ) -> None:
        limited(store, 0)

        assert ask(store, "k", "x", want=lane("a", capacity=capacity)).status is BUSY
        take(store, "k", "y", want=lane("b", capacity=capacity))

    @BOTH
    def test_one_in_flight_of_a_paused_lane_waits_again_and_another_has_its_turn(
        self, store: QueueStore, capacity: int
    ) -> None:
        in_a, in_b = (lane(name, units=capacity, capacity=capacity) for name in "ab")
        take(store, "k", "holder", want=in_b)
        send(store, "k", "a1", want=in_a)
        send(store, "k", "b1", want=in_b)
        assert runs_of(leave(store, "k", "holder")) == ["a1"]
        assert limited(store, 0) == []

        reply = ask(store, "k", "o", run="a1", redelivered=True, want=in_a)

        assert reply.status is BUSY
        assert runs_of(all_of(reply.wake)) == ["b1"]
        again = {"queue": ParkRequest(b"e"), "arrival": reply.arrival, "want": in_a}
        assert ask(store, "k", "o", run="a1", **again).status is Status.PARKED
        take(store, "k", "o", run="b1", redelivered=True, want=in_b)
        assert leave(store, "k", "o", run="b1", completion=Completion.YES) == []
        assert limited(store, None) == ["a1"]

    def test_one_in_flight_beyond_a_lowered_limit_waits_again(self, store: QueueStore) -> None:
        want = lane("a", capacity=5)
        take(store, "k", "all", want=Want(5, 5))
        for run in ("a1", "a2"):
            send(store, "k", run, want=want)
        assert runs_of(leave(store, "k", "all")) == ["a1", "a2"]
        limited(store, 1)

        reply = ask(store, "k", "o2", run="a2", redelivered=True, want=want)
        assert reply.status is BUSY
        again = {"queue": ParkRequest(b"e"), "arrival": reply.arrival, "want": want}
        assert ask(store, "k", "o2", run="a2", **again).status is Status.PARKED
        take(store, "k", "o1", run="a1", redelivered=True, want=want)
        assert runs_of(leave(store, "k", "o1", run="a1", completion=Completion.YES)) == ["a2"]

    @BOTH
    def test_a_pause_of_a_lane_ends_by_itself(
        self, store: QueueStore, pass_time: Callable[[float], None], capacity: int
    ) -> None:
        limited(store, 0, until=time.time() + 1.5)
        assert send(store, "k", "a1", want=lane("a", capacity=capacity)).sent is Sent.QUEUED
        assert store.timetable.dues().many == 1
        again: dict[str, float | None] = {}
        assert list(store.parking.wake_due(["k"], again)) == []
        assert again["k"] is not None
        pass_time(2.0)

        claim = wait_until(lambda: claimed(store), "a claim")

        assert claim is not None
        assert wake(store, claim)[0] == ["a1"]
        assert store.inspect("k").lane_limits == ()

    def test_a_lane_whose_pause_is_over_has_its_turn_with_the_next_request(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "holder", lease=300.0, want=lane("b", capacity=5))
        limited(store, 0, until=time.time() + 1.5)
        assert send(store, "k", "a1", want=lane("a", capacity=5)).sent is Sent.QUEUED
        pass_time(2.0)

        sent = send(store, "k", "b1", want=lane("b", capacity=5))

        assert (sent.sent, runs_of(all_of(sent.wake))) == (Sent.GO, ["a1"])

    def test_the_newest_call_of_a_paused_lane_runs_when_it_goes_on(self, store: QueueStore) -> None:
        same, want = Identity("same"), lane("a")
        limited(store, 0)
        assert send(store, "k", "a1", want=want, identity=same).sent is Sent.QUEUED
        newest = same._replace(replaces="a1")

        assert send(store, "k", "a1", b"newest", want=want, identity=newest).sent is Sent.UPDATED

        (wake,) = all_of(store.units.set_limit("k", None, "a").wake)
        assert (wake.run, wake.envelope) == ("a1", b"newest")

    def test_the_limits_of_a_key_and_of_its_lanes_are_apart(self, store: QueueStore) -> None:
        for name in ODD[1:]:
            limited(store, 2, name)
        store.units.set_limit("k", Limit(4, author="one"))
        store.units.set_limit("k", Limit(0, author="two\nlines"), "a")

        state = store.inspect("k")

        assert state.limit is not None
        assert (state.limit.capacity, state.limit.author) == (4, "one")
        assert len(state.lane_limits) == len(ODD) - 1
        its, another = state.limit_of("a"), state.limit_of("a b")
        assert its is not None
        assert another is not None
        assert (its.capacity, its.author, another.capacity) == (0, "two lines", 2)
        store.units.set_limit("k", None)
        limited(store, None, "a b")
        state = store.inspect("k")
        assert state.limit is None
        assert len(state.lane_limits) == len(ODD) - 2

    def test_a_key_with_a_limited_lane_is_found_though_nothing_uses_it(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        limited(store, 1)
        for _ in range(2):
            pass_time(61.0)
            swept(store)

        assert found_keys(store) == ["k"]

    def test_other_lanes_than_a_paused_one_go_on_when_their_holders_have_died(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        for name in "abc":
            take(store, "k", name, 30.0, want=lane(name, capacity=0, most=1))
            send(store, "k", f"{name}1", want=lane(name, capacity=0, most=1))
        limited(store, 0)
        pass_time(31.0)

        assert sorted(runs_of(swept(store))) == ["b1", "c1"]
        assert limited(store, None) == ["a1"]

    def test_a_lane_at_its_most_goes_on_when_its_waiter_is_replaced_by_one_without(
        self, store: QueueStore
    ) -> None:
        same = Identity("same")
        take(store, "k", "x", want=lane("a", capacity=5, most=1))
        want = lane("a", capacity=5, most=1)
        assert send(store, "k", "a1", want=want, identity=same).sent is Sent.QUEUED
        newest = same._replace(replaces="a1")

        sent = send(store, "k", "a1", want=lane("a", capacity=5), identity=newest)

        assert sent.sent is Sent.GO
        store.release(ReleaseRequest("k", "x"))
