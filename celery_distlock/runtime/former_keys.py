"""
Runs that were parked at a key which their task no longer has, as after a deploy.

Workers of both releases may have been given the message of one. So it runs under the key at which
it was parked, as every delivery of it does, and under the keys of this release inside that.
"""

from dataclasses import replace

from celery_distlock.engine.wants import key_wanting
from celery_distlock.errors import ConfigurationError, StoreError
from celery_distlock.key import Key
from celery_distlock.keys import key_of, slot_name
from celery_distlock.policies import Requeue
from celery_distlock.stores import Ability, QueueStore, Store

from .app import Runtime
from .current import Task
from .execution import Execution, drop_reservations, is_woken
from .plans import Plan
from .received import Received

__all__ = ["at_former_key"]


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
