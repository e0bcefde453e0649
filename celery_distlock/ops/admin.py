"""
The operations behind ``celery locks``, remote control, the web page and the exporter.

They use the lock store directly; no worker has to answer.
"""

import itertools
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
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
from celery_distlock.runtime.message_facts import LockHeader, without_ours
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
from celery_distlock.stores.holders import HoldInfo
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.queue_store import ready
from celery_distlock.stores.values import (
    Ability,
    KeyState,
    Lane,
    Limit,
    Sending,
    Waiter,
    WokenTask,
)

from .acts import Act
from .demand import Demand
from .looks import CallInfo, WaiterInfo, holds_named, is_of_interest, lock_info, waiter_info

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # timeout for reading the store's time, in seconds
BROKER_PATIENCE = 15.0  # seconds that a tick waits for the broker, to which it connects first
PAGE = 1000  # waiters per request
MOST_LIMITED = 100  # lanes of a key that may have a limit: each request reads them all


@dataclass(frozen=True, slots=True)
class Released:
    """
    The result of a forced release.

    Attributes:
        done: False if nothing was released: the key was not held, or no longer by those holders.
        before: The key before the release.
        after: The key after the release.
        lost: The holds that were released.
    """

    done: bool
    before: KeyState
    after: KeyState
    lost: tuple[HoldInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Recalled:
    """The result of a recall: the key before it, and the holds that were asked to leave."""

    before: KeyState
    asked: tuple[HoldInfo, ...]


@dataclass(frozen=True, slots=True)
class Limited:
    """
    The result of a limit.

    Attributes:
        before: The key before it.
        after: The key after it.
        lane: The lane that it applies to; None: to the key.
        replaced: The limit that there was before.
        unused: Whether it may be a typo: the key had no holder, waiter or limit, or the lane no
            waiter or limit.
    """

    before: KeyState
    after: KeyState
    lane: str | None
    replaced: Limit | None
    unused: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    """
    The result of a tick.

    Attributes:
        sent: Number of woken tasks that this process has sent to the broker or to a worker.
        left: Number of woken tasks that it could not send, which was logged.
        demand: What waits after it.
        opens: Seconds until time alone opens one of the keys with waiters, or a delayed call is
            due; None: that is not known.
    """

    sent: int
    left: int
    demand: Demand
    opens: float | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A task that was removed from the queue of *key*."""

    key: str
    task: str
    task_id: str


class _ParkedMessage(NamedTuple):
    """The decoded message of a parked task; `request` is None if decoding failed."""

    task: str
    request: Context | None
    ignored: bool
    names: tuple[str, ...] = ()  # of its keys, if it has several


class Admin:
    """
    See the module.

    All methods raise :exc:`~celery_distlock.errors.StoreUnavailableError` if the store does not
    answer, and :exc:`~celery_distlock.errors.StoreError` if it does not support the operation.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app

    @property
    def store(self) -> Store:
        """The app's store."""
        return Runtime.of(self._app).store

    @property
    def where(self) -> str:
        """The store's address and the prefix, for messages about missing keys."""
        return f"{self.store.address}, prefix {Runtime.of(self._app).settings.prefix!r}"

    def locks(self, pattern: str = "*") -> Iterator[KeyState]:
        """
        Yield all keys that are held, waited for, resting or limited, or that have delayed calls.

        They come in no particular order and are not a snapshot of one moment.

        Args:
            pattern: A pattern for the keys, as in :mod:`fnmatch`.
        """
        store = ListingStore.of(self.store)
        for keys in store.find_keys(pattern):
            for key, state in zip(keys, store.inspect_many(keys), strict=True):
                if is_of_interest(state):
                    yield lock_info(key, state)

    def show(self, key: str) -> KeyState:
        """Return one key, which may be free, and the keys for which its reservations wait."""
        key = as_key(key)
        info = lock_info(key, self.store.inspect(key))
        waits = [(hold.who.owner, self._waits_for(key, hold)) for hold in info.holds]
        return info._replace(elsewhere=tuple((owner, look) for owner, look in waits if look))

    def _waits_for(self, key: str, hold: HoldInfo) -> KeyState | None:
        """Return the key that a task of several keys waits for while *key* is reserved for it."""
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

    def queue(
        self, key: str, *, first: int = 0, limit: int = 100, lane: str | None = None
    ) -> list[WaiterInfo]:
        """
        Return the waiters of *key*: tasks in flight, then the queue, then delayed calls.

        Args:
            key: The key.
            first: The first position to return. Positions beyond the end of the queue count the
                delayed calls. The tasks in flight are numbered separately, from 0 as well.
            limit: The most to return of the queue and the delayed calls together, and the most of
                the tasks in flight.
            lane: Only waiters and tasks in flight of this lane, with positions in it, and no
                delayed calls; empty: of those that have asked for none.
        """
        store = ListingStore.of(self.store)
        read = partial(store.waiters, as_key(key))
        if lane is not None:
            read = partial(QueueStore.of(store).parking.lane_waiters, as_key(key), as_key(lane))
        found: list[Waiter] = []
        for begin in range(first, first + limit, PAGE):  # each occupies the server briefly
            size = min(PAGE, first + limit - begin)
            page = read(first=begin, limit=size)
            found += page
            if len(page) < size:
                break
        woken = [waiter_info(None, "woken", waiter) for waiter in found if waiter.woken]
        queued = [
            waiter_info(place, "parked" if waiter.run else "blocked", waiter)
            for place, waiter in enumerate((each for each in found if not each.woken), first)
        ]
        left = limit - len(queued)
        if left <= 0 or lane is not None:
            return woken + queued
        passed = 0 if queued or not first else max(0, first - store.inspect(as_key(key)).waiting)
        return woken + queued + self.delayed(key, first=passed, limit=left)

    def delayed(self, key: str, *, first: int = 0, limit: int = 100) -> list[WaiterInfo]:
        """Return the delayed calls of *key*, the earliest first."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        pages = _delayed(QueueStore.of(self.store), as_key(key), first)
        found = itertools.islice(itertools.chain.from_iterable(pages), limit)
        return [waiter_info(None, "later", waiter) for waiter in found]

    def lanes(self, key: str, *, limit: int = 100) -> list[Lane]:
        """Return up to *limit* lanes with waiters at *key*, the one that has its turn first."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        return QueueStore.of(self.store).parking.lanes(as_key(key), limit)

    def lane_limit(self, key: str, lane: str) -> Limit | None:
        """Return the operator's limit of *lane* of *key*."""
        return self.show(key).limit_of(_lane_name(lane))

    def calls(self, key: str, *, limit: int = 100) -> list[CallInfo]:
        """Return up to *limit* calls at *key* that have an identity, sorted by identity."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        found = sorted(QueueStore.of(self.store).calls.bearers(as_key(key), limit).items())
        return [
            CallInfo(key_of(name), task_id_of(bearer.run), bearer.where.value)
            for name, bearer in found
        ]

    def actions(self, key: str) -> list[Action]:
        """Return the recorded actions of operators on *key*, the latest first."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        return QueueStore.of(self.store).audit.actions(as_key(key))

    def recent_actions(self, seconds: float) -> list[tuple[str, Action]]:
        """Return operators' actions on all keys in the last *seconds*, the latest first."""
        if Ability.QUEUE not in self.store.abilities:
            return []
        audit, begin = QueueStore.of(self.store).audit, _store_time(self.store) - seconds
        keys = itertools.chain.from_iterable(audit.keys_acted_on())
        found = [(key, action) for key in keys for action in audit.actions(key)]
        recent = [each for each in found if each[1].at >= begin]
        return sorted(recent, key=lambda each: each[1].at, reverse=True)

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
        Release *key* on behalf of its holder, and hand it to the next waiter.

        The holder is not asked. It notices when it renews, within a third of its lease, and its
        task is aborted then (`lock_on_lost`). Until then two tasks may believe that they hold the
        key. Release what is stuck, not what is slow.

        Args:
            key: The key.
            token: If given, `KeyState.token` of an earlier look: nothing is done if the key has
                been granted again since.
            owners: If given, the holders to release; other holders keep the key.
            all_holders: Release all holders of a shared key: the current ones, not those that are
                admitted in their place.
            author: The operator, for the record and for the holder's error; empty: this process's
                user and host.
            reason: The reason, for the record and for the holder's error.

        Raises:
            DistlockError: The key has several holders, and neither *owners* nor *all_holders* is
                given.
        """
        act = Act("release", author, reason)
        Runtime.of(self._app).import_tasks()  # only known tasks are sent
        key, store = as_key(key), self.store
        before = lock_info(key, store.inspect(key))
        losing = _chosen(before, token, owners, many=all_holders)
        if losing:  # before the release: the holders read the record when they notice
            act.record(store, key, _those(losing), [hold.who.owner for hold in losing])
        lost: list[HoldInfo] = []
        for hold in losing:
            released = store.release(ReleaseRequest(key, hold.who.owner))
            store.dispatch(released.wake)
            lost += [hold] if released.released else []
        for hold in lost:
            facts = {"holder": hold.who.owner, "reason": f"released by {act}"}
            signals.send("lock_freed", self._app, store, key=before.key, **facts)
        return Released(bool(lost), before, self.show(key), tuple(lost))

    def recall(
        self,
        key: str,
        *,
        token: int = 0,
        owners: Collection[str] = (),
        author: str = "",
        reason: str = "",
    ) -> Recalled:
        """
        Ask the holder of *key* to leave, without taking the key from it.

        The holder learns of it by its next renewal, within a third of its lease. In a task
        :exc:`~celery_distlock.errors.RecalledError` is raised then, unless the task declares
        otherwise; a lock has `recalled`. One that does not renew never learns. If its process is
        killed before it has left, the task runs again.

        Arguments as in :meth:`release`.

        Raises:
            DistlockError: The key has several holders, and *owners* is not given.
        """
        act = Act("recall", author, reason)
        key, store = as_key(key), self.store
        if Ability.RECALL not in store.abilities:
            raise StoreError(f"{store.address} cannot {Ability.RECALL.value}")
        before = lock_info(key, store.inspect(key))
        chosen = [hold for hold in _chosen(before, token, owners) if hold.state != "resting"]
        if chosen:  # before the recall: the holders read the record when they learn
            about = _those(chosen).removeprefix("from ")
            act.record(store, key, about, [hold.who.owner for hold in chosen])
        asked = [hold for hold in chosen if store.recall(key, hold.who.owner)]
        return Recalled(before, tuple(asked))

    def limit(
        self,
        key: str,
        capacity: int | None,
        *,
        lane: str | None = None,
        rate: RateLike | None = None,
        seconds: float = 0.0,
        author: str = "",
        reason: str = "",
    ) -> Limited:
        """
        Limit the units of *key* in use, or the rate of its starts, or both.

        The limit overrides the capacity and the rates that tasks and locks request, and replaces
        an earlier limit. Current holders are not affected. Waiters that fit now are woken at once.

        Args:
            key: The key, which may be free.
            capacity: The most units in use; 0: no new grants. None: as requested.
            lane: Limit only what is in use by this lane, in place of its tasks' `most`.
            rate: The rate of starts, as that of a :class:`~celery_distlock.Key`. None: as
                requested; if *capacity* is None, too, the limit is removed.
            seconds: The limit ends after this time; 0: it stays until it is removed.
            author: The operator, for the record; empty: this process's user and host.
            reason: The reason, for the record.

        Raises:
            ValueError: *capacity* or *seconds* is out of range, or a text is too long; or *lane* is
                empty, or has a rate.
            ConfigurationError: *rate* is not a valid rate.
            DistlockError: No waiter of *key* is in a lane, or too many lanes have a limit.
        """
        _check_limit(key, capacity, seconds)
        if lane is not None and (not lane or rate):
            raise ValueError("a limit of a lane needs the lane's name, and has no rate")
        clears = capacity is None and not rate
        act = Act("resume" if clears else "limit" if capacity or rate else "pause", author, reason)
        rates = rates_in(rate, f"the limit of {shown(key)!r}")
        Runtime.of(self._app).import_tasks()  # only known tasks are sent
        key, store = as_key(key), QueueStore.of(self.store)
        lane = None if lane is None else _lane_name(lane)
        before, limit = self.show(key), None
        replaced = before.limit_of(lane)
        unused = not before.is_in_use
        if lane is not None and not (clears or replaced):
            unused = not _lane_waits(store, before, lane)
        if not clears:
            until = _store_time(store) + seconds if seconds else 0.0
            limit = Limit(capacity, until, act.author, rates=rates)
        if limit or replaced:
            act.record(store, key, _terms(limit, lane))
        store.dispatch(store.units.set_limit(key, limit, lane).wake)
        return Limited(before, self.show(key), lane, replaced, unused)

    def wake(self, key: str, *, author: str = "", reason: str = "") -> int:
        """
        Send the tasks at *key* that should be in flight; return their number.

        Use this if the broker has lost messages. It sends the next task in the queue of a free key,
        and tasks that were woken and have not arrived. Sending a task twice does no harm: the
        second delivery is recognised.

        Raises:
            DistlockError: The broker did not accept a task; a worker's sweep sends it again. Or
                this process may send none of them, see :mod:`celery_distlock.runtime.trust`.
        """
        act = Act("wake", author, reason)
        Runtime.of(self._app).import_tasks()  # only known tasks are sent
        sent = 0
        store, refusal = QueueStore.of(self.store), None
        for wake in (
            each for found in store.parking.wake_again(as_key(key)) for each in ready(store, found)
        ):
            try:
                self._send(store, wake)
                sent += 1
            except (NotOursError, UnsendableError) as error:  # send the other tasks
                refusal = error
        if sent:
            act.record(store, as_key(key), _many(sent, "task"))
        if refusal is not None and not sent:
            raise DistlockError(
                f"this process may not send the tasks that wait for {shown(key)!r}:"
                f" {shown(str(refusal))}"
            ) from refusal
        return sent

    def tick(self) -> Ticked:
        """
        Wake what is due at all keys, as the workers' ticker and sweeper do; count what waits then.

        Use this while no worker runs. It does no harm while some do.

        Raises:
            DistlockError: The broker does not answer.
        """
        Runtime.of(self._app).import_tasks()  # only known tasks are sent
        store, sent, left = QueueStore.of(self.store), list[WokenTask](), 0
        for keys in store.find_keys():
            states = zip(keys, store.inspect_many(keys), strict=True)
            names = [slot_name(key) for key, state in states if state.has_waiters]
            opens: dict[str, float | None] = {}
            woken = store.parking.wake_due(names, opens)
            for became in store.dispatch_each(woken, sent.append, BROKER_PATIENCE):
                if became is Sending.PENDING:
                    raise DistlockError(
                        "the broker does not answer: the next tick, or a worker, sends the tasks"
                    )
                left += became is Sending.LEFT
            store.timetable.note_due({n: due for n, due in opens.items() if due is not None})
        demand, times = Demand(self._app, store), []
        for keys in store.find_keys():
            found = store.inspect_many(keys)
            demand.add(keys, found)
            times += [state.opens for state in found if state.opens is not None]
            times += [state.due for state in found if state.later]
        return Ticked(len(sent), left, demand, min(times, default=None))

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
                f"the broker did not accept a task that waits for {key_of(wake.name)!r}: {error}"
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
        Remove a waiting task from its queue for good; its state becomes ``REVOKED``.

        This includes a delayed call that has not joined the queue yet. The identity of the task is
        removed, too: later calls with this identity are no longer duplicates.

        A chord that waits for the task fails, as it does for a revoked member. A running task is
        not affected: use ``celery control revoke`` for that.

        Args:
            task_id: The task's id.
            key: The key at which it is parked, if known; else all queues are searched.
            force: Drop it even if it is not a locked task of this app. Its message is not trusted
                then, so a chord that waits for it keeps waiting.
            author: The operator, for the record and for the task's result; empty: this process's
                user and host.
            reason: The reason, for the record and for the task's result.

        Returns:
            The dropped tasks; an empty list if the task is not parked.

        Raises:
            DistlockError: It is not a locked task of this app, and was not dropped. Or it was
                dropped, and its result could not be stored.
        """
        act = Act("drop", author, reason)
        Runtime.of(self._app).import_tasks()  # the task knows its result backend
        store = QueueStore.of(self.store)
        found = list(store.parking.find_parked(task_id, None if key is None else as_key(key)))
        dropped = (self._drop(store, at, run, act, force=force, alone=True) for at, run in found)
        return list(filter(None, dropped))

    def drop_all(
        self, key: str, *, force: bool = False, author: str = "", reason: str = ""
    ) -> list[Dropped]:
        """
        Remove all tasks from the queue of *key* for good, as `drop` does.

        This includes tasks in flight that have not arrived, and delayed calls. It does not include
        blocked processes, nor tasks that arrive while this runs. A task that cannot be dropped does
        not prevent the others from being dropped.

        Raises:
            DistlockError: A task could not be dropped, for a reason as in `drop`; the error names
                the first one. The others were dropped.
        """
        act = Act("drop", author, reason)
        Runtime.of(self._app).import_tasks()  # a task knows its result backend
        store, refusal = QueueStore.of(self.store), None
        dropped: list[Dropped] = []
        pages = itertools.chain(_waiting(store, as_key(key)), _delayed(store, as_key(key)))
        runs = [waiter.run for page in pages for waiter in page if waiter.run]
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
                f"{len(dropped)} were dropped from the queue of {shown(key)!r}, but not all:"
                f" {refusal}"
            ) from refusal
        return dropped

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
        if names[0] != slot_name(key):  # its first key has its message
            first = key_of(names[0])
            key, waiter = first, store.parking.parked(first, run) or waiter
        # Read before it is removed: a task that must not be dropped stays in the queue.
        parked = self._read(key, waiter, force)
        removed = store.parking.cancel(key, run)
        if not removed.released:
            return None  # it has arrived at its key in the meantime
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
        """Decode the message of a parked task; on failure, return it without a `request`."""
        try:
            # Only a trusted message may be used: the errbacks of its chord are sent.
            wake = WokenTask(slot_name(key), waiter.run, waiter.envelope)
            known = Runtime.of(self._app).trust.check(wake, anywhere=True)
            message = to_message(self._app, known)
            headers: dict[str, Any] = message.headers
            args, kwargs, embedded = message.payload
        except Exception as error:  # of any serializer: the body is only needed for a chord
            unknown = isinstance(error, RefusedError) and error.reason is Reason.TASK
            if unknown and not force:
                raise DistlockError(
                    f"{shown(task_id_of(waiter.run))} was not dropped: {error}. Drop it from an"
                    " app that has this task, or use celery locks drop --force: a chord that waits"
                    " for it keeps waiting then"
                ) from error
            why = shown(str(error))
            words = "the message of %r, parked at %r, cannot be read; dropped anyway: %r"
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
        """Store the state ``REVOKED`` for callers that wait for the task's result."""
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
                f" its result could not be stored, so waiting callers are not notified: {error}"
            ) from error


