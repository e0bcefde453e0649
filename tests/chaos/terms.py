"""What the tasks, the workers and those who look at them have to agree about."""

from __future__ import annotations

LEASE = 2.0  # seconds
SWEEP = 1.0  # seconds
VISIBILITY = 5  # seconds after which the broker delivers again what a killed worker had
KEYS = [f"key-{n}" for n in range(10)]
