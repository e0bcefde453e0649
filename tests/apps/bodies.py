"""What bodies of tasks do."""

from __future__ import annotations

import threading
import time
from typing import Any

from celery_distlock.engine.abort import LEAVES_MUTEXES


def go_on(lock: Any) -> None:
    """Run for a minute; in a thread of Python 3.14, only a call of the lock ends that early."""
    asks = LEAVES_MUTEXES and threading.current_thread() is not threading.main_thread()
    for _ in range(60_000):
        time.sleep(0.001)
        if asks:
            lock.ensure_held()
