"""What the tasks, the workers and their observers have to agree about."""

from __future__ import annotations

from celery_distlock import Rate

LEASE = 2.0  # seconds
SWEEP = 1.0  # seconds
VISIBILITY = 5  # seconds after which the broker delivers again what a killed worker had
KEYS = [f"key-{n}" for n in range(10)]
RATE = Rate(4, per=2.0, burst=4)  # of tasks with a rate, which have keys of their own
RATED = [f"rated-{n}" for n in range(2)]
LANED = {"laned-0": 1, "laned-1": 1, "laned-2": 4}  # keys with lanes, and their capacities
SHARES = {"slow": 1.0, "even": 1.0, "fast": 3.0}  # of the lanes
MOST = 2  # units of a lane at once
