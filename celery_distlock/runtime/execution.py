"""
One execution of a locked task, from its keys to their release.

In order: :mod:`.acquiring` acquires the keys, and asks :mod:`.conflicts` what to do when one is
taken; `Body` runs the task and classifies its end; :mod:`.requeueing` parks the message or sends it
again. They share an :mod:`.invocation`. Cleanup off the usual path is in :mod:`.repairs`.
"""

import contextlib
import sys
from collections.abc import Callable
from operator import attrgetter
from types import CellType, FrameType
from typing import Any

from celery.app import trace
from celery.exceptions import Ignore, Reject, Retry
from kombu.serialization import dumps, loads

from celery_distlock import clock, policies
from celery_distlock.engine.abort import Guard
from celery_distlock.engine.acquisition import release
from celery_distlock.engine.hold import ensure_able
from celery_distlock.engine.lease import Lease, PostponeRequest
from celery_distlock.engine.upgrading import leave
from celery_distlock.errors import LockConflictError, LockLostError, StoreError
from celery_distlock.key import Key
from celery_distlock.policies import Decision
from celery_distlock.settings import MAX_LEASE
from celery_distlock.stores import Store
from celery_distlock.stores.values import Completion, WokenTask
from celery_distlock.telemetry import events

from .acquiring import KeyAcquisition
from .app import Runtime
from .conflicts import fail, note_hold_time
from .current import Task, here
from .invocation import Invocation
from .message_facts import execution_id, receive_of_call
from .messages import seconds_until
from .plans import Plan
from .requeueing import Requeueing
from .task_function import is_pending

__all__ = ["Body", "Execution", "note_call"]


class Execution:
    """
    Runs *task* once, by :meth:`run`, under the lock of *keys*.

    A *nested* call is one by other code, see :func:`note_call`.
    """

    def __init__(
        self, task: Task, plan: Plan, store: Store, keys: tuple[Key, ...], *, nested: bool
    ) -> None:
        ensure_able(store, keys, f"task {task.name}")
        self.task = task
        self._store = store
        self._nested = nested
        # The same order in all processes, so that no two wait for each other.
        in_order = tuple(sorted(keys, key=attrgetter("template")))
        self._invocation = invocation = Invocation(task, plan, store, in_order, nested=nested)
        if invocation.has_message:
            received = invocation.received
            events.set_source(task.app, received.events)
            Runtime.of(task.app).relay.own_address = received.delivery_address
        self._requeueing = Requeueing(invocation, in_order)
        self._keys = KeyAcquisition(invocation, in_order, self._requeueing)
        self._body = Body(invocation, self._keys, self._requeueing)
        self._around = sys.exc_info()[1]  # being handled already where the task is called

    @property
    def lease(self) -> Lease:
        """The lease on the keys."""
        return self._keys.lease

    def run(self, body: Callable[[], Any]) -> Any:
        """
        Run *body* under the lock; return its result, or the policy's answer instead.

        Raises:
            Ignore: The task is parked, was sent again, or was a second delivery.
            LockConflictError: The key is taken, and the policy or the call fails then.
            LockLostError: The lock was lost while the body ran.
            StoreUnavailableError: The store is away, and `lock_on_outage` is ``"fail"``.
        """
        here().stack.append(self)
        try:
            try:
                decision = self._keys.take_all()
            except (LockConflictError, StoreError) as error:
                self._note_failure(error)
                raise
            if decision is not None:
                return self._follow(decision)
            began = clock.monotonic()
            try:
                return self._body.run(body)
            finally:
                note_hold_time(str(self.task.name), clock.monotonic() - began)
        finally:
            self.release()

    def _note_failure(self, error: LockConflictError | StoreError) -> None:
        """Fail the task with *error*, and drop its parked message, if any, after a conflict."""
        if isinstance(error, LockConflictError):
            self._forget_parked()
        if not self._nested:
            fail(self.task, error)

    def _forget_parked(self) -> None:
        # It was parked under another policy, such as that of the previous release.
        if self._invocation.redelivered:
            self._requeueing.leave_reservations(mark=True)
            self._requeueing.drop_parked()

    def _follow(self, decision: Decision) -> Any:
        if isinstance(decision, policies.Answer):
            self._forget_parked()
            return decision.result
        if isinstance(decision, policies.Resend):
            return self._requeueing.resend(decision)
        policy = self._invocation.plan.policy
        raise TypeError(f"{policy!r} decided {decision!r}, which is no decision")

    def release(self) -> None:
        """Release every key, the last one first; may be called again if it was interrupted."""
        body, entered = self._body, self._keys.entered
        while entered:
            hold = entered.pop()
            hold.depth -= 1
            leave(hold)
        woken_tasks: list[WokenTask | None] = []
        with contextlib.ExitStack() as releases:
            releases.callback(self._dispatch, woken_tasks)  # not before the last one is released
            for hold in self._keys.taken:
                self._keys.owned.pop((self._store.identity, hold.key), None)
                releases.callback(
                    release,
                    hold,
                    body.completion,
                    body.keep_for.get(hold.key),
                    woken_tasks.append,
                    succeeded=body.succeeded,
                )
                if body.completion is Completion.UNSETTLED:
                    here().unsettled.append((hold, self._around))
        if self in (stack := here().stack):
            stack.remove(self)

    def _dispatch(self, woken_tasks: list[WokenTask | None]) -> None:
        for woken in filter(None, woken_tasks):
            self._store.dispatch(woken)


