from __future__ import annotations

import logging
import threading
import time
from weakref import ref

import pytest
from redis.exceptions import RedisError

from celery_distlock import clock
from celery_distlock.engine.hold import Hold, HoldState, Terms
from celery_distlock.engine.watchdog import ANSWER_IN, ANSWER_SHARE, Watchdog, _Watched
from celery_distlock.runtime.plans import RECALL_IN
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import RenewOutcome, Reply, Status
from tests.waiting import wait_until


class Patience(MemoryStore):
    """Answers no renewal, and keeps for how long it was waited for."""

    def __init__(self):
        super().__init__("memory://", "test")
        self.timeouts = []

    def renew(self, holds, timeout):
        self.timeouts.append(timeout)
        return [(RenewOutcome.UNKNOWN, clock.monotonic()) for _ in holds]


def held(store: Patience, lease: float) -> Hold:
    hold = Hold(store, f"for {lease} s", Terms(lease), label="test")
    assert hold.take(Reply(Status.GRANTED, clock.monotonic(), token=1))
    return hold


@pytest.mark.parametrize("watchdog", [True, False])
def test_a_hold_is_warned_of_once_when_its_time_is_over(caplog, monkeypatch, watchdog):
    now = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: now)  # on a busy machine much time passes here
    store, dog = Patience(), Watchdog()
    terms = Terms(60.0, watchdog=watchdog, warn_held=10.0)
    hold = Hold(store, "k", terms, label="shop.reserve[id]")
    assert hold.take(Reply(Status.GRANTED, clock.monotonic(), token=1))
    assert 9 < dog._period(hold) <= 10

    dog._due[_Watched(hold)] = clock.monotonic()
    dog._pass()
    hold.held_since -= 10.0
    for _ in range(2):
        dog._pass()
    wait_until(lambda: "still holds" in caplog.text, what="the warning")

    assert caplog.text.count("shop.reserve[id] still holds 'k' after 10.0 s") == 1
    assert dog._period(hold) > 10


class Asking(MemoryStore):
    """Asks each holder to leave when it renews, and counts the renewals."""

    def __init__(self):
        super().__init__("memory://", "test")
        self.renewals = 0

    def renew(self, holds, timeout):
        self.renewals += 1
        return [(RenewOutcome.RECALLED, clock.monotonic()) for _ in holds]


@pytest.mark.parametrize(("lease", "within"), [(60.0, 1.0), (1.5, 0.5)])
def test_one_renewal_asks_a_holder_to_leave_within_a_second_or_a_third(monkeypatch, lease, within):
    now = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    store, dog = Asking(), Watchdog()
    hold = Hold(store, "k", Terms(lease, renew_every=RECALL_IN), label="shop.reserve[id]")
    assert hold.take(Reply(Status.GRANTED, now, token=1))
    dog._due[_Watched(hold)] = now + dog._period(hold)

    dog._pass()
    assert store.renewals == 0
    now += within
    dog._pass()

    wait_until(lambda: hold.recalled, what="the recall")
    assert store.renewals == 1
    assert 0 < min(dog._due.values()) - now <= within


@pytest.mark.parametrize("due", [60.0, 6.0])
def test_no_renewal_is_waited_for_longer_than_the_shortest_lease_can_bear(due):
    store, dog = Patience(), Watchdog()
    holds = {lease: held(store, lease) for lease in (60.0, 6.0)}
    now = clock.monotonic()
    for lease, hold in holds.items():
        dog._due[_Watched(hold)] = now - 1 if lease == due else now + 100

    dog._pass()

    assert store.timeouts == [6.0 / ANSWER_SHARE * ANSWER_IN]


def test_short_holds_that_have_gone_do_not_wake_it_again_and_again(monkeypatch):
    store, dog = Patience(), Watchdog()
    notify, notified = dog._changed.notify, []
    monkeypatch.setattr(dog._changed, "notify", lambda: (notified.append(1), notify()))
    hold = held(store, 60.0)

    for _ in range(200):
        dog.watch(hold)
        dog.forget(hold)
        time.sleep(0)  # it may look in between

    assert 0 < len(notified) < 50  # for each that would be due before all others
    assert store.timeouts == []


def test_a_hold_is_renewed_though_another_that_was_planned_for_has_gone():
    store, dog = Patience(), Watchdog()
    for lease in (60.0, 0.6):
        hold = held(store, lease)
        dog.watch(hold)
        dog.forget(hold)
    kept = held(store, 0.9)
    dog.watch(kept)

    wait_until(lambda: store.timeouts, what="a renewal")
    assert store.timeouts == [pytest.approx(0.9 / ANSWER_SHARE * ANSWER_IN)]


