"""How many random schedules a state machine tries: its own few, or what the environment says."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def schedules(few: int, *, steps: int) -> settings:
    """
    Settings for *few* schedules of up to *steps* steps, the same ones each time.

    ``DISTLOCK_TEST_SCHEDULES`` asks for another number of them, and then for new ones.
    """
    asked = os.environ.get("DISTLOCK_TEST_SCHEDULES")
    return settings(
        max_examples=int(asked or few),
        stateful_step_count=steps,
        derandomize=asked is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