def note_call(task: Task) -> bool:
    """
    Note that the request of *task* has reached `LockedTask.__call__`.

    Returns:
        Whether the call is nested, that is, not the request's own: there is no request, a locked
        task runs in this thread, or one of the task's handlers (`before_start`, `on_success`,
        `after_return`) makes the call.
    """
    request, running = task.request, here()
    if request.called_directly or _is_in_before_start(task):
        return True
    nested = running.in_a_body or request in running.called
    running.called.add(request)
    return nested


def _is_in_before_start(task: Task) -> bool:
    """Whether the task's `before_start` is running in this thread; Celery keeps no flag for it."""
    handler: Any = type(task).before_start
    if handler is Task.before_start:
        return False
    code = getattr(handler, "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not vars(trace):  # the request begins there
        if frame.f_code is code and _runs(frame, handler):
            return True
        frame = frame.f_back
    return False


def _runs(frame: FrameType, function: Any) -> bool:
    """Whether *frame* runs *function*, and not another closure of the same decorator."""
    closed_over = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return all(frame.f_locals.get(name) is _value(cell) for name, cell in closed_over)


def _value(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


class Body:
    """
    Runs the body once, by :meth:`run`, after the keys are acquired.

    Attributes:
        completion: Whether the execution is over; sent to the store with the release.
        keep_for: For each key that is kept for the next attempt: that attempt's execution id, and
            the time in seconds.
        succeeded: Whether the body has returned; None: it has not begun.
    """

    def __init__(
        self, invocation: Invocation, keys: KeyAcquisition, requeueing: Requeueing
    ) -> None:
        self._invocation = invocation
        self._settings = invocation.plan.settings
        self._keys = keys
        self._requeueing = requeueing
        self.completion = Completion.NO
        self.keep_for: dict[str, tuple[str, float]] = {}
        self.succeeded: bool | None = None

    def run(self, body: Callable[[], Any]) -> Any:
        """
        Run *body*, aborted if a key is lost; return its result.

        Raises:
            Exception: Any error of the body; :exc:`LockLostError` if it was aborted.
            Postponed: The body failed, and the task is requeued.
        """
        sealed = None
        if self._goes_back(lost=True):
            sealed = self._requeueing.seal_for_failure(self._keys.taken)
        late = self._invocation.has_message and bool(self._invocation.task.acks_late)
        may_come_again = self._invocation.redelivered or late
        ended = Completion.YES_AND_MAY_COME_AGAIN if may_come_again else Completion.YES
        with_result = Completion.UNSETTLED if late else ended
        self.succeeded = False
        try:
            holds = self._keys.holds if self._settings.on_lost != "warn" else ()
            result = Guard(holds).run(body)
        except Retry as retry:
            self.completion = ended
            self._keep_keys(retry)
            raise
        except PostponeRequest as asked:
            self.completion = ended
            self._requeueing.postpone(self._keys.taken, asked.seconds)
        except Reject as reject:
            self.completion = Completion.NO if getattr(reject, "requeue", False) else ended
            raise
        except (Ignore, MemoryError) as error:
            self.completion = ended if isinstance(error, Ignore) else Completion.NO
            raise
        except Exception as error:
            self.completion = ended
            lost = isinstance(error, LockLostError) and error.key in self._keys.lease.keys
            if sealed is not None and self._goes_back(lost=lost):
                self._requeueing.requeue(sealed, self._keys.taken, error)
            # A run that lost its lock has not ended: a waiting second delivery of it may run.
            self.completion = Completion.NO if lost else with_result
            raise
        self.completion = with_result
        self.succeeded = True
        if is_pending(result):
            self._report_pending(result)
        return result

    def _report_pending(self, result: Any) -> None:
        """Log, once for each task, that the key is released although *result* is unfinished."""
        task = self._invocation.task
        reported = Runtime.of(task.app).pending
        if task.name not in reported:
            reported.add(str(task.name))
            words = (
                "has returned a {kind}, which is unfinished; its key is released now, so the rest"
                " of its work runs WITHOUT the lock: finish it in the body, by asyncio.run(...) or"
                " list(...), and return the result of that"
            )
            self._invocation.report.error(words, kind=type(result).__qualname__)

    def _keep_keys(self, retry: Retry) -> None:
        if not (self._settings.hold_on_retry and self._invocation.has_message):
            return
        seconds = min(MAX_LEASE, seconds_until(retry.when) + self._settings.lease)
        kept = self._next_attempt(retry), seconds
        self.keep_for = dict.fromkeys(self._wanted_again(retry), kept)

    def _next_attempt(self, retry: Retry) -> str:
        """Return the execution id of the retry that was sent; Celery does not copy all headers."""
        request, signature = self._invocation.request, getattr(retry, "sig", None)
        headers = {} if signature is None else signature.options.get("headers") or {}
        nesting = request.replaced_task_nesting
        facts = {"id": request.id, "replaced_task_nesting": nesting}
        return execution_id({**headers, **facts, "retries": (request.retries or 0) + 1})

    def _wanted_again(self, retry: Retry) -> set[str]:
        """Return the keys that the next attempt, perhaps with other arguments, wants again."""
        held = {hold.key for hold in self._keys.taken}
        plan, signature = self._invocation.plan, getattr(retry, "sig", None)
        if signature is None:  # raised by a nested call without a message: nothing was sent
            return set()
        if not plan.rule.runs_no_code:
            return held
        try:
            task, given = self._invocation.task, (signature.args or (), signature.kwargs or {})
            _ensure_readable(given, signature.options.get("serializer") or task.serializer)
            keys = plan.rule.keys(*given, receive_of_call(task, signature.options))
            wanted = {key.template for key in keys}
        except Exception:  # noqa: BLE001  # the retry will fail as well, and claim no key
            return set()
        return held & wanted

    def _goes_back(self, *, lost: bool) -> bool:
        """Whether a task that failed, or *lost* its lock, is requeued."""
        settings = self._settings
        return settings.on_failure == "requeue" or (lost and settings.on_lost == "requeue")


def _ensure_readable(given: Any, serializer: str) -> None:
    """Raise an error if *given* cannot be serialized, or not deserialized by its receiver."""
    kind, encoding, body = dumps(given, serializer=serializer)
    loads(body, kind, encoding, accept=[kind])
