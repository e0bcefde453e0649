"""What a run has waited for last: for a holder, or for time alone."""

from collections.abc import Callable
from typing import Any

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import ALONE, Limit, Reply, Want
from celery_distlock.testing.contract.actions import (
    BUSY,
    GRANTED,
    RESTS,
    YES,
    ask,
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

__all__ = ["Causes"]

LONG = 4 * PER  # a lease


def claim(store: Store, key: str, run: str, want: Want = ALONE) -> Reply:
    """Claim what is reserved for a run."""
    reply = ask(store, key, f"claims-{run}", run=run, redelivered=True, want=want)
    assert reply.status is GRANTED
    return reply


def pass_until_swept(
    store: QueueStore, pass_time: Callable[[float], None], seconds: float
) -> list[str]:
    """Let time pass; return the runs that a sweep finds then."""
    pass_time(seconds)
    return runs_of(wait_until(lambda: swept(store), "a sweep"))


def waited_behind_a_holder(store: QueueStore, join: Callable[..., object], want: Want) -> str:
    """Have a run *join* the queue of a held key; return what its claim is answered."""
    key = want.written()
    take(store, key, "a")
    join(store, key, "run", want=want)
    assert runs_of(leave(store, key, "a")) == ["run"]
    return claim(store, key, "run", want).waited_for


class Causes(Given):
    """The answer to a claim says what was in the way last, where its caller cannot know it."""

    def test_a_run_behind_a_holder_has_not_waited_for_time(self, store: QueueStore) -> None:
        for want in (ALONE, Want(1, 1, so_often(9).rates), Want(1, 2)):
            assert waited_behind_a_holder(store, park, want) == ""

    def test_a_run_that_a_rate_keeps_out_has_waited_for_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        for capacity in (0, 1, 5):
            key, want = f"k{capacity}", so_often(1)._replace(capacity=capacity)
            count(store, key, want)
            park(store, key, "run", want=want)
            assert pass_until_swept(store, pass_time, PER + MORE) == ["run"]

            assert claim(store, key, "run", want).waited_for == "time"

    def test_each_run_of_a_queue_that_a_rate_serves_has_waited_for_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1)
        count(store, "k", want)
        for run in ("run1", "run2", "run3"):
            park(store, "k", run, want=want)

        for run in ("run1", "run2", "run3"):
            assert pass_until_swept(store, pass_time, PER + MORE) == [run]
            assert claim(store, "k", run, want).waited_for == "time"
            leave(store, "k", f"claims-{run}", run=run, completion=YES, started=True)

    def test_what_was_in_the_way_last_counts(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1)._replace(capacity=1)
        for key, first, second, expected in (
            ("holder", PER + MORE, 0.0, ""),
            ("rate", 0.0, PER + MORE, "time"),
        ):
            take(store, key, "a", LONG, want=want)
            park(store, key, "run", want=want)
            pass_time(first)
            found = runs_of(leave(store, key, "a", started=True))
            if second:
                assert found == []
                found = pass_until_swept(store, pass_time, second)
            assert found == ["run"]

            assert claim(store, key, "run", want).waited_for == expected

    def test_a_run_at_a_key_that_rests_has_waited_for_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        for run in ("first", "second"):
            park(store, "k", run)
        assert leave(store, "k", "a", keep_for=(RESTS, 2.0)) == []
        assert pass_until_swept(store, pass_time, 2.0 + MORE) == ["first"]

        assert claim(store, "k", "first").waited_for == "time"
        assert runs_of(leave(store, "k", "claims-first", run="first", completion=YES)) == ["second"]
        assert claim(store, "k", "second").waited_for == ""

    def test_a_run_at_a_paused_key_has_waited_for_time(self, store: Any) -> None:
        store.units.set_limit("k", Limit(0))
        park(store, "k", "run")
        wake = store.units.set_limit("k", None).wake
        assert wake.run == "run"

        assert claim(store, "k", "run").waited_for == "time"

    def test_a_pause_that_ends_while_the_key_is_taken_is_not_what_counts(self, store: Any) -> None:
        take(store, "k", "a")
        store.units.set_limit("k", Limit(0))
        park(store, "k", "run")
        store.units.set_limit("k", None)
        assert runs_of(leave(store, "k", "a")) == ["run"]

        assert claim(store, "k", "run").waited_for == ""

    def test_a_call_that_starts_at_once_has_not_waited(self, store: QueueStore) -> None:
        for want in (ALONE, Want(1, 2), so_often(5)):
            send(store, want.written(), "run", want=want)

            assert claim(store, want.written(), "run", want).waited_for == ""

    def test_a_call_that_was_queued_by_the_store_has_waited_for_a_holder(
        self, store: QueueStore
    ) -> None:
        for want in (ALONE, Want(1, 2)):
            assert waited_behind_a_holder(store, send, want) == "holder"

    def test_a_call_that_is_paced_has_waited_for_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1)
        count(store, "k", want)
        send(store, "k", "run", want=want, paced=True)
        assert pass_until_swept(store, pass_time, PER + MORE) == ["run"]

        assert claim(store, "k", "run", want).waited_for == "time"

    def test_a_delay_that_a_call_asked_for_is_no_wait(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run", delay=30.0)
        assert pass_until_swept(store, pass_time, 31.0) == ["run"]

        assert claim(store, "k", "run").waited_for == ""

    def test_a_caller_that_is_refused_learns_what_for(self, store: QueueStore) -> None:
        rated = so_often(1)
        take(store, "held", "a")
        count(store, "rated", rated)
        take(store, "rests", "a")
        leave(store, "rests", "a", keep_for=(RESTS, 30.0))
        store.units.set_limit("paused", Limit(0))

        for key, want, expected in (
            ("held", ALONE, "holder"),
            ("held", rated, "holder"),
            ("rated", rated, "time"),
            ("rests", ALONE, "time"),
            ("paused", ALONE, "time"),
        ):
            assert ask(store, key, "b", want=want).waits_for == expected
            first = wait_for(store, key, f"first-{want.written()}", want=want)
            again = ask(store, key, first.owner, queue=first.inbox, want=want)
            assert (again.status, again.place, again.waits_for) == (BUSY, 0, expected)
            assert ask(store, key, "b", want=want).waits_for == "holder"  # behind that one
            store.release(ReleaseRequest(key, first.owner, inbox=first.inbox))
