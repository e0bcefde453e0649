"""
One thread that renews this process's leases, and reports when it cannot.

It serves any number of leases in one store. A process with locks in several stores has one watchdog
for each, so that a store that hangs does not affect the others. A separate thread makes the
requests: one that hangs beyond its limit, as in a name lookup, does not delay the report of a loss.

A lease is renewed every third of it, as in Redisson, a little earlier or later so that processes
that began together do not stay in step. Renewals that are due at about the same time share a round
trip.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakSet, ref

from celery_distlock import clock
from celery_distlock.errors import LockLostError
from celery_distlock.naming import shown
from celery_distlock.process.background import Background
from celery_distlock.process.forks import ForkStage, at_fork
from celery_distlock.process.notifications import log, notify
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.base import Store, batches
from celery_distlock.stores.values import Ownership, RenewOutcome

from .hold import Hold, HoldState

logger = logging.getLogger(__name__)

Outcome: TypeAlias = tuple[RenewOutcome, float]

BATCH = 100  # holds per round trip
GATHER = 0.15  # of a renewal period: what is due this soon is renewed in the same round trip
# A renewal is given up after a sixth of the shortest lease here, in time for another attempt: the
# server that does not answer may not be the one that has the key with that lease.
ANSWER_SHARE = 6
RETRY_SHARE = 9  # and repeated after a ninth
# Of the time for which the thread waits, so that a late answer still arrives in time.
ANSWER_IN = 0.9
_FAILED = "unexpected error while renewing leases; trying again"


class _Watched(ref[Hold]):
    """A weak reference to a hold that can also stop its renewal."""

    __slots__ = ("_keeper", "_owner")

    def __init__(self, hold: Hold) -> None:
        super().__init__(hold)  # type: ignore[call-arg]
        self._keeper = hold.keeper
        self._owner = hold.owner

    def abandon(self) -> None:
        """Stop the renewal by the parent, too, now that the hold is gone."""
        if self._keeper is not None:
            self._keeper.erase(self._owner)


class Watchdog:
    """Renews holds; see the module. All of its methods may be called from any thread."""

    def __init__(self) -> None:
        # By weak reference: a hold that no code refers to is not renewed, even if its owner lives
        # on.
        self._due: dict[_Watched, float] = {}
        self._warned: WeakSet[Hold] = WeakSet()  # holds that were reported as held for long
        self._looks_at = float("inf")  # the local clock's time when the thread looks again
        # Taken as such: a time limit's exception inside a Condition's own `with` leaves it locked.
        # Reentrant: a signal handler, or a finalizer, may take a lock while its thread has this.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._asking = Background("distlock-renewals", _FAILED)
        self._answered = threading.Event()  # set once the last request was answered
        self._answered.set()

    def watch(self, hold: Hold) -> None:
        """Renew *hold*, or only watch for its end, until :meth:`forget`."""
        due = clock.monotonic() + self._period(hold)
        self._due[_Watched(hold)] = due
        if due < self._looks_at or self._thread is None:
            with self._mutex:
                self._start()
                self._changed.notify()
                # Kept, even if the hold is gone before the thread looks: otherwise each of many
                # short holds would wake it. Last: if a time limit's exception comes before, the
                # next hold notifies.
                self._look_at(due)

    def forget(self, hold: Hold) -> None:
        """Stop renewing *hold*. A renewal in flight does no harm: its owner has no key then."""
        self._due.pop(ref(hold), None)  # type: ignore[call-overload]  # equal to a _Watched

    def holds(self) -> list[Hold]:
        """Return what any thread holds here now."""
        return [hold for watched in list(self._due) if (hold := watched()) is not None]

    def _look_at(self, due: float) -> None:
        # After a call, a signal handler could run in between.
        if due < self._looks_at:  # noqa: PLR1730
            self._looks_at = due

    def _start(self) -> None:
        if self._thread is None:
            # Assigned first: a signal handler may run while the start is waited for, too.
            self._thread = thread = DaemonThread("distlock-watchdog", self._run)
            try:
                thread.start()
            except BaseException:
                self._thread = None
                raise

    def _period(self, hold: Hold) -> float:
        if not hold.renewable:
            period = max(0.0, hold.valid_until - clock.monotonic())
        else:
            period = hold.terms.period * clock.jitter(0.85, 1.0)
        after = hold.terms.warn_held
        if after is None or hold in self._warned:
            return period
        return min(period, max(0.0, after - hold.held_for))

    def _warn_if_held_for_long(self, hold: Hold) -> None:
        after = hold.terms.warn_held
        if after is not None and hold.held_for >= after and hold not in self._warned:
            self._warned.add(hold)
            text = "%s still holds %r after %.1f s"
            log(logger, logging.WARNING, text, hold.label, shown(hold.key), hold.held_for)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (pause := self._looks_at - clock.monotonic()) > 0:
                    self._changed.wait(pause if pause < threading.TIMEOUT_MAX else None)
                # Before the pass: holds that are added during it may not be part of it.
                self._looks_at = float("inf")
            _go_on_after(self._pass)
            with self._mutex:
                self._look_again()

    def _look_again(self) -> None:
        self._look_at(min(self._due.copy().values(), default=float("inf")))

    def _pass(self) -> None:
        now = clock.monotonic()
        renewals: list[Hold] = []
        ends_at = shortest = float("inf")  # of the first lease here, and of the shortest
        for reference, due in self._due.copy().items():
            hold = reference()
            if hold is None or hold.is_orphaned:
                self._due.pop(reference, None)
                reference.abandon()
                continue
            if hold.state is not HoldState.HELD:
                self.forget(hold)
                continue
            if not hold.lasts(now):
                self._lost(hold, _why(hold))
                continue
            self._warn_if_held_for_long(hold)
            ends_at = min(ends_at, hold.valid_until)
            if hold.renewable:
                shortest = min(shortest, hold.terms.lease)
            if due <= now + GATHER * hold.terms.period and hold.renewable:
                renewals.append(hold)
            elif due <= now:
                self._due[reference] = now + self._period(hold)
        for batch in batches(renewals, BATCH):
            self._renew(batch, ends_at, shortest / ANSWER_SHARE)

    def _renew(self, holds: Sequence[Hold], ends_at: float, patience: float) -> None:
        wanted = [hold.ownership() for hold in holds]
        # Never longer than the first lease here lasts: its end must be noticed in time.
        patience = max(0.0, min(patience, ends_at - clock.monotonic()))
        note = partial(self._note, holds, wanted)
        note(self.ask(Request(holds[0].store, wanted, patience, note)))

    def ask(self, request: "Request") -> list[Outcome]:
        """Return the outcomes that arrive in time; asks nothing while another request hangs."""
        if not self._answered.is_set():
            return request.unknown
        make = partial(_go_on_after, request.make)
        try:
            self._asking.submit(make)
        except RuntimeError:  # no thread can be started
            make()
        self._answered = request.answered
        return request.wait()

    def _note(
        self, holds: Sequence[Hold], wanted: Sequence[Ownership], outcomes: Sequence[Outcome]
    ) -> None:
        reports: list[Callable[[], object]] = []
        for hold, ownership, (outcome, asked_at) in zip(holds, wanted, outcomes, strict=True):
            _go_on_after(partial(hold.renewed, outcome, asked_at, ownership.lease, reports.append))
            reference = _Watched(hold)
            if hold.state is not HoldState.HELD or reference not in self._due:
                self.forget(hold)
            elif outcome is RenewOutcome.UNKNOWN:
                if hold.suspect:
                    text = "the lease of %r is not renewed and ends in %.1f s"
                    log(logger, logging.WARNING, text, shown(hold.key), hold.remaining)
                retry = clock.monotonic() + hold.terms.lease / RETRY_SHARE
                self._due[reference] = min(retry, hold.valid_until)
            else:
                self._due[reference] = clock.monotonic() + self._period(hold)
        if reports:
            notify(partial(_report, reports))

    def _lost(self, hold: Hold, reason: str) -> None:
        self.forget(hold)
        _go_on_after(partial(hold.lose, reason, notify))


class Request:
    """
    A renewal request, made in a thread other than the watchdog's.

    Args:
        store: The store to ask.
        wanted: The leases to renew.
        patience: Seconds to wait for the answer.
        late: Called with the outcomes that arrive after that.

    Attributes:
        answered: Set when the request was answered, or has failed.
    """

    def __init__(
        self,
        store: Store,
        wanted: Sequence[Ownership],
        patience: float,
        late: Callable[[list[Outcome]], object],
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._patience = patience
        self._late = late
        self._mutex = threading.Lock()
        self.answered = threading.Event()
        self._outcomes: list[Outcome] | None = None
        self._is_given_up = False

    @property
    def unknown(self) -> list[Outcome]:
        """The outcomes without an answer: all unknown."""
        return [(RenewOutcome.UNKNOWN, clock.monotonic())] * len(self._wanted)

    def make(self) -> None:
        """Ask the store."""
        outcomes = None
        try:
            outcomes = self._store.renew(self._wanted, self._patience * ANSWER_IN)
        finally:
            with self._mutex:
                self._outcomes, is_late = outcomes, self._is_given_up
            self.answered.set()
        if is_late:
            self._late(outcomes)

    def wait(self) -> list[Outcome]:
        """Return the outcomes that arrive in time."""
        self.answered.wait(self._patience)
        with self._mutex:
            self._is_given_up = self._outcomes is None
            return self.unknown if self._outcomes is None else self._outcomes


def _report(reports: Iterable[Callable[[], object]]) -> None:
    for each in reports:
        _go_on_after(each)


def _go_on_after(step: Callable[[], object]) -> None:
    """Do *step* and log what it raises: the other leases must still be renewed."""
    try:
        step()
    except LockLostError:  # a test's clock runs this in the task's own thread, which gets the error
        raise
    except Exception as error:  # noqa: BLE001  # it is logged
        log(logger, logging.ERROR, _FAILED, exc_info=error)


def _why(hold: Hold) -> str:
    renewed = hold.renewable
    return "no renewal was confirmed in time" if renewed else "its lease ran out without renewal"


def watchdog(store: Store) -> Watchdog:
    """Return this process's watchdog for *store*: a store that hangs does not delay another."""
    try:
        return _watchdogs[store]
    except KeyError:
        return _watchdogs.setdefault(store, Watchdog())


_watchdogs: "WeakKeyDictionary[Store, Watchdog]" = WeakKeyDictionary()
at_fork(_watchdogs.clear, ForkStage.THREADS)
