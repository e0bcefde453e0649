"""
Lease signals and log lines, emitted by their own thread for the watchdog and its stores.

A receiver of a signal or a log handler may block. In the watchdog's thread it would delay renewals
and the reports of further losses.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from .background import BackgroundNotifier
from .log_lines import log_safely

_notifier = BackgroundNotifier("distlock-notifications")


def notify(call: Callable[[], object]) -> None:
    """Queue *call* for the thread; call it now if no thread can be started."""
    try:
        _notifier.submit(call)
    except RuntimeError:
        call()


def log(logger: logging.Logger, level: int, text: str, *args: object, **more: Any) -> None:
    """Queue a log line; errors of log handlers are ignored."""
    notify(partial(log_safely, logger, level, text, *args, **more))
