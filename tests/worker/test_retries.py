"""How soon tasks with "retry" come again: when their key is free, and when the store is back."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockLostError
from celery_distlock.stores import open_store
from tests.waiting import wait_until

APP = "tests.apps.configured"
RETRY = {"distlock_on_conflict": "retry"}
SENT_AGAIN = r"look\[{id}\] is sent again in ([\d.]+) s{why}"


@pytest.fixture
def tasks(load_app):
    loaded = load_app(APP)
    yield loaded
    loaded.journal.close()


@pytest.fixture
def cut_off(worker, private_server):
    """A lock store that has been stopped, and a worker that began before."""
    server = private_server()
    conf = {"distlock_url": server.url, **RETRY}
    process = worker(
        APP, pool="threads", concurrency=2, env={"DISTLOCK_TEST_CONF": json.dumps(conf)}
    )
    server.stop()
    return server, process


def delays(log: str, result, why: str) -> list[float]:
    return [float(each) for each in re.findall(SENT_AGAIN.format(id=result.id, why=why), log)]


def test_an_outage_does_not_make_conflicts_wait_longer_nor_they_the_outage(
    tasks, cut_off, prefix, key
):
    server, process = cut_off
    result = tasks.look.delay(key)
    wait_until(
        lambda: len(delays(process.log(), result, ", the lock store is unavailable")) >= 4,
        what="four attempts",
        timeout=60.0,
    )
    server.start()
    back_at = time.monotonic()
    lock = Lock(key, store=open_store(server.url, f"{prefix}:lock"))
    assert lock.acquire(timeout=30)
    try:
        process.wait_log(f"look[{result.id}] is sent again in ")
        wait_until(lambda: delays(process.log(), result, ": "), what="a conflict", timeout=30.0)
        assert time.monotonic() - back_at < 20.0  # eight, as it has been asked for, and its noise
        # The holder is late: it has had the key for that long.
        first = delays(process.log(), result, ": ")[0]
        assert first < 0.8 * (time.monotonic() - back_at) + 1.0

        server.stop()
        seen = len(delays(process.log(), result, ", the lock store is unavailable"))
        wait_until(
            lambda: len(delays(process.log(), result, ", the lock store is unavailable")) > seen,
            what="another outage",
            timeout=60.0,
        )
        assert delays(process.log(), result, ", the lock store is unavailable")[seen] <= 1.0
        server.start()
    finally:
        with suppress(LockLostError):  # the server remembers nothing
            lock.release()

    assert result.get(timeout=60) > 0


def test_no_delay_of_an_outage_is_longer_than_eight_seconds(tasks, cut_off, key):
    server, process = cut_off
    result = tasks.look.delay(key)
    wait_until(
        lambda: len(delays(process.log(), result, ", the lock")) >= 6, what="six", timeout=90.0
    )
    server.start()

    assert result.get(timeout=30) > 0
    assert max(delays(process.log(), result, ", the lock")) <= 8.0


def test_many_on_one_key_come_one_after_the_other(tasks, worker, key):
    """Thirty of a tenth of a second: 3 s, if none met another and the key was never free."""
    conf = {**RETRY, "worker_prefetch_multiplier": 16}
    process = worker(
        APP, pool="threads", concurrency=4, env={"DISTLOCK_TEST_CONF": json.dumps(conf)}
    )
    tasks.nap.delay(f"{key}-warm", 0.1).get(timeout=30)
    begin = time.monotonic()

    results = [tasks.nap.delay(key, 0.1) for _ in range(30)]
    for result in results:
        result.get(timeout=60)

    took = time.monotonic() - begin
    again = process.log().count(" is sent again in ")
    assert took < 60.0
    assert again < 30 * 5
