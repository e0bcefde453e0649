"""A queue that a running worker is asked to consume, which its pool's processes do not know."""

from __future__ import annotations

import pytest
from kombu import Exchange

from tests.waiting import wait_until

WORKERS = [{"concurrency": 1}]


@pytest.mark.parametrize("policy", ["requeue", "retry"])
def test_a_task_that_comes_by_it_comes_again(site, key, policy):
    exchange = Exchange(f"of-{key}", "topic")
    (worker,) = site.workers
    queue = f"queue-{key}"
    where = queue, exchange.name, "topic", "orders.#"

    def consumes() -> object:  # again, if it did not listen yet
        return site.app.control.add_consumer(*where, destination=[worker.name], reply=True)

    wait_until(consumes, what="the worker to consume it")
    wait_until(
        lambda: site.store.channels.find_channels([queue]), timeout=30.0, what="it to be consumed"
    )
    task = site.tasks.work_retry if policy == "retry" else site.tasks.work_requeue
    how = {"exchange": exchange, "routing_key": "orders.new", "declare": [exchange]}

    with site.held(key):
        result = task.apply_async((key,), **how)
        worker.wait_log(f"[{result.id}] ignored")

    assert result.get(timeout=30) == 0
