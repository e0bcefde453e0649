"""Queues in which a limited number may wait."""

from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import SendRequest
from celery_distlock.stores.values import ParkRequest, Reply, Status
from celery_distlock.testing.contract.actions import holder, leave, take, wait_for
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import PARKED, park
from tests.threads import in_threads

__all__ = ["Bounded"]

FULL = Status.FULL


def _park(store: QueueStore, run: str, most: int) -> Reply:
    request = ParkRequest(run.encode(), task="shop.reserve", max_waiting=most)
    return store.acquire(AcquireRequest("k", new_owner("delivery"), 30.0, queue=request, run=run))


def _line(store: QueueStore, run: str, most: int) -> Reply:
    request = ParkRequest(run.encode(), task="shop.reserve", max_waiting=most)
    return store.parking.park_if_held("k", run, request, 5.0)


def _send(store: QueueStore, run: str, most: int, **more: float) -> Sent:
    request = ParkRequest(run.encode(), task="shop.reserve", max_waiting=most)
    return store.calls.send(SendRequest("k", run, request, **more)).sent


class Bounded(Given):
    """A request that allows N waiters is not queued as the one after them."""

    def test_it_is_not_parked_behind_as_many_as_it_allows(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert _park(store, "one", 2).status is PARKED
        assert _park(store, "two", 2).status is PARKED

        reply = _park(store, "three", 2)

        assert (reply.status, reply.holder) == (FULL, "a")
        assert reply.remaining > 0
        assert store.parking.parked("k", "three") is None
        assert store.inspect("k").waiting == 2

    def test_a_worker_that_cannot_take_the_key_is_refused_too(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert _line(store, "one", 1).status is PARKED

        assert _line(store, "two", 1).status is FULL

        assert store.parking.parked("k", "two") is None

    def test_a_call_is_refused_and_names_the_holder(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert _send(store, "one", 1) is Sent.QUEUED

        request = ParkRequest(b"two", max_waiting=1)
        reply = store.calls.send(SendRequest("k", "two", request))

        assert (reply.sent, reply.holder) == (Sent.FULL, "a")
        assert reply.remaining > 0
        assert store.parking.parked("k", "two") is None

    def test_blocked_requests_wait_too(self, store: QueueStore) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")

        assert _park(store, "run", 1).status is FULL

    def test_each_request_is_judged_by_its_own_number(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "one")
        park(store, "k", "two")

        assert _park(store, "three", 2).status is FULL
        assert _park(store, "three", 3).status is PARKED

    def test_one_that_waits_already_goes_on_waiting(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert _park(store, "one", 1).status is PARKED

        assert _park(store, "one", 1).status is PARKED
        assert _line(store, "one", 1).status is PARKED
        assert _send(store, "one", 1) is Sent.QUEUED

    def test_one_whose_claim_comes_late_waits_again(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert _park(store, "one", 1).status is PARKED
        leave(store, "k", "a")
        assert holder(store, "k") == "parked:one"
        assert store.parking.cancel("k", "one").released
        take(store, "k", "b")
        assert _park(store, "two", 1).status is PARKED

        assert _park(store, "two", 1).status is PARKED

    def test_a_free_key_is_taken_however_few_may_wait(self, store: QueueStore) -> None:
        assert _park(store, "one", 1).status is Status.GRANTED
        assert _send(store, "two", 1) is Sent.QUEUED

    def test_a_call_that_is_deferred_is_not_refused(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert _send(store, "one", 1) is Sent.QUEUED

        assert _send(store, "two", 1, delay=60.0) is Sent.LATER

    def test_a_place_that_became_free_is_taken(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert _park(store, "one", 1).status is PARKED
        assert store.parking.cancel("k", "one").released

        assert _park(store, "two", 1).status is PARKED

    def test_no_more_than_that_many_wait_however_many_come_at_once(self, store: QueueStore) -> None:
        take(store, "k", "a")
        outcomes: list[Status | Sent] = []
        runs = iter([f"run{number}" for number in range(40)])

        def come() -> None:
            for run in runs:
                if len(outcomes) % 2:
                    outcomes.append(_send(store, run, 5))
                else:
                    outcomes.append(_park(store, run, 5).status)

        in_threads(come)

        assert store.inspect("k").waiting == 5
        assert sum(each in (PARKED, Sent.QUEUED) for each in outcomes) == 5
        assert sum(each in (FULL, Sent.FULL) for each in outcomes) == 35
