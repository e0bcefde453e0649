"""Logging for background threads that must survive a failing log handler."""

import logging
from contextlib import suppress
from typing import Any


def log_safely(logger: logging.Logger, level: int, text: str, *args: object, **more: Any) -> None:
    """Log a line, and ignore exceptions of the handlers, for example if a log server is down."""
    with suppress(Exception):
        logger.log(level, text, *args, stacklevel=2, **more)
