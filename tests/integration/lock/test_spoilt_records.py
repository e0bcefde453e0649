"""What other software writes into a key's records spoils that key at most, and no other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_distlock.errors import StoreError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.queue_parts import Settled
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import (
    UNREADABLE,
    Completion,
    Ownership,
    ParkRequest,
    Status,
    Want,
    WokenTask,
)
from tests import parked_runs
from tests.servers import grant
from tests.waiting import wait_until

if TYPE_CHECKING:
    pass

RUN = "id:0:0:0"
SHARED = Want(2, 6)
FIELDS = {
    "lock": ["x", "token", "count", "used", "next", "rest", "g:h|1|t|n", "o:run", "up", "kept"],
    "tasks": ["limit", *(f"{kind}:{run}" for kind in "er" for run in (RUN, "run"))],
}

# Hypothesis takes it for the strategies' doing if another thread draws a random number then.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")

relaxed = settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

values = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [
            *(b"\xff\xfe", b"", b"abc", b"9" * 30, b"-1", b"inf", b"nan", b"1e400", b"0x10"),
            *(b'{"s":"waiting","p":"x"}', b'{"s":1,"k":[]}', b"9" * 13 + b" 1 -1 h 0 0 3 abc"),
            *(b"parked:run", f"parked:{RUN}".encode(), RUN.encode(), b"h|1|t|n", b"\xed\xa0\x80"),
        ]
    ),
)
scores = st.sampled_from([float("inf"), float("-inf"), -1.0, 0.0, 1.0, 2.0**60, 1e300])
members = st.one_of(
    values, st.sampled_from([b"p:", b"b:", f"p:{RUN}".encode(), b"b:inbox\xff owner", b"~run"])
)


@st.composite
def spoils(draw: st.DrawFn) -> tuple[str, str, Any]:
    """A record, and what other software writes there: its type and its value."""
    record = draw(st.sampled_from(["lock", "queue", "tasks", "woken", "fence", "done", "rate"]))
    kind = draw(st.sampled_from(["hash", "zset", "string", "list"]))
    if kind == "hash":
        fields = st.one_of(st.sampled_from(FIELDS.get(record, ["x"])), values)
        return record, kind, draw(st.dictionaries(fields, values, min_size=1, max_size=4))
    if kind == "zset":
        return record, kind, draw(st.dictionaries(members, scores, min_size=1, max_size=4))
    return record, kind, draw(values)


def write(client: redis.Redis, name: str, kind: str, value: Any) -> None:
    client.delete(name)
    if kind == "hash":
        client.hset(name, mapping=value)
    elif kind == "zset":
        client.zadd(name, value)
    elif kind == "list":
        client.rpush(name, value)
    else:
        client.set(name, value)


def use(store: RedisStore) -> None:
    """Do everything to the key that is spoilt: what is refused is a `StoreError`."""
    park_request = ParkRequest(b"envelope", "", "shop.reserve")
    for call in (
        lambda: store.inspect("bad"),
        lambda: store.waiters("bad"),
        lambda: store.parking.parked("bad", RUN),
        lambda: list(store.parking.find_parked("id", "bad")),
        lambda: store.parking.park_if_held("bad", RUN, park_request, 5.0),
        lambda: store.renew([Ownership("bad", "h|1|t|n", 5.0)], 5.0),
        lambda: store.acquire_all(["bad"], ["h|1|t|n"], 5.0),
        lambda: store.acquire(AcquireRequest("bad", "h|1|t|n", 5.0, redelivered=True, run="run")),
        lambda: store.acquire(AcquireRequest("bad", "other", 5.0, queue=park_request, run=RUN)),
        lambda: store.parking.mark_published(WokenTask("bad", RUN, b"")),
        lambda: list(store.parking.wake_again("bad")),
        lambda: store.release(
            ReleaseRequest("bad", "h|1|t|n", run="run", completion=Completion.UNSETTLED)
        ),
        lambda: store.drop(WokenTask("bad", "run", b"")),
        lambda: store.parking.cancel("bad", RUN),
    ):
        with contextlib.suppress(StoreError):
            call()


def found(store: RedisStore) -> list[str]:
    return [key for keys in store.find_keys() for key in keys]


@relaxed
@example(writes=[("queue", "zset", {b"": float("inf")})], noted=False)
@given(writes=st.lists(spoils(), min_size=1, max_size=3), noted=st.booleans())
def test_whatever_a_record_has_the_other_keys_are_found_looked_at_and_swept(
    redis_store, client, prefix, writes, noted
):
    for name in client.scan_iter(f"{prefix}:*", count=1000):
        client.delete(name)
    if noted:
        redis_store._requests.ask([redis_store._records.index("add", "bad")], "bad")
    for record, kind, value in writes:
        write(client, f"{prefix}:{{bad}}:{record}", kind, value)
    redis_store.acquire(AcquireRequest("good", "dead", 5.0))
    redis_store.acquire(
        AcquireRequest(
            "good", "o", 5.0, queue=ParkRequest(b"e", "", "shop.reserve"), run="good:0:0:0"
        )
    )

    assert "good" in found(redis_store)
    use(redis_store)
    for record, kind, value in writes:
        write(client, f"{prefix}:{{bad}}:{record}", kind, value)
    keys = found(redis_store)
    states = dict(zip(keys, redis_store.inspect_many(keys), strict=True))
    assert (states["good"].owner, states["good"].waiting) == ("dead", 1)

    client.delete(f"{prefix}:{{good}}:lock")  # its holder's process is gone
    wakes = wait_until(lambda: list(redis_store.parking.sweep(0.001)), what="a sweep")
    assert ("good", "good:0:0:0") in [(wake.name, wake.run) for wake in wakes]


@pytest.mark.parametrize("token", [b"abc", b"9" * 30, b"-5", b"\xff", b"0"])
def test_a_lock_whose_token_cannot_be_read_is_listed_and_can_be_freed(
    redis_store, client, prefix, token, caplog
):
    client.hset(f"{prefix}:{{k}}:lock", mapping={"x": grant(b"o"), "token": token})

    (state,) = redis_store.inspect_many(["k"])

    assert (state.owner, state.token, state.since) == ("o", UNREADABLE, 0.0)
    assert "'k'" in caplog.text
    assert "locks release --force" in caplog.text
    assert redis_store.acquire(AcquireRequest("k", "another", 5.0)).status is Status.BUSY
    with pytest.raises(StoreError, match=r"'k' is corrupt.*locks release --force"):
        redis_store.acquire(AcquireRequest("k", "o", 5.0))
    assert redis_store.release(ReleaseRequest("k", state.owner)).released


def share(store, *owners):
    for owner in owners:
        reply = store.acquire(AcquireRequest("k", owner, 60.0, want=SHARED))
        assert reply.status is Status.GRANTED


@pytest.mark.parametrize("field", ["used", "count"])
@pytest.mark.parametrize("count", [b"", b"1 2", b"\xff"])
def test_counts_of_a_shared_key_that_are_none_are_computed_again(
    redis_store, client, prefix, field, count
):
    share(redis_store, "a", "b")
    client.hset(f"{prefix}:{{k}}:lock", field, count)

    assert [holder.owner for holder in redis_store.inspect("k").holders] == ["a", "b"]
    share(redis_store, "c")
    refused = redis_store.acquire(AcquireRequest("k", "d", 60.0, want=SHARED))
    assert refused.status is Status.BUSY  # six of six are in use
    client.hset(f"{prefix}:{{k}}:lock", field, count)
    for owner in ("a", "b", "c"):
        assert redis_store.release(ReleaseRequest("k", owner)).released
    assert redis_store.inspect("k").token == 0


@pytest.mark.parametrize("part", [1, 2, 4, 5])
@pytest.mark.parametrize("digits", [310, 5000])
def test_a_share_whose_numbers_are_none_is_listed_and_can_be_freed(
    redis_store, client, prefix, part, digits
):
    share(redis_store, "a", "b")
    record = f"{prefix}:{{k}}:lock"
    words = client.hget(record, "g:a").split(b" ", 7)
    words[part] = b"9" * digits
    client.hset(record, mapping={"g:a": b" ".join(words), "capacity": b"9" * digits})

    (state,) = redis_store.inspect_many(["k"])

    assert {holder.owner for holder in state.holders} == {"a", "b"}
    for owner in ("a", "b"):
        assert redis_store.release(ReleaseRequest("k", owner)).released


@pytest.mark.parametrize("entry", [b"x" * 200_000, b"1@" + b"=" * 200_000 + b"x r"])
def test_a_long_entry_of_an_identity_does_not_hold_up_the_server(
    redis_store, client, prefix, entry
):
    client.hset(f"{prefix}:{{k}}:calls", "identity", entry)

    assert redis_store.inspect("k").owner == ""
    assert redis_store.calls.bearers("k") is not None


def test_a_long_number_as_a_limit_does_not_hold_up_the_server(redis_store, client, prefix):
    client.hset(f"{prefix}:{{k}}:tasks", "limit", b"1" * 200_000)

    assert redis_store.acquire(AcquireRequest("k", "a", 5.0)).status is Status.GRANTED


def test_a_holder_whose_name_is_no_utf8_can_be_released(redis_store, client, prefix):
    client.hset(f"{prefix}:{{k}}:lock", mapping={"x": grant(b"\xff\xfe"), "token": 5})

    assert redis_store.acquire(AcquireRequest("k", "another", 5.0)).status is Status.BUSY
    assert redis_store.release(ReleaseRequest("k", redis_store.inspect("k").owner)).released
    assert redis_store.acquire(AcquireRequest("k", "another", 5.0)).status is Status.GRANTED


def test_a_name_in_the_index_that_is_no_utf8_keeps_nothing_from_being_swept_or_found(
    redis_store, client, prefix
):
    client.zadd(f"{prefix}:parked", {b"\xff": 1, b"}{": 2})
    redis_store.acquire(AcquireRequest("k", "dead", 60.0))
    redis_store.acquire(AcquireRequest("k", "o", 5.0, queue=ParkRequest(b"e"), run="run"))
    client.delete(f"{prefix}:{{k}}:lock")

    assert "k" in found(redis_store)
    assert [wake.run for wake in redis_store.parking.sweep(0.001)] == ["run"]
    assert client.zrange(f"{prefix}:parked", 0, -1) == [b"k"]  # the others were removed


def test_an_index_of_another_type_hides_only_keys_without_a_holder(
    redis_store, client, prefix, caplog
):
    client.set(f"{prefix}:parked", "x")
    redis_store.acquire(AcquireRequest("k", "o", 5.0))

    assert found(redis_store) == ["k"]
    assert "of another type" in caplog.text


@pytest.mark.parametrize("spoilt", ["a list", "for ever", "for years"])
def test_a_malformed_turn_prevents_no_sweep(redis_store, client, prefix, spoilt):
    name = f"{prefix}:sweeper"
    if spoilt == "a list":
        client.rpush(name, "x")
    else:
        client.set(name, "x", ex=None if spoilt == "for ever" else 10**8)
    redis_store.acquire(AcquireRequest("k", "dead", 60.0))
    redis_store.acquire(AcquireRequest("k", "o", 5.0, queue=ParkRequest(b"e"), run="run"))
    client.delete(f"{prefix}:{{k}}:lock")

    assert [wake.run for wake in redis_store.parking.sweep(60.0)] == ["run"]
    assert list(redis_store.parking.sweep(60.0)) == []  # another sweeper has the turn now


def test_a_name_among_what_is_due_that_is_none_is_looked_at_once(redis_store, client, prefix):
    spoilt = [b"a b", b"a 1 b", b"a\nb", b" ", b"", b"\xff"]
    client.zadd(f"{prefix}:{{ticker}}:due", dict.fromkeys(spoilt, 1))

    with contextlib.closing(redis_store.timetable.ticker_inbox("ticker")) as inbox:
        claim = redis_store.timetable.claim_due("ticker", inbox, 60.0)
        settled = Settled(claim.number, dict.fromkeys(claim.names))
        redis_store.timetable.claim_due("ticker", inbox, 60.0, settled)

    assert redis_store.timetable.dues().many == 0


def test_a_last_token_that_is_none_keeps_no_request_from_the_key(redis_store, client, prefix):
    for last in ("abc", "inf", "nan", "9" * 30):
        client.set(f"{prefix}:{{k}}:fence", last)
        reply = redis_store.acquire(AcquireRequest("k", "o", 5.0))
        redis_store.release(ReleaseRequest("k", "o"))

        assert 10**15 < reply.token < 2**53


def test_a_counter_that_is_no_number_spoils_no_other(redis_store, client, prefix):
    client.hset(f"{prefix}:counts", mapping={"a": "abc", b"\xff": 1, "inf": "inf", "b": 2})

    assert redis_store.counts() == {"b": 2.0}
    redis_store.count({"a": 1.0, "c": 1.0})
    assert redis_store.counts() == {"a": 1.0, "b": 2.0, "c": 1.0}


def test_a_run_that_was_sent_an_unknown_number_of_times_is_not_sent_every_time(
    redis_store, client, prefix
):
    redis_store.acquire(AcquireRequest("k", "dead", 60.0))
    redis_store.acquire(AcquireRequest("k", "o", 5.0, queue=ParkRequest(b"e"), run="run"))
    wake = redis_store.release(ReleaseRequest("k", "dead")).wake
    tasks = f"{prefix}:{{k}}:tasks"
    for times in ("abc", "-inf", "inf", "nan", -1e300, 1e300, [1], True):
        record = parked_runs.records(client, tasks)["run"]
        parked_runs.write(client, tasks, "run", {**record, "n": times})
        redis_store.parking.mark_published(wake)

        seconds, _ = client.time()
        assert client.zscore(f"{prefix}:{{k}}:woken", "run") / 1000 > seconds + 30
