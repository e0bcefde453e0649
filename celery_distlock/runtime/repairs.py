"""
What is set right around executions that do not go the usual way.

- Runs that were parked at a key which their task no longer has, as after a deploy. Workers of both
  releases may have been given the message of one. So it runs under the key at which it was parked,
  as every delivery of it does, and under the keys of this release inside that.
- Keys that are reserved for a run which does not come for them.
- What a task still holds when it has ended, and runs whose results are stored by then.
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery import states
from celery.signals import task_postrun

from celery_distlock.engine.hold import Hold
from celery_distlock.engine.pending_releases import release_later
from celery_distlock.engine.wants import key_wanting
from celery_distlock.errors import ConfigurationError, StoreError
from celery_distlock.key import Key
from celery_distlock.keys import key_of, slot_name
from celery_distlock.policies import Requeue
from celery_distlock.stores import Ability, QueueStore, Store
from celery_distlock.stores.values import Completion

from .app import Runtime
from .current import Task, here
from .execution import Execution
from .lock_header import execution_id
from .plans import Plan
from .received import Received, receive_of_request
from .reporting import Report
from .requeueing import drop, drop_at

__all__ = ["at_former_key", "drop_reservations"]

# Of a task; any other state is that of a process that ends, and says nothing.
_ENDS = frozenset(
    {states.SUCCESS, states.FAILURE, states.IGNORED, states.RETRY, states.REJECTED, states.REVOKED}
)


def at_former_key(
    task: Task, runtime: Runtime, plan: Plan | None, keys: tuple[Key, ...]
) -> Execution | None:
    """
    Return the execution under the key at which a woken run was parked, if that is none of *keys*.

    The other keys that are reserved for the run, and are none of *keys*, are freed.
    """
    if not is_woken(task):
        return None
    header = Received.of(task.request).header
    name = header.places[0]
    parks = Ability.QUEUE in runtime.store.abilities and runtime.settings.enabled
    if plan is None or not parks or name in {slot_name(key.template) for key in keys}:
        drop_reservations(task, runtime, keys)
        return None
    former = _key_as_parked(runtime.store, name, header.run)
    drop_reservations(task, runtime, (*keys, former))
    settings = replace(plan.settings, on_failure="release", on_lost="abort", hold_on_retry=False)
    as_parked = replace(plan, settings=settings, policy=Requeue(), unique=None)
    return Execution(task, as_parked, runtime.store, (former,), nested=False)


def _key_as_parked(store: Store, name: str, run: str) -> Key:
    """Return the key of slot name *name*, with as much of it as *run* wants there."""
    text = key_of(name)
    try:
        parked = QueueStore.of(store).parking.parked(text, run)
        return Key(text) if parked is None else key_wanting(text, parked.want)
    except (StoreError, ConfigurationError):
        return Key(text)


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
