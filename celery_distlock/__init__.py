"""Celery tasks that run under a distributed, reentrant lock."""

from .lock import Lock
from .task import LockedTask
from .worker import install

__all__ = ["Lock", "LockedTask", "install"]

__version__ = "0.1.0"
