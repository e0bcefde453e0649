from __future__ import annotations

import contextlib

import pytest

from celery_distlock import clock
from celery_distlock.engine.abort import Guard
from celery_distlock.engine.hold import Hold, HoldState, Terms
from celery_distlock.engine.lease import Lease
from celery_distlock.errors import LockLostError, StoreError
from celery_distlock.settings import MAX_LEASE
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import RenewOutcome, Reply, Status
from tests.handlers import hangs_of

RENEWED, RECALLED, HELD, LOST, UNKNOWN = (
    RenewOutcome.RENEWED,
    RenewOutcome.RECALLED,
    RenewOutcome.HELD,
    RenewOutcome.LOST,
    RenewOutcome.UNKNOWN,
)
BELIEVED = 10.0 - 0.1 - 0.002  # of a lease of 10 s, after the allowance for drift


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Renewals(MemoryStore):
    """Answers renewals as a test asks, and keeps what was asked for."""

    def __init__(self):
        super().__init__("memory://", "test")
        self.outcome = RENEWED
        self.asked = []
        self.takes = 0.0
        self.clock = None

    def renew(self, holds, timeout):
        asked_at = clock.monotonic()
        self.asked.extend(holds)
        self.clock.now += self.takes
        return [(self.outcome, asked_at) for _ in holds]


