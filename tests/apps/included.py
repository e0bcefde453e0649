"""The tasks of `tests.apps.including`."""

from __future__ import annotations

from celery_distlock import LockedTask
from tests.apps.including import app


@app.task(base=LockedTask, name="included.square", lock_key="{key}")
def square(key: str, number: int) -> int:
    return number**2


@app.task(name="included.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)
