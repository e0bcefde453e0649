"""What the store keeps in Redis, and what it does when that is spoilt, lost or refused."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import redis

from celery_distlock.errors import StoreError
from celery_distlock.keys import slot_name
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest, queue_store
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.redis.connections import ConnectionPool
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import Identity, SendRequest
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    Limit,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Route,
    Want,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    AGAIN,
    BUSY,
    DONE,
    GRANTED,
    HOSTILE_KEYS,
    holder,
    leave,
    take,
    take_all,
    wait_for,
)
from tests import servers
from tests.contract.grace import lengthen
from tests.contract.parts.actions import park, swept, work
from tests.contract.parts.sending import send
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def redis_store(redis_url: str, prefix: str) -> Iterator[RedisStore]:
    with closing(RedisStore(redis_url, prefix)) as made:
        yield made


def records(redis_url, prefix):
    with redis.Redis.from_url(redis_url) as client:
        return {
            key.decode().removeprefix(f"{prefix}:"): client.pttl(key)
            for key in servers.keys(redis_url, prefix)
        }


def test_tokens_rise_though_the_keys_records_are_deleted(redis_store, redis_url, prefix):
    first = take(redis_store, "k", "a")
    servers.delete_keys(redis_url, prefix)

    assert take(redis_store, "k", "b") > first


def test_tokens_rise_though_the_servers_clock_was_set_back(redis_store, redis_url, prefix):
    ahead = int((time.time() + 600) * 1e6)
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}:{{k}}:fence", ahead)

    assert take(redis_store, "k", "a") == ahead + 1
    redis_store.release(ReleaseRequest("k", "a"))
    assert take(redis_store, "k", "b") == ahead + 2


@pytest.mark.parametrize("of_two_keys", [False, True], ids=["one key", "two keys"])
def test_an_arrival_before_the_servers_clock_was_set_back_stays_before(
    redis_store, redis_url, prefix, of_two_keys
):
    redis_store.acquire(AcquireRequest("k", "a", 60.0))

    def park(run: str) -> None:
        queue, arrival = ParkRequest(b"envelope"), redis_store.time(5.0)
        if of_two_keys:
            queue_store.reserve_or_queue(
                redis_store, StandRequest(run, Route(("k", "l")), arrival, queue)
            )
        else:
            request = AcquireRequest("k", "", 60.0, queue=queue, run=run, arrival=arrival)
            redis_store.acquire(request)

    park("first")
    with closing(redis.Redis.from_url(redis_url)) as client:
        client.zincrby(f"{prefix}:{{k}}:queue", 600e6, "p:first")
    park("second")
    park("third")

    assert [each.run for each in redis_store.waiters("k")] == ["first", "second", "third"]


def test_numbers_without_an_end_are_read_as_great_ones(redis_store, redis_url, prefix):
    nines = "9" * 400
    with redis.Redis.from_url(redis_url) as client:
        facts = {"count": "1", "token": 7, "rest": "inf", "used": "nan", "next": "inf"}
        grant = f"{nines} {nines} -1 h 0 {nines} 2 ".encode() + b"a\xff" + bytes(range(256))
        client.hset(f"{prefix}:{{k}}:lock", mapping={**facts, b"g:a\xff": grant})

    state = redis_store.inspect("k")

    assert (state.owner, state.token, state.since) == ("a\udcff", 7, 0.0)
    assert state.run.encode("utf-8", "surrogateescape") == bytes(range(256))
    assert min(state.remaining, state.used, state.rest) > 1e9
    assert redis_store.acquire(AcquireRequest("k", "b", 60.0)).holder == "a\udcff"


def test_a_waiter_whose_inbox_is_gone_is_passed_over(redis_store, redis_url, prefix, monkeypatch):
    lengthen(monkeypatch, GRANT=30.0)
    take(redis_store, "k", "a")
    dead = RedisStore(redis_url, prefix)
    wait_for(dead, "k", "dead")
    wait_for(redis_store, "k", "alive")
    with redis.Redis.from_url(redis_url) as client:
        (channel,) = set(client.pubsub_channels(f"{prefix}:inbox:*")) - {
            redis_store._inboxes.channel.encode()
        }
        dead.close()
        wait_until(lambda: client.pubsub_numsub(channel)[0][1] == 0, what="the inbox to close")

    redis_store.release(ReleaseRequest("k", "a"))

    assert holder(redis_store, "k") == "alive"


def test_a_repeated_request_for_several_keys_is_the_same(redis_store):
    assert take_all(redis_store, "kl", "ab") == take_all(redis_store, "kl", "ab")


def test_a_repeated_request_for_several_keys_renews_them(redis_store):
    take_all(redis_store, "kl", "ab")
    for key, owner in zip("kl", "ab", strict=True):
        assert redis_store.acquire(AcquireRequest(key, owner, 30.0)).status is GRANTED
    time_left = redis_store.acquire_all(["k", "l"], ["a", "b"], 60.0, run="run")

    assert time_left is not None
    assert min(redis_store.inspect(key).remaining for key in "kl") > 50.0


def test_what_a_lost_request_for_several_keys_has_taken_is_given_back(
    redis_store, prefix, monkeypatch
):
    # The first attempt is executed, its answer lost; before the second one, a key changes hands.
    exchange, attempts = ConnectionPool.exchange, []

    def lose_the_first_answer(pool, calls):
        answers = exchange(pool, calls)
        if not calls[0].key.startswith(prefix.encode()):
            return answers  # another store's, in the background
        attempts.append(calls)
        if len(attempts) == 1:
            monkeypatch.setattr(ConnectionPool, "exchange", exchange)
            redis_store.release(ReleaseRequest("l", "b"))
            take(redis_store, "l", "z")
            raise redis.ConnectionError("lost")
        return answers

    monkeypatch.setattr(ConnectionPool, "exchange", lose_the_first_answer)

    assert take_all(redis_store, "kl", "ab") is None
    assert [holder(redis_store, key) for key in "kl"] == ["", "z"]


def test_a_cluster_takes_one_key_at_a_time(private_server):
    server = private_server(options={"cluster-enabled": "yes"})
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
    with closing(RedisStore(f"redis+cluster://127.0.0.1:{server.port}", "p")) as store:
        assert take_all(store, "kl", "ab") is None
        take(store, "k", "a")


def test_a_key_whose_records_are_spoilt_does_not_keep_others_from_being_swept(
    redis_store, redis_url, prefix, caplog
):
    for key in ("spoilt", "sound"):
        take(redis_store, key, "a")
        park(redis_store, key, f"run-{key}")
    servers.bring_nearer(redis_url, prefix, 30.0)
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}:{{spoilt}}:woken", "not a sorted set")

    (wake,) = wait_until(lambda: swept(redis_store), what="the sound key to be swept")

    assert wake.run == "run-sound"
    wait_until(lambda: swept(redis_store) == [], what="another sweep")
    logged = [record for record in caplog.records if "spoilt" in record.getMessage()]
    assert len(logged) == 1


def test_a_run_whose_message_no_worker_takes_is_sent_daily_for_a_month_and_then_forgotten(
    redis_store, redis_url, prefix
):
    take(redis_store, "k", "a")
    park(redis_store, "k", "run")
    wake = redis_store.release(ReleaseRequest("k", "a")).wake
    tasks, woken = f"{prefix}:{{k}}:tasks", f"{prefix}:{{k}}:woken"
    days = 0
    with redis.Redis.from_url(redis_url) as client:
        while client.hexists(tasks, "e:run") and days < 40:
            redis_store.parking.mark_published(wake)
            days += client.zscore(woken, "run") / 1000 - time.time() > 80_000
            servers.bring_nearer(redis_url, prefix, 90_000.0)
            client.delete(f"{prefix}:sweeper")
            list(redis_store.parking.sweep(1.0))

        assert days == 30
        left = {key.rpartition(b":")[2] for key in client.scan_iter(f"{prefix}:{{k}}:*")}
    assert left.isdisjoint({b"tasks", b"woken", b"queue"})


def test_a_full_server_remembers_what_is_unsettled(private_server):
    server = private_server()
    with closing(RedisStore(server.url, "p")) as full:
        take(full, "k", "a", run="run")
        with server.client() as client:
            client.config_set("maxmemory", "1")
        full.release(ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED))
        assert full.drop(WokenTask(slot_name("k"), "run", b"")).released
        with server.client() as client:
            client.config_set("maxmemory", "0")

        assert (
            full.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status is DONE
        )


def test_a_run_whose_channel_is_closed_is_given_back_to_be_sent(redis_store, redis_url):
    channel = redis_store.channels.open_channel(lambda wake: None)
    take(redis_store, "k", "a")
    redis_store.acquire(
        AcquireRequest("k", "b", 30.0, queue=ParkRequest(b"e", channel.address), run="run")
    )
    channel.close()
    channel.close()
    with redis.Redis.from_url(redis_url) as client:
        wait_until(
            lambda: client.pubsub_numsub(channel.address)[0][1] == 0,
            what="the channel to be closed",
        )

    assert redis_store.release(ReleaseRequest("k", "a")).wake == WokenTask("k", "run", b"e")


def test_what_remains_in_redis_is_the_last_token_and_what_has_ended_for_an_hour(
    redis_store, redis_url, prefix
):
    work(redis_store)
    take(redis_store, "plain", "a")
    redis_store.release(ReleaseRequest("plain", "a"))

    left = records(redis_url, prefix)

    assert set(left) == {"{k}:fence", "{k}:done", "{plain}:fence", "parked"}
    lasting = {name: ttl for name, ttl in left.items() if name != "parked"}
    assert all(0 < ttl <= 1.1 * 3_600_000 for ttl in lasting.values())


def test_every_record_of_a_key_is_in_one_cluster_slot(redis_store, redis_url, prefix):
    for n, key in enumerate(HOSTILE_KEYS.values()):
        if key.isprintable() or "\ud800" not in key:
            take(redis_store, key, "a", run="r")
            wait_for(redis_store, key, f"w{n}")
            park(redis_store, key, "run")
            redis_store.release(ReleaseRequest(key, "a", run="r", completion=AGAIN))

    tags: dict[bytes, set[bytes]] = {}
    for record in servers.keys(redis_url, prefix):
        if b"{" in record:
            tag = record.split(b"{", 1)[1].split(b"}", 1)[0]
            tags.setdefault(tag, set()).add(record.rpartition(b":")[2])
    assert len(tags) == len(HOSTILE_KEYS) - 1
    assert all({b"lock", b"fence", b"tasks"} <= names for names in tags.values())


def test_identities_that_mean_nothing_are_removed_by_a_sweep(redis_store, redis_url, prefix):
    for number in range(3):
        send(redis_store, "k", f"run-{number}", identity=Identity(f"same-{number}"))
    take(redis_store, "k", "a", run="run-0", redelivered=True)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert len(client.hgetall(f"{prefix}:{{k}}:calls")) == 3

        list(redis_store.parking.wake_next("k"))

        assert set(client.hgetall(f"{prefix}:{{k}}:calls")) == {"same-1", "same-2"}


def test_an_identity_that_may_recall_its_run_is_removed_when_that_has_ended(
    redis_store, redis_url, prefix
):
    send(redis_store, "k", "run", identity=Identity("same", recalls="free"))
    take(redis_store, "k", "a", run="run", redelivered=True)
    with redis.Redis.from_url(redis_url) as client:
        list(redis_store.parking.wake_next("k"))
        assert client.exists(f"{prefix}:{{k}}:calls")
        redis_store.release(ReleaseRequest("k", "a", run="run", completion=Completion.YES))

        list(redis_store.parking.wake_next("k"))

        assert not client.exists(f"{prefix}:{{k}}:calls")


def test_identities_are_removed_behind_many_that_are_taken(redis_store, redis_url, prefix):
    many = 1500  # of each kind: a sweep looks at fewer
    for number in range(many):
        identity = Identity(f"taken-{number}")
        send(redis_store, "k", f"run-{number}", identity=identity, delay=600.0)
    with redis.Redis.from_url(redis_url) as client:
        gone = {f"gone-{number}": f"started over-{number}" for number in range(many)}
        client.hset(f"{prefix}:{{k}}:calls", mapping=gone)

        def left() -> int:
            list(redis_store.parking.wake_next("k"))
            return client.hlen(f"{prefix}:{{k}}:calls")

        wait_until(lambda: left() == many, what="those that mean nothing to be removed")
        assert left() == many


def test_more_than_a_score_distinguishes_in_a_millisecond_keep_their_order(redis_store):
    want = Want(1, 1, (Rate(1, 3600.0),))
    take(redis_store, "k", "a", run="first", want=want)
    leave(redis_store, "k", "a", run="first", completion=Completion.YES)
    calls = [f"{number:04}" for number in range(2100, 0, -1)]

    for run in calls:
        send(redis_store, "k", run, identity=Identity(run), want=want, paced=True)

    assert [waiter.run for waiter in redis_store.calls.delayed("k", limit=3000)] == calls


def test_the_identity_of_a_cancelled_run_is_not_looked_for_among_all(private_server):
    server = private_server()
    with closing(RedisStore(server.url, "p")) as store, server.client() as client:
        send(store, "k", "task:0:0:0", identity=Identity("same", 60.0), delay=600.0)

        assert store.parking.cancel("k", "task:0:0:0").released

        assert not client.exists("p:{k}:calls", "p:{k}:tasks")
        assert "cmdstat_hscan" not in client.info("commandstats")


@pytest.mark.parametrize("delay", [0.0, 600.0], ids=["queue", "later"])
def test_a_run_whose_place_was_evicted_has_no_identity(redis_store, redis_url, prefix, delay):
    take(redis_store, "k", "a")
    send(redis_store, "k", "lost", identity=Identity("same"), delay=delay)
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"{prefix}:{{k}}:queue", f"{prefix}:{{k}}:later")

    assert redis_store.calls.peek("k", "same") is None
    assert send(redis_store, "k", "next", identity=Identity("same")).sent is Sent.QUEUED


def test_a_run_whose_delay_was_evicted_does_not_keep_the_ticker_busy(
    redis_store, redis_url, prefix
):
    take(redis_store, "k", "a")
    request = ParkRequest(b"lost", leaves=60.0)
    redis_store.calls.send(SendRequest("k", "lost", request, delay=600.0))
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"{prefix}:{{k}}:later")
    servers.bring_nearer(redis_url, prefix, 61.0)
    again = {}

    assert list(redis_store.parking.wake_due([slot_name("k")], again)) == []

    assert again == {slot_name("k"): None}


def test_a_task_is_looked_for_at_many_keys_at_once(redis_store, monkeypatch):
    for number in range(150):
        take(redis_store, f"k{number}", "a")
        park(redis_store, f"k{number}", f"task-{number}:0:0:0")
    exchange, asked = ConnectionPool.exchange, []

    def count(pool, calls):
        asked.append(len(calls))
        return exchange(pool, calls)

    monkeypatch.setattr(ConnectionPool, "exchange", count)

    assert list(redis_store.parking.find_parked("task-149")) == [("k149", "task-149:0:0:0")]
    assert len(asked) < 20


def test_a_full_server_lets_holders_with_a_rate_go_on_and_leave(private_server):
    server = private_server()
    want = Want(1, 3, (Rate(5, per=60.0, burst=5),))
    with closing(RedisStore(server.url, "p")) as full:
        for owner in "abc":
            take(full, "k", owner, want=want)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "1")
        holds = [Ownership("k", owner, 30.0) for owner in "abc"]

        assert {outcome for outcome, _ in full.renew(holds, 5.0)} == {RenewOutcome.RENEWED}
        assert full.release(ReleaseRequest("k", "a", started=True)).released
        assert full.release(ReleaseRequest("k", "b", started=False)).released
        with pytest.raises(StoreError, match="memory"):
            full.acquire(AcquireRequest("k", "d", 30.0, want=want))
        assert full.release(ReleaseRequest("k", "c", started=True)).released

        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "0")
        for owner in "def":
            take(full, "k", owner, want=want)
        full.release(ReleaseRequest("k", "d", started=True))
        assert full.acquire(AcquireRequest("k", "g", 30.0, want=want)).status is BUSY


@pytest.mark.parametrize("want", [ALONE, Want(1, 2)], ids=str)
def test_a_full_server_keeps_a_key_for_the_next_waiter(private_server, want):
    server, kept = private_server(), ("task:1:0:0", 60.0)
    with closing(RedisStore(server.url, "p")) as full, server.client() as client:
        take(full, "k", "a", run="task:0:0:0", want=want)
        client.config_set("maxmemory", "1")
        assert full.release(ReleaseRequest("k", "a", run="task:0:0:0", keep_for=kept)).released
        client.config_set("maxmemory", "0")

        assert full.inspect("k").owner == "parked:task:1:0:0"
        take(full, "k", "b", run="task:1:0:0", want=want)


def test_a_limit_that_has_ended_is_removed_by_a_sweep(redis_store, redis_url, prefix):
    redis_store.units.set_limit("k", Limit(2, until=time.time() + 60.0))
    servers.bring_nearer(redis_url, prefix, 120.0)

    def is_removed():
        list(redis_store.parking.sweep(0.01))
        return not client.exists(f"{prefix}:{{k}}:tasks")

    with redis.Redis.from_url(redis_url) as client:
        wait_until(is_removed, what="a sweep")


def test_what_is_known_of_starts_ends_by_itself(redis_store, redis_url, prefix):
    want = Want(1, 0, (Rate(5, per=10.0),))
    take(redis_store, "k", "a", want=want)
    redis_store.release(ReleaseRequest("k", "a", started=True))

    left = records(redis_url, prefix)

    assert set(left) == {"{k}:rate", "{k}:fence"}
    assert 0 < left["{k}:rate"] <= 70_000