def test_a_signal_s_handler_may_take_a_lock_while_its_thread_plans_a_renewal(monkeypatch):
    store, dog = Patience(), Watchdog()
    first, second = held(store, 60.0), held(store, 30.0)
    notify = dog._changed.notify

    def interrupted() -> None:
        monkeypatch.undo()
        dog.watch(second)  # where Python calls the handler: in the thread that watches `first`
        notify()

    monkeypatch.setattr(dog._changed, "notify", interrupted)
    thread = threading.Thread(target=dog.watch, args=(first,), daemon=True)
    thread.start()
    thread.join(30)

    assert not thread.is_alive()
    assert set(dog.holds()) == {first, second}


def test_a_handler_that_takes_a_lock_while_the_thread_is_started_starts_no_other(monkeypatch):
    store, dog = Patience(), Watchdog()
    first, second = held(store, 60.0), held(store, 30.0)
    started = []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 1:
            dog.watch(second)

    monkeypatch.setattr(threading.Thread, "start", start)
    dog.watch(first)

    assert len(started) == 1


def test_what_a_finalizer_takes_while_the_next_look_is_planned_is_looked_at_in_time(monkeypatch):
    class Interrupted(dict[_Watched, float]):
        def copy(self) -> dict[_Watched, float]:
            found = super().copy()
            dog.watch(second)
            return found

    store, dog = Patience(), Watchdog()
    first, second = held(store, 600.0), held(store, 3.0)
    monkeypatch.setattr(dog, "_start", lambda: None)
    dog._due = Interrupted({_Watched(first): clock.monotonic() + 200.0})

    dog._look_again()

    assert dog._looks_at <= clock.monotonic() + 1.0


# A log's handler that raises, as one whose server is unreachable with the store


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log's server is unreachable")


@pytest.fixture
def broken_log():
    handler = Broken(logging.WARNING)
    logging.getLogger("celery_distlock").addHandler(handler)
    yield
    logging.getLogger("celery_distlock").removeHandler(handler)


@pytest.mark.usefixtures("broken_log")
def test_leases_are_renewed_after_what_a_log_s_handler_has_raised():
    class Away(Patience):
        def renew(self, holds, timeout):
            if len(super().renew(holds, timeout)) and len(self.timeouts) < 3:
                logging.getLogger("celery_distlock").warning("away")
            return [(RenewOutcome.RENEWED, clock.monotonic()) for _ in holds]

    store, dog = Away(), Watchdog()
    hold = held(store, 0.9)

    dog.watch(hold)

    wait_until(lambda: len(store.timeouts) > 5, what="later renewals")
    assert hold.held


@pytest.mark.usefixtures("broken_log")
def test_a_loss_is_reported_to_the_holder_though_a_log_s_handler_raises():
    interrupted: list[Hold] = []

    def log(*_: object, **__: object) -> None:
        logging.getLogger("celery_distlock").warning("lost")

    store, dog = Patience(), Watchdog()
    holds = [held(store, 0.3), held(store, 0.4)]
    for hold in holds:
        hold.on_event, hold.on_interrupted = log, interrupted.append
        dog.watch(hold)

    wait_until(lambda: len(interrupted) == 2, what="both losses")


def test_a_loss_is_reported_to_the_holder_though_a_receiver_of_its_signal_hangs():
    interrupted: list[Hold] = []
    gate = threading.Event()
    store, dog = Patience(), Watchdog()
    hold = held(store, 0.3)
    hold.on_event, hold.on_interrupted = lambda *_, **__: gate.wait(60.0), interrupted.append

    dog.watch(hold)

    try:
        wait_until(lambda: interrupted == [hold], what="the loss")
    finally:
        gate.set()


@pytest.mark.parametrize("lease", [0.3, 0.9], ids=["the hold renewed", "another one"])
def test_a_loss_is_reported_to_the_holder_though_a_renewal_hangs_beyond_its_patience(lease):
    class Resolving(Patience):
        def renew(self, holds, timeout):
            gate.wait(60.0)  # as for the server's address, which has no time limit
            return super().renew(holds, timeout)

    interrupted: list[Hold] = []
    gate = threading.Event()
    store, dog = Resolving(), Watchdog()
    holds = [held(store, 0.3), held(store, lease)]
    for hold in holds:
        hold.on_interrupted = interrupted.append
        dog.watch(hold)

    try:
        wait_until(lambda: len(interrupted) == 2, what="both losses")
    finally:
        gate.set()


