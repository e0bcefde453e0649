"""Requests and answers that get lost on the way to some nodes or to all."""

from __future__ import annotations

import pytest

from celery_distlock.errors import QuorumError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Completion, RenewOutcome, Status
from tests.losses import Losses
from tests.stores.redlock.records import owners, renewed, take
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("patience")

executed_or_not = pytest.mark.parametrize("executed", [False, True], ids=["request", "answer"])
# Each node's thread asks twice at once. So 2 is up to one node, 4 two, 10 all, or some of all.
some_times = pytest.mark.parametrize("times", [1, 2, 5])


@pytest.fixture
def losses(monkeypatch, store):
    take(store, "warm", "warm")
    return Losses(monkeypatch)


@some_times
@executed_or_not
def test_an_acquisition_is_one_hold(masters, store, losses, executed, times):
    losses.lose("vote", executed=executed, times=times)

    token = take(store, "a")

    assert losses.lost
    assert store.inspect("k").token == token
    assert store.release(ReleaseRequest("k", "a")).released
    wait_until(lambda: owners(masters) == [""] * 5, what="all votes to be given back")


@executed_or_not
def test_an_acquisition_that_no_node_answers_leaves_nothing(masters, store, losses, executed):
    losses.lose("vote", executed=executed, times=10)

    with pytest.raises(QuorumError):
        store.acquire(AcquireRequest("k", "a", 30.0))

    wait_until(lambda: owners(masters) == [""] * 5, what="all votes to be given back")


@some_times
@executed_or_not
def test_a_key_rests_at_all_masters_though_answers_are_lost(
    masters, store, losses, executed, times
):
    take(store, "a")
    losses.lose("release", executed=executed, times=times)
    request = ReleaseRequest("k", "a", keep_for=("resting:x", 60.0))

    assert store.release(request).released

    assert losses.lost
    wait_until(lambda: owners(masters) == ["parked:resting:x"] * 5, what="all votes to rest")
    assert store.acquire(AcquireRequest("k", "b", 30.0)).status is Status.BUSY
    assert store.inspect("k").owner == "parked:resting:x"


def test_a_key_rests_on_without_a_minority_of_its_masters(masters, store):
    take(store, "a")
    for server in masters.servers[:2]:
        server.stop()
    request = ReleaseRequest("k", "a", keep_for=("resting:x", 60.0))

    assert store.release(request).released

    assert store.acquire(AcquireRequest("k", "b", 30.0)).status is Status.BUSY
    assert store.inspect("k").owner == "parked:resting:x"


@some_times
@executed_or_not
def test_a_release_is_one_release(masters, store, losses, executed, times):
    take(store, "a")
    losses.lose("release", executed=executed, times=times)

    assert store.release(ReleaseRequest("k", "a")).released

    assert losses.lost
    wait_until(lambda: owners(masters) == [""] * 5, what="all votes to be given back")


@executed_or_not
def test_a_release_that_no_node_answers_is_done_all_the_same(masters, store, losses, executed):
    take(store, "a", run="run")
    losses.lose("release", executed=executed, times=10)

    with pytest.raises(QuorumError):
        store.release(
            ReleaseRequest("k", "a", run="run", completion=Completion.YES_AND_MAY_COME_AGAIN)
        )

    wait_until(lambda: owners(masters) == [""] * 5, what="all votes to be given back")
    assert (
        store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
        is Status.DONE
    )


@some_times
@executed_or_not
def test_a_renewal_is_confirmed(store, losses, executed, times):
    take(store, "a", lease=20.0)
    losses.lose("renew", executed=executed, times=times)

    assert renewed(store, "a") is RenewOutcome.RENEWED

    assert store.inspect("k").remaining > 20.0


def test_a_renewal_that_no_node_answers_is_unknown(store, losses):
    take(store, "a")
    losses.lose("renew", executed=True, times=10)

    assert renewed(store, "a") is RenewOutcome.UNKNOWN
