"""A worker that holds tasks until their ETA fetches no others from a quorum queue."""

from __future__ import annotations

import json

import pytest

from tests.acceptance.combinations.crews import QUORUM
from tests.waiting import wait_until

APP = "tests.apps.combined"
ENV = {"DISTLOCK_TEST_CONF": json.dumps({**QUORUM, "worker_prefetch_multiplier": 1})}
WORKERS = [{"concurrency": 1}]


@pytest.fixture(autouse=True, scope="module")
def _delete_queues(rabbit_server):
    yield
    rabbit_server.delete(QUORUM["task_default_queue"])


def test_a_worker_goes_on_while_tasks_are_sent_again_by_countdown(site, key):
    with site.held(f"{key}:taken"):
        again = [site.tasks.sent_far_ahead.delay(key, number, ["taken"]) for number in range(3)]
        wait_until(lambda: {result.state for result in again} == {"PARKED"})
        others = [site.tasks.requeued.delay(key, number, ["free"]) for number in range(3, 6)]

        assert [other.get(timeout=8) for other in others] == ["ran"] * 3

    assert [result.get(timeout=60) for result in again] == ["ran"] * 3
