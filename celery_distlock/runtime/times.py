"""Times, as Celery's messages have them."""

import datetime
from typing import Any

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware

__all__ = ["seconds_left", "seconds_until", "when"]


def when(delay: float) -> str:
    """Return the time in *delay* seconds as Celery writes an ETA."""
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=delay)
    return at.isoformat()


def seconds_until(at: Any) -> float:
    """
    Return the seconds until a time, which may be a text, or so many seconds; 0 if it is over.

    Celery takes a time without a zone as UTC.
    """
    if isinstance(at, str | datetime.date):
        now = datetime.datetime.now(datetime.UTC)
        at = (maybe_make_aware(maybe_iso8601(_with_time(at)) or now) - now).total_seconds()
    return max(0.0, float(at or 0))


def seconds_left(app: Celery, at: Any) -> float:
    """
    Return the seconds until a time that was given to `apply_async`; negative if it is over.

    Celery takes a time without a zone as the app's.
    """
    aware: Any = maybe_make_aware(maybe_iso8601(_with_time(at)), app.timezone)  # type: ignore[arg-type]
    left: datetime.timedelta = aware - datetime.datetime.now(datetime.UTC)
    return left.total_seconds()


def _with_time(at: Any) -> Any:
    """Return a date as Celery sends it, which is taken for its midnight, and all else as it is."""
    is_date = isinstance(at, datetime.date) and not isinstance(at, datetime.datetime)
    return at.isoformat() if is_date else at