def _chosen(
    info: KeyState, token: int, owners: Collection[str], *, many: bool = False
) -> list[HoldInfo]:
    """Return the holds of *owners*, or of all, if the key has been granted as *token* still."""
    if not info.token or token not in (0, info.token):
        return []
    held = info.holds if owners else holds_named(info, many=many)
    return [hold for hold in held if not owners or hold.who.owner in owners]


def _those(holds: Sequence[HoldInfo]) -> str:
    if len(holds) > 1:
        return f"from {_many(len(holds), 'holder')}"
    return f"from {holds[0].who}" if str(holds[0].who) else "from no holder: the key rests"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _terms(limit: Limit | None, lane: str | None) -> str:
    words = [] if lane is None else [f"lane {shown(lane)}"]
    if limit is not None:
        words += [_many(limit.capacity, "unit")] if limit.capacity else []
        words += map(str, limit.rates)
        if limit.until:
            until = datetime.fromtimestamp(limit.until, UTC).isoformat(timespec="seconds")
            words.append(f"until {until}")
    return ", ".join(words)


def _lane_name(lane: str) -> str:
    """Return a lane, or the listed form of a long one, as a store returns it."""
    return key_of(slot_name(as_key(lane)))


def _lane_waits(store: QueueStore, before: KeyState, lane: str) -> bool:
    """
    Whether a lane of a key has waiters, or tasks in flight.

    Raises:
        DistlockError: The waiters of the key are in no lanes, or too many lanes have a limit.
    """
    key, name = before.key, shown(before.key)
    if before.waiting and not store.parking.lanes(key, 1):
        raise DistlockError(f"{name!r} has no lanes: what waits there has asked for none")
    if len(before.lane_limits) >= MOST_LIMITED:
        raise DistlockError(f"{MOST_LIMITED} lanes of {name!r} have a limit; no more may have one")
    return bool(store.parking.lane_waiters(key, lane, limit=1))


