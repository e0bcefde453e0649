"""Waiters of a key that are in lanes, which have their turns in proportion to their shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.redis.connections import command
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import ALONE, Completion, Lane, Limit, Status, Want
from celery_distlock.testing.contract.actions import all_of, ask, leave, runs_of, take, wait_for
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept
from tests.contract.parts.sending import send

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.queue_store import QueueStore

__all__ = ["Lanes", "Line", "lane"]

ODD = ["", "a", "a b", "a!", "t0", "@1/b", "a/b", "{a}", "\N{SNOWMAN}", "\0", "x" * 10_000]


def lane(
    name: str | None, share: float = 1.0, units: int = 1, capacity: int = 1, most: int = 0
) -> Want:
    return Want(units, capacity, (), 1, name, round(1000 * share), most)


class Line:
    """Sends runs to a key, and runs them to the end; notes the order of their starts."""

    def __init__(self, store: QueueStore, key: str = "k") -> None:
        self.store = store
        self.key = key
        self.wants: dict[str, Want] = {}
        self.ready: list[str] = []
        self.holds: list[tuple[str, str]] = []
        self.order: list[str] = []
        self.at_once: list[list[str]] = []  # at each start

    def send(self, name: str, want: Want, many: int = 1) -> None:
        for _ in range(many):
            run = f"{name}{len(self.wants)}:0:0:0"
            self.wants[run] = want
            if send(self.store, self.key, run, want=want).sent is Sent.GO:
                self.ready.append(run)
                self.begin()  # before its reservation ends

    def begin(self) -> None:
        """Start all that are dispatched."""
        while self.ready:
            run = self.ready.pop(0)
            owner = f"{self.key} {run}"
            reply = self.store.acquire(
                AcquireRequest(self.key, owner, 300.0, run=run, want=self.wants[run])
            )
            assert reply.status is Status.GRANTED, run
            self.ready += runs_of(all_of(reply.wake))
            self.holds.append((owner, run))
            self.order.append(run[0])
            self.at_once.append([run[0] for _, run in self.holds])

    def end(self) -> None:
        """End the one that has run longest."""
        owner, run = self.holds.pop(0)
        request = ReleaseRequest(self.key, owner, run, Completion.YES)
        self.ready += runs_of(all_of(self.store.release(request).wake))

    def running(self) -> str:
        """Start all that are dispatched; return the names of those that run."""
        self.begin()
        return "".join(sorted(run[0] for _, run in self.holds))

    def most_of(self, name: str) -> int:
        """Return how many with this name have run at once."""
        return max(names.count(name) for names in self.at_once)

    def to_the_end(self) -> str:
        self.begin()
        while self.holds:
            self.end()
            self.begin()
        return "".join(self.order)


class Lanes(Given):
    """What waits in lanes starts lane by lane, and what has no lane is in one of its own."""

    def test_a_flood_of_one_lane_delays_another_by_one_start(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a"), 20)
        line.send("b", lane("b"))
        line.begin()
        line.end()
        line.begin()
        line.send("c", lane("c"), 2)

        assert line.to_the_end() == "abcac" + "a" * 18

    def test_the_waiters_of_each_lane_are_listed_in_pages(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        names: list[str | None] = [None, *ODD]
        for number in range(3):
            for name in names:
                send(store, "k", f"{number}{names.index(name)}", want=lane(name))

        def listed(name: str, first: int = 0, limit: int = 100) -> list[str]:
            page = store.parking.lane_waiters("k", name, first=first, limit=limit)
            return [waiter.run for waiter in page]

        assert listed("other") == []
        for name in ODD[1:]:
            runs = [f"{number}{names.index(name)}" for number in range(3)]
            assert listed(name) == [*listed(name, 0, 2), *listed(name, 2, 2)] == runs
            assert listed(name, 3) == []
        plain = [f"{number}{names.index(name)}" for number in range(3) for name in (None, "")]
        assert listed("") == plain

    def test_waiters_without_lanes_are_listed_as_such(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        send(store, "k", "run")
        waiter = wait_for(store, "k", "blocked")

        found = store.parking.lane_waiters("k", "", first=0, limit=10)

        assert [each.run or each.owner for each in found] == ["run", waiter.owner]
        assert store.parking.lane_waiters("k", "a") == []

    def test_a_run_that_is_dispatched_is_listed_in_its_lane(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        for run, name in (("first", "a"), ("second", "b"), ("third", "a")):
            send(store, "k", run, want=lane(name))
        leave(store, "k", "holder")

        in_a, in_b = (store.parking.lane_waiters("k", name) for name in "ab")

        assert [(each.run, each.woken) for each in in_a] == [("first", True), ("third", False)]
        assert [(each.run, each.woken) for each in in_b] == [("second", False)]

    def test_a_waiter_that_has_left_is_not_listed_in_its_lane(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        want = lane("a")
        first, second = (wait_for(store, "k", name, want=want) for name in ("one", "other"))
        store.release(ReleaseRequest("k", first.owner, inbox=first.inbox))

        assert [each.owner for each in store.parking.lane_waiters("k", "a")] == [second.owner]

    def test_starts_are_in_proportion_to_shares(self, store: QueueStore) -> None:
        line = Line(store)
        for name, share in (("a", 1), ("b", 2), ("c", 0.5)):
            line.send(name, lane(name, share), 40)

        order = line.to_the_end()

        some = order[1:36]  # the first one came to a free key
        assert abs(some.count("a") - 10) <= 1
        assert abs(some.count("b") - 20) <= 1
        assert abs(some.count("c") - 5) <= 1

    def test_turns_are_counted_in_units(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("z", lane("z", units=4, capacity=4))
        line.send("a", lane("a", units=2, capacity=4), 20)
        line.send("b", lane("b", capacity=4), 20)

        order = line.to_the_end()

        assert abs(order[:19].count("b") - 12) <= 1

    def test_nothing_passes_a_waiter_that_does_not_fit(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("z", lane("z", capacity=4), 4)
        line.send("a", lane("a", units=4, capacity=4))
        line.send("b", lane("b", capacity=4), 2)

        assert line.to_the_end() == "zzzzabb"

    def test_a_lanes_order_is_that_of_its_calls(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        for number in range(12):
            send(store, "k", f"{number}", want=lane("ab"[number % 2]))
        order = []
        owner, run = "holder", ""
        while woken := leave(store, "k", owner, run=run, completion=Completion.YES):
            (run,) = runs_of(woken)
            owner = f"o{run}"
            take(store, "k", owner, run=run, want=lane("ab"[int(run) % 2]))
            order.append(int(run))

        assert [each for each in order if each % 2] == [1, 3, 5, 7, 9, 11]
        assert order == list(range(12))

    def test_a_lane_that_had_no_waiters_does_not_make_up_for_it(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a"), 12)
        for _ in range(6):
            line.begin()
            line.end()
        line.send("b", lane("b"), 5)

        assert line.to_the_end() in ("aaaaaababababababa"[:17], "aaaaaaabababababa"[:17])

    def test_a_lane_that_is_never_empty_is_not_passed_by_one_that_comes_again_and_again(
        self, store: QueueStore
    ) -> None:
        line = Line(store)
        line.send("a", lane("a"), 10)
        for _ in range(10):
            line.begin()
            line.send("b", lane("b"))
            line.end()

        order = line.to_the_end()

        assert "bb" not in order[:18]
        assert "aa" not in order[2:18]

    def test_what_waits_without_a_lane_is_in_one_of_its_own(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a"), 6)
        line.send("n", ALONE, 3)

        assert line.to_the_end() == "annan" + "aaaa"

    def test_what_came_before_the_first_lane_has_its_turns(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("n", ALONE, 4)
        line.send("a", lane("a"), 3)

        assert line.to_the_end() == "n" + "nanana"

    def test_one_that_waits_blocked_has_its_turn(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        for number in range(4):
            send(store, "k", f"r{number}", want=lane("a"))
        waiter = wait_for(store, "k", "blocked")

        assert leave(store, "k", "holder") == []

        take(store, "k", "blocked", queue=waiter.inbox)
        assert runs_of(leave(store, "k", "blocked")) == ["r0"]

    def test_blocked_waiters_have_one_turn_after_the_other(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        waiters = [wait_for(store, "k", name) for name in ("one", "other")]
        for number in range(2):
            send(store, "k", f"r{number}", want=lane("a"))
        assert leave(store, "k", "holder") == []
        take(store, "k", "one", queue=waiters[0].inbox)

        assert runs_of(leave(store, "k", "one")) == ["r0"]

    def test_one_that_gives_up_leaves_its_lane(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        for number in range(3):
            send(store, "k", f"r{number}", want=lane("a"))
        waiter = wait_for(store, "k", "blocked")

        store.release(ReleaseRequest("k", "blocked", inbox=waiter.inbox))

        assert runs_of(leave(store, "k", "holder")) == ["r0"]

    def test_one_that_comes_by_itself_has_had_its_turn(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "holder")
        send(store, "k", "r0", want=lane("a"))
        first, second = (wait_for(store, "k", name) for name in ("first", "second"))
        pass_time(31.0)
        take(store, "k", "first", queue=first.inbox)
        pass_time(31.0)

        reply = ask(store, "k", "second", queue=second.inbox)

        assert runs_of(all_of(reply.wake)) == ["r0"]

    def test_those_that_give_up_leave_the_index(self, store: QueueStore) -> None:
        take(store, "k", "holder", lease=300.0)
        send(store, "k", "r0", want=lane("a"))
        for number in range(5):
            waiter = wait_for(store, "k", f"gone{number}")
            store.release(ReleaseRequest("k", waiter.owner, inbox=waiter.inbox))

        assert entries(store, "k", "[w", "(x") == 1

    def test_a_lane_is_looked_at_to_its_end(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        send(store, "k", "r0", want=lane("a"))
        for first in range(0, 1500, 500):
            spoil(store, "k", [f"wa {number:016}p:x" for number in range(first, first + 500)])

        assert runs_of(leave(store, "k", "holder")) == ["r0"]

    def test_a_key_whose_last_one_has_died_leaves_nothing_behind(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "holder")
        send(store, "k", "r0", want=lane("a"))
        leave(store, "k", "holder")
        take(store, "k", "o", run="r0", want=lane("a"))

        swept(store)

        assert entries(store, "k", "[a", "(z") == 0

    def test_one_that_steps_back_returns_to_its_lane(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        send(store, "k", "r0", want=lane("a", units=2, capacity=2))
        leave(store, "k", "holder")
        take(store, "k", "earlier", arrival=2, want=Want(2, 2))
        send(store, "k", "r1", want=lane("b"))

        assert [each.name for each in store.parking.lanes("k")] == ["a", "b"]

    def test_a_lane_has_at_most_its_units_and_leaves_the_others_to_other_lanes(
        self, store: QueueStore
    ) -> None:
        line = Line(store)
        line.send("a", lane("a", capacity=5, most=2), 6)
        line.send("b", lane("b", capacity=5), 6)

        assert line.running() == "aabbb"
        line.end()
        assert line.running() == "aabbb"
        assert line.order[-1] == "a"
        assert line.to_the_end().count("a") == 6
        assert line.most_of("a") == 2
        assert store.inspect("k").waiting == 0

    def test_units_of_a_lane_count_by_weight(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a", units=2, capacity=9, most=5), 4)
        line.send("b", lane("a", capacity=9, most=5), 3)

        assert line.running() == "aa"
        assert line.to_the_end() == "aaaabbb"
        assert max(2 * names.count("a") + names.count("b") for names in line.at_once) == 5

    def test_a_lane_at_its_most_does_not_hold_up_a_call_of_another(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a", capacity=3, most=1), 3)
        line.begin()
        line.send("b", lane("b", capacity=3))
        line.send("n", Want(1, 3))

        assert line.running() == "abn"
        assert ask(store, "k", "x", want=lane("a", capacity=4, most=1)).status is Status.BUSY

    def test_a_lane_whose_holder_has_died_goes_on(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "dead", 30.0, want=lane("a", capacity=3, most=1))
        take(store, "k", "lives", 300.0, want=lane("b", capacity=3, most=1))
        for run, name in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            assert send(store, "k", run, want=lane(name, capacity=3, most=1)).sent is not Sent.GO
        pass_time(31.0)

        assert runs_of(swept(store)) == ["a1"]

    def test_lanes_go_on_whose_holders_have_all_died(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        for name in "abc":
            take(store, "k", name, 30.0, want=lane(name, capacity=0, most=1))
            send(store, "k", f"{name}1", want=lane(name, capacity=0, most=1))
        pass_time(31.0)

        assert sorted(runs_of(swept(store))) == ["a1", "b1", "c1"]

    def test_many_lanes_go_on_whose_holders_have_all_died(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        names = [f"n{number:02}" for number in range(40)]  # more than one sweep looks at
        for name in names:
            take(store, "k", name, 30.0, want=lane(name, capacity=0, most=1))
            send(store, "k", f"{name}-1", want=lane(name, capacity=0, most=1))

        woken: set[str] = set()
        for _ in range(20):
            pass_time(120.0)  # those that are woken are lost, too
            woken.update(runs_of(swept(store)))

        assert sorted(woken) == [f"{name}-1" for name in names]

    def test_a_most_that_is_lowered_throws_nothing_out(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a", capacity=5, most=3), 3)
        line.begin()
        line.send("b", lane("a", capacity=5, most=1), 2)

        assert line.running() == "aaa"
        for expected in ("aa", "a", "b", "b", ""):
            line.end()
            assert line.running() == expected

    def test_the_next_one_of_a_lane_may_have_another_most(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a", capacity=5, most=1), 2)
        line.send("b", lane("a", capacity=5, most=2))
        assert line.running() == "a"

        wake = store.parking.cancel("k", "a1:0:0:0").wake

        assert runs_of(all_of(wake)) == ["b2:0:0:0"]

    def test_units_that_are_upgraded_and_returned_count_in_their_lane(
        self, store: QueueStore
    ) -> None:
        want = lane("a", capacity=3, most=1)
        take(store, "k", "o", want=want)
        send(store, "k", "a1", want=want)
        store.units.upgrade("k", "o", 30.0)
        assert all_of(store.units.downgrade("k", "o", 30.0).wake) == []

        assert runs_of(leave(store, "k", "o")) == ["a1"]

    def test_those_at_their_most_are_listed_last(self, store: QueueStore) -> None:
        take(store, "k", "o", want=lane("a", capacity=3, units=2, most=2))
        send(store, "k", "a1", want=lane("a", capacity=3, most=2))
        store.units.set_limit("k", Limit(2))
        send(store, "k", "b1", want=lane("b", capacity=3, most=3))

        found = store.parking.lanes("k")

        assert found == [Lane("b", 1, 1.0, 3, 0), Lane("a", 1, 1.0, 2, 2)]

    def test_one_that_is_cancelled_leaves_its_lane(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        for run, name in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
            send(store, "k", run, want=lane(name))

        store.parking.cancel("k", "a1")
        store.parking.cancel("k", "b1")
        store.parking.cancel("k", "b2")

        assert runs_of(leave(store, "k", "holder")) == ["a2"]
        take(store, "k", "o", run="a2", want=lane("a"))
        assert leave(store, "k", "o", run="a2", completion=Completion.YES) == []
        assert store.inspect("k").waiting == 0

    def test_one_that_lost_its_reservation_goes_before_all_lanes(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "holder")
        for run, name in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            send(store, "k", run, want=lane(name))
        assert runs_of(leave(store, "k", "holder")) == ["a1"]
        pass_time(30.0)

        take(store, "k", "o", run="a1", want=lane("a"), redelivered=True)

        assert runs_of(leave(store, "k", "o", run="a1", completion=Completion.YES)) == ["b1"]

    def test_one_for_which_its_key_is_kept_goes_before_all_lanes(self, store: QueueStore) -> None:
        take(store, "k", "o", run="b1:0:0:0", want=lane("b"))
        send(store, "k", "a1:0:0:0", want=lane("a"))
        park(store, "k", "b1:1:0:0", want=lane("b"))

        request = ReleaseRequest("k", "o", "b1:0:0:0", Completion.YES, keep_for=("b1:1:0:0", 30.0))
        wakes = all_of(store.release(request).wake)

        assert runs_of(wakes) == ["b1:1:0:0"]

    def test_a_limit_of_an_operator_holds_over_all_lanes(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(0))
        for number in range(4):
            send(store, "k", f"{number}", want=lane("ab"[number % 2], capacity=9))

        wake = store.units.set_limit("k", Limit(3)).wake

        assert sorted(runs_of(all_of(wake))) == ["0", "1", "2"]

    @pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name[:5]))
    def test_a_lane_may_be_any_text(self, store: QueueStore, name: str) -> None:
        line = Line(store)
        line.send("h", lane("h"))
        line.send("a", lane(name), 5)
        line.send("b", lane("b~"), 3)

        assert line.to_the_end()[1:] in ("ababab" + "aa", "bababa" + "aa")

    @pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name[:5]))
    def test_the_units_of_a_lane_are_counted_whatever_its_name(
        self, store: QueueStore, name: str
    ) -> None:
        line = Line(store)
        line.send("a", lane(name, capacity=4, most=2), 5)

        assert line.running() == "aa"
        line.end()
        assert line.running() == "aa"
        assert line.to_the_end() == "aaaaa"
        assert line.most_of("a") == 2

    def test_they_are_listed_in_the_order_of_their_turns(self, store: QueueStore) -> None:
        take(store, "k", "holder")
        assert store.parking.lanes("k") == []
        for number in range(6):
            send(store, "k", f"{number}", want=lane("ab"[number % 2], 1 + number % 2))
        send(store, "k", "none", want=ALONE)
        leave(store, "k", "holder")
        store.parking.cancel("k", "1")

        found = store.parking.lanes("k")

        assert found == [Lane("a", 3, 1.0), Lane("b", 2, 2.0)]
        assert store.parking.lanes("k", 1) == found[:1]

    def test_a_key_with_lanes_leaves_nothing_behind(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("a", lane("a"), 3)
        line.send("b", lane("b"), 3)
        line.to_the_end()

        assert store.inspect("k").waiting == 0
        take(store, "k", "o")
        send(store, "k", "n1", want=ALONE)
        send(store, "k", "n2", want=ALONE)
        assert runs_of(leave(store, "k", "o")) == ["n1"]

    @pytest.mark.parametrize("many", [3, 450])
    def test_an_index_that_the_server_has_evicted_is_made_again_without_a_sweep(
        self, store: QueueStore, many: int
    ) -> None:
        line = Line(store)
        line.send("n", ALONE, many)
        line.send("a", lane("a"), 2)
        lose(store, "k", "lanes")
        line.send("b", lane("b"))

        order = line.to_the_end()

        assert sorted(order) == sorted("n" * many + "aab")
        assert order.index("a") < 5


def entries(store: Any, key: str, first: str, last: str) -> int:
    """Return the number of entries of the index of a key's lanes."""
    name = f"{store._records.stem(key)}lanes"
    (many,) = store._requests.ask(
        [command(name.encode(), "ZLEXCOUNT", name, first, last)], key
    ).answers
    return int(many)


def spoil(store: Any, key: str, obsolete: list[str]) -> None:
    """Add entries to the index of a key's lanes, as those of waiters that a server has evicted."""
    name = f"{store._records.stem(key)}lanes"
    words = [word for entry in obsolete for word in (0, entry)]
    assert store._requests.ask([command(name.encode(), "ZADD", name, *words)], key).answers == [500]


def lose(store: Any, key: str, record: str) -> None:
    """Delete a record of a key, as a server that is full may do."""
    name = f"{store._records.stem(key)}{record}"
    assert store._requests.ask([command(name.encode(), "DEL", name)], key).answers == [1]
