"""Plain tasks, without locks."""

from __future__ import annotations

import os
import time

from tests.apps import make_app

app = make_app(__name__)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def pid() -> int:
    return os.getpid()


@app.task
def sleep(seconds: float) -> None:
    time.sleep(seconds)
