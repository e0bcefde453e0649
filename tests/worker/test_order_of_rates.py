"""Tasks of a key with a rate start in the order in which their worker received them."""

from __future__ import annotations

import pytest

APP = "tests.apps.shares"
WORKERS = [{"concurrency": 4}]


def wrong_orders(site, sent):
    """Wait until all calls have begun; return those orders that are not as *sent*, by key."""
    orders = []
    for name, ids in sent.items():
        begun = site.journal.wait(f"order:{name}", len(ids), timeout=60.0)
        orders.append([ids.index(each) for each in begun])
    return [order for order in orders if order != sorted(order)]


@pytest.mark.parametrize("name", ["in_turn", "few_in_turn"])
def test_calls_at_once_for_an_idle_key_start_in_order(site, key, name):
    task = getattr(site.tasks, name)

    names = [f"{key}:{number}" for number in range(8)]
    sent = {name: [task.delay(name).id for _ in range(3)] for name in names}

    assert wrong_orders(site, sent) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["in_turn", "few_in_turn"])
def test_calls_for_many_keys_start_in_order(site, key, name):
    task = getattr(site.tasks, name)

    for number in range(5):
        sent = {f"{key}:{number}:{each}": [] for each in range(20)}
        for _ in range(30):
            for each, ids in sent.items():
                ids.append(task.delay(each).id)
        assert wrong_orders(site, sent) == []
