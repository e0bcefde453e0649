"""
Signals about locks and parked tasks, for your own receivers.

Connect to them as to Celery's signals. The sender is the task, or the
:class:`~celery_distlock.Lock`; every signal has the keyword argument ``key``. Signals are sent from
the code that causes them. Those of the watchdog, renewals, recalls and most losses, are sent from a
separate thread, so that they may arrive after the release; the loss and the recall of a task's lock
with the task's context variables. A receiver that raises is logged and otherwise ignored; one that
hangs delays the watchdog's signals, which are dropped once 10,000 wait.

==================  ============================================================================
signal              further arguments
==================  ============================================================================
``lock_acquired``   ``token``, ``holder``, ``waited`` (seconds since the first request),
                    ``waited_for`` (``"holder"``, ``"time"`` or ``"nothing"``: what was in the
                    way last), ``units``, ``capacity`` (1 and 1: exclusive; capacity 0: any
                    number)
``lock_changed``    ``token``, ``holder``, ``units``, ``capacity``: an upgrade, or a downgrade
``lock_conflict``   ``holder``, ``remaining`` (seconds); before the policy is applied
``lock_renewed``    ``token``, ``holder``
``lock_lost``       ``token``, ``holder``, ``reason``, ``held`` (seconds)
``lock_recalled``   ``token``, ``holder``, ``held`` (seconds), ``by`` (in words); its holder is
                    asked to leave, and still has it
``lock_released``   ``token``, ``holder``, ``held`` (seconds)
``lock_freed``      ``holder``, ``reason``; not by its holder: its process is gone, or an operator
``task_parked``     ``task_id``, ``holder``, ``place`` (0 is next)
``task_woken``      ``task_id``, ``waited`` (seconds); it has its key and is about to run
``task_dropped``    ``task_id``; an operator has removed it from the queue
``task_joined``     ``task_id``; a call was not sent, as that equal task is pending
``task_updated``    ``task_id``; as above, and that task has the call's arguments now
``task_refused``    ``task_id``; a call was not sent, or its task fails, with ``QueueFullError``
==================  ============================================================================

If a task is the sender, the ``lock_`` signals also have its ``task_id``. The sender of
``lock_freed`` is the app, and that of ``task_dropped`` may be.
"""

from collections.abc import Callable
from typing import Any

from celery.utils.dispatch import Signal

from .stores import Store

__all__ = [
    "lock_acquired",
    "lock_changed",
    "lock_conflict",
    "lock_freed",
    "lock_lost",
    "lock_recalled",
    "lock_released",
    "lock_renewed",
    "task_dropped",
    "task_joined",
    "task_parked",
    "task_refused",
    "task_updated",
    "task_woken",
]

_HELD = ["key", "token", "holder"]
_MUCH = ["units", "capacity"]
_WAITED = ["waited", "waited_for"]

lock_acquired = Signal(name="lock_acquired", providing_args=[*_HELD, *_WAITED, *_MUCH])
lock_changed = Signal(name="lock_changed", providing_args=[*_HELD, *_MUCH])
lock_conflict = Signal(name="lock_conflict", providing_args=["key", "holder", "remaining"])
lock_renewed = Signal(name="lock_renewed", providing_args=_HELD)
lock_lost = Signal(name="lock_lost", providing_args=[*_HELD, "reason", "held"])
lock_recalled = Signal(name="lock_recalled", providing_args=[*_HELD, "held", "by"])
lock_released = Signal(name="lock_released", providing_args=[*_HELD, "held"])
lock_freed = Signal(name="lock_freed", providing_args=["key", "holder", "reason"])
task_parked = Signal(name="task_parked", providing_args=["key", "task_id", "holder", "place"])
task_woken = Signal(name="task_woken", providing_args=["key", "task_id", "waited"])
task_dropped = Signal(name="task_dropped", providing_args=["key", "task_id"])
task_joined = Signal(name="task_joined", providing_args=["key", "task_id"])
task_updated = Signal(name="task_updated", providing_args=["key", "task_id"])
task_refused = Signal(name="task_refused", providing_args=["key", "task_id"])

_BY_NAME = {name: globals()[name] for name in __all__}


# Called with every signal before its receivers, with the store: counters, events and log lines.
observers: list[Callable[[str, Any, Store, dict[str, Any]], None]] = []


def send(name: str, sender: object, store: Store, /, **facts: object) -> None:
    """
    Send the signal *name*; cheap if it has no receivers.

    Observers also get the *store* where it happened.
    """
    for observe in observers:
        observe(name, sender, store, facts)
    signal = _BY_NAME[name]
    if signal.receivers:
        signal.send(sender=sender, **facts)
