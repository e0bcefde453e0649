"""Calls of tasks from several threads."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def in_threads(call: Callable[[], None], count: int = 4) -> None:
    """
    Do *call* in *count* threads at once.

    A result has the backend of its thread, which is in cycles, and its socket is left to the
    collector: that is to come here, and not in another test.
    """
    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
