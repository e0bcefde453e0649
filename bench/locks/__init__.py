"""
The locks that are compared, each in a module of its own.

Such a module has a NAME, TERMS (what the lock is like as it is made here), and
``open_lock(url, key)``, which returns something with ``acquire()``, which waits, and ``release()``.
"""

from functools import cache
from types import ModuleType
from typing import Any

import adapters

OURS, BARE = "distlock", "bare"
MODULES = (OURS, BARE, "redis_py", "python_redis_lock", "pottery_redlock")


def present() -> tuple[list[str], list[str]]:
    """Return the modules that can be imported, and a line for each that cannot."""
    return adapters.present(__name__, MODULES)


def adapter(module: str) -> ModuleType:
    return adapters.adapter(__name__, module)


@cache
def open_lock(module: str, url: str, key: str) -> Any:
    """Return this process's lock for *key*; its connection lives as long as the process."""
    return adapter(module).open_lock(url, key)
