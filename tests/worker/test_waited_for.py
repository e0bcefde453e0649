"""What tasks have waited for, a holder or only time, as their grants are counted."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_distlock import Rate
from celery_distlock.stores.values import Limit
from celery_distlock.telemetry.counters import samples
from tests.waiting import wait_until

APP = "tests.apps.shares"
WORKERS = [{"concurrency": 4}]
NOW = Limit(None, rates=(Rate(1000, per=1.0),))  # an operator's, which admits what waits


@pytest.fixture
def waits(site):
    """What the grants of a task have waited for since the test began, once they are counted."""
    before = _counted(site)

    def since(task, grants):
        def found():
            new = _counted(site)
            new.subtract(before)
            mine = {what: many for (name, what), many in new.items() if name == task and many}
            return mine if sum(mine.values()) >= grants else None

        return wait_until(found, what=f"{grants} grants of {task} to be counted")

    return since


def _counted(site):
    counted = Counter()
    for sample in samples(site.store):
        if sample.name == "wait" and sample.bucket != "sum":
            counted[sample.task, sample.waited_for] += int(sample.value)
    return counted


@pytest.mark.parametrize("task", ["write", "write_waiting", "write_again"])
def test_a_task_behind_a_holder_waits_for_it(site, key, waits, task):
    with site.held(key):
        result = getattr(site.tasks, task).delay(key)
        wait_until(
            lambda: site.look(key).waiting or result.state == "PARKED", what="it to be refused"
        )

    result.get(timeout=60)

    assert waits(task, 1) == {"holder": 1}


def test_a_task_at_a_free_key_waits_for_nothing(site, key, waits):
    site.tasks.write.delay(key).get(timeout=30)

    assert waits("write", 1) == {"nothing": 1}


def test_a_task_at_a_key_with_a_rate_waits_for_time(site, key, waits):
    site.tasks.seldom.delay(key).get(timeout=30)
    results = [site.tasks.seldom.delay(key) for _ in range(3)]
    site.wait_queued(key, 3)

    site.store.dispatch(site.store.units.set_limit(key, NOW).wake)
    for result in results:
        result.get(timeout=60)

    assert waits("seldom", 4)["time"] >= 1


@pytest.mark.parametrize("task", ["in_turn", "waits_in_turn", "comes_again_in_turn"])
def test_no_task_that_shares_a_key_waits_for_a_holder(site, key, waits, task):
    results = [getattr(site.tasks, task).delay(key) for _ in range(6)]
    for result in results:
        result.get(timeout=60)

    found = waits(task, 6)

    assert found["time"] >= 1
    assert set(found) <= {"time", "nothing"}
