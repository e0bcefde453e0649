"""
One execution of a locked task, from its keys to their release.

In its order: :mod:`.acquiring` takes the keys, and asks :mod:`.conflicts` what to do when one is
taken; :mod:`.body` runs the task and classifies its end; :mod:`.requeueing` parks the message or
sends it again; what they have in common is an :mod:`.invocation`.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import CellType, FrameType
from typing import Any

from celery import states
from celery.app import trace
from celery.signals import task_postrun

from celery_distlock import clock, policies
from celery_distlock.engine.acquisition import release
from celery_distlock.engine.hold import Hold
from celery_distlock.engine.lease import Lease
from celery_distlock.engine.pending_releases import release_later
from celery_distlock.engine.upgrading import leave
from celery_distlock.engine.wants import ensure_able
from celery_distlock.errors import LockConflictError, StoreError
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
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
from .lock_header import execution_id
from .plans import Plan
from .received import Received, receive_of_request
from .reporting import Report
from .requeueing import Requeueing, drop, drop_at

__all__ = ["Execution", "drop_reservations", "is_woken", "note_call"]

# Of a task; any other state is that of a process that ends, and says nothing.
_ENDS = frozenset(
    {states.SUCCESS, states.FAILURE, states.IGNORED, states.RETRY, states.REJECTED, states.REVOKED}
)


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


def drop_reservations(task: Task, runtime: Runtime, keys: tuple[Key, ...]) -> None:
    """
    Free the keys that are reserved for a woken task and that are none of its *keys*.

    Its key function may return others than when it was parked, or may have failed.
    """
    if not is_woken(task):
        return
    header = Received.of(task.request).header
    former = set(header.places).difference(slot_name(key.template) for key in keys)
    # A run that goes on at some of its keys has not ended at the others, to which it may come back;
    # nor has one that is acknowledged late: its message comes here again if its process dies.
    ends = former.issuperset(header.places) and not task.acks_late
    drop_at(runtime.store, former, header.run, mark=ends)


def is_woken(task: Task) -> bool:
    """Whether the message of the task's request was parked, so that keys are reserved for it."""
    return Received.of(task.request).header.woken and not task.request.called_directly


def _release_and_settle(sender: Task, state: str | None = None, **ended: Any) -> None:
    """
    After a task: release what it still holds, and tell the store that its end is known.

    A time limit's exception can strike between any two instructions, also between a task's last
    one and its release. The result is stored and the links are sent by now, so that a second
    delivery has nothing left to do; until now it had.
    """
    if sender.request.is_eager:
        return
    running = here()
    for execution in reversed(running.stack[:]):
        execution.release()
    for hold, around in running.take_unsettled():
        # Celery comes here with a SystemExit, too, say of SIGTERM: then nothing is known.
        if sys.exc_info()[1] is around:
            _settle(hold)
    running.unlocked = ()
    if sender.request not in running.called and state in _ENDS:
        _settle_uncalled(sender, state, ended)


def _settle_uncalled(task: Task, state: str, ended: Mapping[str, Any]) -> None:
    """
    Tell the store that a run is over which never came to `LockedTask.__call__`.

    It has failed before, or the ``__call__`` of another class has run the body instead: then it
    would be sent again for ever, and its key would be kept for it.
    """
    runtime = Runtime.known(task.app)
    plan = runtime.plans.get(str(task.name)) if runtime is not None else None
    if runtime is None or plan is None or not runtime.settings.enabled:
        return
    if state == states.REJECTED and getattr(ended["retval"], "requeue", False):
        return  # it runs again
    drop_reservations(task, runtime, ())
    if plan.settings.hold_on_retry and task.request.retries:
        _free_what_was_kept(task, runtime, plan, ended)
    if state == states.SUCCESS and _wants_a_key(task, plan, ended):
        words = (
            "ran WITHOUT its lock: the __call__ of {of} does not call LockedTask's; have it return"
            " super().__call__(*args, **kwargs)"
        )
        report = Report(task, task.request.id, runtime.store)
        report.error(words, of=_class_with_call(task).__qualname__)


def _free_what_was_kept(task: Task, runtime: Runtime, plan: Plan, ended: Mapping[str, Any]) -> None:
    """Free the keys that the attempt before has left to this one, which did not come for them."""
    run = execution_id(task.request.__dict__, Received.of(task.request).header)
    try:
        keys = plan.rule.keys(ended["args"], ended["kwargs"], receive_of_request(task))
    except Exception:  # noqa: BLE001  # it has failed for that, perhaps, and said so
        return
    for key in keys:
        with contextlib.suppress(StoreError):
            drop(runtime.store, slot_name(key.template), run)


def _wants_a_key(task: Task, plan: Plan, ended: Mapping[str, Any]) -> bool:
    try:
        return bool(plan.rule.keys(ended["args"], ended["kwargs"], receive_of_request(task)))
    except Exception:  # noqa: BLE001  # its body may have changed them
        return True


def _class_with_call(task: Task) -> type[Any]:
    return next(base for base in type(task).__mro__ if "__call__" in vars(base))


def _settle(hold: Hold) -> None:
    """Tell the store that the run of *hold* is over; in the background if the store is away."""
    try:
        settled = drop(hold.store, slot_name(hold.key), hold.run)
    except StoreError:
        settled = False
    if not settled:  # the release itself may not have come to the store yet
        release_later(hold.store, hold.release_request(Completion.YES_AND_MAY_COME_AGAIN))


task_postrun.connect(_release_and_settle, weak=False)
