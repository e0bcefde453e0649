"""RabbitMQ delivers all of a queue to one of its workers, while that is there."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

APP = "tests.apps.combined"
QUEUE = "for-one"
ENV = {
    "DISTLOCK_TEST_CONF": json.dumps(
        {
            "task_default_queue": QUEUE,
            "task_queues": {QUEUE: {"queue_arguments": {"x-single-active-consumer": True}}},
        }
    )
}


@pytest.fixture(autouse=True, scope="module")
def _delete_queues(rabbit_server):
    yield
    rabbit_server.delete(QUEUE)


@pytest.mark.parametrize("via", ["broker", "store"])
def test_what_has_waited_for_its_key_runs_at_that_one(site, key, via):
    names = [str(number) for number in range(10)]
    with ExitStack() as held:
        for name in names:
            held.enter_context(site.held(f"{key}:{name}"))
        results = [
            site.tasks.requeued.apply_async((key, int(name), [name]), lock_via=via)
            for name in names
        ]
        for name in names:
            site.wait_queued(f"{key}:{name}")

    assert [result.get(timeout=30) for result in results] == ["ran"] * 10
    assert len({note["worker"] for note in site.journal.read(f"{key}:begun")}) == 1
