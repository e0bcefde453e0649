"""The tasks that are timed; see run.py."""

import os
import time

from celery import Celery

from celery_distlock import LockedTask, install

URL = os.environ["BENCH_URL"]

app = Celery("bench", broker=URL, backend=URL)
app.conf.update(worker_prefetch_multiplier=16, task_ignore_result=True)
install(app)


@app.task
def plain(number: int) -> None:
    """Do nothing."""


@app.task(base=LockedTask, lock_key="noop:{number}")
def locked(number: int) -> None:
    """Do nothing, under a lock of its own."""


@app.task(base=LockedTask, lock_key="one")
def one_by_one(seconds: float) -> None:
    """Hold the one key that all want."""
    time.sleep(seconds)
