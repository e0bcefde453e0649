"""A key of a megabyte: it works, and is nowhere shown in full."""

from __future__ import annotations

import pytest

from celery_distlock.naming import shown
from tests.waiting import wait_until

WORKERS = [{"concurrency": 2, "args": ["--task-events"]}]
SHARED = True
PARKED = 2  # by the pool, then on arrival


@pytest.fixture
def long_key(key: str) -> str:
    return f"{key}:" + "x" * 1_000_000


def test_the_report_of_a_parked_task_is_short(site, listener, long_key):
    with site.held(long_key):
        results = [site.tasks.work_requeue.delay(long_key) for _ in range(PARKED)]
        site.wait_queued(long_key, PARKED)
        infos = [result.info for result in results]
    for result in results:
        result.get(timeout=60)

    assert [info["key"] for info in infos] == [shown(long_key)] * PARKED
    wait_until(lambda: "released" in listener.kinds(shown(long_key)), what="events", timeout=60)
    assert listener.of(long_key) == []
    assert max(map(len, site.log().splitlines())) < 3000


def test_it_is_free_when_its_process_is_killed(site, key, long_key):
    site.tasks.die.delay(long_key, "exit")

    wait_until(lambda: f"freed '{key}:xxx" in site.log(), what="the key to be freed", timeout=30)
    assert not site.look(long_key).token
