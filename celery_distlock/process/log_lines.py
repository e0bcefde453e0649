"""Log lines of threads that have to live on."""

import logging
from contextlib import suppress
from typing import Any

__all__ = ["say"]


def say(logger: logging.Logger, level: int, text: str, *args: object, **more: Any) -> None:
    """Log it if that can be: a handler that raises, its server away, is not to end the thread."""
    with suppress(Exception):
        logger.log(level, text, *args, stacklevel=2, **more)
