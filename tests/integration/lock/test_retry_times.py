"""When a request that finds a key taken and does not queue is to ask again."""

from __future__ import annotations

import itertools
import math
import time
from contextlib import closing

import pytest
import redis

from celery_distlock.errors import StoreError
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Limit, ParkRequest, Want

LEASE = 60.0
WITHIN = (0.2, 60.0)


@pytest.fixture
def turn(redis_store):
    def ask(usual: float = 0.0, within: tuple[float, float] = WITHIN) -> float:
        return redis_store.retry_delay("k", usual, within, 5.0)

    return ask


def test_the_first_comes_when_the_hold_is_likely_to_end(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))

    assert 8.0 < turn(usual=10.0) <= 10.0


def test_each_further_one_comes_a_part_of_a_hold_later(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))

    turns = [turn(usual=10.0) for _ in range(5)]

    steps = [later - earlier for earlier, later in itertools.pairwise(turns)]
    assert steps == pytest.approx([5.0] * 4, abs=1.0)


def test_waiters_in_the_queue_go_before(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    for number in range(3):
        redis_store.acquire(
            AcquireRequest("k", f"b{number}", LEASE, queue=ParkRequest(b"e"), run=f"run{number}")
        )

    assert 35.0 < turn(usual=10.0) <= 40.0


def test_a_task_of_unknown_duration_gets_a_delay_by_that_of_others(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    turn(usual=10.0)

    assert 13.0 < turn(usual=0.0) <= 15.1


def test_what_others_know_follows_what_is_seen(redis_store, turn, redis_url, prefix):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    for _ in range(8):
        turn(usual=20.0)
    for _ in range(8):
        turn(usual=0.5)

    with closing(redis.Redis.from_url(redis_url)) as client:
        assert 400 < float(client.hget(f"{prefix}:{{k}}:returns", "hold")) < 1000


def test_a_late_holder_is_left_alone_for_the_least(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    time.sleep(0.1)

    assert 4.9 <= turn(usual=0.01, within=(5.0, 60.0)) <= 5.1


def test_a_very_late_holder_is_given_three_quarters_of_that(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    begin = time.monotonic()
    time.sleep(1.0)
    pause = turn(usual=0.01, within=(0.001, 60.0))

    assert 0.75 <= pause <= 0.75 * (time.monotonic() - begin) + 0.1


def enter(redis_store, count):
    for number in range(count):
        redis_store.acquire(AcquireRequest("k", f"a{number}", LEASE, want=Want(1, 0)))


def test_one_of_several_is_likely_to_end_every_so_often(redis_store, turn):
    enter(redis_store, 2)

    assert 4.0 < turn(usual=10.0) <= 5.0


def test_several_are_late_when_the_youngest_is(redis_store, turn):
    enter(redis_store, 1)
    time.sleep(1.0)
    enter(redis_store, 2)

    assert 0.1 < turn(usual=0.5, within=(5.0, 60.0)) <= 0.3

    time.sleep(0.5)
    assert 4.9 <= turn(usual=0.5, within=(5.0, 60.0)) <= 5.1


def test_very_many_are_left_alone_for_the_least(redis_store, turn):
    enter(redis_store, 70)

    assert 4.9 <= turn(usual=0.01, within=(5.0, 60.0)) <= 5.1


def test_waiters_for_a_rate_are_left_alone_for_the_least(redis_store, turn):
    want = Want(1, 0, (Rate(1, per=600.0, burst=1),))
    redis_store.acquire(AcquireRequest("k", "a", LEASE, want=want))
    redis_store.release(ReleaseRequest("k", "a"))
    park = ParkRequest(b"e")
    redis_store.acquire(AcquireRequest("k", "b", LEASE, queue=park, run="run", want=want))

    assert 4.9 <= turn(usual=0.01, within=(5.0, 60.0)) <= 5.1


def test_a_pause_without_an_end_counts_as_a_late_holder(redis_store, turn):
    redis_store.units.set_limit("k", Limit(0))

    assert 4.9 <= turn(within=(5.0, 60.0)) <= 5.1


def test_a_long_pause_without_an_end_is_given_three_quarters_of_that(redis_store, turn):
    begin = time.monotonic()
    redis_store.units.set_limit("k", Limit(0))
    time.sleep(1.0)
    pause = turn(within=(0.001, 60.0))

    assert 0.75 <= pause <= 0.75 * (time.monotonic() - begin) + 0.1


def test_a_task_that_finds_a_pause_with_an_end_comes_then(redis_store, turn):
    redis_store.units.set_limit("k", Limit(0, time.time() + 20.0))

    assert 18.0 < turn() <= 20.1


def test_a_task_that_finds_a_resting_shared_key_comes_when_it_has_rested(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE, want=Want(1, 0)))
    redis_store.units.rest("k", "a", 20.0)
    redis_store.release(ReleaseRequest("k", "a"))

    assert 18.0 < turn() <= 20.1


def test_what_is_too_long_is_said_and_no_turn_kept(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))

    assert turn(usual=10.0, within=(0.1, 5.0)) == math.inf
    assert 8.0 < turn(usual=10.0) <= 10.0


def test_a_turn_keeps_no_request_out(redis_store, turn):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    turn(usual=30.0)
    redis_store.release(ReleaseRequest("k", "a"))

    assert redis_store.acquire(AcquireRequest("k", "b", LEASE)).token


@pytest.mark.parametrize("most", [60.0, 1.0])
def test_what_is_noted_is_forgotten_a_minute_after_the_last_turn_that_may_be(
    redis_store, turn, redis_url, prefix, most
):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    turn(usual=10.0, within=(0.1, most))

    with closing(redis.Redis.from_url(redis_url)) as client:
        left = client.pttl(f"{prefix}:{{k}}:returns") / 1000
    assert most + 50.0 < left <= most + 60.0


@pytest.mark.parametrize("value", [b"", b"abc", b"-1", b"inf", b"nan", b"1e400", b"9" * 30])
@pytest.mark.parametrize("field", ["next", "hold", "token"])
def test_foreign_data_there_counts_for_nothing(redis_store, turn, redis_url, prefix, field, value):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    record = "lock" if field == "token" else "returns"
    with closing(redis.Redis.from_url(redis_url)) as client:
        client.hset(f"{prefix}:{{k}}:{record}", field, value)

    assert 0.0 < turn(usual=1.0) <= 2.0


def test_a_record_of_another_type_is_a_store_error(redis_store, turn, redis_url, prefix):
    redis_store.acquire(AcquireRequest("k", "a", LEASE))
    with closing(redis.Redis.from_url(redis_url)) as client:
        client.set(f"{prefix}:{{k}}:returns", "x")

    with pytest.raises(StoreError):
        turn(usual=1.0)


def test_a_full_server_gives_turns_all_the_same(server, prefix):
    with closing(RedisStore(server.url, prefix)) as store, server.client() as client:
        store.acquire(AcquireRequest("k", "a", LEASE))
        client.config_set("maxmemory", "1kb")

        assert 8.0 < store.retry_delay("k", 10.0, WITHIN, 5.0) <= 10.0
