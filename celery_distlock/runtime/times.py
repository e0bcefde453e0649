"""Times, as Celery's messages have them."""

import datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

__all__ = ["seconds_left", "seconds_until", "when"]


def when(delay: float) -> str:
    """Return the time in *delay* seconds as Celery writes an ETA."""
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=delay)
    return at.isoformat()


def seconds_until(at: Any) -> float:
    """Return the seconds until a time, as `seconds_left`, or so many seconds; 0 if it is over."""
    if at and isinstance(at, str | datetime.date):
        at = seconds_left(at)
    return max(0.0, float(at or 0))


def seconds_left(at: Any) -> float:
    """
    Return the seconds until a time, or a date or text that is one; negative if it is over.

    Celery takes a time without a zone as UTC, whatever the app's is.
    """
    aware: Any = maybe_make_aware(maybe_iso8601(_with_time(at)))  # type: ignore[arg-type]
    left: datetime.timedelta = aware - datetime.datetime.now(datetime.UTC)
    return left.total_seconds()


def _with_time(at: Any) -> Any:
    """Return a date as Celery sends it, which is taken for its midnight, and all else as it is."""
    is_date = isinstance(at, datetime.date) and not isinstance(at, datetime.datetime)
    return at.isoformat() if is_date else at
