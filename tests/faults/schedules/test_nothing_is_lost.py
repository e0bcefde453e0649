"""
No task that waits for a key is forgotten, whatever happens and in whatever order.

``DISTLOCK_TEST_SCHEDULES`` says how many random schedules are tried; without it they are the same
few each time.
"""

from __future__ import annotations

import collections
import logging
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from celery_distlock import clock
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.redis import request_runner
from tests.schedules import schedules

from .machine import World
from .store import Time, UnluckyStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.values import Release

pytestmark = pytest.mark.timeout(0)  # a failure takes minutes to be made small

SETTINGS = schedules(300, steps=20)


class ForgetfulStore(UnluckyStore):
    """Forgets to say what a release has woken."""

    def release(self, request: ReleaseRequest) -> Release:
        return super().release(request)._replace(wake=None)


@pytest.fixture
def try_schedules(
    redis_url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Callable[[type[UnluckyStore], settings], dict[str, int]]:
    caplog.set_level(logging.CRITICAL, logger="celery_distlock")
    monkeypatch.setattr(request_runner, "PAUSES", (0.0, 0.0, 0.0))
    time = Time()
    monkeypatch.setattr(clock, "monotonic", time)

    def run(kind: type[UnluckyStore], how: settings) -> dict[str, int]:
        tally: dict[str, int] = collections.Counter()
        with closing(kind(redis_url, prefix, time)) as store:
            run_state_machine_as_test(lambda: World(store, tally), settings=how)
        return tally

    return run


def test_every_task_runs_to_its_end(try_schedules):
    tally = try_schedules(UnluckyStore, SETTINGS)

    print(dict(tally))  # noqa: T201
    assert tally["schedules"] >= SETTINGS.max_examples


def test_a_forgotten_wake_is_noticed(try_schedules):
    how = settings(SETTINGS, phases=[Phase.generate], max_examples=5000)
    with pytest.raises(AssertionError, match=r"a sweep is needed|sweeps were not enough"):
        try_schedules(ForgetfulStore, how)
