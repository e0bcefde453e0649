"""
Client-side state of one acquisition, from the request to its end.

::

    NEW ──acquire──▶ HELD ──release──▶ ENDED
                      │ ╲
                      │  ╲ the store reports it, or no renewal was confirmed in time
                      │   ▼
                      └─▶ LOST ──release──▶ ENDED

A holder stops relying on its lease before the store can grant the key to another: it counts the
lease from the moment *before* the request was sent, and for slightly less than it asked for.
"""

import enum
import secrets
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeAlias

from celery_distlock import clock
from celery_distlock.errors import (
    ConfigurationError,
    Interruption,
    LockLostError,
    RecalledError,
    StoreError,
)
from celery_distlock.key import MAX_REST, Key
from celery_distlock.naming import RESTING, shown
from celery_distlock.process.forks import ForkStage, PerProcess
from celery_distlock.stores import QueueStore, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import (
    ALONE,
    Ability,
    Completion,
    OwnChannel,
    Ownership,
    RenewOutcome,
    Reply,
    Status,
    Want,
)

__all__ = [
    "GLANCE",
    "GONE",
    "SUPERSEDED",
    "Hold",
    "HoldState",
    "Keeper",
    "Terms",
    "believed",
    "ensure_able",
    "want_of",
]

# Redlock's allowance for two clocks of different speed (redis.io, "Distributed locks").
DRIFT_SHARE = 0.01
DRIFT_SECONDS = 0.002

GONE = "the store no longer knows it"  # reason for a loss where no other holder is known
SUPERSEDED = "superseded by a newer call"
GLANCE = 0.5  # seconds to look up the reason for a loss, in a thread that does nothing else

SHORTEST_REST = 0.001  # seconds; a shorter rest is over before the store gets the request

_process = PerProcess(object, ForkStage.IDENTITY)  # another object in a forked child


class HoldState(enum.Enum):
    """The state of a hold."""

    NEW = "new"
    HELD = "held"
    LOST = "lost"
    ENDED = "ended"


# Looking a member up in its class is slow in Python 3.11.
NEW, HELD, LOST, ENDED = HoldState
_GRANTED, _QUEUE = Status.GRANTED, Ability.QUEUE


class Terms:
    """
    The terms of a request for a key.

    Attributes:
        lease: Seconds that the lock outlives its holder's last sign of life. A longer lease
            survives longer pauses of the process; a shorter one admits others sooner after a crash.
        watchdog: Whether the lease is renewed while it is held.
        max_hold: Seconds after which renewal stops, or None.
        warn_held: Seconds after which a warning is logged that it is still held, or None.
        renew_every: Seconds after which it is renewed if a third of the lease is longer, so that a
            recall is noticed by then; or None.
        stops: Whether a recall interrupts what runs under it.
    """

    __slots__ = ("lease", "max_hold", "renew_every", "stops", "warn_held", "watchdog")

    def __init__(
        self,
        lease: float = 30.0,
        *,
        watchdog: bool = True,
        max_hold: float | None = None,
        warn_held: float | None = None,
        renew_every: float | None = None,
        stops: bool = False,
    ) -> None:
        self.lease = lease
        self.watchdog = watchdog
        self.max_hold = max_hold
        self.warn_held = warn_held
        self.renew_every = renew_every
        self.stops = stops

    @property
    def period(self) -> float:
        """Seconds between renewals, at most."""
        third = self.lease / 3
        return third if self.renew_every is None else min(third, self.renew_every)


class Keeper(Protocol):
    """Renews this process's leases while it cannot: `celery_distlock.engine.shared_holds`."""

    def heartbeat(self) -> None:
        """Note that this process renews its leases itself."""

    def renewed_until(self, owner: str) -> float:
        """Return until when, by the local clock, *owner*'s lease was renewed for it; or 0."""

    def erase(self, owner: str) -> None:
        """Stop renewing the leases of *owner*."""


class Taker(Protocol):
    """A lock of `celery_distlock.engine.key_locks` that has acquired a key."""

    wanted: Key


Emitter: TypeAlias = Callable[[Callable[[], object]], object]


def at_once(call: Callable[[], object]) -> None:
    """Emit the report *call* in this thread."""
    call()


def ignore_event(name: str, **_facts: Any) -> None:
    """Ignore the event: the default for holds without a receiver."""


