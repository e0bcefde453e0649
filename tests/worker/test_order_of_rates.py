"""Tasks of a key with a rate start in the order in which their worker received them."""

from __future__ import annotations

import pytest

APP = "tests.apps.shares"
WORKERS = [{"concurrency": 4}]


def in_wrong_order(site, key, task, *, keys, calls):
    """Send so many calls for each of so many idle keys; return the orders that are not as sent."""
    names = [f"{key}:{number}" for number in range(keys)]
    sent = {name: [] for name in names}
    for _ in range(calls):
        for name in names:
            sent[name].append(task.delay(name).id)
    begun = {name: site.journal.wait(f"order:{name}", calls, timeout=60.0) for name in names}
    orders = [[sent[name].index(each) for each in begun[name]] for name in names]
    return [order for order in orders if order != sorted(order)]


@pytest.mark.parametrize("name", ["in_turn", "few_in_turn"])
def test_calls_at_once_for_an_idle_key_start_in_order(site, key, name):
    task = getattr(site.tasks, name)

    for number in range(8):
        assert in_wrong_order(site, f"{key}:{number}", task, keys=1, calls=3) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["in_turn", "few_in_turn"])
def test_calls_for_many_keys_start_in_order(site, key, name):
    task = getattr(site.tasks, name)

    for number in range(5):
        assert in_wrong_order(site, f"{key}:{number}", task, keys=20, calls=30) == []
