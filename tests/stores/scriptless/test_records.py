"""Tokens, renewals and losses where each step is a command of its own."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import closing

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockLostError, StoreError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.scriptless import ScriptlessStore
from celery_distlock.stores.values import Completion, Ownership, RenewOutcome, Status
from tests.losses import Losses

HOUR = 3600 * 10**6  # microseconds
executed_or_not = pytest.mark.parametrize("executed", [False, True], ids=["request", "answer"])
times = pytest.mark.parametrize("times", [1, 2])


@pytest.fixture
def another(redis_server, prefix):
    with closing(ScriptlessStore(f"{redis_server.url}?scripts=off", prefix)) as made:
        yield made


@pytest.fixture
def losses(monkeypatch, store):
    store.acquire(AcquireRequest("warm", "warm", 30.0))
    return Losses(monkeypatch)


def take(store, owner, key="k", lease=30.0, **more):
    reply = store.acquire(AcquireRequest(key, owner, lease, **more))
    assert reply.status is Status.GRANTED
    return reply.token


def renewed(store, owner, lease=30.0):
    ((outcome, _),) = store.renew([Ownership("k", owner, lease)], 5.0)
    return outcome


# Tokens


def test_a_token_is_above_the_last_though_the_clock_was_set_back(redis_server, store, prefix):
    before = take(store, "a")
    store.release(ReleaseRequest("k", "a"))
    with redis_server.client() as client:
        client.zadd(f"{prefix}:{{k}}:fence", {"last": before + HOUR})

    assert take(store, "b") == before + HOUR + 1


def test_a_token_is_the_time_though_its_record_is_gone(redis_server, store, prefix):
    before = take(store, "a")
    store.release(ReleaseRequest("k", "a"))
    with redis_server.client() as client:
        client.delete(f"{prefix}:{{k}}:fence")

    assert take(store, "b") > before


def test_one_that_was_too_slow_with_the_fence_is_not_granted(
    redis_server, store, another, prefix, monkeypatch
):
    """Between its two round trips the key has gone to another, which has raised the fence."""
    settle, tokens = ScriptlessStore._settle, []

    def slow(self, wanted, seen):
        if wanted.owner == "slow" and not tokens:
            with redis_server.client() as client:
                client.delete(f"{prefix}:{{k}}:lock")
            tokens.append(take(another, "quick"))
        return settle(self, wanted, seen)

    monkeypatch.setattr(ScriptlessStore, "_settle", slow)

    assert store.acquire(AcquireRequest("k", "slow", 30.0)).holder == "quick"
    another.release(ReleaseRequest("k", "quick"))
    assert take(store, "next") > tokens[0]


def test_the_fence_is_raised_before_the_token_is_written(monkeypatch, store):
    store.acquire(AcquireRequest("warm", "warm", 30.0))
    losses = Losses(monkeypatch)

    take(store, "a")

    words = [call.head.split(b"\r\n")[1] for calls in losses.sent for call in calls]
    assert words.index(b"ZADD") > words.index(b"ZSCORE")
    assert words.index(b"ZADD") < words.index(b"SET", 1)


def test_a_grant_takes_two_round_trips_and_a_look_one(monkeypatch, store):
    store.acquire(AcquireRequest("warm", "warm", 30.0))
    losses = Losses(monkeypatch)

    take(store, "a")
    assert len(losses.sent) == 2
    store.acquire(AcquireRequest("k", "b", 30.0))
    assert len(losses.sent) == 3
    renewed(store, "a")
    assert len(losses.sent) == 4
    store.release(ReleaseRequest("k", "a"))
    assert len(losses.sent) == 5


# Renewals


def test_a_shorter_renewal_does_not_take_from_a_longer_one(store, another):
    take(store, "a", lease=60.0)

    assert renewed(store, "a", 5.0) is RenewOutcome.RENEWED
    assert store.inspect("k").remaining > 50
    assert renewed(another, "a", 5.0) is RenewOutcome.RENEWED
    assert store.inspect("k").remaining > 50


def test_many_renewals_share_a_round_trip(store, another, monkeypatch):
    holds = [Ownership(f"k{n}", "a", 30.0) for n in range(50)]
    for hold in holds:
        take(store, "a", hold.key)
    another.acquire(AcquireRequest("warm", "warm", 30.0))
    losses = Losses(monkeypatch)

    assert {outcome for outcome, _ in store.renew(holds, 5.0)} == {RenewOutcome.RENEWED}
    assert len(losses.sent) == 1
    assert {outcome for outcome, _ in another.renew(holds, 5.0)} == {RenewOutcome.RENEWED}
    assert len(losses.sent) == 3


def test_one_spoilt_record_does_not_keep_others_from_being_renewed(
    redis_server, store, another, prefix
):
    take(store, "a")
    with redis_server.client() as client:
        client.set(f"{prefix}:{{l}}:lock", "something")

    outcomes = another.renew([Ownership("l", "a", 30.0), Ownership("k", "a", 30.0)], 5.0)

    assert [outcome for outcome, _ in outcomes] == [RenewOutcome.UNKNOWN, RenewOutcome.RENEWED]


# Losses


@times
@executed_or_not
@pytest.mark.parametrize("word", ["NX", "ZADD"])
def test_an_acquisition_is_one_hold(store, losses, word, executed, times):
    losses.lose(word, executed=executed, times=times)

    token = take(store, "a")

    assert losses.lost
    assert store.inspect("k").token == token
    assert renewed(store, "a") is RenewOutcome.RENEWED
    assert store.release(ReleaseRequest("k", "a")).released
    assert not store.inspect("k").token


@times
@executed_or_not
def test_a_release_is_one_release(store, losses, executed, times):
    take(store, "a")
    losses.lose("DELIFEQ", executed=executed, times=times)

    assert store.release(ReleaseRequest("k", "a")).released

    assert losses.lost
    assert not store.inspect("k").token


@executed_or_not
def test_a_key_is_kept_for_a_run_though_the_answer_was_lost(store, losses, executed):
    token = take(store, "a", run="run")
    losses.lose("IFEQ", executed=executed, times=1)

    assert store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 30.0))).released

    assert take(store, "b", run="run") == token


def test_a_renewal_without_an_answer_is_unknown(store, losses):
    take(store, "a")
    losses.lose("IFEQ", executed=True, times=1)

    assert renewed(store, "a") is RenewOutcome.UNKNOWN
    assert renewed(store, "a") is RenewOutcome.RENEWED


def test_a_request_that_is_never_answered_is_an_outage(store, losses):
    losses.lose("NX", executed=True, times=3)

    with pytest.raises(StoreUnavailableError):
        store.acquire(AcquireRequest("k", "a", 30.0))

    store.release(ReleaseRequest("k", "a"))
    assert take(store, "b")


def test_a_run_is_marked_as_ended_before_its_key_is_free(store, losses):
    take(store, "a", run="run")
    del losses.sent[:]

    store.release(ReleaseRequest("k", "a", run="run", completion=Completion.YES_AND_MAY_COME_AGAIN))

    words = [call.head.split(b"\r\n")[1] for calls in losses.sent for call in calls]
    assert words == [b"SET", b"DELIFEQ"]


# Locks and processes


def test_a_lock_is_reentrant_exclusive_and_can_be_lost(redis_server, store, prefix):
    lock = Lock("k", store=store)
    with lock, lock:
        taken = []
        thread = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=0.05)))
        thread.start()
        thread.join()
        assert taken == [False]
    assert not lock.locked()
    lock.acquire()
    with redis_server.client() as client:
        client.delete(f"{prefix}:{{k}}:lock")
    with pytest.raises(LockLostError):
        lock.release()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(store):
    token = take(store, "a")
    pid = os.fork()
    if not pid:
        try:
            reply = store.acquire(AcquireRequest("k", "b", 30.0))
            good = reply.status is Status.BUSY and reply.token == token
            good = (
                good and store.acquire(AcquireRequest("child", "c", 30.0)).status is Status.GRANTED
            )
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    for n in range(50):
        take(store, "a", f"k{n}")

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.inspect("child").owner == "c"


# What other software has written


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "\xff",
        '{"owner": 5, "run": "", "token": 1}',
        '{"owner": "o", "run": null, "token": 1}',
        '{"owner": "o", "run": "", "token": "1"}',
        '{"owner": "o", "run": "", "token": 1e400}',
        '{"owner": "o", "run": "", "token": 999999999999999999999}',
        None,
    ],
    ids=["deep", "latin", "owner", "run", "token", "infinite", "too large", "a list"],
)
def test_a_record_that_is_none_of_ours_spoils_its_own_key_alone(
    redis_server, store, prefix, text, caplog
):
    gc.collect()  # else what others have left may be finalized where no further call can be made
    take(store, "a", "good")
    with redis_server.client() as client:
        if text is None:
            client.rpush(f"{prefix}:{{bad}}:lock", "x")
        else:
            client.set(f"{prefix}:{{bad}}:lock", text.encode("latin-1"))

    states = store.inspect_many(["bad", "good"])
    assert sorted(key for keys in store.find_keys() for key in keys) == ["bad", "good"]
    for use in (
        store.inspect,
        lambda key: take(store, "b", key),
        lambda key: store.release(ReleaseRequest(key, "b")),
    ):
        with pytest.raises(StoreError, match="'bad'") as caught:
            use("bad")
        assert not isinstance(caught.value, StoreUnavailableError)

    assert [state.owner for state in states] == ["", "a"]
    assert "not listed" in caplog.text


@pytest.mark.parametrize("last", ["inf", "-inf", "1e300", "1.5"])
def test_a_last_token_that_is_none_keeps_no_request_from_the_key(redis_server, store, prefix, last):
    with redis_server.client() as client:
        client.zadd(f"{prefix}:{{k}}:fence", {"last": last})

    assert 10**15 < take(store, "a") < 2**53
