"""
One execution of a locked task: its keys are acquired, its body runs, its keys are released.

All parts share an :mod:`.invocation`. Off this path: :mod:`.contention` if a key is taken or there
are several, where :mod:`.conflicts` applies the policy; :mod:`.requeueing` if it runs later;
:mod:`.retries` if it keeps its keys; :mod:`.repairs` before and after.
"""

import concurrent.futures
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from celery_distlock import clock
from celery_distlock.engine.abort import Guard, ensure_not_recalled
from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.hold import Hold, ensure_able
from celery_distlock.engine.lease import Lease, PostponeRequest
from celery_distlock.engine.upgrading import leave
from celery_distlock.errors import (
    LockConflictError,
    LockLostError,
    RecalledError,
    StoreError,
    StoreUnavailableError,
)
from celery_distlock.key import Key
from celery_distlock.policies import Decision
from celery_distlock.stores.values import Completion, Status, WokenTask
from celery_distlock.telemetry import events

from .app import Runtime
from .conflicts import Conflicts
from .contention import Contention
from .current import Task, here
from .invocation import LOOK_TIMEOUT, Invocation
from .plans import Plan
from .recalls import answer_recalled
from .requeueing import Requeueing
from .retries import kept_for_retry

__all__ = ["Execution", "is_pending"]

_PENDING = (Awaitable, Generator, AsyncGenerator, concurrent.futures.Future)