def _waiting(store: ListingStore, key: str) -> Iterator[list[Waiter]]:
    """Yield pages of the waiters of *key*, including tasks in flight."""
    for begin in itertools.count(0, PAGE):
        page = store.waiters(key, first=begin, limit=PAGE)
        if not page:
            return
        yield page


def _delayed(store: QueueStore, key: str, first: int = 0) -> Iterator[list[Waiter]]:
    """Yield pages of the delayed calls of *key*; an empty page need not be the last."""
    numbers = max(store.inspect(key).later, first + 1)
    for begin in range(first, numbers, PAGE):
        yield store.calls.delayed(key, first=begin, limit=PAGE)


def _check_limit(key: str, capacity: Any, seconds: Any) -> None:
    of = f"the limit of {shown(key)!r}"
    if capacity is not None and not (type(capacity) is int and 0 <= capacity <= MAX_CAPACITY):
        raise ValueError(
            f"{of} must be a whole number from 0 to {MAX_CAPACITY}, or None for no limit,"
            f" not {capacity!r}"
        )
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(
            f"{of} must end after a finite number of seconds, or 0 for no end, not {seconds!r}"
        )


def _store_time(store: Store) -> float:
    """Return the store's time in seconds since the epoch; this host's if it has none."""
    shared = Ability.SHARE in store.abilities  # else it is in this process, and uses its clock
    return (shared and store.time(PATIENCE) / 1e6) or clock.wall()
