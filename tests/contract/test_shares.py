"""What goes wrong easily where several hold a key, on the stores that count units."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.values import ALONE, Completion, Limit, ParkRequest, Status, Want

TWO, SHARED = Want(1, 2), Want(1, 0)
RUN = "run:0:0:0"


@pytest.fixture(params=["redis", "memory"])
def store(request, redis_url, prefix):
    url = redis_url if request.param == "redis" else f"memory://{prefix}"
    with closing(open_store(url, prefix)) as opened:
        yield opened


def ask(store, owner, want=TWO, **more):
    return store.acquire(AcquireRequest("k", owner, 30.0, want=want, **more))


def give_up(store, owner, **more):
    return store.release(ReleaseRequest("k", owner, **more))


def owners(store):
    return {each.owner for each in store.inspect("k").holders}


def test_two_deliveries_that_wait_are_not_served_both(store):
    first, second = store.inbox("k", "first"), store.inbox("k", "second")
    for owner in ("x", "y"):
        ask(store, owner)
    ask(store, "first", queue=first, run=RUN)
    ask(store, "second", queue=second, run=RUN, redelivered=True)
    for owner in ("x", "y"):
        give_up(store, owner)

    assert ask(store, "first", queue=first, run=RUN).status is Status.GRANTED
    reply = ask(store, "second", queue=second, run=RUN, redelivered=True)

    assert (reply.status, reply.holder_run) == (Status.BUSY, RUN)
    assert owners(store) == {"first"}
    assert ask(store, "z").status is Status.GRANTED
    for inbox in (first, second):
        inbox.close()


def test_of_a_blocked_and_a_parked_delivery_one_is_served(store):
    inbox = store.inbox("k", "first")
    for owner in ("x", "y"):
        ask(store, owner)
    ask(store, "first", queue=inbox, run=RUN)
    ask(store, "second", queue=ParkRequest(b"again"), run=RUN, redelivered=True)
    for owner in ("x", "y"):
        give_up(store, owner)

    assert ask(store, "first", queue=inbox, run=RUN).status is Status.GRANTED
    assert ask(store, "second", run=RUN, redelivered=True).status is Status.BUSY
    assert owners(store) == {"first"}
    inbox.close()


def test_a_delivery_that_is_deferred_does_not_wait_in_the_queue(store):
    inbox = store.inbox("k", "second")
    ask(store, "first", run=RUN)
    ask(store, "x")

    ask(store, "second", queue=inbox, run=RUN, redelivered=True)

    assert store.inspect("k").waiting == 0
    inbox.close()


def test_one_that_was_exclusive_for_a_while_has_its_slot_and_units_again(store):
    ask(store, "other")
    slot = ask(store, "own").slot
    give_up(store, "other")

    store.units.upgrade("k", "own", 30.0)
    assert store.units.downgrade("k", "own", 30.0).slot == slot == 1
    assert ask(store, "next").slot == 0
    assert store.inspect("k").used == 2


def test_the_weight_counts_again_after_an_upgrade(store):
    ask(store, "own", Want(3, 3))
    store.units.upgrade("k", "own", 30.0)
    store.units.downgrade("k", "own", 30.0)

    assert ask(store, "light", Want(1, 3)).status is Status.BUSY


def test_a_reservation_is_claimed_before_its_upgrade(store):
    with closing(store.inbox("k", "own")) as inbox:
        for owner in ("x", "y"):
            ask(store, owner)
        ask(store, "own", queue=inbox)
        give_up(store, "x")

        assert store.units.upgrade("k", "own", 30.0).status is Status.FREE

        assert ask(store, "own", queue=inbox).status is Status.GRANTED
        assert store.units.upgrade("k", "own", 30.0).status is Status.BUSY


def test_what_is_kept_for_a_retry_under_a_raised_limit_remains_its_own(store):
    store.units.set_limit("k", Limit(3))
    for owner in ("x", "y"):
        ask(store, owner)
    ask(store, "own", Want(1, 4), run=RUN)
    give_up(store, "own", keep_for=(RUN, 30.0))
    ask(store, "", queue=ParkRequest(b"e"), run="other:0:0:0")

    assert ask(store, "again", TWO, run=RUN).status is Status.GRANTED


def test_a_shorter_rest_does_not_end_a_longer_one(store):
    ask(store, "own", ALONE)
    store.units.rest("k", "own", 60.0)
    give_up(store, "own", keep_for=("resting:1", 0.01))

    assert store.inspect("k").rest > 50 or store.inspect("k").remaining > 50


@pytest.mark.parametrize("want", [SHARED, TWO, Want(2, 3)], ids=["shared", "two", "heavy"])
def test_the_end_of_one_that_was_parked_twice_is_known(store, want):
    ask(store, "x", ALONE)
    ask(store, "own", want, queue=ParkRequest(b"e"), run=RUN)
    give_up(store, "x")
    assert ask(store, "own", want, queue=ParkRequest(b"e"), run=RUN).status is Status.GRANTED
    give_up(store, "own", run=RUN, completion=Completion.YES)

    assert ask(store, "later", want, run=RUN, redelivered=True).status is Status.DONE


def test_one_that_is_served_while_it_asks_again_is_counted_once(store):
    inbox = store.inbox("k", "own")
    ask(store, "x", ALONE)
    ask(store, "own", queue=inbox)
    give_up(store, "x")

    assert ask(store, "own").status is Status.GRANTED
    assert (store.inspect("k").used, len(store.inspect("k").holders)) == (1, 1)
    inbox.close()


def test_a_parked_run_shows_what_it_wants(store):
    ask(store, "x", ALONE)
    ask(store, "own", Want(2, 3), queue=ParkRequest(b"e"), run=RUN)

    assert store.parking.parked("k", RUN).want == Want(2, 3)
    assert [each.want for each in store.waiters("k")] == [Want(2, 3)]