class Hold:
    """
    One key that one owner holds or asks for. Its methods may be called from any thread.

    Args:
        store: Where the key is.
        key: The key and the amount of it; a plain text means all of it.
        terms: See :class:`Terms`.
        label: Name of the caller, for display when the lock is inspected.
        run: Name of the task execution that asks, see :meth:`Store.acquire`.
        waited: Seconds for which it has already waited, elsewhere.
        waited_for: What it waited for there: ``holder``, ``time``, or ``nothing``.
        redelivered: As in :class:`~celery_distlock.stores.AcquireRequest`.
        retain: As in :class:`~celery_distlock.stores.AcquireRequest`.
        on_event: Called with the name of a signal of :mod:`celery_distlock.signals`, and its facts.

    Attributes:
        wanted: What was asked for.
        want: The amount that it has or asks for; an upgrade changes it.
        slot: The index of its unit, if the store numbers units; else None.
        upgraded_at: The depth at which an inner acquisition upgraded it; None: none has.
        upgrades: The number of attempts to upgrade it so far.
        unconfirmed: Whether a downgrade was not answered: the hold is at least shared.
        unsettled: Whether the hold may change in the store without its holder. An attempt to
            upgrade it was given up or has not ended, or an inner acquisition that upgraded it was
            undone.
        changing: Taken by a thread that upgrades or downgrades it, so that they do so in turn.
        begun: Whether anything has run under it, as far as known at the release.
        recalled: Whether its holder is asked to leave. It still has the key.
        recalled_by: Why, in words.
        stops: Whether a recall interrupts what runs under it.
        on_interrupted: Called with the hold once :meth:`interruption` returns another error.
    """

    __slots__ = (
        "__weakref__",
        "_extended_until",
        "_loss_reason",
        "_mutex",
        "_process",
        "_rests_until",
        "_waited_for",
        "_wanted_since",
        "arrival",
        "begun",
        "changing",
        "depth",
        "held_since",
        "keeper",
        "key",
        "label",
        "on_event",
        "on_interrupted",
        "own_channel",
        "owner",
        "recalled",
        "recalled_by",
        "redelivered",
        "retain",
        "run",
        "sharing",
        "slot",
        "state",
        "stops",
        "store",
        "takers",
        "terms",
        "token",
        "turns",
        "unconfirmed",
        "unsettled",
        "upgraded_at",
        "upgrades",
        "valid_until",
        "want",
        "wanted",
    )

    def __init__(
        self,
        store: Store,
        key: str | Key,
        terms: Terms,
        *,
        label: str,
        run: str = "",
        waited: float = 0.0,
        waited_for: str = "nothing",
        redelivered: bool = False,
        retain: bool = False,
        on_event: Callable[..., None] = ignore_event,
    ) -> None:
        self.store = store
        self.wanted = key if isinstance(key, Key) else Key(key)
        self.key = self.wanted.template
        self.want = want_of(self.wanted)
        self.slot: int | None = None
        self.upgraded_at: int | None = None
        self.upgrades = 0
        self.unconfirmed = False
        self.unsettled = False
        self.changing = threading.RLock()
        self.begun = False
        self.terms = terms
        self.run = run
        self.redelivered = redelivered
        self.retain = retain
        self.label = label
        self.owner = new_owner(label)
        self._process = _process.value
        self.state = NEW
        self.token = 0
        self.arrival = 0  # when it joined the key's queue, by the store's clock
        self.own_channel: OwnChannel | None = None  # the channel of the worker that holds it
        self.depth = 0
        self.takers: list[Taker] = []  # one entry for each release that is due
        self.sharing: list[Taker] = []  # those of them that were here at a downgrade
        self.held_since = 0.0
        self._wanted_since = clock.monotonic() - waited
        self._waited_for = waited_for
        self.valid_until = 0.0
        self.on_event = on_event
        self.on_interrupted: Callable[[Hold], None] | None = None
        self.recalled = False
        self.recalled_by = ""
        self.stops = False
        self.keeper: Keeper | None = None
        self.turns: Any = None  # the turns of a loop's tasks in this thread: see `owners`
        self._extended_until = 0.0
        self._rests_until = 0.0
        self._loss_reason = ""
        # Reentrant: a signal handler may check the hold while this is taken.
        self._mutex = threading.RLock()

    @property
    def is_orphaned(self) -> bool:
        """Whether no code is left that could release it, so that it is not renewed."""
        return False

    def start_over(self) -> None:
        """Ask as a new owner, after a grant that came too late: that one is being released."""
        self.owner = new_owner(self.label)
        self.state = NEW

    def take(self, reply: Reply) -> bool:
        """Begin to hold what *reply* granted; false if it granted nothing, or came too late."""
        if reply.status is not _GRANTED:
            self._waited_for = reply.waits_for
            return False
        now = clock.monotonic()
        with self._mutex:
            self._note_grant(reply)
            self.held_since = now
            self.valid_until = reply.asked_at + believed(self.terms.lease)
            if now >= self.valid_until:  # the answer took longer than the lease
                return False
            self.state = HELD
            self.depth = 1
        self._emit(
            "lock_acquired",
            waited=now - self._wanted_since,
            waited_for=reply.waited_for or self._waited_for,
            units=self.want.units,
            capacity=self.want.capacity,
        )
        return True

    def _note_grant(self, reply: Reply) -> None:
        self.token = reply.token
        self.slot = reply.slot if reply.slot >= 0 else None

    def begin_upgrade(self) -> int:
        """Return the number of a new attempt to upgrade it, from 1; earlier attempts are over."""
        with self._mutex:
            self.upgrades += 1
            self.unsettled = True
            return self.upgrades

    def settle(self, number: int) -> None:
        """Note that attempt *number* has ended and its holder knows, unless a later one began."""
        with self._mutex:
            self.unsettled = self.unsettled and number != self.upgrades

    @property
    def shared_want(self) -> Want:
        """The amount after a downgrade: as before its upgrade, or shared if it began exclusive."""
        return Want(1, 0) if self.wanted.alone else want_of(self.wanted)

    def change(self, want: Want, reply: Reply, lease: float) -> None:
        """Have *want* of the key from now on, as *reply* granted it for *lease* seconds."""
        with self._mutex:
            if self.state is not HELD:
                return
            self._note_grant(reply)
            self.want = want
            self.unconfirmed = False
            self.valid_until = reply.asked_at + believed(lease)
        self._emit("lock_changed", units=want.units, capacity=want.capacity)

    def doubt(self) -> None:
        """Count as shared only, as a downgrade was not answered."""
        with self._mutex:
            self.want, self.slot, self.unconfirmed = self.shared_want, None, True

    @property
    def waited(self) -> float:
        """Seconds between the first request and the grant."""
        return self.held_since - self._wanted_since

    @property
    def held_for(self) -> float:
        """Seconds since the grant."""
        return clock.monotonic() - self.held_since

    def _emit(self, what: str, **facts: Any) -> None:
        self.on_event(what, key=self.key, token=self.token, holder=self.owner, **facts)

    def _report(self, what: str, **facts: Any) -> Callable[[], None]:
        """Return a function that reports the event and keeps no reference to this hold."""
        event = {"key": self.key, "token": self.token, "holder": self.owner, **facts}
        return partial(self.on_event, what, **event)

    @property
    def held(self) -> bool:
        """Whether the key is ours, by the local clock; no round trip. False in a forked child."""
        return (
            self.state is HELD and self._process is _process.value and self.lasts(clock.monotonic())
        )

    @property
    def is_parents(self) -> bool:
        """Whether it belongs to the process that forked this one."""
        return self._process is not _process.value

    def lasts(self, now: float) -> bool:
        """Return whether the lease has not run out, including renewals by the keeper."""
        if now >= self.valid_until and self.keeper is not None:
            self.valid_until = max(self.valid_until, self.keeper.renewed_until(self.owner))
        return now < self.valid_until

    @property
    def remaining(self) -> float:
        """Seconds that the key is still ours if no renewal succeeds; 0 when it is not."""
        now = clock.monotonic()
        if self.state is not HELD or self.is_parents or not self.lasts(now):
            return 0.0
        return self.valid_until - now

    @property
    def suspect(self) -> bool:
        """Whether it is ours, and a renewal has been due for a third of the lease."""
        return self.renewable and 0 < self.remaining < self.terms.lease / 3

    @property
    def renewable(self) -> bool:
        """Whether the watchdog renews it: not after `max_hold`, nor without a watchdog."""
        if self.state is not HELD or not self.terms.watchdog:
            return False
        limit = self.terms.max_hold
        return limit is None or clock.monotonic() < self.held_since + limit

    def ensure_held(self) -> None:
        """Raise :exc:`LockLostError` unless the key is ours now; no round trip."""
        if self.state is HELD and self._process is _process.value:
            now = clock.monotonic()
            if now < self.valid_until or self.lasts(now):
                return
            self.lose("its lease ran out")
        raise self.loss()

    def loss(self) -> LockLostError:
        """Return the error that describes how the key was lost."""
        reason = "the process that forked this one has it" if self.is_parents else ""
        return LockLostError(self.key, token=self.token, reason=self._loss_reason or reason)

    def ownership(self) -> Ownership:
        """Return what a renewal asks for: the lease, or longer where it was extended."""
        wanted = max(self.terms.lease, self._extended_until - clock.monotonic())
        return Ownership(self.key, self.owner, wanted)

    def note_downgrade(self) -> None:
        """Note that all current takers share it from now on, whatever they asked for."""
        self.upgraded_at = None
        self.sharing = list(self.takers)

    def leave(self, taker: Taker) -> None:
        """Note one release by a lock; another lock of this key may have taken it."""
        self.depth -= 1
        if taker in self.takers:
            self.takers.remove(taker)
        if self.sharing and self.sharing.count(taker) > self.takers.count(taker):
            self.sharing.remove(taker)

    @property
    def is_wanted_alone(self) -> bool:
        """Whether a lock that has yet to release it wants it exclusive, with no downgrade since."""
        return any(
            taker.wanted.alone and self.takers.count(taker) > self.sharing.count(taker)
            for taker in self.takers
        )

    def lease_for_change(self) -> float:
        """Return the lease for an upgrade or a downgrade, which does not prolong a fixed one."""
        return self.ownership().lease if self.renewable else self.remaining

    def renewed(
        self, outcome: RenewOutcome, asked_at: float, lease: float, emit: Emitter = at_once
    ) -> None:
        """
        Record the outcome of a renewal that was requested at *asked_at* for *lease* seconds.

        *emit* is called with the function that reports it.
        """
        if outcome.is_held:
            with self._mutex:
                if self.state is not HELD:
                    return
                self.valid_until = max(self.valid_until, asked_at + believed(lease))
            if self.keeper is not None:
                self.keeper.heartbeat()
            emit(self._report("lock_renewed"))
            if outcome is RenewOutcome.RECALLED and not self.recalled:
                self.recall(self.why_lost(SUPERSEDED), emit)
        elif outcome is RenewOutcome.HELD:
            self.lose(self.why_lost("another owner holds it"), emit)
        elif outcome is RenewOutcome.LOST:
            self.lose(self.why_lost(GONE), emit)
        # UNKNOWN changes nothing: the lease holds until `valid_until`, and only until then.

    def renew(self, timeout: float) -> RenewOutcome:
        """Renew the lease now, which notes a loss and a recall; one round trip."""
        wanted = self.ownership()
        ((outcome, asked_at),) = self.store.renew([wanted], timeout)
        self.renewed(outcome, asked_at, wanted.lease)
        return outcome

    def lose(self, reason: str, emit: Emitter = at_once) -> None:
        """Mark the key as lost. Reported once, by *emit*, and not after the hold has ended."""
        with self._mutex:
            if self.state is not HELD:
                return
            self.state = LOST
            self._loss_reason = reason
            # A callback that is set later checks the state itself, or has a later grant.
            receiver = self.on_interrupted
        self._interrupt(receiver, emit, "lock_lost", reason=reason)

    def recall(self, by: str = SUPERSEDED, emit: Emitter = at_once) -> None:
        """Ask its holder to leave, without taking the key. Reported once, as a loss is."""
        with self._mutex:
            if self.state is not HELD or self.recalled:
                return
            self.recalled_by = by
            self.recalled = True
            receiver = self.on_interrupted if self.stops else None
        self._interrupt(receiver, emit, "lock_recalled", by=by)

    def _interrupt(
        self, receiver: "Callable[[Hold], None] | None", emit: Emitter, what: str, **facts: Any
    ) -> None:
        held = self.held_for
        try:  # first: a signal's receiver may hang or raise
            if receiver is not None:
                receiver(self)
        finally:
            emit(self._report(what, **facts, held=held))

    def interruption(self) -> Interruption | None:
        """Return the error that what runs under it must end with now; None: it goes on."""
        if self.state is LOST:
            return self.loss()
        if self.recalled and self.stops:
            return self.recall_error()
        return None

    def recall_error(self) -> RecalledError:
        """Return the error that describes the recall."""
        return RecalledError(self.key, self.token, self.recalled_by)

    def why_lost(self, otherwise: str, *, patience: float = 0.0) -> str:
        """Return the operator's action that took the key, by `Audit.why_lost`, or *otherwise*."""
        if _QUEUE not in self.store.abilities:
            return otherwise
        audit = QueueStore.of(self.store).audit
        return audit.why_lost(self.key, self.owner, patience) or otherwise

    def find_lost(self, reason: str) -> None:
        """Report a loss that is noticed only after the hold has ended."""
        self._loss_reason = reason
        self._emit("lock_lost", reason=reason, held=self.held_for)

    def report_released(self) -> None:
        """Report that it was released while it was held."""
        self._emit("lock_released", held=clock.monotonic() - self.held_since)

    def extend(self, seconds: float) -> None:
        """
        Make the lease last at least *seconds* from now; one round trip.

        Raises:
            LockLostError: The key was lost before.
            StoreError: The store did not confirm it; the lease is as long as it was.
        """
        self.ensure_held()
        before = self._extended_until
        self._extended_until = max(before, clock.monotonic() + seconds)
        if self.renew(5.0) is RenewOutcome.UNKNOWN:
            self._extended_until = before
            raise StoreError(f"the lease of {shown(self.key)!r} was not extended: no answer")
        self.ensure_held()

    def cool_down(self, seconds: float) -> None:
        """
        Refuse all new grants for *seconds* from now, even if this hold ends before.

        Raises:
            LockLostError: The key was lost before.
            StoreError: The store did not confirm it, or cannot do it for a shared key.
        """
        self.ensure_held()
        if _QUEUE not in self.store.abilities and self.want.alone:
            self._rests_until = max(self._rests_until, clock.monotonic() + seconds)
        elif not QueueStore.of(self.store).units.rest(self.key, self.owner, seconds):
            self.lose(self.why_lost(GONE, patience=GLANCE))
            raise self.loss()

    def rest(self, *, succeeded: bool) -> tuple[str, float] | None:
        """
        Return the placeholder owner, and the seconds for which the key rests after release.

        None: it is free then.
        """
        if self.state is not HELD:
            return None
        now, wanted = clock.monotonic(), self.wanted
        until = max(self._rests_until, self.held_since + wanted.min_hold)
        if succeeded:
            until = max(until, now + wanted.cooldown)
        if until - now < SHORTEST_REST:
            return None
        return f"{RESTING}{secrets.token_hex(8)}", min(until - now, MAX_REST)

    @property
    def started(self) -> bool | None:
        """Whether anything ran under the grant; None: the store counts no starts."""
        # An operator's rate counts, too.
        counts = self.wanted.rate or _QUEUE in self.store.abilities
        return self.begun if counts else None

    def end(self) -> HoldState:
        """Stop holding, before the request to the store; return the state before."""
        with self._mutex:
            before, self.state = self.state, ENDED
            return before

    def release_request(
        self,
        completion: Completion = Completion.NO,
        *,
        inbox: Inbox | None = None,
        keep_for: tuple[str, float] | None = None,
        own_channel: OwnChannel | None = None,
    ) -> ReleaseRequest:
        """Return the request that removes this owner from the key and from its queue."""
        return ReleaseRequest(
            self.key,
            self.owner,
            run=self.run,
            completion=completion,
            inbox=inbox,
            keep_for=keep_for,
            started=self.started,
            own_channel=own_channel,
        )


def believed(lease: float) -> float:
    """Return how long to rely on a lease of *lease* seconds, from before its request."""
    return lease - lease * DRIFT_SHARE - DRIFT_SECONDS


def want_of(key: Key) -> Want:
    """Return the amount of *key* that is asked for."""
    order = key.order
    if key.alone and not key.rate and order is None:
        return ALONE
    capacity = 0 if key.shared or key.capacity is None else key.capacity
    if order is None:
        return Want(key.weight, capacity, key.rates, key.cost)
    terms = order.lane, round(1000 * order.share), order.most or 0
    more = round(1000 * order.ahead), order.strict
    return Want(key.weight, capacity, key.rates, key.cost, *terms, *more)


def ensure_able(store: Store, keys: Iterable[Key], where: str) -> None:
    """
    Raise :exc:`ConfigurationError` if *store* cannot do what one of *keys* needs.

    Args:
        store: The store.
        keys: What is asked for.
        where: The name of the caller, for the message.
    """
    for key in keys:
        want = want_of(key)
        needed = None if want is ALONE else want.needs
        if needed is not None and needed not in store.abilities:
            raise ConfigurationError(
                f"{where}: {key!r} needs a store that can {needed.value}; {store.address} cannot"
            )
