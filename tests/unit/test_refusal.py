"""When a key that is looked at on a task's arrival counts as taken."""

from __future__ import annotations

import pytest
from celery.app.task import Context

from celery_distlock import Key
from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.engine.wants import want_of
from celery_distlock.runtime.invocation import Invocation
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import ALONE, Holder, KeyState, Reply, Status, Want
from celery_distlock.worker.in_flight import leaves_room


@pytest.mark.parametrize("want", [ALONE, Want(1, 0), Want(2, 3)])
@pytest.mark.parametrize("key", [Key("k"), Key("k", capacity=3)])
def test_a_key_that_rests_and_that_nobody_has_is_taken(key, want):
    store = MemoryStore("memory://", "test")
    hold = Hold(store, key, Terms(), label="test")
    acquire(hold)
    hold.cool_down(60)
    release(hold)

    state = store.inspect("k")

    assert not state.token
    assert state.rest > 0
    assert not leaves_room(state, want, "run")


@pytest.mark.parametrize("key", [Key("k"), Key("k", capacity=3)])
def test_a_free_key_is_not_taken(key):
    state = MemoryStore("memory://", "test").inspect("k")
    assert leaves_room(state, want_of(key), "run")


@pytest.mark.parametrize("run", ["task:1:0:0", "task:0:0:0"], ids=["kept for it", "its attempt"])
@pytest.mark.parametrize("want", [ALONE, Want(1, 2)], ids=["alone", "shared"])
def test_what_is_for_a_retry_or_will_be_is_not_taken(run, want):
    others = (Holder("x", "other:0:0:0", 1, 0, 0.0, 9.0), Holder("y", run, 1, 1, 0.0, 9.0))
    alone = want == ALONE
    state = KeyState("y" if alone else "x", 1, run if alone else "other:0:0:0", 0.0, 9.0, 3)
    state = state._replace(holders=() if alone else others, used=2)

    assert leaves_room(state, want, "task:1:0:0")
    assert not leaves_room(state, want, "another:1:0:0")


@pytest.mark.parametrize("want", [ALONE, Want(1, 2)], ids=["alone", "shared"])
def test_what_is_kept_for_a_retry_is_its_own_whoever_had_the_key_on_its_arrival(want):
    store = MemoryStore("memory://", "test")
    store.acquire(AcquireRequest("k", "a", 30.0, run="task:0:0:0", want=want))
    store.release(ReleaseRequest("k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 30.0)))
    retry = Invocation.__new__(Invocation)
    retry.store, retry.execution_id = store, "task:1:0:0"
    retry.request = Context(retries=1)
    taken = Reply(Status.BUSY, 0.0, holder="x", holder_run="other:0:0:0")

    assert retry.is_held_by_an_earlier_attempt("k", taken)
    assert not retry.is_held_by_an_earlier_attempt("another", taken)
