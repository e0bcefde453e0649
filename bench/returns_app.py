"""The task that comes again by "retry"; see returns.py."""

import os
import time

import redis
from celery import Celery

from celery_distlock import LockedTask, install

RAN = "returns:ran"  # a list at the broker: when it was sent, began and ended, and its key

app = Celery("returns", broker=os.environ["BENCH_URL"])
app.conf.update(
    distlock_url=os.environ["BENCH_STORE"],
    task_ignore_result=True,
    worker_prefetch_multiplier=16,
    worker_enable_remote_control=False,
)
install(app)
_client = redis.Redis.from_url(os.environ["BENCH_URL"])


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="retry")
def work(key: str, seconds: float, sent_at: float) -> None:
    """Hold *key* for *seconds*."""
    began_at = time.time()
    time.sleep(seconds)
    _client.rpush(RAN, f"{key} {sent_at} {began_at} {time.time()}")
