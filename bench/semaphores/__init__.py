"""
What lets several hold a key, each in a module of its own.

Such a module has a NAME, TERMS (what it is like as it is made here), ``open_semaphore(url, key,
units)``, which returns something with ``acquire()``, which waits, and ``release()``, and
``taken(client, key, units)``: how many units are taken, as its records say, by one command.
"""

from functools import cache
from types import ModuleType
from typing import Any

import adapters

OURS = "distlock"
MODULES = (OURS, "polling", "permits", "dramatiq_limiter")


def present() -> tuple[list[str], list[str]]:
    """Return the modules that can be imported, and a line for each that cannot."""
    return adapters.present(__name__, MODULES)


def adapter(module: str) -> ModuleType:
    return adapters.adapter(__name__, module)


@cache
def open_semaphore(module: str, url: str, key: str, units: int) -> Any:
    """Return this process's access to *key*; its connection lives as long as the process."""
    return adapter(module).open_semaphore(url, key, units)
