"""
What the watchdog, and the stores that it asks, tell others of leases, by a thread of its own.

A signal's receiver, or a log's handler, may hang with what it reports to: nobody would renew the
leases meanwhile, or tell of further losses.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from .background import BackgroundNotifier
from .log_lines import say

__all__ = ["log", "tell"]

_notifier = BackgroundNotifier("distlock-news")


def tell(call: Callable[[], object]) -> None:
    """Have *call* made soon; at once where there can be no more threads."""
    try:
        _notifier.submit(call)
    except RuntimeError:
        call()


def log(logger: logging.Logger, level: int, text: str, *args: object, **more: Any) -> None:
    """Have a line logged soon, if that can be."""
    tell(partial(say, logger, level, text, *args, **more))
