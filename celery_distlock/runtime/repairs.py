"""
Cleanup around executions that leave the usual path.

- Runs that were parked at a key which their task no longer has, as after a deploy. Workers of both
  releases may receive the message of such a run. So it runs under the key at which it was parked,
  like every delivery of it, and inside that under the keys of this release.
- Keys that are reserved for a run that does not claim them.
- Keys that a task still holds when it has ended, and runs whose results are stored by then.
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
from celery_distlock.errors import ConfigurationError, StoreError
from celery_distlock.key import Key
from celery_distlock.keys import key_of, slot_name
from celery_distlock.order import Order
from celery_distlock.policies import Requeue
from celery_distlock.stores import Ability, QueueStore, Store
from celery_distlock.stores.values import Completion, Want

from .app import Runtime
from .current import Task, here
from .execution import Execution
from .message_facts import Received, execution_id, receive_of_request
from .plans import Plan
from .reporting import Report
from .requeueing import drop, drop_at

__all__ = ["at_former_key", "drop_reservations", "key_wanting"]

# Final states of a task; any other state comes from a process that is ending, and proves nothing.
_ENDS = frozenset(
    {states.SUCCESS, states.FAILURE, states.IGNORED, states.RETRY, states.REJECTED, states.REVOKED}
)


def at_former_key(
    task: Task, runtime: Runtime, plan: Plan | None, keys: tuple[Key, ...]
) -> Execution | None:
    """
    Return the execution under the key at which a woken run was parked, unless it is one of *keys*.

    Frees the other keys that are reserved for the run and are not among *keys*.
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
    return Execution(task, task.request, as_parked, runtime, (former,), nested=False)


def _key_as_parked(store: Store, name: str, run: str) -> Key:
    """Return the key with slot name *name*, with the units and mode that *run* asked for."""
    text = key_of(name)
    try:
        parked = QueueStore.of(store).parking.parked(text, run)
        return Key(text) if parked is None else key_wanting(text, parked.want)
    except (StoreError, ConfigurationError):
        return Key(text)


def key_wanting(text: str, want: Want) -> Key:
    """Return the key *text* with the capacity, weight, rates and cost of *want*."""
    weight = want.units if want.capacity > 1 else 1
    capacity, cost = want.capacity or None, want.cost if want.rates else 1
    order, rate = None, want.rates or None
    if want.has_order:
        share, most, ahead = want.share / 1000, want.most or None, want.ahead / 1000
        order = Order(want.lane, share=share, most=most, ahead=ahead, strict=want.strict)
    return Key(text, capacity=capacity, weight=weight, rate=rate, cost=cost, order=order)


def drop_reservations(task: Task, runtime: Runtime, keys: tuple[Key, ...]) -> None:
    """
    Free the keys that are reserved for a woken task and are not among its *keys*.

    Its key function may return other keys than when it was parked, or may have failed.
    """
    if not is_woken(task):
        return
    header = Received.of(task.request).header
    former = set(header.places).difference(slot_name(key.template) for key in keys)
    # A run that keeps some of its keys has not ended at the others: it may come back to them. Nor
    # has one with late acknowledgement: its message is delivered again if its process dies.
    ends = former.issuperset(header.places) and not task.acks_late
    drop_at(runtime.store, former, header.run, mark=ends)


def is_woken(task: Task) -> bool:
    """Whether the message of the task's request was parked, so that keys are reserved for it."""
    return Received.of(task.request).header.woken and not task.request.called_directly


def _release_and_settle(sender: Task, state: str | None = None, **ended: Any) -> None:
    """
    After a task: release what it still holds, and report to the store that the run is over.

    A time limit's exception can be raised between any two instructions, also between a task's last
    one and its release. By now the result is stored and the links are sent, so a second delivery
    has nothing left to do; before this point it had.
    """
    request, running = sender.request, here()
    if request.is_eager:
        return
    for execution in reversed(running.stack[:]):
        execution.release()
    for hold, around in running.take_unsettled():
        # Celery also comes here with a SystemExit, as after SIGTERM: then the end is not known.
        if sys.exc_info()[1] is around:
            _settle(hold)
    running.unlocked = ()
    if request not in running.called and state in _ENDS:
        _settle_uncalled(sender, state, ended)


def _settle_uncalled(task: Task, state: str, ended: Mapping[str, Any]) -> None:
    """
    Report to the store that a run is over which never reached `LockedTask.__call__`.

    It failed before, or the ``__call__`` of another class ran the body instead. Otherwise it would
    be sent again for ever, and its key would stay reserved for it.
    """
    runtime = Runtime.known(task.app)
    plan = runtime.plans.get(str(task.name)) if runtime is not None else None
    if runtime is None or plan is None or not runtime.settings.enabled:
        return
    if state == states.REJECTED and getattr(ended["retval"], "requeue", False):
        return  # it runs again
    drop_reservations(task, runtime, ())
    if plan.settings.hold_on_retry and task.request.retries:
        _free_kept_keys(task, runtime, plan, ended)
    if state == states.SUCCESS and _wants_a_key(task, plan, ended):
        words = (
            "ran WITHOUT its lock: the __call__ of {of} does not call LockedTask's; have it return"
            " super().__call__(*args, **kwargs)"
        )
        report = Report(task, task.request.id, runtime.store)
        report.error(words, of=_class_with_call(task).__qualname__)


def _free_kept_keys(task: Task, runtime: Runtime, plan: Plan, ended: Mapping[str, Any]) -> None:
    """Free the keys that the previous attempt kept for this one, which did not claim them."""
    run = execution_id(task.request.__dict__, Received.of(task.request).header)
    try:
        receive = receive_of_request(task, task.request)
        keys = plan.rule.keys(ended["args"], ended["kwargs"], receive)
    except Exception:  # noqa: BLE001  # the task has probably failed with this error already
        return
    for key in keys:
        with contextlib.suppress(StoreError):
            drop(runtime.store, slot_name(key.template), run)


def _wants_a_key(task: Task, plan: Plan, ended: Mapping[str, Any]) -> bool:
    try:
        receive = receive_of_request(task, task.request)
        return bool(plan.rule.keys(ended["args"], ended["kwargs"], receive))
    except Exception:  # noqa: BLE001  # its body may have changed them
        return True


def _class_with_call(task: Task) -> type[Any]:
    return next(base for base in type(task).__mro__ if "__call__" in vars(base))


def _settle(hold: Hold) -> None:
    """Report that the run of *hold* is over; in the background if the store is unreachable."""
    try:
        settled = drop(hold.store, slot_name(hold.key), hold.run)
    except StoreError:
        settled = False
    if not settled:  # the release itself may not have reached the store yet
        release_later(hold.store, hold.release_request(Completion.YES_AND_MAY_COME_AGAIN))


task_postrun.connect(_release_and_settle, weak=False)
