"""
What the broker's driver loses, with locks or without.

kombu takes a message from Redis (``BRPOP``) and then writes down that it has it. A worker that is
killed in between takes the message with it. So does one whose closed connection the server has
not noticed yet: at load 20, a message that was sent 11 ms after the kill. And so does one that is
delivered again, after its visibility timeout, because the first process that had it was killed.
"""

from __future__ import annotations

import datetime
import re
import time
from typing import TYPE_CHECKING

from celery_distlock import clock
from tests.chaos.terms import VISIBILITY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.chaos.judge import Fault

SOON = 5.0  # seconds in which a message is taken from the broker
UNNOTICED = 1.0  # seconds for which a busy broker may still give messages to a killed worker
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}):")
_SENT_AGAIN = " is sent again in "


def dropped(missing: Mapping[str, float], faults: Iterable[Fault], logs: Iterable[str]) -> set[str]:
    """
    Of the tasks that did not run, those that a killed worker can have lost in flight.

    These have no log line since they were sent, sent again, or delivered again, and a worker was
    killed just then.

    Args:
        missing: When each of them was sent.
        faults: What happened.
        logs: The workers', whole.
    """
    kills = [fault for fault in faults if fault.kind == "worker"]
    lines = [line for log in logs for line in log.splitlines() if _counts(line)]
    found = set()
    for task, sent_at in missing.items():
        last = max((line for line in lines if task in line), default="")
        at = _logged_at(last) if last else sent_at
        if last and _SENT_AGAIN not in last:
            if not _is_disturbed(faults, at):
                continue
            at += VISIBILITY
        if any(kill.begin <= at + SOON and at <= kill.end + UNNOTICED for kill in kills):
            found.add(task)
    return found


def _is_disturbed(faults: Iterable[Fault], at: float) -> bool:
    """Return whether a process of a worker was killed then."""
    kills = (fault for fault in faults if fault.kind in ("child", "worker"))
    return any(kill.begin <= at + UNNOTICED and at <= kill.end + UNNOTICED for kill in kills)


def _counts(line: str) -> bool:
    # Celery says "ignored" of one that was sent again, too, and after that.
    return bool(_TIME.match(line)) and not line.endswith("] ignored")


def _logged_at(line: str) -> float:
    """When that was, by our clock."""
    match = _TIME.match(line)
    assert match is not None
    wall = datetime.datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").astimezone()
    return wall.timestamp() - time.time() + clock.monotonic()
