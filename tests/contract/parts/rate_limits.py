"""How often a key may be taken while an operator limits that."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_distlock.rate import Rate
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.values import Limit, Want
from celery_distlock.testing.contract.actions import (
    BUSY,
    GRANTED,
    SHARED,
    all_of,
    ask,
    enter,
    leave,
    runs_of,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept
from tests.contract.parts.rates import MORE, PER, count, so_often
from tests.contract.parts.sending import send

__all__ = ["RateLimits"]


def allow(store: Any, starts: int) -> None:
    """As an operator, have the key taken so often in `PER`, at once or not."""
    store.units.set_limit("k", Limit(None, rates=(Rate(starts, PER, starts),)))


class RateLimits(Given):
    """An operator's rates go before those of requests, and apply to requests without one."""

    @pytest.mark.parametrize("want", [Want(), SHARED, so_often(100), so_often(1)])
    def test_a_key_is_taken_as_often_as_an_operator_allows(self, store: Any, want: Want) -> None:
        allow(store, 2)

        assert count(store, "k", want) == 2
        reply = ask(store, "k", "late", want=want)
        assert reply.status is BUSY
        assert PER - 60.0 < reply.due <= PER + MORE

        store.units.set_limit("k", None)
        take(store, "k", "free", want=Want())

    def test_what_counts_as_more_than_an_operator_allows_counts_as_all_of_it(
        self, store: Any
    ) -> None:
        allow(store, 2)

        assert count(store, "k", so_often(50, cost=5)) == 1
        assert count(store, "k", SHARED) == 0

    def test_it_limits_no_units_if_it_does_not_say_so(self, store: Any) -> None:
        allow(store, 1000)

        enter(store, "k", "ab", Want(1, 2))

        assert ask(store, "k", "c", want=Want(1, 2)).status is BUSY
        enter(store, "l", "ab", SHARED)

    def test_units_and_rates_are_limited_at_once(self, store: Any) -> None:
        store.units.set_limit("k", Limit(1, rates=(Rate(2, PER, 2),)))

        take(store, "k", "a", want=SHARED)
        assert ask(store, "k", "b", want=SHARED).status is BUSY
        leave(store, "k", "a", started=True)
        assert count(store, "k", SHARED) == 1

    def test_parked_ones_are_counted_as_they_come(
        self, store: Any, pass_time: Callable[[float], None]
    ) -> None:
        allow(store, 2)
        take(store, "k", "a")
        for number in range(3):
            park(store, "k", f"run{number}")

        assert runs_of(leave(store, "k", "a", started=True)) == ["run0"]
        take(store, "k", "b", run="run0")
        assert leave(store, "k", "b", run="run0", started=True) == []

        assert store.inspect("k").opens == pytest.approx(PER, abs=60.0)
        pass_time(PER + MORE)
        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run1"]

    def test_blocked_ones_are_counted_as_they_come(self, store: Any) -> None:
        allow(store, 2)
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        leave(store, "k", "a", started=True)
        take(store, "k", "b", queue=waiter.inbox)
        leave(store, "k", "b", started=True)

        assert ask(store, "k", "c").status is BUSY

    def test_time_lets_in_when_an_operators_limit_ends(
        self, store: Any, pass_time: Callable[[float], None]
    ) -> None:
        store.units.set_limit("k", Limit(None, time.time() + 100.0, rates=(Rate(1, PER),)))
        assert count(store, "k", Want()) == 1

        assert 0.0 < ask(store, "k", "late").due <= 100.01

        pass_time(101.0)
        take(store, "k", "b")

    def test_to_share_what_one_had_alone_is_no_start(self, store: Any) -> None:
        allow(store, 2)
        take(store, "k", "a")

        assert store.units.downgrade("k", "a", 30.0).status is GRANTED

        assert count(store, "k", SHARED) == 1

    def test_a_look_shows_an_operators_rates(self, store: Any) -> None:
        several = (Rate(2, 1.0), Rate(50, 60.0, 5))
        store.units.set_limit("k", Limit(None, author="an operator: 1/2", rates=several))

        limit = store.inspect("k").limit

        assert (limit.capacity, limit.author, limit.rates) == (None, "an operator: 1/2", several)
        assert not limit.pauses
        store.units.set_limit("k", Limit(3, author="another"))
        limit = store.inspect("k").limit
        assert (limit.capacity, limit.author, limit.rates) == (3, "another", ())

    def test_what_is_kept_for_a_retry_waits_for_an_operators_rate(self, store: Any) -> None:
        allow(store, 1)
        take(store, "k", "a", run="task:0:0:0")
        leave(store, "k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 3000.0), started=True)

        reply = ask(store, "k", "b", run="task:1:0:0")

        assert (reply.status, count(store, "k", Want())) == (BUSY, 0)

    def test_a_retry_that_is_too_early_waits_before_all_others(
        self, store: Any, pass_time: Callable[[float], None]
    ) -> None:
        allow(store, 1)
        take(store, "k", "a", run="task:0:0:0")
        park(store, "k", "other")
        leave(store, "k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 3000.0), started=True)

        early = ask(store, "k", "b", run="task:1:0:0")
        park(store, "k", "task:1:0:0", arrival=early.arrival)

        assert early.status is BUSY
        pass_time(PER + MORE)
        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["task:1:0:0"]

    def test_a_reservation_from_before_a_rate_was_set_is_counted(self, store: Any) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        leave(store, "k", "a")
        allow(store, 1)

        take(store, "k", "b", queue=waiter.inbox)

        leave(store, "k", "b", started=True)
        assert count(store, "k", Want()) == 0

    def test_a_paced_call_waits_no_longer_than_its_own_rate(self, store: Any) -> None:
        store.units.set_limit("k", Limit(None, rates=(Rate(1, 10 * PER),)))
        assert count(store, "k", Want()) == 1

        reply = send(store, "k", "run", want=so_often(5), paced=True)

        assert reply.sent is Sent.QUEUED
        assert runs_of(all_of(store.units.set_limit("k", None).wake)) == ["run"]
