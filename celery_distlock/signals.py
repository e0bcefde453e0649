"""
What happens to locks and parked tasks, for receivers of one's own.

Connect to them as to Celery's signals. The sender is the task, or the
:class:`~celery_distlock.Lock`; every signal has the keyword argument ``key``. They are sent from
where it happens: a renewal and most losses from the watchdog's thread. A receiver that raises is
logged and otherwise ignored.

==================  ===============================================================
signal              further arguments
==================  ===============================================================
``lock_acquired``   ``token``, ``holder``
``lock_conflict``   ``holder``, ``remaining`` (seconds); before the policy is applied
``lock_renewed``    ``token``, ``holder``
``lock_lost``       ``token``, ``holder``, ``reason``
``lock_released``   ``token``, ``holder``
``task_parked``     ``task_id``, ``holder``, ``place`` (0 is next)
``task_woken``      ``task_id``; it has its key and is about to run
==================  ===============================================================
"""

from celery.utils.dispatch import Signal

__all__ = [
    "lock_acquired",
    "lock_conflict",
    "lock_lost",
    "lock_released",
    "lock_renewed",
    "task_parked",
    "task_woken",
]

_HELD = ["key", "token", "holder"]

lock_acquired = Signal(name="lock_acquired", providing_args=_HELD)
lock_conflict = Signal(name="lock_conflict", providing_args=["key", "holder", "remaining"])
lock_renewed = Signal(name="lock_renewed", providing_args=_HELD)
lock_lost = Signal(name="lock_lost", providing_args=[*_HELD, "reason"])
lock_released = Signal(name="lock_released", providing_args=_HELD)
task_parked = Signal(name="task_parked", providing_args=["key", "task_id", "holder", "place"])
task_woken = Signal(name="task_woken", providing_args=["key", "task_id"])

_BY_NAME = {name: globals()[name] for name in __all__}


def send(name: str, sender: object, **facts: object) -> None:
    """Send the signal *name*; costs a look-up where nobody listens."""
    signal = _BY_NAME[name]
    if signal.receivers:
        signal.send(sender=sender, **facts)
