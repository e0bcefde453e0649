"""
Locked tasks that write down when they had which keys, for `tests.acceptance.combinations`.

All have the same parameters: the series that they are one of, their number in it, and names of
keys, of which each takes as many as it needs. ``DISTLOCK_TEST_CONF`` has more of `app.conf`.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery_distlock import Lock, LockedTask, clock, install, policies
from tests.apps import make_app
from tests.apps.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_distlock.engine.lease import Lease

PAUSE = 0.01  # seconds that each of them works

app = make_app(__name__)
app.conf.update(json.loads(os.environ.get("DISTLOCK_TEST_CONF", "{}")))
install(app)
journal = Journal.of_environment()

FIRST, SECOND, THIRD = (f"{{series}}:{{keys[{n}]}}" for n in range(3))
QUICKLY = policies.Retry(delay=0.05, max_delay=0.4)


def locked(**options: Any) -> Any:
    return app.task(base=LockedTask, bind=True, **{"lock_key": FIRST, "shared": False, **options})


@contextmanager
def noted(task: Any, series: str, number: int, lease: Lease) -> Iterator[int]:
    """Note the begin and the end of what goes on with *lease*; give the number of this attempt."""
    request = task.request
    attempt = journal.write(f"{series}:{request.id}", None)
    tokens = {hold.key: hold.token for hold in lease._holds}
    # One that keeps the key between its attempts had it all the time; one that comes before the
    # attempt before it has ended waits, and gets another token.
    turn = sorted(tokens.values()) if task.lock_hold_on_retry is True else attempt
    note = {
        "execution": f"{request.id}-{turn}",
        "task": request.id,
        "number": number,
        "tokens": tokens,
        "worker": request.hostname,
    }
    journal.write(f"{series}:begun", {**note, "at": clock.monotonic()})
    yield attempt
    lease.ensure_held()
    journal.write(f"{series}:ended", {"execution": note["execution"], "at": clock.monotonic()})


def work(self: Any, series: str, number: int, keys: list[str]) -> str:
    with noted(self, series, number, self.lock):
        time.sleep(PAUSE)
    return "ran"


requeued = locked(name="requeued")(work)
retried = locked(name="retried", lock_on_conflict=QUICKLY)(work)
sent_far_ahead = locked(
    name="sent_far_ahead", lock_on_conflict=policies.Retry(delay=20.0, max_delay=20.0, turns=False)
)(work)
waiting = locked(name="waiting", lock_on_conflict="wait", lock_wait=60.0)(work)
skipped = locked(name="skipped", lock_on_conflict=policies.Skip(result="left"))(work)
failing = locked(name="failing", lock_on_conflict="fail")(work)
of_two = locked(name="of_two", lock_key=[FIRST, SECOND])(work)
of_three = locked(name="of_three", lock_key=[FIRST, SECOND, THIRD])(work)


def retry_itself(self: Any, series: str, number: int, keys: list[str]) -> str:
    with noted(self, series, number, self.lock):
        time.sleep(PAUSE)
    if not self.request.retries:
        raise self.retry(countdown=0.05)
    return "ran"


coming_again = locked(name="coming_again")(retry_itself)
keeping_its_key = locked(name="keeping_its_key", lock_hold_on_retry=True)(retry_itself)


@locked(name="failing_once", lock_on_failure="requeue")
def failing_once(self: Any, series: str, number: int, keys: list[str]) -> str:
    with noted(self, series, number, self.lock) as attempt:
        time.sleep(PAUSE)
    if attempt == 1:
        raise ValueError(number)
    return "ran"


@locked(name="with_another_inside")
def with_another_inside(self: Any, series: str, number: int, keys: list[str]) -> str:
    with (
        noted(self, series, number, self.lock),
        Lock(f"{series}:{keys[1]}") as inner,
        noted(self, f"{series}:inside", number, inner),
    ):
        time.sleep(PAUSE)
    return "ran"