class Execution:
    """
    Runs *task* once, by :meth:`run`, under the lock of *keys*.

    A *nested* call is one by other code: it has no message of its own.
    """

    def __init__(
        self,
        task: Task,
        request: Any,
        plan: Plan,
        runtime: Runtime,
        keys: tuple[Key, ...],
        *,
        nested: bool,
    ) -> None:
        self._store = store = runtime.store
        ensure_able(store, keys, f"task {task.name}")
        self.task = task
        # The same order in all processes, so that no two wait for each other.
        in_order = tuple(sorted(keys, key=attrgetter("template")))
        self._invocation = invocation = Invocation(
            task, request, plan, store, in_order, nested=nested
        )
        if invocation.has_message:
            received = invocation.received
            events.set_source(task.app, received.events)
            runtime.relay.own_address = received.delivery_address
        self._completion = Completion.NO  # whether it is over, as the store learns at the release
        # By the keys that are kept for the next attempt: its execution id, and for how many seconds
        self._keep_for: dict[str, tuple[str, float]] = {}
        self._succeeded: bool | None = None  # whether the body has returned; None: it has not begun
        self._around = sys.exc_info()[1]  # being handled already where the task is called

    def run(self, body: Callable[[], Any]) -> Any:
        """
        Run *body* under the lock; return its result, or the policy's answer instead.

        Raises:
            Ignore: The task is parked, was sent again, or was a second delivery.
            LockConflictError: The key is taken, and the policy or the call fails then.
            LockLostError: The lock was lost while the body ran.
            StoreUnavailableError: The store is unreachable, and `lock_on_outage` is ``"fail"``.
        """
        here().stack.append(self)
        try:
            try:
                decision = self._acquire_keys()
            except (LockConflictError, StoreError) as error:
                self._conflicts.note_failure(error)
                raise
            if decision is not None:
                return self._conflicts.follow(decision)
            began = clock.monotonic()
            try:
                return self._run_body(body)
            finally:
                self._invocation.note_hold_time(clock.monotonic() - began)
        finally:
            self.release()

    def _acquire_keys(self) -> Decision | None:
        """Acquire every key, or return the policy's decision for the first one that is taken."""
        invocation = self._invocation
        if invocation.received.taken is not None or invocation.plan.unique is not None:
            decision = self._contention.decide_at_once()
            if decision is not None:
                return decision
        invocation.missing = [key for key in invocation.keys if not invocation.enter(key)]
        if invocation.entered or len(invocation.missing) > 1:
            decision = self._contention.take_together()
            if decision is not None:
                return decision
        while invocation.missing:
            decision = self._acquire(invocation.missing[0])
            if decision is not None:
                return decision
        if invocation.is_shown_as_parked:
            invocation.states.running()
        return None

    def _acquire(self, key: Key) -> Decision | None:
        invocation, patience = self._invocation, self._invocation.patience
        if patience and invocation.header.woken:
            return self._contention.take_woken(key, patience)
        hold = invocation.new_hold(key)
        try:
            reply = acquire(hold, timeout=patience)
        except StoreUnavailableError as error:
            self._requeueing.on_outage(error)  # it returns only to run the task unlocked
        else:
            if reply.status is not Status.GRANTED:
                return self._contention.resolve(key, hold, reply)
            invocation.keep(hold)
        invocation.missing.remove(key)
        return None

    def _run_body(self, body: Callable[[], Any]) -> Any:
        """
        Run *body*, aborted if a key is lost; return its result.

        Raises:
            Exception: Any error of the body; :exc:`LockLostError` if it was aborted.
            Ignore: It was recalled, and its rule has no result for it.
            Postponed: The body failed, and the task is requeued.
        """
        invocation = self._invocation
        sealed = None
        if self._goes_back(lost=True):
            sealed = self._requeueing.seal_for_failure(invocation.taken)
        late = invocation.has_message and bool(self.task.acks_late)
        may_come_again = invocation.redelivered or late
        ended = Completion.YES_AND_MAY_COME_AGAIN if may_come_again else Completion.YES
        with_result = Completion.UNSETTLED if late else ended
        self._succeeded = False
        try:
            aborts = invocation.plan.settings.on_lost != "warn"
            result = Guard(invocation.holds if aborts else ()).run(body)
        except Retry as retry:
            self._completion = ended
            self._keep_for = kept_for_retry(invocation, retry)
            raise
        except RecalledError as recalled:
            self._completion = ended
            if not invocation.has_message:
                raise  # and ends the run around it
            result = answer_recalled(invocation, recalled.key, recalled.by).result
            self._completion = with_result
            return result
        except PostponeRequest as asked:
            self._completion = ended
            self._requeueing.postpone(invocation.taken, asked.seconds)
        except Reject as reject:
            self._completion = Completion.NO if getattr(reject, "requeue", False) else ended
            raise
        except (Ignore, MemoryError) as error:
            self._completion = ended if isinstance(error, Ignore) else Completion.NO
            raise
        except Exception as error:
            self._completion = ended
            lost = isinstance(error, LockLostError) and error.key in self.lease.keys
            if sealed is not None and not self.lease.recalled and self._goes_back(lost=lost):
                self._requeueing.requeue(sealed, invocation.taken, error)
            # A run that lost its lock has not ended: a waiting second delivery of it may run.
            self._completion = Completion.NO if lost else with_result
            raise
        self._completion = with_result
        self._succeeded = True
        if is_pending(result):
            self._report_pending(result)
        return result

    def hand_on(self) -> None:
        """
        Prepare for a retry, after which no recall is raised in this attempt.

        Raises:
            RecalledError: It is recalled, so it has no further attempt.
        """
        for hold in self._invocation.taken if self._invocation.has_message else ():
            hold.stops = False
        self._ensure_not_recalled()

    def _ensure_not_recalled(self) -> None:
        """Raise :exc:`RecalledError` if it is recalled, as far as the store knows by now."""
        for hold in self._invocation.taken:
            if hold.terms.renew_every is not None and hold.renewable and not hold.recalled:
                hold.renew(LOOK_TIMEOUT)
        ensure_not_recalled(self._invocation.holds)

    def _goes_back(self, *, lost: bool) -> bool:
        """Whether a task that failed, or *lost* its lock, is requeued."""
        settings = self._invocation.plan.settings
        return settings.on_failure == "requeue" or (lost and settings.on_lost == "requeue")

    def release(self) -> None:
        """Release every key, the last one first; may be called again if it was interrupted."""
        invocation = self._invocation
        while invocation.entered:
            hold = invocation.entered.pop()
            hold.depth -= 1
            leave(hold)
        woken_tasks: list[WokenTask | None] = []
        for hold in invocation.taken:
            invocation.owned.pop((self._store.identity, hold.key), None)
            if self._completion is Completion.UNSETTLED:
                here().unsettled.append((hold, self._around))
        try:
            self._release_all(list(invocation.taken), woken_tasks)
        finally:  # not before the last one is released
            for woken in filter(None, woken_tasks):
                self._store.dispatch(woken)
        if self in (stack := here().stack):
            stack.remove(self)

    def _release_all(self, holds: list[Hold], woken_tasks: list[WokenTask | None]) -> None:
        """Release *holds*, the last one first; the others, too, if the release of one raises."""
        while holds:
            hold = holds.pop()
            keep, note = self._keep_for.get(hold.key), woken_tasks.append
            try:
                release(hold, self._completion, keep, note, succeeded=self._succeeded)
            except BaseException:  # such as a time limit's
                self._release_all(holds, woken_tasks)
                raise

    # Off the path

    @cached_property
    def _requeueing(self) -> Requeueing:
        return Requeueing(self._invocation)

    @cached_property
    def _conflicts(self) -> Conflicts:
        return Conflicts(self._invocation, self._requeueing)

    @cached_property
    def _contention(self) -> Contention:
        return Contention(self._invocation, self._conflicts, self._requeueing)

    @property
    def lease(self) -> Lease:
        """The lease on the keys, as the task sees it."""
        holds, why_not = self._invocation.holds, self._why_not_postpone
        return Lease(holds, wanted=False, why_not_postpone=why_not)

    def _why_not_postpone(self) -> str:
        if self._invocation.entered:
            return "it has entered a key that is held around it"
        why = self._requeueing.why_not_postpone()
        if not why:
            self._ensure_not_recalled()
        return why

    def _report_pending(self, result: Any) -> None:
        """Log, once for each task, that the key is released although *result* is unfinished."""
        reported = Runtime.of(self.task.app).pending
        if self.task.name not in reported:
            reported.add(str(self.task.name))
            words = (
                "has returned a {kind}, which is unfinished; its key is released now, so the rest"
                " of its work runs WITHOUT the lock: finish it in the body, by asyncio.run(...) or"
                " list(...), and return the result of that"
            )
            self._invocation.report.error(words, kind=type(result).__qualname__)


@lru_cache(maxsize=64)  # to compare with abstract classes takes long
def _can_be_pending(kind: Any) -> bool:
    return issubclass(kind, _PENDING)


def is_pending(result: Any) -> bool:
    """Whether *result* is work that has not ended: a coroutine, a generator, a future."""
    kind: Any = type(result)
    if not _can_be_pending(kind):
        return False
    done = getattr(result, "done", None)
    return not (callable(done) and done())
