"""Tasks whose keys have an order: each lane has its turn, over all workers."""

from __future__ import annotations

import pytest

from celery_distlock.errors import LockKeyError
from celery_distlock.ops.admin import Admin

SHARED = True

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's backend


def test_a_flood_of_one_lane_delays_another_by_one_start(site, key):
    task = site.tasks.work_in_lanes
    with site.held(key):
        results = [task.delay(key, "big") for _ in range(40)]
        results += [task.delay(key, lane) for lane in ("small", "other", "small")]
        assert site.unread() == 0  # none waits at the broker

    for result in results:
        result.get(timeout=60)
    starts = site.journal.read(key)
    assert sorted(starts[:3]) == ["big", "other", "small"]
    assert sorted(starts[3:5]) == ["big", "small"]
    assert starts[5:] == ["big"] * 38


def test_starts_are_in_proportion_to_shares(site, key):
    task = site.tasks.work_in_shares["store"]
    with site.held(key):
        results = [task.delay(key, lane) for lane in ("one", "three") for _ in range(12)]

    for result in results:
        result.get(timeout=60)
    starts = site.journal.read(key)
    assert abs(starts[:12].count("three") - 9) <= 1
    assert len(starts) == 24


def test_a_paused_lane_waits_while_others_have_their_turns(site, key):
    task, admin = site.tasks.work_in_lanes, Admin(site.app)
    with site.held(key):
        waiting = [task.delay(key, "acme") for _ in range(2)]
        others = [task.delay(key, "bolt") for _ in range(3)]
        admin.limit(key, 0, lane="acme")

    for result in others:
        result.get(timeout=60)
    others = task.delay(key, "bolt")
    others.get(timeout=60)
    assert site.journal.read(key) == ["bolt"] * 4
    assert [result.state for result in waiting] == ["PENDING"] * 2

    admin.limit(key, None, lane="acme")
    for result in waiting:
        result.get(timeout=60)
    assert site.journal.read(key)[4:] == ["acme"] * 2


def test_calls_without_a_lane_have_one_of_their_own(site, key):
    with site.held(key):
        results = [site.tasks.work_in_lanes.delay(key, "lane") for _ in range(12)]
        results += [
            site.tasks.work_requeue.apply_async((key, "none"), lock_via="store") for _ in range(3)
        ]

    for result in results:
        result.get(timeout=60)
    assert site.journal.read(key)[:7].count("none") == 3


def test_a_call_replaces_only_one_of_its_lane(site, key):
    task = site.tasks.work_newest_in_lanes
    with site.held(key):
        results = [task.delay(key, lane) for lane in ("a", "b", "a", "b")]
        assert site.look(key).waiting == 2

    for result in results:
        result.get(timeout=60)
    assert sorted(site.journal.read(key)) == ["a", "b"]


def test_an_order_that_a_callable_returns_needs_calls_that_wait_in_the_store(site, key):
    result = site.tasks.work_in_shares["broker"].delay(key, "one")

    with pytest.raises(LockKeyError, match="declare lock_via='store'"):
        result.get(timeout=30)
    assert site.journal.read(key) == []
