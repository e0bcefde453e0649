"""What every store promises; see `celery_distlock.stores.base.Store`."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import redis

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.stores.base import (
    Ability,
    Ended,
    Ownership,
    Parcel,
    RenewOutcome,
    Status,
    Store,
    Wake,
    new_owner,
)
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis import RedisStore
from tests import servers
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GRANTED, BUSY, PARKED, DONE = Status.GRANTED, Status.BUSY, Status.PARKED, Status.DONE
YES, AGAIN = Ended.YES, Ended.YES_AND_MAY_COME_AGAIN

HOSTILE_KEYS = {
    "braces": "{a}{b}}{",
    "percent": "%7B%25%",
    "blanks": " a\tb\r\nc ",
    "nul": "a\0b",
    "glob": "*?[a]\\",
    "unicode": "größe \U0001f512 \u2028",
    "surrogate": "a\ud800b",
    "long": "x" * 10_000,
    "quotes": "'\"; return 1 --",
}
hostile_keys = pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=list(HOSTILE_KEYS))


@pytest.fixture(params=["redis", "memory"])
def store(request: pytest.FixtureRequest, redis_url: str, prefix: str) -> Iterator[Store]:
    made: Store
    if request.param == "redis":
        made = RedisStore(redis_url, prefix)
    else:
        made = MemoryStore("memory://", prefix)
    with closing(made):
        yield made


@pytest.fixture
def redis_store(redis_url: str, prefix: str) -> Iterator[RedisStore]:
    with closing(RedisStore(redis_url, prefix)) as made:
        yield made


@pytest.fixture
def skip(
    store: Store, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], None]:
    """Makes seconds pass: for this process, or for the records of leases and of woken runs."""
    now = clock.monotonic
    offset = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal offset
        if isinstance(store, MemoryStore):
            offset += seconds
            return
        with redis.Redis.from_url(redis_url) as client:
            for record in servers.keys(redis_url, prefix):
                if record.endswith((b":woken", b":done")):
                    for run in client.zrange(record, 0, -1):
                        client.zincrby(record, -1000 * seconds, run)
                elif record.endswith(b":lock"):
                    client.pexpire(record, max(1, client.pttl(record) - int(1000 * seconds)))

    monkeypatch.setattr(clock, "monotonic", lambda: now() + offset)
    return pass_by


class Waiter(NamedTuple):
    owner: str
    inbox: Any


def wait_for(store: Store, key: str, name: str, **more: Any) -> Waiter:
    """A blocked waiter in the queue of *key*."""
    waiter = Waiter(name, store.inbox(key, name))
    assert store.acquire(key, name, 30.0, queue=waiter.inbox, **more).status is BUSY
    return waiter


def park(store: Store, key: str, run: str, envelope: bytes | None = None, **more: Any) -> None:
    """A parked run in the queue of *key*; it was delivered to an owner that is over by now."""
    parcel = Parcel(run.encode() if envelope is None else envelope)
    owner = new_owner("delivery")
    assert store.acquire(key, owner, 30.0, queue=parcel, run=run, **more).status is PARKED


def take(store: Store, key: str, owner: str, lease: float = 30.0, **more: Any) -> int:
    reply = store.acquire(key, owner, lease, **more)
    assert reply.status is GRANTED
    return reply.token


def holder(store: Store, key: str) -> str:
    return store.inspect(key).owner


def expire(store: Store, key: str) -> None:
    wait_until(lambda: not store.inspect(key).token, what="the end of the lease", poll=0.005)


def swept(store: Store) -> list[Wake]:
    return list(store.sweep(0.01))


# Taking a key


def test_a_free_key_is_granted(store):
    before = clock.monotonic()

    reply = store.acquire("k", "a", 30.0)

    assert reply.status is GRANTED
    assert reply.token > 0
    assert reply.wake is None
    assert before <= reply.asked_at <= clock.monotonic()


def test_a_taken_key_is_busy_and_says_who_holds_it(store):
    token = take(store, "k", "a", run="run-a")

    reply = store.acquire("k", "b", 30.0)

    assert (reply.status, reply.token, reply.holder, reply.holder_run) == (
        BUSY,
        token,
        "a",
        "run-a",
    )
    assert 0 < reply.remaining <= 30.0
    assert reply.place == 0
    assert store.inspect("k").waiting == 0


def test_the_same_owner_asking_again_changes_nothing_but_the_end(store):
    token = take(store, "k", "a", 2.0)

    assert take(store, "k", "a", 30.0) == token

    assert 2.0 < store.inspect("k").remaining <= 30.0
    assert store.release("k", "a").released
    assert not holder(store, "k")


def test_keys_are_independent(store):
    take(store, "k1", "a")
    take(store, "k2", "b")

    assert (holder(store, "k1"), holder(store, "k2")) == ("a", "b")


def test_stores_with_other_prefixes_are_other_places(store, redis_url, prefix):
    if isinstance(store, RedisStore):
        other: Store = RedisStore(redis_url, f"{prefix}-other")
    else:
        other = MemoryStore("memory://", f"{prefix}-other")
    take(store, "k", "a")

    with closing(other):
        take(other, "k", "b")


def test_one_of_many_threads_gets_the_key(store):
    start = threading.Barrier(8)
    replies = []

    def ask(name):
        start.wait()
        replies.append(store.acquire("k", name, 30.0))

    threads = [threading.Thread(target=ask, args=(f"t{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    statuses = [reply.status for reply in replies]
    assert (statuses.count(GRANTED), statuses.count(BUSY)) == (1, 7)


def test_an_expired_key_is_free(store):
    take(store, "k", "a", 0.02)
    expire(store, "k")

    take(store, "k", "b")


@pytest.mark.parametrize("lease", [0.001, 0.0001])
def test_the_shortest_lease_is_granted_and_expires(store, lease):
    take(store, "k", "a", lease)

    expire(store, "k")


def test_a_lease_of_30_days_is_granted(store):
    take(store, "k", "a", 30 * 86400.0)

    assert store.inspect("k").remaining == pytest.approx(30 * 86400.0, rel=0.01)


# Renewing


def renew(store, *holds):
    return [outcome for outcome, _ in store.renew([Ownership(*hold) for hold in holds], 10.0)]


def test_a_holder_renews(store):
    take(store, "k", "a", 2.0)
    before = clock.monotonic()

    ((outcome, asked_at),) = store.renew([Ownership("k", "a", 30.0)], 10.0)

    assert outcome is RenewOutcome.RENEWED
    assert before <= asked_at <= clock.monotonic()
    assert store.inspect("k").remaining > 2.0


def test_renewing_keeps_the_token(store):
    token = take(store, "k", "a")

    renew(store, ("k", "a", 30.0))

    assert store.inspect("k").token == token


def test_what_somebody_else_holds_is_not_renewed(store):
    take(store, "k", "b", 5.0)

    assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.HELD]

    assert holder(store, "k") == "b"
    assert store.inspect("k").remaining <= 5.0


@pytest.mark.parametrize("end", ["never", "released", "expired"])
def test_renewing_never_makes_a_lock_anew(store, end):
    if end == "released":
        take(store, "k", "a")
        store.release("k", "a")
    elif end == "expired":
        take(store, "k", "a", 0.02)
        expire(store, "k")

    assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

    assert not store.inspect("k").token


def test_each_of_many_renewals_has_its_own_outcome(store):
    take(store, "k1", "a")
    take(store, "k2", "b")
    holds = [("k1", "a", 30.0), ("k2", "a", 30.0), ("k3", "a", 30.0), ("k1", "a", 30.0)]

    assert renew(store, *holds) == [
        RenewOutcome.RENEWED,
        RenewOutcome.HELD,
        RenewOutcome.LOST,
        RenewOutcome.RENEWED,
    ]


def test_nothing_to_renew_is_no_error(store):
    assert store.renew([], 10.0) == []


# Releasing


def test_a_released_key_is_free(store):
    take(store, "k", "a")

    released = store.release("k", "a")

    assert released == (True, None)
    take(store, "k", "b")


def test_who_does_not_hold_the_key_cannot_release_it(store):
    take(store, "k", "a")

    assert store.release("k", "b") == (False, None)

    assert holder(store, "k") == "a"


def test_a_second_release_finds_nothing(store):
    take(store, "k", "a")
    store.release("k", "a")

    assert not store.release("k", "a").released


def test_a_key_nobody_has_taken_cannot_be_released(store):
    assert store.release("k", "a") == (False, None)


def test_a_late_release_does_not_free_the_next_holders_key(store):
    take(store, "k", "a", 0.02)
    expire(store, "k")
    take(store, "k", "b")

    assert not store.release("k", "a").released

    assert holder(store, "k") == "b"


def test_a_late_release_wakes_nobody(store):
    take(store, "k", "a", 0.02)
    expire(store, "k")
    take(store, "k", "b")
    park(store, "k", "run")

    assert store.release("k", "a") == (False, None)

    assert store.inspect("k").waiting == 1


# Tokens


def test_tokens_rise_with_every_grant(store):
    tokens = []
    for n in range(20):
        tokens.append(take(store, "k", f"o{n}"))
        store.release("k", f"o{n}")

    assert tokens == sorted(set(tokens))


def test_tokens_rise_over_expiry(store):
    first = take(store, "k", "a", 0.02)
    expire(store, "k")

    assert take(store, "k", "b") > first


def test_tokens_rise_over_hand_overs(store):
    tokens = [take(store, "k", "a")]
    waiter = wait_for(store, "k", "b")
    park(store, "k", "run")
    store.release("k", "a")
    tokens.append(take(store, "k", "b", queue=waiter.inbox))
    store.release("k", "b")
    tokens.append(take(store, "k", "c", run="run"))

    assert tokens == sorted(set(tokens))


def test_tokens_are_microseconds_so_they_outlive_their_record(store):
    token = take(store, "k", "a")

    assert abs(token / 1e6 - time.time()) < 60


def test_tokens_rise_though_the_keys_records_are_deleted(redis_store, redis_url, prefix):
    first = take(redis_store, "k", "a")
    servers.delete_keys(redis_url, prefix)

    assert take(redis_store, "k", "b") > first


def test_tokens_rise_though_the_servers_clock_was_set_back(redis_store, redis_url, prefix):
    ahead = int((time.time() + 600) * 1e6)
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}:{{k}}:fence", ahead)

    assert take(redis_store, "k", "a") == ahead + 1
    redis_store.release("k", "a")
    assert take(redis_store, "k", "b") == ahead + 2


def test_tokens_rise_though_this_processes_clock_stands_still(prefix, monkeypatch):
    store = MemoryStore("memory://", prefix)
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    first = take(store, "k", "a")
    store.release("k", "a")

    assert take(store, "k", "b") > first


# Waiting


def test_a_queue_is_served_in_the_order_of_arrival(store):
    take(store, "k", "first")
    arrivals = []
    for n in range(6):
        name = f"w{n}"
        if n % 2:
            park(store, "k", name)
        else:
            wait_for(store, "k", name)
        arrivals.append(name)
    assert store.inspect("k").waiting == 6

    served = []
    current, run = "first", ""
    for _ in arrivals:
        wake = store.release("k", current, run=run, ended=YES).wake
        if wake is not None:
            run = current = wake.run
            take(store, "k", current, run=run)
        else:
            run, current = "", holder(store, "k")
        served.append(current)

    assert served == arrivals


def test_the_place_in_the_queue_counts_from_0(store):
    take(store, "k", "a")

    places = []
    for n in range(3):
        inbox = store.inbox("k", f"w{n}")
        places.append(store.acquire("k", f"w{n}", 30.0, queue=inbox).place)
        places.append(store.acquire("k", f"w{n}", 30.0, queue=inbox).place)

    assert places == [0, 0, 1, 1, 2, 2]
    assert store.inspect("k").waiting == 3


def test_one_who_does_not_queue_learns_how_many_are_before_him(store):
    take(store, "k", "a")
    wait_for(store, "k", "b")
    park(store, "k", "run")

    assert store.acquire("k", "c", 30.0).place == 2


def test_a_release_hands_the_key_to_the_waiter_and_tells_him(store):
    take(store, "k", "a")
    waiter = wait_for(store, "k", "b")
    told = threading.Event()
    thread = threading.Thread(target=lambda: (waiter.inbox.wait(60.0), told.set()))
    thread.start()

    assert store.release("k", "a") == (True, None)

    assert holder(store, "k") == "b"
    assert told.wait(30.0), "nothing came to the waiter's inbox"
    thread.join()
    take(store, "k", "b", queue=waiter.inbox)
    assert store.inspect("k").waiting == 0


def test_what_came_before_the_wait_is_not_missed(store):
    take(store, "k", "a")
    waiter = wait_for(store, "k", "b")
    store.release("k", "a")

    started = time.monotonic()
    waiter.inbox.wait(60.0)

    assert time.monotonic() - started < 30


def test_waiting_ends_though_nothing_comes(store):
    store.inbox("k", "a").wait(0.01)


def test_a_handed_over_key_is_not_free_to_others(store):
    take(store, "k", "a")
    wait_for(store, "k", "b")
    store.release("k", "a")

    assert store.acquire("k", "c", 30.0).status is BUSY


def test_a_waiter_that_does_not_confirm_loses_his_turn(store, skip):
    take(store, "k", "a")
    wait_for(store, "k", "stopped")
    alive = wait_for(store, "k", "alive")
    store.release("k", "a")
    skip(1.0)

    reply = wait_until(
        lambda: (r := store.acquire("k", "alive", 30.0, queue=alive.inbox)).status is GRANTED and r,
        what="the key to pass the one who does not answer",
    )

    assert holder(store, "k") == "alive"
    assert reply.token


def test_a_waiter_whose_inbox_is_gone_is_passed_over(redis_store, redis_url, prefix):
    take(redis_store, "k", "a")
    dead = RedisStore(redis_url, prefix)
    wait_for(dead, "k", "dead")
    wait_for(redis_store, "k", "alive")
    with redis.Redis.from_url(redis_url) as client:
        (channel,) = set(client.pubsub_channels(f"{prefix}:inbox:*")) - {
            redis_store._post.subscription.channel.encode()
        }
        dead.close()
        wait_until(lambda: client.pubsub_numsub(channel)[0][1] == 0, what="the inbox to close")

    redis_store.release("k", "a")

    assert holder(redis_store, "k") == "alive"


def test_a_waiter_that_gives_up_leaves_no_trace(store):
    take(store, "k", "a")
    waiter = wait_for(store, "k", "b")
    waiter.inbox.close()

    released = store.release("k", "b", inbox=waiter.inbox)

    assert not released.released
    assert store.inspect("k").waiting == 0
    assert store.release("k", "a") == (True, None)
    assert not holder(store, "k")


def test_a_waiter_that_gives_up_just_as_he_is_served_passes_the_key_on(store):
    take(store, "k", "a")
    waiter = wait_for(store, "k", "b")
    park(store, "k", "run")
    store.release("k", "a")

    released = store.release("k", "b", inbox=waiter.inbox)

    assert released.released
    assert released.wake is not None
    assert released.wake.run == "run"


def test_a_newcomer_does_not_overtake_the_queue(store):
    take(store, "k", "a", 0.02)
    wait_for(store, "k", "b")
    expire(store, "k")

    reply = store.acquire("k", "newcomer", 30.0)

    assert (reply.status, reply.holder) == (BUSY, "b")


def test_a_newcomer_does_not_overtake_a_parked_run_and_is_given_it_to_send(store):
    take(store, "k", "a", 0.02)
    park(store, "k", "run", b"envelope")
    expire(store, "k")

    reply = store.acquire("k", "newcomer", 30.0)

    assert (reply.status, reply.holder, reply.holder_run) == (BUSY, "parked:run", "run")
    assert reply.wake == Wake(slot_name("k"), "run", b"envelope")


def test_the_first_in_the_queue_gets_a_key_that_expired(store):
    take(store, "k", "a", 0.02)
    first = wait_for(store, "k", "b")
    second = wait_for(store, "k", "c")
    expire(store, "k")

    assert store.acquire("k", "c", 30.0, queue=second.inbox).status is BUSY
    take(store, "k", "b", queue=first.inbox)


# Parking

ENVELOPES = [
    b"",
    b"\x00",
    bytes(range(256)),
    b'{"task": "t"}\r\n$5\r\n',
    b"\xff\xfe not utf-8",
    pytest.param(bytes(range(256)) * 4096, id="1MB"),
]


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_a_release_returns_the_next_runs_envelope_as_it_was_parked(store, envelope):
    take(store, "k", "a")
    park(store, "k", "run", envelope)

    wake = store.release("k", "a").wake

    assert wake == Wake(slot_name("k"), "run", envelope)


def test_a_parked_run_says_who_holds_the_key_and_its_place(store):
    take(store, "k", "a", run="run-a")
    park(store, "k", "first")

    reply = store.acquire("k", "b", 30.0, queue=Parcel(b"e"), run="second")

    assert (reply.status, reply.holder, reply.holder_run, reply.place) == (
        PARKED,
        "a",
        "run-a",
        1,
    )


def test_a_free_key_is_granted_and_not_parked_at(store):
    reply = store.acquire("k", "a", 30.0, queue=Parcel(b"e"), run="run")

    assert reply.status is GRANTED
    assert store.release("k", "a", run="run", ended=YES) == (True, None)


def test_the_key_is_reserved_while_a_woken_run_is_on_its_way(store):
    take(store, "k", "a")
    park(store, "k", "run")
    store.release("k", "a")

    reply = store.acquire("k", "b", 30.0)

    assert (reply.status, reply.holder, reply.wake) == (BUSY, "parked:run", None)
    assert reply.remaining > 0


def test_a_woken_run_claims_its_key_whoever_brings_it(store):
    take(store, "k", "a")
    park(store, "k", "run")
    store.release("k", "a")
    token = store.inspect("k").token

    assert take(store, "k", "another-worker", run="run") == token

    assert holder(store, "k") == "another-worker"
    assert store.inspect("k").remaining > 10


def test_a_claimed_run_is_waiting_no_more(store):
    take(store, "k", "a")
    park(store, "k", "run")
    store.release("k", "a")
    take(store, "k", "b", run="run")

    assert store.release("k", "b", run="run", ended=YES) == (True, None)
    assert swept(store) == []
    assert store.inspect("k").waiting == 0


def test_a_late_woken_run_is_still_served_before_the_queue(store):
    take(store, "k", "a")
    park(store, "k", "run")
    store.release("k", "a")
    store.release("k", "parked:run")  # its reservation ends
    wait_for_owner = new_owner("late")

    take(store, "k", wait_for_owner, run="run")


def test_a_run_is_parked_once_however_often_it_comes(store):
    take(store, "k", "a")
    park(store, "k", "run", b"first")
    park(store, "k", "other")
    park(store, "k", "run", b"second")

    assert store.inspect("k").waiting == 2
    wake = store.release("k", "a").wake
    assert (wake.run, wake.envelope) == ("run", b"second")


def test_a_woken_run_that_finds_the_key_taken_keeps_its_turn(store):
    take(store, "k", "a")
    park(store, "k", "early")
    park(store, "k", "late")
    wake = store.release("k", "a").wake
    store.sent(wake)
    store.release("k", "parked:early")  # its reservation ends, and the next one is on its way
    assert holder(store, "k") == "parked:late"

    park(store, "k", "early")

    assert store.release("k", "parked:late").wake.run == "early"


def test_a_second_delivery_of_a_finished_run_is_recognised(store):
    take(store, "k", "a", run="run")
    store.release("k", "a", run="run", ended=AGAIN)

    assert store.acquire("k", "b", 30.0, run="run", repeated=True).status is DONE


def test_a_first_delivery_is_never_taken_for_a_second(store):
    take(store, "k", "a", run="run")
    store.release("k", "a", run="run", ended=AGAIN)

    take(store, "k", "b", run="run", repeated=False)


def test_a_second_delivery_of_a_run_that_has_not_ended_runs(store):
    take(store, "k", "a", run="run")
    store.release("k", "a", run="run", ended=Ended.NO)

    take(store, "k", "b", run="run", repeated=True)


def test_a_second_delivery_of_another_run_runs(store):
    take(store, "k", "a", run="run")
    store.release("k", "a", run="run", ended=AGAIN)

    take(store, "k", "b", run="other", repeated=True)


def test_a_second_delivery_does_not_run_beside_the_first(store):
    take(store, "k", "a", run="run")

    reply = store.acquire("k", "b", 30.0, run="run", repeated=True)

    assert (reply.status, reply.holder_run) == (BUSY, "run")


def test_a_parked_second_delivery_of_a_finished_run_is_dropped(store):
    take(store, "k", "a", run="run")
    park(store, "k", "run", repeated=True)
    park(store, "k", "other")

    wake = store.release("k", "a", run="run", ended=YES).wake

    assert wake.run == "other"
    assert store.inspect("k").waiting == 0
    assert store.acquire("k", "b", 30.0, run="run", repeated=True).status is DONE


@pytest.mark.parametrize("ended", [AGAIN, Ended.UNSETTLED])
def test_a_second_delivery_that_blocks_does_not_run_when_the_first_has_ended(store, ended):
    take(store, "k", "a", run="run")
    waiter = wait_for(store, "k", "b", run="run", repeated=True)
    other = wait_for(store, "k", "c")

    store.release("k", "a", run="run", ended=ended)
    told = store.acquire("k", "b", 30.0, queue=waiter.inbox, run="run", repeated=True)

    assert told.status is (DONE if ended is AGAIN else BUSY)
    assert holder(store, "k") == "c"
    take(store, "k", "c", queue=other.inbox)
    store.release("k", "c")
    assert not holder(store, "k")


def test_a_second_delivery_whose_turn_has_come_does_not_run_when_the_first_has_ended(store):
    take(store, "k", "a", 0.05, run="run")
    park(store, "k", "run", repeated=True)
    park(store, "k", "other")
    expire(store, "k")
    (wake,) = wait_until(lambda: swept(store), what="the free key to be handed over")
    assert wake.run == "run"
    store.release("k", "a", run="run", ended=AGAIN)  # it had lost its lease, and has ended

    told = store.acquire("k", "b", 30.0, run="run", repeated=True)

    assert (told.status, told.wake.run) == (DONE, "other")


# Several keys at once


def take_all(store: Store, keys: str, owners: str) -> list[int] | None:
    replies = store.acquire_all(list(keys), list(owners), 30.0, run="run")
    return None if replies is None else [reply.token for reply in replies]


def test_free_keys_are_taken_in_one_step(store):
    tokens = take_all(store, "klm", "abc")

    assert tokens is not None
    for key, owner, token in zip("klm", "abc", tokens, strict=True):
        state = store.inspect(key)
        assert (state.owner, state.token, state.run) == (owner, token, "run")


@pytest.mark.parametrize("taken", "klm")
def test_if_one_of_several_is_taken_none_is(store, taken):
    take(store, taken, "z")

    assert take_all(store, "klm", "abc") is None
    assert [holder(store, key) for key in "klm"] == ["z" * (key == taken) for key in "klm"]


def test_who_wants_several_keys_does_not_overtake(store):
    take(store, "k", "z", 0.05)
    park(store, "k", "first")
    expire(store, "k")

    assert take_all(store, "kl", "ab") is None
    assert not holder(store, "l")


def test_several_keys_are_given_up_one_by_one(store):
    take_all(store, "kl", "ab")

    assert store.release("k", "a", run="run").released
    assert store.release("l", "b", run="run").released


def test_tokens_rise_however_a_key_was_taken(store):
    first = take(store, "k", "z")
    store.release("k", "z")

    ((second, _),) = [take_all(store, "kl", "ab")]

    assert second > first


def test_a_repeated_request_for_several_keys_is_the_same(redis_store):
    assert take_all(redis_store, "kl", "ab") == take_all(redis_store, "kl", "ab")


def test_a_repeated_request_for_several_keys_renews_them(redis_store):
    take_all(redis_store, "kl", "ab")
    for key, owner in zip("kl", "ab", strict=True):
        assert redis_store.acquire(key, owner, 30.0).status is GRANTED
    time_left = redis_store.acquire_all(["k", "l"], ["a", "b"], 60.0, run="run")

    assert time_left is not None
    assert min(redis_store.inspect(key).remaining for key in "kl") > 50.0


def test_what_a_lost_request_for_several_keys_has_taken_is_given_back(redis_store, monkeypatch):
    # The first attempt is executed, its answer lost; before the second one, a key changes hands.
    exchange, attempts = redis_store._exchange, []

    def lose_the_first_answer(wire, commands):
        answers = exchange(wire, commands)
        attempts.append(commands)
        if len(attempts) == 1:
            monkeypatch.setattr(redis_store, "_exchange", exchange)
            redis_store.release("l", "b")
            take(redis_store, "l", "z")
            raise redis.ConnectionError("lost")
        return answers

    monkeypatch.setattr(redis_store, "_exchange", lose_the_first_answer)

    assert take_all(redis_store, "kl", "ab") is None
    assert [holder(redis_store, key) for key in "kl"] == ["", "z"]


def test_a_cluster_takes_one_key_at_a_time(private_server):
    server = private_server(options={"cluster-enabled": "yes"})
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
    with closing(RedisStore(server.url, "p")) as store:
        assert take_all(store, "kl", "ab") is None
        take(store, "k", "a")


def test_a_blocked_run_that_finds_the_key_free_leaves_nothing_in_the_queue(store):
    take(store, "k", "a", 0.05)
    waiter = wait_for(store, "k", "b", run="run")
    expire(store, "k")
    take(store, "k", "b", queue=waiter.inbox, run="run")

    store.release("k", "b", run="run", ended=YES)

    assert not holder(store, "k")
    assert store.inspect("k").waiting == 0


def test_a_parked_second_delivery_of_a_run_that_died_runs(store):
    take(store, "k", "a", run="run")
    park(store, "k", "run", b"again", repeated=True)

    assert store.release("k", "a", run="run").wake == Wake(slot_name("k"), "run", b"again")
    take(store, "k", "b", run="run", repeated=True)


def test_a_key_whose_records_are_spoilt_does_not_keep_others_from_being_swept(
    redis_store, redis_url, prefix, caplog
):
    for key in ("spoilt", "sound"):
        take(redis_store, key, "a", 0.05)
        park(redis_store, key, f"run-{key}")
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}:{{spoilt}}:woken", "not a sorted set")

    (wake,) = wait_until(lambda: swept(redis_store), what="the sound key to be swept")

    assert wake.run == "run-sound"
    wait_until(lambda: swept(redis_store) == [], what="another sweep")
    told = [record for record in caplog.records if "spoilt" in record.getMessage()]
    assert len(told) == 1


# A run whose body has ended, and whose result is not stored yet


def unsettled(store) -> None:
    take(store, "k", "a", run="run")
    assert store.release("k", "a", run="run", ended=Ended.UNSETTLED).released


def test_an_unsettled_run_leaves_its_key_free(store):
    unsettled(store)

    take(store, "k", "b", run="other")


def test_the_second_delivery_of_an_unsettled_run_does_not_run(store):
    unsettled(store)

    reply = store.acquire("k", "b", 30.0, run="run", repeated=True)

    assert (reply.status, reply.holder_run) == (BUSY, "run")
    assert 25.0 < reply.remaining < 30.1
    assert not holder(store, "k")


def test_the_parked_second_delivery_of_an_unsettled_run_is_held_back(store):
    take(store, "k", "a", run="run")
    park(store, "k", "run", repeated=True)
    park(store, "k", "other")

    wake = store.release("k", "a", run="run", ended=Ended.UNSETTLED).wake

    assert wake.run == "other"
    assert swept(store) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_second_delivery_of_a_run_that_is_settled_is_dropped(store, when, skip):
    unsettled(store)
    if when == "before":
        park(store, "k", "run", repeated=True)
    assert store.drop(Wake(slot_name("k"), "run", b"")).released

    assert store.acquire("k", "b", 30.0, run="run", repeated=True).status is DONE
    skip(120.0)
    assert swept(store) == []


@pytest.mark.parametrize("parked", ["before its end", "after its end"])
def test_the_second_delivery_of_a_run_that_is_never_settled_runs(store, parked, skip):
    take(store, "k", "a", run="run")
    if parked == "before its end":
        park(store, "k", "run", b"again", repeated=True)
    store.release("k", "a", run="run", ended=Ended.UNSETTLED)
    if parked == "after its end":
        park(store, "k", "run", b"again", repeated=True)
    assert swept(store) == []

    skip(31.0)

    found = wait_until(lambda: swept(store), what="the run to be swept up")
    assert found == [Wake(slot_name("k"), "run", b"again")]
    take(store, "k", "b", run="run", repeated=True)


def test_a_kept_run_that_is_never_settled_runs_again(store, skip):
    kept(store)
    take(store, "k", "b", 30.0)
    store.release("k", "b", run="run", ended=Ended.UNSETTLED)
    assert swept(store) == []

    skip(31.0)

    (wake,) = wait_until(lambda: swept(store), what="the run to be swept up")
    assert wake.run == "run"


def test_a_kept_unsettled_run_whose_message_came_back_is_sent_at_once(store):
    kept(store)
    take(store, "k", "b", 30.0)
    store.release("k", "b", run="run", ended=Ended.UNSETTLED)

    store.came_back(Wake(slot_name("k"), "run", b""))

    (wake,) = wait_until(lambda: swept(store), what="the run to be swept up")
    assert wake.run == "run"
    take(store, "k", "c", run="run", repeated=True)


def test_a_full_server_remembers_what_is_unsettled(private_server):
    server = private_server()
    with closing(RedisStore(server.url, "p")) as full:
        take(full, "k", "a", run="run")
        with server.client() as client:
            client.config_set("maxmemory", "1")
        full.release("k", "a", run="run", ended=Ended.UNSETTLED)
        assert full.drop(Wake(slot_name("k"), "run", b"")).released
        with server.client() as client:
            client.config_set("maxmemory", "0")

        assert full.acquire("k", "b", 30.0, run="run", repeated=True).status is DONE


def test_a_run_with_a_short_lease_has_five_seconds_to_be_settled(store, skip):
    take(store, "k", "a", 0.5, run="run")
    store.release("k", "a", run="run", ended=Ended.UNSETTLED)

    skip(4.0)
    assert store.acquire("k", "b", 30.0, run="run", repeated=True).status is BUSY

    skip(1.1)
    take(store, "k", "b", run="run", repeated=True)


def test_a_key_can_stay_locked_for_a_run_that_comes_later(store):
    token = take(store, "k", "a", run="run")
    park(store, "k", "other")

    released = store.release("k", "a", run="run", keep_for=("run", 30.0))

    assert released == (True, None)
    assert store.acquire("k", "b", 30.0).status is BUSY
    assert take(store, "k", "c", run="run") == token


def test_a_key_that_was_kept_in_vain_goes_to_the_next(store):
    take(store, "k", "a", run="run")
    park(store, "k", "other")
    store.release("k", "a", run="run", keep_for=("run", 0.02))
    expire(store, "k")

    (wake,) = swept(store)

    assert wake.run == "other"


def test_who_does_not_hold_the_key_cannot_keep_it(store):
    take(store, "k", "a", run="run")

    assert not store.release("k", "b", run="other", keep_for=("other", 30.0)).released

    assert holder(store, "k") == "a"


# Runs whose only copy is in the store


def kept(store):
    """A run that holds the key and whose message nobody else has."""
    take(store, "k", "a")
    park(store, "k", "run", b"envelope")
    wake = store.release("k", "a").wake
    take(store, "k", "b", 0.05, run="run", keep=True)
    return wake


def test_a_kept_run_is_sent_again_if_its_process_dies(store):
    wake = kept(store)

    (again,) = wait_until(lambda: swept(store), what="the run to be swept up")

    assert again == wake


def test_a_kept_run_is_not_sent_again_while_it_runs(store):
    kept(store)
    for _ in range(20):
        assert renew(store, ("k", "b", 0.5)) == [RenewOutcome.RENEWED]
        assert swept(store) == []
        time.sleep(0.02)


def test_a_kept_run_is_forgotten_when_it_has_ended(store):
    kept(store)
    take(store, "k", "b", 30.0)

    store.release("k", "b", run="run", ended=YES)

    assert swept(store) == []
    assert not holder(store, "k")


def test_a_run_that_came_back_is_sent_by_the_next_sweep(store):
    take(store, "k", "a")
    park(store, "k", "run", b"envelope")
    wake = store.release("k", "a").wake
    assert swept(store) == []

    store.came_back(wake)

    assert wait_until(lambda: swept(store), what="a sweep") == [wake]


def test_a_dropped_run_gives_its_key_to_the_next(store):
    take(store, "k", "a")
    park(store, "k", "run")
    park(store, "k", "next")
    wake = store.release("k", "a").wake

    released = store.drop(wake)

    assert released.wake.run == "next"
    assert holder(store, "k") == "parked:next"


def test_a_run_that_was_dropped_is_not_sent_again(store):
    take(store, "k", "a")
    park(store, "k", "run")
    wake = store.release("k", "a").wake
    store.drop(wake)

    store.came_back(wake)
    store.sent(wake)

    assert swept(store) == []
    assert not store.inspect("k").token


# Desks


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_a_run_is_pushed_to_the_desk_it_was_parked_from(redis_store, envelope):
    received = []
    desk = redis_store.desk(received.append)
    take(redis_store, "{k} 1", "a")
    parcel = Parcel(envelope, desk.address)
    redis_store.acquire("{k} 1", "b", 30.0, queue=parcel, run="run 7")

    released = redis_store.release("{k} 1", "a")

    assert released == (True, None)
    wake = Wake(slot_name("{k} 1"), "run 7", envelope)
    assert wait_until(lambda: received, what="the push") == [wake]
    desk.close()


def test_a_run_whose_desk_is_closed_is_given_back_to_be_sent(redis_store, redis_url):
    desk = redis_store.desk(lambda wake: None)
    take(redis_store, "k", "a")
    redis_store.acquire("k", "b", 30.0, queue=Parcel(b"e", desk.address), run="run")
    desk.close()
    desk.close()
    with redis.Redis.from_url(redis_url) as client:
        wait_until(
            lambda: client.pubsub_numsub(desk.address)[0][1] == 0, what="the desk to be closed"
        )

    assert redis_store.release("k", "a").wake == Wake("k", "run", b"e")


def test_a_pushed_run_that_nobody_takes_is_swept_up(redis_store):
    desk = redis_store.desk(lambda wake: None)
    take(redis_store, "k", "a")
    redis_store.acquire("k", "b", 30.0, queue=Parcel(b"e", desk.address), run="run")
    redis_store.release("k", "a")

    assert wait_until(lambda: swept(redis_store), what="a sweep") == [Wake("k", "run", b"e")]
    desk.close()


# Sweeping


def test_an_unsent_run_is_sent_by_a_sweep_after_its_time(store, skip):
    take(store, "k", "a")
    park(store, "k", "run", b"envelope")
    wake = store.release("k", "a").wake
    assert swept(store) == []
    skip(2.0)

    assert wait_until(lambda: swept(store), what="a sweep") == [wake]
    assert swept(store) == []


def test_a_run_that_was_sent_is_left_alone(store, skip):
    take(store, "k", "a")
    park(store, "k", "sent")
    store.sent(store.release("k", "a").wake)
    take(store, "k2", "a")
    park(store, "k2", "unsent")
    store.release("k2", "a")
    skip(2.0)

    (wake,) = wait_until(lambda: swept(store), what="the other one to be swept up")

    assert wake.run == "unsent"


def test_a_sweep_frees_the_key_of_a_holder_that_died(store):
    take(store, "k", "dead", 0.02)
    park(store, "k", "run", b"envelope")
    expire(store, "k")

    assert swept(store) == [Wake(slot_name("k"), "run", b"envelope")]
    assert holder(store, "k") == "parked:run"


def test_a_sweep_hands_a_free_key_to_a_blocked_waiter_before_parked_ones(store):
    take(store, "k", "dead", 0.02)
    waiter = wait_for(store, "k", "b")
    park(store, "k", "run")
    expire(store, "k")

    assert swept(store) == []

    assert holder(store, "k") == "b"
    waiter.inbox.wait(30.0)


def test_a_sweep_leaves_held_keys_alone(store):
    take(store, "k", "a")
    park(store, "k", "run")

    assert swept(store) == []

    assert (holder(store, "k"), store.inspect("k").waiting) == ("a", 1)


def test_a_sweep_finds_every_key(store):
    for n in range(250):
        take(store, f"k{n}", "dead", 0.001)
        store.acquire(f"k{n}", "b", 30.0, queue=Parcel(b"e"), run=f"run{n}")
    # Some were granted at once: their holders had expired already.
    waiting = {f"run{n}" for n in range(250) if store.inspect(f"k{n}").waiting}

    found = wait_until(lambda: swept(store), what="a sweep")

    assert {wake.run for wake in found} == waiting


def test_of_all_who_sweep_in_an_interval_one_gets_to_look(store):
    take(store, "k", "dead", 0.02)
    assert list(store.sweep(60.0)) == []
    park(store, "k", "run")
    expire(store, "k")

    assert list(store.sweep(60.0)) == []


def test_dispatching_sends_and_notes_it(store):
    sent = []
    store.courier = sent.append
    take(store, "k", "a")
    park(store, "k", "run", b"envelope")

    store.dispatch(store.release("k", "a").wake)

    assert sent == [Wake(slot_name("k"), "run", b"envelope")]


def test_what_cannot_be_dispatched_is_left_to_the_sweep(store, caplog):
    noted = []
    store.courier = {}.__getitem__  # raises
    store.sent = noted.append
    take(store, "k", "a")
    park(store, "k", "run")

    store.dispatch(store.release("k", "a").wake)

    assert "the next sweep sends it" in caplog.text
    assert noted == []


def test_nothing_to_dispatch_is_no_error(store):
    store.dispatch(None)


# Looking


def test_a_look_at_a_free_key(store):
    state = store.inspect("k")

    assert (state.owner, state.token, state.run, state.waiting) == ("", 0, "", 0)
    assert state.remaining == 0.0


def test_a_look_at_a_held_key(store):
    token = take(store, "k", "a", run="run")
    park(store, "k", "b")

    state = store.inspect("k")

    assert (state.owner, state.token, state.run, state.waiting) == ("a", token, "run", 1)
    assert abs(state.since - time.time()) < 60
    assert 0 < state.remaining <= 30.0


def test_looking_changes_nothing(store):
    take(store, "k", "a", 0.02)
    park(store, "k", "run")
    expire(store, "k")

    assert store.inspect("k") == store.inspect("k")
    assert store.inspect("k").waiting == 1


def test_a_working_store_passes_its_check(store):
    assert isinstance(store.check(), list)


# Any text


@hostile_keys
def test_a_key_may_hold_any_text(store, key):
    token = take(store, key, "a")
    assert store.acquire(key, "b", 30.0).status is BUSY
    assert renew(store, (key, "a", 30.0)) == [RenewOutcome.RENEWED]
    assert store.inspect(key).token == token

    assert store.release(key, "a") == (True, None)
    assert not store.inspect(key).token


@hostile_keys
def test_a_run_can_be_parked_at_any_key(store, key):
    take(store, key, "a")
    park(store, key, "run", b"envelope")

    wake = store.release(key, "a").wake
    assert wake.envelope == b"envelope"
    store.sent(wake)
    store.came_back(wake)
    assert wait_until(lambda: swept(store), what="a sweep") == [wake]
    store.drop(wake)
    assert not store.inspect(key).token


@hostile_keys
def test_one_can_wait_for_any_key(store, key):
    take(store, key, "a")
    waiter = wait_for(store, key, "b")

    store.release(key, "a")

    waiter.inbox.wait(30.0)
    take(store, key, "b", queue=waiter.inbox)


@pytest.mark.parametrize("run", ["a:b", "p:x", "b:x y", " ", "{}", "run\n2", "ü", "%"])
def test_a_run_may_have_any_name(store, run):
    take(store, "k", "a")
    park(store, "k", run)

    assert store.release("k", "a").wake.run == run
    take(store, "k", "b", run=run)
    store.release("k", "b", run=run, ended=AGAIN)
    assert store.acquire("k", "c", 30.0, run=run, repeated=True).status is DONE


def test_owners_are_never_given_twice_and_fit_into_any_record():
    owners = [new_owner("label with blanks {|} \n"), new_owner("")]

    assert len({*owners, new_owner(""), new_owner("")}) == 4
    for owner in owners:
        assert len(owner.split("|")) == 4
        assert not set(owner) & set("{} \n")


# Residue


def records(redis_url, prefix):
    with redis.Redis.from_url(redis_url) as client:
        return {
            key.decode().removeprefix(f"{prefix}:"): client.pttl(key)
            for key in servers.keys(redis_url, prefix)
        }


def work(store):
    """Everything that can happen at a key, to its end."""
    take(store, "k", "a", run="run-a")
    gone = wait_for(store, "k", "gone")
    waiter = wait_for(store, "k", "b")
    park(store, "k", "run-c")
    park(store, "k", "run-d")
    park(store, "k", "run-a", repeated=True)
    store.release("k", "gone", inbox=gone.inbox)
    store.release("k", "a", run="run-a", ended=AGAIN)
    take(store, "k", "b", queue=waiter.inbox)
    store.sent(store.release("k", "b").wake)
    take(store, "k", "c", run="run-c", keep=True)
    store.release("k", "c", run="run-c", keep_for=("run-c", 30.0))
    take(store, "k", "c2", run="run-c")
    wake = store.release("k", "c2", run="run-c", ended=YES).wake
    store.came_back(wake)
    store.drop(wake)
    assert not store.inspect("k").token


def test_what_remains_in_redis_is_the_last_token_and_what_has_ended_for_an_hour(
    redis_store, redis_url, prefix
):
    work(redis_store)
    take(redis_store, "plain", "a")
    redis_store.release("plain", "a")

    left = records(redis_url, prefix)

    assert set(left) == {"{k}:fence", "{k}:done", "{plain}:fence", "parked"}
    lasting = {name: ttl for name, ttl in left.items() if name != "parked"}
    assert all(0 < ttl <= 3_600_000 for ttl in lasting.values())


def test_every_record_of_a_key_is_in_one_cluster_slot(redis_store, redis_url, prefix):
    for n, key in enumerate(HOSTILE_KEYS.values()):
        if key.isprintable() or "\ud800" not in key:
            take(redis_store, key, "a", run="r")
            wait_for(redis_store, key, f"w{n}")
            park(redis_store, key, "run")
            redis_store.release(key, "a", run="r", ended=AGAIN)

    tags: dict[bytes, set[bytes]] = {}
    for record in servers.keys(redis_url, prefix):
        if b"{" in record:
            tag = record.split(b"{", 1)[1].split(b"}", 1)[0]
            tags.setdefault(tag, set()).add(record.rpartition(b":")[2])
    assert len(tags) == len(HOSTILE_KEYS) - 1
    assert all({b"lock", b"fence", b"tasks"} <= names for names in tags.values())


def test_nothing_remains_in_memory_but_what_has_ended(prefix):
    store = MemoryStore("memory://", prefix)
    take(store, "plain", "a")
    store.acquire("plain", "b", 30.0)
    store.release("plain", "a")
    assert not store._keys

    work(store)

    assert set(store._keys) == {"k"}
    state = store._keys["k"]
    left = [state.queue, state.envelopes, state.arrivals, state.sends, state.woken]
    assert not any(left)
    assert set(state.done) == {"run-a", "run-d"}  # those whose message may come again


def test_what_every_store_can_do(store):
    assert {Ability.WAIT, Ability.PARK} <= store.abilities
