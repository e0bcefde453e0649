"""The tasks that are timed; see tasks.py."""

import os
import time
from functools import cache
from typing import Any

import redis
from celery import Celery
from celery.signals import task_retry
from rivals import declare_all, declare_rates

from celery_distlock import Key, LockedTask, install

URL = os.environ["BENCH_URL"]
STARTS, RETRIES = "bench:starts", "bench:retries"  # of tasks with a rate
FINISHED, RUNS = "bench:finished", "bench:runs"  # counters of one_by_one and by_retry

app = Celery("bench", broker=URL, backend=URL)
app.conf.update(worker_prefetch_multiplier=16, task_ignore_result=True)
install(app)


@app.task
def plain(number: int) -> None:
    """Do nothing."""


@app.task(base=LockedTask, lock_key="noop:{number}")
def locked(number: int) -> None:
    """Do nothing, under a lock of its own."""


@app.task(base=LockedTask, lock_key="noop:{number}", lock_unique="finished")
def unique(number: int) -> None:
    """Do nothing, once at a time for each number."""


once_queued, absent = declare_all(app, URL)


@app.task(base=LockedTask, lock_key="one", bind=True)
def one_by_one(self: Any, seconds: float) -> None:
    """Hold the one key that all want."""
    hold(self, seconds)


@app.task(base=LockedTask, lock_key="one by store", lock_via="store", bind=True)
def one_by_store(self: Any, seconds: float) -> None:
    """Do the same, and wait in the store from the call on."""
    hold(self, seconds)


@app.task(base=LockedTask, lock_key="few:{number}", bind=True)
def on_few_keys(self: Any, number: int, seconds: float) -> None:  # noqa: ARG001  # its key
    """Do the same where there are more keys than one."""
    hold(self, seconds)


@app.task(bind=True)
def unlocked(self: Any, seconds: float) -> None:
    """Do the same without a lock."""
    hold(self, seconds)


@app.task(bind=True, max_retries=None)
def by_retry(self: Any, seconds: float, countdown: float) -> None:
    """Do the same as one_by_one as it is often done: come again later if the lock is taken."""
    lock = client().lock("by-retry", timeout=30)
    if not lock.acquire(blocking=False):
        raise self.retry(countdown=countdown)
    try:
        time.sleep(seconds)
    finally:
        lock.release()
    count(self)


def start() -> None:
    client().rpush(STARTS, time.time())


@app.task(base=LockedTask, lock_key=Key("rated", shared=True, rate="100/s"))
def rated() -> None:
    """Note that it has begun."""
    start()


with_rates, absent_rates = declare_rates(app, start, 100)


@task_retry.connect(weak=False)
def count_retry(**_: Any) -> None:
    client().incr(RETRIES)


def hold(task: Any, seconds: float) -> None:
    time.sleep(seconds)
    count(task)


def count(task: Any) -> None:
    with client().pipeline(transaction=False) as pipe:
        pipe.incr(FINISHED).incrby(RUNS, task.request.retries + 1).execute()


@cache
def client() -> redis.Redis:
    return redis.Redis.from_url(URL)
