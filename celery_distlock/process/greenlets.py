"""Detects whether gevent or eventlet has patched Python's threads."""

import sys
from typing import Any


def gevent_patched() -> bool:
    """Whether this process's threads are gevent's greenlets."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def eventlet_patched() -> bool:
    """Whether this process's threads are eventlet's greenlets."""
    patcher: Any = sys.modules.get("eventlet.patcher")
    return patcher is not None and bool(patcher.is_monkey_patched("thread"))


def greenlets_library() -> str:
    """Return the name of the library that has patched threads, or an empty string."""
    return "gevent" if gevent_patched() else "eventlet" if eventlet_patched() else ""
