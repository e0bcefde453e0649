"""
The operations of ``celery locks``, remote control, the web page and the exporter.

Everything here asks the lock store; no worker has to answer.
"""

import itertools
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from celery import Celery
from celery.app.task import Context

from celery_distlock import clock, signals
from celery_distlock.errors import DistlockError, StoreError
from celery_distlock.key import MAX_CAPACITY
from celery_distlock.keys import as_key, key_of, slot_name
from celery_distlock.naming import PARKED, shown
from celery_distlock.rate import RateLike, rates_in
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.lock_header import LockHeader, without_ours
from celery_distlock.runtime.messages import to_message
from celery_distlock.runtime.trust import Reason, RefusedError
from celery_distlock.stores import (
    Action,
    ListingStore,
    NotOursError,
    QueueStore,
    ReleaseRequest,
    Store,
    UnsendableError,
)
from celery_distlock.stores.holders import Holder, HoldInfo, known_time
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.queue_store import ready
from celery_distlock.stores.values import Ability, KeyState, Limit, Waiter, WokenTask

from .acts import Act
from .looks import (
    CallInfo,
    WaiterInfo,
    holds_named,
    is_of_interest,
    lock_info,
    printable,
    waiter_info,
)

__all__ = [
    "Admin",
    "CallInfo",
    "Dropped",
    "HoldInfo",
    "Holder",
    "Limited",
    "Released",
    "WaiterInfo",
    "known_time",
    "printable",
]

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds for the store to tell its time
PAGE = 1000  # waiters that are asked for at once


