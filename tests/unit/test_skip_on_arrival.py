"""When a key that is looked at on a task's arrival counts as taken."""

from __future__ import annotations

from contextlib import closing

import pytest
from celery.app.task import Context

from celery_distlock import Key
from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.runtime.invocation import Invocation
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import ALONE, Reply, Status, Want
from celery_distlock.worker.arrival import look_at


@pytest.fixture
def store():
    with closing(MemoryStore("memory://", "refusal")) as store:
        yield store


def is_open(store, run: str, want: Want = ALONE) -> bool:
    return look_at(store, Key("k"), want, run)[1]


@pytest.mark.parametrize("want", [ALONE, Want(1, 0), Want(2, 3)])
@pytest.mark.parametrize("key", [Key("k"), Key("k", capacity=3)])
def test_a_resting_key_without_a_holder_is_taken(store, key, want):
    hold = Hold(store, key, Terms(), label="test")
    acquire(hold)
    hold.cool_down(60)
    release(hold)

    state = store.inspect("k")

    assert not state.token
    assert state.rest > 0
    assert not is_open(store, "run", want)


@pytest.mark.parametrize("want", [ALONE, Want(1, 3)])
def test_a_free_key_is_not_taken(store, want):
    assert is_open(store, "run", want)


@pytest.mark.parametrize("ends", [False, True], ids=["its attempt", "kept for it"])
@pytest.mark.parametrize("want", [ALONE, Want(1, 2)], ids=["alone", "shared"])
def test_what_is_for_a_retry_or_will_be_is_not_taken(store, want, ends):
    if want != ALONE:
        store.acquire(AcquireRequest("k", "other", 30.0, run="other:0:0:0", want=want))
    store.acquire(AcquireRequest("k", "a", 30.0, run="task:0:0:0", want=want))
    if ends:
        kept = ("task:1:0:0", 30.0)
        store.release(ReleaseRequest("k", "a", run="task:0:0:0", keep_for=kept))

    assert is_open(store, "task:1:0:0", want)
    assert not is_open(store, "another:1:0:0", want)


@pytest.mark.parametrize("want", [ALONE, Want(1, 2)], ids=["alone", "shared"])
def test_what_is_kept_for_a_retry_is_its_own_with_any_holder_on_its_arrival(store, want):
    store.acquire(AcquireRequest("k", "a", 30.0, run="task:0:0:0", want=want))
    store.release(ReleaseRequest("k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 30.0)))
    retry = Invocation.__new__(Invocation)
    retry.store, retry.execution_id = store, "task:1:0:0"
    retry.request = Context(retries=1)
    taken = Reply(Status.BUSY, 0.0, holder="x", holder_run="other:0:0:0")

    assert retry.is_held_by_an_earlier_attempt("k", taken)
    assert not retry.is_held_by_an_earlier_attempt("another", taken)
