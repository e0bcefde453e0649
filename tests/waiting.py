"""Waiting for a fact, instead of sleeping and hoping."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    *,
    timeout: float = 30.0,
    what: str = "the condition",
    poll: float = 0.02,
) -> T:
    """
    Call *predicate* until it returns something true, and return that.

    Fails the test, with *what* it waited for and the last value, after *timeout* seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout:g} s for {what}; the last value was {value!r}")
        time.sleep(poll)