def test_leases_are_renewed_when_a_renewal_that_hung_is_over():
    class Resolving(Patience):
        def renew(self, holds, timeout):
            if not self.timeouts:
                gate.wait(60.0)
            super().renew(holds, timeout)
            return [(RenewOutcome.RENEWED, clock.monotonic()) for _ in holds]

    gate = threading.Event()
    store, dog = Resolving(), Watchdog()
    hold = held(store, 3.0)
    until = hold.valid_until

    dog.watch(hold)
    wait_until(lambda: not dog._answered.is_set(), what="a renewal")
    time.sleep(3.0 / ANSWER_SHARE + 0.1)  # it is given up
    gate.set()

    wait_until(lambda: hold.valid_until > until, what="a later renewal")


def test_a_renewal_that_is_answered_after_its_timeout_counts():
    class Late(Patience):
        def renew(self, holds, timeout):
            asked_at = clock.monotonic()
            unknown = super().renew(holds, timeout)
            if len(self.timeouts) > 1:
                return unknown
            gate.wait(60.0)
            return [(RenewOutcome.RENEWED, asked_at) for _ in holds]

    gate = threading.Event()
    store, dog = Late(), Watchdog()
    hold = held(store, 3.0)
    until = hold.valid_until

    dog.watch(hold)
    wait_until(lambda: store.timeouts, what="a renewal")
    time.sleep(3.0 / ANSWER_SHARE + 0.1)  # it is given up
    gate.set()

    wait_until(lambda: hold.valid_until > until, what="its answer")


class Hanging(logging.Handler):
    def __init__(self, gate: threading.Event) -> None:
        super().__init__(logging.WARNING)
        self.gate = gate

    def emit(self, record: logging.LogRecord) -> None:
        self.gate.wait(60.0)


@pytest.fixture
def hanging():
    """What hangs until the test has ended: receivers of signals, and the log."""
    gate = threading.Event()
    handler = Hanging(gate)
    logging.getLogger("celery_distlock").addHandler(handler)
    yield gate
    gate.set()
    logging.getLogger("celery_distlock").removeHandler(handler)


def test_leases_are_renewed_while_a_receiver_of_their_signals_hangs(hanging):
    class Renewing(Patience):
        def renew(self, holds, timeout):
            super().renew(holds, timeout)
            return [(RenewOutcome.RENEWED, clock.monotonic()) for _ in holds]

    store, dog = Renewing(), Watchdog()
    hold = held(store, 0.6)
    hold.on_event = lambda *_, **__: hanging.wait(60.0)

    dog.watch(hold)

    wait_until(lambda: len(store.timeouts) > 5, what="later renewals")
    assert hold.held


def test_losses_are_reported_to_the_holders_while_receivers_and_the_log_hang(hanging):
    interrupted: list[Hold] = []
    store, dog = Patience(), Watchdog()
    holds = [held(store, lease) for lease in (0.3, 0.6)]
    for hold in holds:
        hold.on_event, hold.on_interrupted = lambda *_, **__: hanging.wait(60.0), interrupted.append
        dog.watch(hold)

    wait_until(lambda: interrupted == holds, what="both losses")


def test_the_report_of_a_hold_does_not_keep_it(hanging):
    store, dog = Patience(), Watchdog()
    holds = [held(store, 0.3)]
    holds[0].on_event = lambda *_, **__: hanging.wait(60.0)
    gone = ref(holds[0])

    dog.watch(holds[0])
    wait_until(lambda: holds[0].state is HoldState.LOST, what="the loss")
    holds.clear()

    wait_until(lambda: gone() is None, what="the hold to be gone")


# What a store says of a renewal that it did not confirm


@pytest.fixture
def away():
    """A store whose server is unreachable."""
    store = RedisStore("redis://127.0.0.1:1", "test")
    yield store
    store.close()


def test_a_loss_is_reported_to_the_holder_while_the_log_hangs_at_the_stores_report(hanging, away):
    interrupted: list[Hold] = []
    dog, hold = Watchdog(), held(away, 0.6)
    hold.on_interrupted = interrupted.append

    dog.watch(hold)

    wait_until(lambda: interrupted == [hold], what="the loss")


@pytest.mark.usefixtures("broken_log")
def test_what_is_renewed_is_held_though_the_log_raises_at_what_the_store_says(away, monkeypatch):
    monkeypatch.setattr(
        away._servers, "exchange", lambda *_: [1, RedisError("its node is unreachable")]
    )
    dog = Watchdog()
    holds = [held(away, 30.0), held(away, 30.0)]
    until = [hold.valid_until for hold in holds]

    dog._renew(holds, clock.monotonic() + 30.0, 1.0)

    assert [hold.valid_until for hold in holds] == [pytest.approx(until[0], abs=20.0), until[1]]
    assert holds[0].valid_until > until[0]
