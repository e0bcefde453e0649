"""
One execution of a locked task, from its keys to their release.

In its order: :mod:`.acquiring` takes the keys, and asks :mod:`.conflicts` what to do when one is
taken; :mod:`.body` runs the task and classifies its end; :mod:`.requeueing` parks the message or
sends it again; what they have in common is an :mod:`.invocation`.
"""

import contextlib
import sys
from collections.abc import Callable
from operator import attrgetter
from types import CellType, FrameType
from typing import Any

from celery.app import trace

from celery_distlock import clock, policies
from celery_distlock.engine.acquisition import release
from celery_distlock.engine.lease import Lease
from celery_distlock.engine.upgrading import leave
from celery_distlock.engine.wants import ensure_able
from celery_distlock.errors import LockConflictError, StoreError
from celery_distlock.key import Key
from celery_distlock.policies import Decision
from celery_distlock.stores import Store
from celery_distlock.stores.values import Completion, WokenTask
from celery_distlock.telemetry import events

from .acquiring import KeyAcquisition
from .app import Runtime
from .body import Body
from .conflicts import fail, note_hold_time
from .current import Task, here
from .invocation import Invocation
from .plans import Plan
from .requeueing import Requeueing

__all__ = ["Execution", "note_call"]


class Execution:
    """
    Runs *task* once, by :meth:`run`, under the lock of *keys*.

    A *nested* call is one by other code, as :func:`note_call` says.
    """

    def __init__(
        self, task: Task, plan: Plan, store: Store, keys: tuple[Key, ...], *, nested: bool
    ) -> None:
        ensure_able(store, keys, f"task {task.name}")
        self.task = task
        self._store = store
        self._nested = nested
        # The same order for all: no two wait for each other.
        in_order = tuple(sorted(keys, key=attrgetter("template")))
        self._invocation = invocation = Invocation(task, plan, store, in_order, nested=nested)
        if invocation.has_message:
            received = invocation.received
            events.set_source(task.app, received.events)
            Runtime.of(task.app).relay.own_address = received.delivery_address
        self._requeueing = Requeueing(invocation, in_order)
        self._keys = KeyAcquisition(invocation, in_order, self._requeueing)
        self._body = Body(invocation, self._keys, self._requeueing)
        self._around = sys.exc_info()[1]  # what is being handled anyway, where the task is called

    @property
    def lease(self) -> Lease:
        """What is held."""
        return self._keys.lease

    def run(self, body: Callable[[], Any]) -> Any:
        """
        Run *body* under the lock and return its result, or a policy's instead of it.

        Raises:
            Ignore: The task is parked, sent again, or was a second delivery.
            LockConflictError: The key is taken, and the policy or the call is for failing then.
            LockLostError: The lock was lost while the body ran.
            StoreUnavailableError: The store is away, and `lock_on_outage` is for failing then.
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
        """Have the task fail by *error*; a run that ends so is not sent again."""
        if isinstance(error, LockConflictError):
            self._forget_parked()
        if not self._nested:
            fail(self.task, error)

    def _forget_parked(self) -> None:
        # It was parked under another policy, as that of the code before a deploy.
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
    Note that the request of *task* came to where its lock is taken.

    Returns:
        Whether it is not the request's own call: there is none, a locked task runs here, or one of
        the task's handlers (`before_start`, `on_success`, `after_return`) calls it.
    """
    request, running = task.request, here()
    if request.called_directly or _is_in_before_start(task):
        return True
    nested = running.in_a_body or request in running.called
    running.called.add(request)
    return nested


def _is_in_before_start(task: Task) -> bool:
    """Whether the `before_start` of the task's request is under way here; Celery does not tell."""
    handler: Any = type(task).before_start
    if handler is Task.before_start:
        return False
    code = getattr(handler, "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not vars(trace):  # there the request begins
        if frame.f_code is code and _runs(frame, handler):
            return True
        frame = frame.f_back
    return False


def _runs(frame: FrameType, function: Any) -> bool:
    """Whether it is *function* whose code *frame* runs: a decorator's is also that of others."""
    closed_over = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return all(frame.f_locals.get(name) is _value(cell) for name, cell in closed_over)


def _value(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none
        return None
