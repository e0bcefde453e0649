"""From shared to alone, and back."""

from collections.abc import Callable

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import Limit, RenewOutcome, Status, Want
from celery_distlock.testing.contract.actions import (
    BUSY,
    GRANTED,
    PATIENCE,
    SHARED,
    all_of,
    ask,
    enter,
    leave,
    renew,
    runs_of,
    take,
    wait_for,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park

__all__ = ["Upgrading"]

DEADLOCK, FREE = Status.DEADLOCK, Status.FREE


class Upgrading(Given):
    """A sharing holder gets all of the key at last, and shares it again."""

    def test_the_only_sharer_has_it_exclusively_at_once(self, store: QueueStore) -> None:
        shared = take(store, "k", "a", want=SHARED)

        reply = store.units.upgrade("k", "a", 30.0)

        assert reply.status is GRANTED
        assert reply.token > shared
        assert ask(store, "k", "b", want=SHARED).status is BUSY
        assert store.inspect("k").holders == ()
        leave(store, "k", "a")
        take(store, "k", "b", want=SHARED)

    def test_it_may_be_asked_for_again(self, store: QueueStore) -> None:
        take(store, "k", "a", want=SHARED)

        first, again = (store.units.upgrade("k", "a", 30.0) for _ in range(2))

        assert (first.status, first.token) == (again.status, again.token) == (GRANTED, first.token)

    def test_what_is_not_its_own_is_not_given(self, store: QueueStore) -> None:
        assert store.units.upgrade("k", "a", 30.0).status is FREE
        enter(store, "k", "b")
        assert store.units.upgrade("k", "a", 30.0).status is FREE
        assert store.units.downgrade("k", "a", 30.0).status is FREE
        leave(store, "k", "b")
        take(store, "k", "b")
        assert store.units.upgrade("k", "a", 30.0).status is FREE
        assert store.units.downgrade("k", "a", 30.0).status is FREE

    def test_a_request_that_does_not_wait_keeps_no_other_out(self, store: QueueStore) -> None:
        enter(store, "k", "ab")

        assert store.units.upgrade("k", "a", 30.0).status is BUSY

        take(store, "k", "c", want=SHARED)
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]

    def test_no_request_is_granted_while_one_waits_for_the_others_to_leave(
        self, store: QueueStore
    ) -> None:
        token = enter(store, "k", "ab")
        inbox = store.inbox("k", "a")
        assert store.units.upgrade("k", "a", 30.0, inbox).status is BUSY

        assert ask(store, "k", "c", want=SHARED).status is BUSY
        assert ask(store, "k", "d", want=Want(1, 9)).status is BUSY
        leave(store, "k", "b")

        inbox.wait(2 * PATIENCE)
        reply = store.units.upgrade("k", "a", 30.0, inbox)
        assert reply.status is GRANTED
        assert reply.token > token
        assert ask(store, "k", "c", want=SHARED).status is BUSY
        inbox.close()

    def test_a_request_for_several_keys_is_not_granted_either(self, store: QueueStore) -> None:
        enter(store, "k", "ab")
        inbox = store.inbox("k", "a")
        store.units.upgrade("k", "a", 30.0, inbox)

        assert store.acquire_all(["k", "l"], ["c", "d"], 30.0, wants=[SHARED, SHARED]) is None
        inbox.close()

    def test_it_goes_before_all_queued_requests(self, store: QueueStore) -> None:
        enter(store, "k", "ab")
        writer = wait_for(store, "k", "writer")
        inbox = store.inbox("k", "a")
        store.units.upgrade("k", "a", 30.0, inbox)

        leave(store, "k", "b")

        assert ask(store, "k", "writer", queue=writer.inbox).status is BUSY
        assert store.units.upgrade("k", "a", 30.0, inbox).status is GRANTED
        leave(store, "k", "a")
        take(store, "k", "writer", queue=writer.inbox)
        inbox.close()

    def test_a_second_upgrade_is_refused_because_both_would_wait_for_ever(
        self, store: QueueStore
    ) -> None:
        enter(store, "k", "ab")
        inbox = store.inbox("k", "a")
        store.units.upgrade("k", "a", 30.0, inbox)

        assert store.units.upgrade("k", "b", 30.0, store.inbox("k", "b")).status is DEADLOCK
        assert store.units.upgrade("k", "b", 30.0).status is DEADLOCK

        assert renew(store, ("k", "b", 30.0)) == [RenewOutcome.RENEWED]
        assert store.units.upgrade("k", "a", 30.0, inbox).status is BUSY
        leave(store, "k", "b")
        assert store.units.upgrade("k", "a", 30.0, inbox).status is GRANTED
        inbox.close()

    def test_one_that_stops_waiting_has_what_it_had(self, store: QueueStore) -> None:
        token = enter(store, "k", "ab")
        inbox = store.inbox("k", "a")
        store.units.upgrade("k", "a", 30.0, inbox)

        reply = store.units.downgrade("k", "a", 30.0)

        assert (reply.status, reply.token) == (GRANTED, token)
        assert take(store, "k", "c", want=SHARED) == token
        assert store.units.upgrade("k", "b", 30.0).status is BUSY
        inbox.close()

    def test_one_that_stops_waiting_admits_those_in_the_queue(self, store: QueueStore) -> None:
        enter(store, "k", "ab")
        inbox = store.inbox("k", "a")
        capacity = QueueStore.of(store)
        capacity.units.upgrade("k", "a", 30.0, inbox)
        park(store, "k", "run", want=SHARED)

        woken = all_of(capacity.units.downgrade("k", "a", 30.0).wake)

        assert runs_of(woken) == ["run"]
        inbox.close()

    def test_if_it_leaves_others_enter_again(self, store: QueueStore) -> None:
        token = enter(store, "k", "ab")
        inbox = store.inbox("k", "a")
        store.units.upgrade("k", "a", 30.0, inbox)

        leave(store, "k", "a")

        assert take(store, "k", "c", want=SHARED) == token
        inbox.close()

    def test_if_its_lease_ends_others_enter_again(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "b", 30.0, want=SHARED)
        take(store, "k", "a", 1.0, want=SHARED)
        inbox = store.inbox("k", "a")
        store.units.upgrade("k", "a", 1.0, inbox)
        pass_time(1.5)

        take(store, "k", "c", want=SHARED)
        assert store.units.upgrade("k", "b", 30.0).status is BUSY
        inbox.close()

    def test_if_the_lease_of_the_last_other_ends_it_has_it_alone(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 30.0, want=SHARED)
        take(store, "k", "b", 1.0, want=SHARED)
        inbox = store.inbox("k", "a")
        assert store.units.upgrade("k", "a", 30.0, inbox).status is BUSY
        pass_time(1.5)

        assert store.units.upgrade("k", "a", 30.0, inbox).status is GRANTED
        inbox.close()

    # Back

    def test_one_that_was_exclusive_shares_with_a_new_token(self, store: QueueStore) -> None:
        alone = take(store, "k", "a")

        reply = store.units.downgrade("k", "a", 30.0)

        assert reply.status is GRANTED
        assert reply.token > alone
        assert take(store, "k", "b", want=SHARED) == reply.token
        assert ask(store, "k", "c").status is BUSY
        assert store.inspect("k").used == 2

    def test_waiting_sharers_enter_up_to_the_next_request_that_does_not(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        for run in ("reader1", "reader2"):
            park(store, "k", run, want=SHARED)
        park(store, "k", "writer")
        park(store, "k", "late", want=SHARED)

        woken = all_of(QueueStore.of(store).units.downgrade("k", "a", 30.0).wake)

        assert runs_of(woken) == ["reader1", "reader2"]

    def test_a_second_delivery_that_waits_is_not_admitted_during_the_first(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", redelivered=True, want=SHARED)
        park(store, "k", "other", want=SHARED)

        woken = all_of(QueueStore.of(store).units.downgrade("k", "a", 30.0).wake)

        assert runs_of(woken) == ["other"]

    def test_no_request_is_granted_between_shared_and_exclusive_and_back(
        self, store: QueueStore
    ) -> None:
        tokens = [take(store, "k", "a", run="run", want=SHARED)]
        for _ in range(2):
            tokens.append(store.units.upgrade("k", "a", 30.0).token)
            tokens.append(store.units.downgrade("k", "a", 30.0).token)

        assert tokens == sorted(set(tokens))
        assert [(each.owner, each.run) for each in store.inspect("k").holders] == [("a", "run")]
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
        assert store.release(ReleaseRequest("k", "a")) == (True, None)
        assert not store.inspect("k").token

    def test_it_shares_though_an_operator_paused_the_key(self, store: QueueStore) -> None:
        take(store, "k", "a")
        store.units.set_limit("k", Limit(0))

        assert store.units.downgrade("k", "a", 30.0).status is GRANTED

        assert store.inspect("k").used == 1
        assert ask(store, "k", "b", want=SHARED).status is BUSY