@pytest.fixture
def now(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(clock, "monotonic", fake)
    return fake


@pytest.fixture
def store(now):
    store = Renewals()
    store.clock = now
    return store


@pytest.fixture
def events():
    return []


@pytest.fixture
def new_hold(now, store, events):
    def make(**terms):
        return Hold(
            store,
            "k",
            Terms(**{"lease": 10.0, **terms}),
            label="test",
            on_event=lambda name, **facts: events.append((name, facts)),
        )

    return make


@pytest.fixture
def hold(new_hold, now):
    hold = new_hold()
    assert hold.take(Reply(Status.GRANTED, now.now, token=7))
    return hold


def names(events):
    return [name for name, _ in events]


def test_a_new_hold_holds_nothing(new_hold):
    hold = new_hold()

    assert (hold.state, hold.held, hold.remaining) == (HoldState.NEW, False, 0.0)
    assert not hold.renewable
    with pytest.raises(LockLostError):
        hold.ensure_held()


def test_every_hold_is_an_owner_of_its_own(new_hold):
    assert new_hold().owner != new_hold().owner


def test_a_grant_begins_the_hold(hold, events):
    ((_, facts),) = events
    assert (hold.state, hold.held, hold.token, hold.depth) == (HoldState.HELD, True, 7, 1)
    assert names(events) == ["lock_acquired"]
    base = {"key": "k", "token": 7, "holder": hold.owner, "waited": 0.0, "waited_for": "nothing"}
    assert facts == {**base, "units": 1, "capacity": 1}
    hold.ensure_held()


def test_a_lease_counts_from_before_its_request_was_sent(new_hold, now):
    hold = new_hold()
    asked_at = now.now
    now.now += 3

    assert hold.take(Reply(Status.GRANTED, asked_at, token=7))

    assert hold.valid_until == pytest.approx(asked_at + BELIEVED)
    assert hold.remaining == pytest.approx(BELIEVED - 3)


def test_a_lease_is_suspect_when_its_renewal_is_overdue(hold, now):
    asked_at = now.now
    now.now = asked_at + 6.5
    assert not hold.suspect
    now.now = asked_at + 7.0
    assert hold.suspect

    hold.renewed(RenewOutcome.RENEWED, now.now, 10.0)

    assert not hold.suspect


def test_a_lease_that_is_not_to_be_renewed_is_never_suspect(new_hold, now):
    hold = new_hold(watchdog=False)
    hold.take(Reply(Status.GRANTED, now.now, token=7))

    now.now += 9.0

    assert hold.held
    assert not hold.suspect


def test_a_lost_lease_is_not_suspect(hold, now):
    now.now += 11.0

    assert not hold.suspect


def test_a_lease_is_believed_for_less_than_it_was_asked_for(hold, now):
    asked_at = now.now
    now.now = asked_at + BELIEVED - 0.001
    assert hold.held

    now.now = asked_at + BELIEVED + 0.001
    assert not hold.held
    assert hold.remaining == 0.0
    assert now.now < asked_at + 10.0


def test_a_grant_that_took_longer_than_the_lease_is_not_believed(new_hold, now, events):
    hold = new_hold()

    assert not hold.take(Reply(Status.GRANTED, now.now - BELIEVED - 0.01, token=7))

    assert hold.state is HoldState.NEW
    assert not hold.held
    assert not events


@pytest.mark.parametrize("status", [Status.BUSY, Status.PARKED, Status.DONE])
def test_only_a_grant_begins_a_hold(new_hold, now, status):
    hold = new_hold()

    assert not hold.take(Reply(status, now.now, token=7, holder="other"))

    assert hold.state is HoldState.NEW


def test_a_renewal_counts_from_before_it_was_asked_for(hold, now, events):
    asked_at = now.now = now.now + 5
    now.now += 2

    hold.renewed(RENEWED, asked_at, 10.0)

    assert hold.valid_until == pytest.approx(asked_at + BELIEVED)
    assert names(events) == ["lock_acquired", "lock_renewed"]


def test_an_older_renewal_does_not_shorten_the_belief(hold, now):
    hold.renewed(RENEWED, now.now + 5, 10.0)
    until = hold.valid_until

    hold.renewed(RENEWED, now.now + 1, 10.0)

    assert hold.valid_until == until


def test_an_unknown_renewal_keeps_the_belief_until_the_leases_end_and_not_beyond(hold, now):
    until = hold.valid_until
    now.now = until - 0.1

    hold.renewed(UNKNOWN, now.now, 10.0)

    assert hold.held
    assert hold.valid_until == until
    now.now = until
    assert not hold.held
    with pytest.raises(LockLostError, match="its lease ran out"):
        hold.ensure_held()
    assert hold.state is HoldState.LOST


@pytest.mark.parametrize(
    ("outcome", "reason"), [(HELD, "another owner holds it"), (LOST, "no longer knows it")]
)
def test_a_refused_renewal_ends_the_belief_at_once(hold, events, outcome, reason, now):
    hold.renewed(outcome, now.now, 10.0)

    assert (hold.state, hold.held, hold.remaining) == (HoldState.LOST, False, 0.0)
    name, facts = events[-1]
    assert name == "lock_lost"
    assert (facts["key"], facts["token"], facts["holder"]) == ("k", 7, hold.owner)
    assert reason in facts["reason"]
    with pytest.raises(LockLostError, match=reason) as caught:
        hold.ensure_held()
    assert (caught.value.key, caught.value.token) == ("k", 7)


def test_a_loss_is_reported_once(hold, events, now):
    lost = []
    hold.on_interrupted = lost.append

    hold.lose("first")
    hold.lose("second")
    hold.renewed(LOST, now.now, 10.0)

    assert lost == [hold]
    assert names(events).count("lock_lost") == 1
    assert "first" in str(hold.loss())


def test_a_recall_is_noted_and_reported_once_and_leaves_the_lease(hold, events, now):
    interrupted = []
    hold.on_interrupted, hold.stops = interrupted.append, True
    until = now.now + 10.0

    hold.renewed(RECALLED, until, 10.0)
    hold.renewed(RECALLED, until, 10.0)

    assert interrupted == [hold]
    assert hold.recalled
    assert hold.held
    assert hold.valid_until > until
    assert names(events).count("lock_recalled") == 1
    (facts,) = [facts for name, facts in events if name == "lock_recalled"]
    assert (facts["key"], facts["token"], facts["holder"]) == ("k", 7, hold.owner)
    assert facts["by"] == "superseded by a newer call"


def test_a_recall_of_what_does_not_stop_is_only_noted(hold):
    interrupted = []
    hold.on_interrupted = interrupted.append

    hold.recall("asked by an operator")

    assert interrupted == []
    assert hold.recalled
    assert hold.interruption() is None
    hold.lose("gone")
    assert interrupted == [hold]


@pytest.mark.parametrize("end", [lambda hold: hold.end(), lambda hold: hold.lose("gone")])
def test_what_is_not_held_is_not_recalled(hold, events, end):
    end(hold)

    hold.recall()

    assert not hold.recalled
    assert "lock_recalled" not in names(events)


def test_what_may_be_recalled_is_renewed_often_enough_to_learn_of_it():
    periods = [
        Terms(lease, renew_every=every).period for lease in (60.0, 1.5) for every in (None, 1.0)
    ]

    assert periods == [20.0, 1.0, 0.5, 0.5]


def test_a_renewal_that_comes_after_the_loss_does_not_bring_the_lock_back(hold, now):
    hold.lose("gone")

    hold.renewed(RENEWED, now.now, 10.0)

    assert hold.state is HoldState.LOST
    assert not hold.held


def test_an_ended_hold_is_not_lost_any_more(hold, events, now):
    assert hold.end() is HoldState.HELD

    hold.renewed(LOST, now.now, 10.0)
    hold.lose("too late")

    assert hold.state is HoldState.ENDED
    assert "lock_lost" not in names(events)
    assert hold.end() is HoldState.ENDED


def test_a_renewal_that_comes_after_the_end_is_not_reported(hold, events, now):
    hold.end()

    hold.renewed(RENEWED, now.now, 10.0)

    assert names(events) == ["lock_acquired"]


def test_a_held_lock_is_renewable_unless_its_terms_say_otherwise(new_hold, now):
    hold, fixed, short = new_hold(), new_hold(watchdog=False), new_hold(max_hold=3.0)
    for each in (hold, fixed, short):
        each.take(Reply(Status.GRANTED, now.now, token=7))

    assert (hold.renewable, fixed.renewable, short.renewable) == (True, False, True)
    now.now += 3.0
    assert (hold.renewable, short.renewable) == (True, False)
    hold.end()
    assert not hold.renewable


def test_extend_makes_the_lease_longer_with_one_request(hold, store, now):
    hold.extend(60.0)

    (asked,) = store.asked
    assert (asked.key, asked.owner, asked.lease) == ("k", hold.owner, pytest.approx(60.0))
    assert hold.remaining == pytest.approx(60.0 * 0.99 - 0.002)


def test_extend_never_makes_the_lease_shorter(hold, store):
    until = hold.valid_until

    hold.extend(1.0)

    assert store.asked[0].lease == 10.0
    assert hold.valid_until >= until


def test_renewals_keep_what_was_extended(hold, now):
    hold.extend(60.0)
    now.now += 20.0

    assert hold.ownership().lease == pytest.approx(40.0)
    now.now += 39.0
    assert hold.ownership().lease == 10.0


def test_an_extension_counts_from_before_it_was_asked_for(hold, store, now):
    asked_at = now.now
    store.takes = 4.0

    hold.extend(60.0)

    assert hold.valid_until == pytest.approx(asked_at + 60.0 * 0.99 - 0.002)


def test_an_extension_without_an_answer_is_an_error_and_changes_nothing(hold, store):
    until = hold.valid_until
    store.outcome = UNKNOWN

    with pytest.raises(StoreError, match="no answer"):
        hold.extend(60.0)

    assert hold.valid_until == until
    assert hold.held


def test_the_watchdog_does_not_ask_again_for_what_was_refused(hold, store):
    store.outcome = UNKNOWN
    with pytest.raises(StoreError):
        Lease((hold,)).extend(60.0)

    assert hold.ownership().lease == 10.0


@pytest.mark.parametrize("outcome", [HELD, LOST])
def test_an_extension_that_is_refused_is_a_loss(hold, store, outcome):
    store.outcome = outcome

    with pytest.raises(LockLostError):
        hold.extend(60.0)

    assert hold.state is HoldState.LOST


def test_what_is_lost_cannot_be_extended(hold, store):
    hold.lose("gone")

    with pytest.raises(LockLostError, match="gone"):
        hold.extend(60.0)

    assert not store.asked


@pytest.fixture
def two(new_hold, now):
    holds = new_hold(), new_hold()
    holds[1].key = "k2"
    for token, hold in enumerate(holds, start=7):
        hold.take(Reply(Status.GRANTED, now.now, token=token))
    return holds


def test_a_lease_of_several_keys_is_held_as_long_as_all_are(two, now):
    lease = Lease(two)
    assert (lease.key, lease.keys, lease.token) == ("k", ("k", "k2"), 7)
    assert lease.held
    lease.ensure_held()
    two[0].renewed(RENEWED, now.now + 5, 10.0)

    assert lease.remaining == pytest.approx(BELIEVED)

    two[1].lose("gone")
    assert not lease.held
    assert lease.remaining == 0.0
    with pytest.raises(LockLostError) as caught:
        lease.ensure_held()
    assert caught.value.key == "k2"


def test_a_lease_extends_all_its_keys(two, store):
    Lease(two).extend(60)

    assert [asked.key for asked in store.asked] == ["k", "k2"]


@pytest.mark.parametrize(
    "seconds", [0, -1, float("nan"), float("inf"), "60", None, True, MAX_LEASE + 1]
)
def test_extend_takes_a_positive_number_of_seconds(hold, store, seconds):
    with pytest.raises(ValueError, match="positive number of seconds"):
        Lease((hold,)).extend(seconds)

    assert not store.asked


def test_the_repr_of_a_lease_says_what_is_held(hold):
    assert repr(Lease((hold,))) == "<Lease 'k' token 7: 9.9 s left>"
    hold.lose("gone")
    assert repr(Lease((hold,))) == "<Lease 'k' token 7: not held>"


def test_the_clock_counts_seconds_and_does_not_go_back():
    times = [clock.monotonic() for _ in range(100)]

    assert times == sorted(times)
    assert isinstance(times[0], float)


def test_a_signal_s_handler_may_find_a_lease_lost_while_its_thread_finds_it(store, now):
    held: list[Hold] = []

    def find() -> None:
        with contextlib.suppress(LockLostError):
            held[0].ensure_held()

    def hold_what_is_over() -> None:
        held[:] = [Hold(store, "k", Terms(10.0, watchdog=False), label="task")]
        held[0].take(Reply(Status.GRANTED, token=1, asked_at=now()))
        now.now += 60.0

    assert hangs_of(find, find, {"lose"}, before=hold_what_is_over) == []

    def guarded() -> None:
        with contextlib.suppress(LockLostError):
            Guard((held[0],)).run(lambda: None)

    assert hangs_of(guarded, find, {"_disarm"}, before=hold_what_is_over) == []
