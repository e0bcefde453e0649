"""When a retry is due, however that was given."""

from __future__ import annotations

import datetime
import time

import pytest

from celery_distlock.runtime.messages import seconds_left, seconds_until


@pytest.fixture(params=["UTC", "Asia/Tokyo", "America/New_York"])
def host_zone(request, monkeypatch):
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def in_ten_minutes(zone: datetime.tzinfo = datetime.UTC) -> datetime.datetime:
    return datetime.datetime.now(zone) + datetime.timedelta(minutes=10)


def test_a_time_without_a_zone_is_utc_as_celery_takes_it(host_zone):
    when = in_ten_minutes().replace(tzinfo=None)

    assert seconds_until(when) == pytest.approx(600, abs=30)
    assert seconds_until(when.isoformat()) == pytest.approx(600, abs=30)


def test_a_time_with_a_zone_is_taken_at_its_word(host_zone):
    zone = datetime.timezone(datetime.timedelta(hours=-5))

    assert seconds_until(in_ten_minutes(zone)) == pytest.approx(600, abs=30)


def test_seconds_are_seconds_and_what_is_past_is_due():
    assert seconds_until(7) == 7
    assert seconds_until(None) == 0
    assert seconds_until(in_ten_minutes() - datetime.timedelta(hours=1)) == 0


def test_a_date_is_its_midnight_as_celery_sends_it(host_zone):
    tomorrow = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1)
    midnight = datetime.datetime.combine(tomorrow, datetime.time(), datetime.UTC)
    left = (midnight - datetime.datetime.now(datetime.UTC)).total_seconds()

    assert seconds_until(tomorrow) == pytest.approx(left, abs=30)
    assert seconds_left(tomorrow) == pytest.approx(left, abs=30)
