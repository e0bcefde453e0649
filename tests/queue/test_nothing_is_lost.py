"""
Nobody who waits for a key is forgotten, whatever happens and in whatever order.

``DISTLOCK_TEST_SCHEDULES`` says how many random schedules are tried on each store.
"""

from __future__ import annotations

import os
from contextlib import closing

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from celery_distlock import clock

from .machine import World
from .places import MemoryPlace, RedisPlace, StillClock

pytestmark = pytest.mark.timeout(0)  # a failure takes minutes to be made small

SCHEDULES = int(os.environ.get("DISTLOCK_TEST_SCHEDULES", "60"))

SETTINGS = settings(
    max_examples=SCHEDULES,
    stateful_step_count=40,
    deadline=None,
    derandomize=False,
    print_blob=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def try_schedules(place):
    statistics: dict[str, int] = {}
    run_state_machine_as_test(lambda: World(place, statistics), settings=SETTINGS)
    assert statistics["schedules"] >= SCHEDULES
    print(statistics)  # noqa: T201


def test_a_redis_loses_nobody(redis_url, prefix):
    with closing(RedisPlace(redis_url, prefix)) as place:
        try_schedules(place)


def test_a_process_loses_nobody(monkeypatch):
    still = StillClock()
    monkeypatch.setattr(clock, "monotonic", still)
    try_schedules(MemoryPlace(still, "test"))
