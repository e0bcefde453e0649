"""Tasks that ask nothing of a store but the lock; and one that wants to park, if asked."""

from __future__ import annotations

import os
import time
from typing import Any

from celery_distlock import LockedTask, install, policies
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__)
app.conf.update(
    distlock_prefix=f"{os.environ['DISTLOCK_TEST_PREFIX']}-lock",
    distlock_lease=5.0,
    distlock_on_conflict=policies.Retry(delay=0.05, factor=1.2, turns=False),
    worker_prefetch_multiplier=1,
)
install(app)
journal = Journal.of_environment()


def count(self: Any, key: str) -> int:
    """Increment a counter as one should not without a lock."""
    if journal.enter(key) > 1:
        journal.write(f"{key}:overlaps", self.request.id)
    value = journal.get(key)
    time.sleep(0.002)
    journal.set(key, value + 1)
    journal.write(f"{key}:tokens", self.lock.token)
    journal.leave(key)
    return value


def locked(**options: Any) -> Any:
    return app.task(base=LockedTask, bind=True, lock_key="{key}", shared=False, **options)


count_retry = locked(name="count_retry")(count)
count_wait = locked(
    name="count_wait",
    lock_on_conflict=policies.Wait(then="retry"),
    lock_wait=60.0,
)(count)
count_late = locked(name="count_late", acks_late=True)(count)


@locked(lock_on_conflict="fail")
def fail(self: Any, key: str, gate: str) -> None:
    journal.write(key, self.request.id)
    journal.pass_gate(gate)


def pass_gate(self: Any, key: str, gate: str) -> str:
    journal.write(key, self.request.id)
    journal.pass_gate(gate)
    return "done"


gated_retry = locked(name="gated_retry", acks_late=True)(pass_gate)
gated_skip = locked(name="gated_skip", acks_late=True, lock_on_conflict="skip")(pass_gate)


@locked(lock_on_conflict="skip")
def skip(self: Any, key: str) -> str:
    return "ran"


if os.environ.get("DISTLOCK_TEST_PARK"):

    @locked(lock_on_conflict="requeue")
    def park(self: Any, key: str) -> None:
        """Want what the store cannot."""
