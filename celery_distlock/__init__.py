"""Celery tasks that run under a distributed, reentrant lock."""

from .async_lock import AsyncLock
from .key import Key
from .lock import Lock
from .order import Order
from .rate import Rate
from .task import LockedTask
from .typing import TypedTask, locked_task
from .worker import install

__all__ = [
    "AsyncLock",
    "Key",
    "Lock",
    "LockedTask",
    "Order",
    "Rate",
    "TypedTask",
    "install",
    "locked_task",
]

__version__ = "0.1.0"
