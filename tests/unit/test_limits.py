"""What an operator may set as a limit."""

from __future__ import annotations

import uuid

import pytest
from celery import Celery

from celery_distlock.key import MAX_CAPACITY
from celery_distlock.ops.admin import Admin


@pytest.fixture
def admin():
    with Celery("limits", broker="memory://", set_as_current=False) as app:
        app.conf.update(distlock_url="memory://", distlock_prefix=f"limits-{uuid.uuid4().hex}")
        yield Admin(app)


@pytest.mark.parametrize("wrong", [-1, MAX_CAPACITY + 1, 1.5, True, "2", float("nan")])
def test_a_wrong_capacity_is_refused_by_key_and_value(admin, wrong):
    with pytest.raises(ValueError, match=rf"limit of 'tenant:7' must be a whole .*{wrong!r}$"):
        admin.limit("tenant:7", wrong)
    assert admin.show("tenant:7").limit is None


@pytest.mark.parametrize("wrong", [-1, float("inf"), float("nan"), True, "60", None])
def test_a_limit_without_a_finite_end_is_refused_by_key_and_value(admin, wrong):
    with pytest.raises(ValueError, match=rf"limit of 'tenant:7' must end after .*{wrong!r}$"):
        admin.limit("tenant:7", 2, seconds=wrong)
    assert admin.show("tenant:7").limit is None


@pytest.mark.parametrize("units", [0, 1, MAX_CAPACITY])
def test_every_number_of_units_is_a_limit(admin, units):
    assert admin.limit("tenant:7", units).after.limit.capacity == units
    assert admin.limit("tenant:7", None).after.limit is None


def test_a_limit_ends_when_it_should(admin):
    limit = admin.limit("tenant:7", 2, seconds=60.0).after.limit

    assert 50.0 < limit.until - limit.since < 70.0