@dataclass(frozen=True, slots=True)
class Released:
    """
    What a forced release did.

    Attributes:
        done: False: the key was not held, or not any more by those who were to lose it.
        before: How the key was.
        after: How it is now.
        lost: Those who have lost it.
    """

    done: bool
    before: KeyState
    after: KeyState
    lost: tuple[HoldInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Limited:
    """What a limit has changed: how the key was, and how it is."""

    before: KeyState
    after: KeyState


@dataclass(frozen=True, slots=True)
class Dropped:
    """A task that was taken out of the queue of *key*."""

    key: str
    task: str
    task_id: str


class _ParkedMessage(NamedTuple):
    """A parked task's message, decoded; no `request` if that failed."""

    task: str
    request: Context | None
    ignored: bool
    names: tuple[str, ...] = ()  # of its keys, if it needs several


class Admin:
    """
    See the module.

    All methods raise :exc:`~celery_distlock.errors.StoreUnavailableError` when the store does not
    answer, and :exc:`~celery_distlock.errors.StoreError` when it cannot do what is asked.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app

    @property
    def store(self) -> Store:
        """The app's store."""
        return Runtime.of(self._app).store

    @property
    def where(self) -> str:
        """The store and the prefix, in words: what to look at if a key is not found."""
        return f"{self.store.address}, prefix {Runtime.of(self._app).settings.prefix!r}"

    def locks(self, pattern: str = "*") -> Iterator[KeyState]:
        """
        Look at all keys that are held, waited for or limited; in no order, not at one moment.

        Also those to which somebody only comes later.

        Args:
            pattern: Of the key, as :mod:`fnmatch` has it.
        """
        store = ListingStore.of(self.store)
        for keys in store.find_keys(pattern):
            for key, state in zip(keys, store.inspect_many(keys), strict=True):
                if is_of_interest(state):
                    yield lock_info(key, state)

    def show(self, key: str) -> KeyState:
        """Look at one key, which may be free, and at what those wait for that it is kept for."""
        key = as_key(key)
        info = lock_info(key, self.store.inspect(key))
        waits = [(hold.who.owner, self._waits_for(key, hold)) for hold in info.holds]
        return info._replace(elsewhere=tuple((owner, look) for owner, look in waits if look))

    def _waits_for(self, key: str, hold: HoldInfo) -> KeyState | None:
        """Return the key that a task of several keys waits for, where *key* is kept for it."""
        if hold.state != "waking" or Ability.QUEUE not in self.store.abilities:
            return None
        store, run = QueueStore.of(self.store), hold.who.owner.removeprefix(PARKED)
        waiter = store.parking.parked(key, run)
        route = waiter.route if waiter is not None else None
        first = store.parking.parked(key_of(route.names[0]), run) if route is not None else None
        if route is None or first is None or first.woken:
            return None
        other = key_of(first.at or route.names[0])
        return lock_info(other, store.inspect(other)) if other != key else None

    def queue(self, key: str, *, first: int = 0, limit: int = 100) -> list[WaiterInfo]:
        """
        Return who waits for *key*: those on their way, the queue, and those who join it later.

        Args:
            key: The key.
            first: From this place of the queue on; those who come later follow on its last place.
                Of those on their way likewise from this number on.
            limit: How many, and as many of those on their way.
        """
        store = ListingStore.of(self.store)
        found: list[Waiter] = []
        for begin in range(first, first + limit, PAGE):  # the server is kept by each for a moment
            size = min(PAGE, first + limit - begin)
            page = store.waiters(as_key(key), first=begin, limit=size)
            found += page
            if len(page) < size:
                break
        woken = [waiter_info(None, "woken", waiter) for waiter in found if waiter.woken]
        queued = [
            waiter_info(place, "parked" if waiter.run else "blocked", waiter)
            for place, waiter in enumerate((each for each in found if not each.woken), first)
        ]
        left = limit - len(queued)
        if left <= 0:
            return woken + queued
        passed = 0 if queued or not first else max(0, first - store.inspect(as_key(key)).waiting)
        return woken + queued + self.delayed(key, first=passed, limit=left)

    def delayed(self, key: str, *, first: int = 0, limit: int = 100) -> list[WaiterInfo]:
        """Return who joins the queue of *key* later, who comes first the first."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        pages = _delayed(QueueStore.of(self.store), as_key(key), first)
        found = itertools.islice(itertools.chain.from_iterable(pages), limit)
        return [waiter_info(None, "later", waiter) for waiter in found]

    def calls(self, key: str, *, limit: int = 100) -> list[CallInfo]:
        """Return some of those at *key* who have an identity, by its name; at most *limit*."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        found = sorted(QueueStore.of(self.store).calls.bearers(as_key(key), limit).items())
        return [
            CallInfo(key_of(name), task_id_of(bearer.run), bearer.where.value)
            for name, bearer in found
        ]

    def actions(self, key: str) -> list[Action]:
        """Return what operators did to *key* recently, the last first; empty if not recorded."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        return QueueStore.of(self.store).audit.actions(as_key(key))

    def release(
        self,
        key: str,
        *,
        token: int = 0,
        owners: Collection[str] = (),
        all_holders: bool = False,
        author: str = "",
        reason: str = "",
    ) -> Released:
        """
        Take *key* from whoever holds it, and give it to the next in its queue.

        The holder is not asked. It notices when it renews, within a third of its lease, and its
        task is aborted then (`lock_on_lost`): until then two may believe that they hold the key.
        Release what is stuck, not what is slow.

        Args:
            key: The key.
            token: If it is given, `KeyState.token` of a look before: nothing is done if the key has
                been granted anew since.
            owners: If they are given, who is to lose it: nothing is done to others.
            all_holders: If several hold it, all of them lose it: those who hold it now, not who is
                let in instead of them.
            author: The operator, for the record and for the error of the holder; this process's
                user and host, if it is empty.
            reason: Why, likewise.

        Raises:
            DistlockError: Several hold it, and it was not said which of them is to lose it.
        """
        act = Act("release", author, reason)
        Runtime.of(self._app).import_tasks()  # only one that is known is sent
        key, store = as_key(key), self.store
        state = store.inspect(key)
        before = lock_info(key, state)
        losing: list[HoldInfo] = []
        if state.token and token in (0, state.token):
            held = before.holds if owners else holds_named(before, many=all_holders)
            losing = [hold for hold in held if not owners or hold.who.owner in owners]
        if losing:  # first: a holder that notices is to find it
            act.record(store, key, _those(losing), [hold.who.owner for hold in losing])
        lost = tuple(hold for hold in losing if self._take(store, key, hold))
        for hold in lost:
            facts = {"holder": hold.who.owner, "reason": f"released by {act}"}
            signals.send("lock_freed", self._app, store, key=before.key, **facts)
        return Released(bool(lost), before, self.show(key), lost)

    def _take(self, store: Store, key: str, hold: HoldInfo) -> bool:
        released = store.release(ReleaseRequest(key, hold.who.owner))
        store.dispatch(released.wake)
        return released.released

    def limit(
        self,
        key: str,
        capacity: int | None,
        *,
        rate: RateLike | None = None,
        seconds: float = 0.0,
        author: str = "",
        reason: str = "",
    ) -> Limited:
        """
        Let at most *capacity* units of *key* be in use, whatever tasks and locks ask with.

        Or have it taken only as often as *rate* says; or both. It takes the place of the limit that
        was set before. Nobody is thrown out: what was granted ends as it would have. Who fits now
        is woken at once.

        Args:
            key: The key, which may be free.
            capacity: How many; 0: nobody is let in. None: as many as are asked with.
            rate: How often, instead of the rates that are asked with: as that of a
                :class:`~celery_distlock.Key`. None: as often as is asked with; without *capacity*,
                there is no limit any more.
            seconds: After which the limit ends by itself; 0: when it is taken back.
            author: The operator, as in `release`.
            reason: Likewise.

        Raises:
            ValueError: *capacity* or *seconds* is no such number, or a text is too long.
            ConfigurationError: *rate* is none.
        """
        _check_limit(key, capacity, seconds)
        clears = capacity is None and not rate
        act = Act("resume" if clears else "limit" if capacity or rate else "pause", author, reason)
        rates = rates_in(rate, f"the limit of {shown(key)!r}")
        Runtime.of(self._app).import_tasks()  # only one that is known is sent
        key, store = as_key(key), QueueStore.of(self.store)
        before = self.show(key)
        limit = None
        if capacity is not None or rates:
            until = _store_time(store) + seconds if seconds else 0.0
            limit = Limit(capacity, until, act.author, rates=rates)
        if limit or before.limit:
            act.record(store, key, _terms(limit))
        store.dispatch(store.units.set_limit(key, limit).wake)
        return Limited(before, self.show(key))

    def wake(self, key: str, *, author: str = "", reason: str = "") -> int:
        """
        Send on what waits for *key* and should be on its way; return how many were sent.

        For a broker that has lost its messages: the next in the queue of a free key, and those that
        were woken and have not come. To send one twice does no harm: the second is recognised.

        Raises:
            DistlockError: The broker did not take one; a worker's sweep sends it again. Or nothing
                of it is for this process to send, see :mod:`celery_distlock.runtime.trust`.
        """
        act = Act("wake", author, reason)
        Runtime.of(self._app).import_tasks()  # likewise
        sent = 0
        store, refusal = QueueStore.of(self.store), None
        for wake in (
            each for found in store.parking.wake_again(as_key(key)) for each in ready(store, found)
        ):
            try:
                self._send(store, wake)
                sent += 1
            except (NotOursError, UnsendableError) as error:  # the others are to go on
                refusal = error
        if sent:
            act.record(store, as_key(key), _many(sent, "task"))
        if refusal is not None and not sent:
            raise DistlockError(
                f"what waits for {shown(key)!r} is not for this process to send:"
                f" {shown(str(refusal))}"
            ) from refusal
        return sent

    def _send(self, store: QueueStore, wake: WokenTask) -> None:
        try:
            if store.publishers.publish(wake):
                return
        except NotOursError as refusal:
            refusal.report()
            raise
        except UnsendableError:
            raise
        except Exception as error:
            raise DistlockError(
                f"the broker does not take what waits for {key_of(wake.name)!r}: {error}"
            ) from error
        store.parking.mark_published(wake)

    def drop(
        self,
        task_id: str,
        key: str | None = None,
        *,
        force: bool = False,
        author: str = "",
        reason: str = "",
    ) -> list[Dropped]:
        """
        Take a task that waits out of its queue for good; its state is ``REVOKED`` then.

        Also one that would have joined it later. Calls like it are no second ones any more.

        A chord that waits for it fails, as Celery does with a revoked member. One that runs already
        is not touched: ``celery control revoke`` is for that.

        Args:
            task_id: The task's id.
            key: Where it is parked, if that is known: it is not searched for then.
            force: Drop it also if it is no locked task of this app. What it says is not believed
                then, so a chord that waits for it goes on waiting.
            author: The operator, for the record and for the task's result, as in `release`.
            reason: Likewise.

        Returns:
            What was dropped; nothing if it is not parked.

        Raises:
            DistlockError: It is no locked task of this app, and is where it was. Or it was dropped,
                and its result could not be stored.
        """
        act = Act("drop", author, reason)
        Runtime.of(self._app).import_tasks()  # how its result is stored, its task says
        store = QueueStore.of(self.store)
        found = list(store.parking.find_parked(task_id, None if key is None else as_key(key)))
        dropped = (self._drop(store, at, run, act, force=force, alone=True) for at, run in found)
        return list(filter(None, dropped))

    def drop_all(
        self, key: str, *, force: bool = False, author: str = "", reason: str = ""
    ) -> list[Dropped]:
        """
        Take every task out of the queue of *key* for good, as `drop` does.

        Also those on their way that have not come, and those who come later; not who blocks, nor
        who comes meanwhile. What it cannot drop keeps the others from nothing.

        Raises:
            DistlockError: Likewise, of the first of those; the others were dropped.
        """
        act = Act("drop", author, reason)
        Runtime.of(self._app).import_tasks()  # likewise
        store, refusal = QueueStore.of(self.store), None
        dropped: list[Dropped] = []
        runs = self._runs_at(store, as_key(key))
        if runs:
            act.record(store, as_key(key), f"all: {_many(len(runs), 'task')}")
        for run in runs:
            try:
                done = self._drop(store, as_key(key), run, act, force=force)
            except StoreError:
                raise
            except DistlockError as error:
                refusal = refusal or error
            else:
                dropped += [done] if done else []
        if refusal is not None:
            raise DistlockError(
                f"{len(dropped)} were dropped from the queue of {shown(key)!r}, and not all:"
                f" {refusal}"
            ) from refusal
        return dropped

    def _runs_at(self, store: QueueStore, key: str) -> list[str]:
        """Return all runs that are on their way to *key*, wait for it, or come later."""
        pages = itertools.chain(_waiting(store, key), _delayed(store, key))
        return [waiter.run for page in pages for waiter in page if waiter.run]

    def _drop(
        self,
        store: QueueStore,
        key: str,
        run: str,
        act: Act,
        *,
        force: bool,
        alone: bool = False,
    ) -> Dropped | None:
        waiter = store.parking.parked(key, run)
        if waiter is None:
            return None
        names = waiter.route.names if waiter.route else (slot_name(key),)
        if names[0] != slot_name(key):  # what is to be known of it lies there
            first = key_of(names[0])
            key, waiter = first, store.parking.parked(first, run) or waiter
        # Read before it is removed: what cannot be read stays in the queue.
        parked = self._read(key, waiter, force)
        removed = store.parking.cancel(key, run)
        if not removed.released:
            return None  # it has come to its key meanwhile
        if alone:
            act.record(store, key, f"{parked.task}[{task_id_of(run)}]")
        store.dispatch(removed.wake)
        for name in (parked.names or names)[1:]:
            store.dispatch(store.parking.cancel(key_of(name), run).wake)
        self._revoke(task_id_of(run), parked, key, act)
        dropped = Dropped(key_of(slot_name(key)), parked.task, task_id_of(run))
        sender = self._app.tasks.get(parked.task, self._app)
        facts = {"key": dropped.key, "task_id": dropped.task_id}
        signals.send("task_dropped", sender, store, **facts)
        return dropped

    def _read(self, key: str, waiter: Waiter, force: bool) -> "_ParkedMessage":
        """Decode a parked task's message; without a `request` where that fails."""
        try:
            # Its chord's errbacks would be sent.
            wake = WokenTask(slot_name(key), waiter.run, waiter.envelope)
            known = Runtime.of(self._app).trust.check(wake, anywhere=True)
            message = to_message(self._app, known)
            headers: dict[str, Any] = message.headers
            args, kwargs, embedded = message.payload
        except Exception as error:  # of any serializer: its body is only for its chord
            unknown = isinstance(error, RefusedError) and error.reason is Reason.TASK
            if unknown and not force:
                raise DistlockError(
                    f"{shown(task_id_of(waiter.run))} was not dropped: {error}. Drop it where that"
                    " task is known, or it is for celery locks drop --force: a chord that waits for"
                    " it goes on waiting then"
                ) from error
            why = shown(str(error))
            words = "the message of %r, parked at %r, cannot be read; it is dropped unread: %r"
            logger.warning(words, shown(waiter.run), shown(key), why)
            return _ParkedMessage(waiter.task, None, ignored=False)
        name = str(headers.get("task", ""))
        task = self._app.tasks.get(name)
        ignored = headers.get("ignore_result")
        if ignored is None:
            ignored = task is not None and task.ignore_result
        request = Context({**without_ours(headers), **embedded, "args": args, "kwargs": kwargs})
        return _ParkedMessage(name, request, bool(ignored), LockHeader.of(headers).names)

    def _revoke(self, task_id: str, parked: "_ParkedMessage", key: str, act: Act) -> None:
        """Store the state ``REVOKED``, for those who wait for the task's result."""
        task = self._app.tasks.get(parked.task)
        backend: Any = task.backend if task is not None else self._app.backend
        why = f"dropped from the queue of its lock by {act}"
        try:
            backend.mark_as_revoked(
                task_id, why, request=parked.request, store_result=not parked.ignored
            )
        except Exception as error:
            raise DistlockError(
                f"task {parked.task}[{task_id}] was dropped from the queue of {shown(key)!r}, but"
                f" its result could not be stored, so whoever waits for it does not know: {error}"
            ) from error


def _those(holds: Sequence[HoldInfo]) -> str:
    if len(holds) > 1:
        return f"from {_many(len(holds), 'holder')}"
    return f"from {holds[0].who}" if str(holds[0].who) else "from no holder, as it rests"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _terms(limit: Limit | None) -> str:
    if limit is None:
        return ""
    much = [_many(limit.capacity, "unit")] if limit.capacity else []
    until = datetime.fromtimestamp(limit.until, UTC).isoformat(timespec="seconds")
    return ", ".join([*much, *map(str, limit.rates), *([f"until {until}"] if limit.until else ())])


def _waiting(store: ListingStore, key: str) -> Iterator[list[Waiter]]:
    """Yield all who are on their way to *key*, or wait for it, by pages."""
    for begin in itertools.count(0, PAGE):
        page = store.waiters(key, first=begin, limit=PAGE)
        if not page:
            return
        yield page


def _delayed(store: QueueStore, key: str, first: int = 0) -> Iterator[list[Waiter]]:
    """Yield who comes to *key* later, likewise; a page may be empty, and the next one not."""
    numbers = max(store.inspect(key).later, first + 1)
    for begin in range(first, numbers, PAGE):
        yield store.calls.delayed(key, first=begin, limit=PAGE)


def _check_limit(key: str, capacity: Any, seconds: Any) -> None:
    of = f"the limit of {shown(key)!r}"
    if capacity is not None and not (type(capacity) is int and 0 <= capacity <= MAX_CAPACITY):
        raise ValueError(
            f"{of} is a whole number from 0 to {MAX_CAPACITY}, or None for no limit,"
            f" not {capacity!r}"
        )
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(
            f"{of} ends after a finite number of seconds, or 0 for no end, not {seconds!r}"
        )


def _store_time(store: Store) -> float:
    """Return the store's time, in seconds since the epoch; this host's if it tells none."""
    shared = Ability.SHARE in store.abilities  # else it ends with this process, as does its clock
    return (shared and store.time(PATIENCE) / 1e6) or clock.wall()
