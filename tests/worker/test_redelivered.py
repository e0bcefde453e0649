"""A task that has begun before, and has not ended, is told so when it comes again."""

from __future__ import annotations

import pytest

WORKERS = [{"concurrency": 2}]


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize("how", ["reject", "die"])
def test_what_came_back_to_the_store_is_redelivered(site, key, how, parked):
    task = site.tasks.end_unless_redelivered
    if parked:
        with site.held(key):
            result = task.delay(key, how)
            site.wait_queued(key)
    else:
        result = task.delay(key, how)

    assert result.get(timeout=30) == "given up"
    assert site.journal.read(key) == [False, True]


def test_what_comes_back_through_the_broker_is_redelivered(site, key):
    with site.held(key):
        result = site.tasks.end_unless_redelivered.delay(key, "reject")
        site.wait_queued(key)
        site.forget_desk(key)

    assert result.get(timeout=30) == "given up"
    assert site.journal.read(key) == [False, True]
