"""What an operator does to tasks from a module that was not imported before."""

from __future__ import annotations

import sys

import pytest
from celery import chord
from celery.exceptions import ChordError, TaskRevokedError

from celery_distlock.errors import ConfigurationError, DistlockError
from celery_distlock.ops.admin import Admin
from celery_distlock.runtime.app import Runtime
from tests.worker.intruder import Intruder, envelope

APP = "tests.apps.including"
WORKERS = [{"concurrency": 1}]

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's backend


@pytest.fixture
def admin(site):
    """The site's, in a process that has just begun."""
    forget(site)
    yield Admin(site.app)
    forget(site)


def forget(site):
    runtime = Runtime.of(site.app)
    runtime._imported = False
    for name in ("included.square", "included.total"):
        runtime.plans.pop(name, None)
        site.app.tasks.pop(name, None)
    sys.modules.pop("tests.apps.included", None)


@pytest.fixture
def intruder(site):
    intruder = Intruder(site)
    yield intruder
    intruder.close()


def square(site, key):
    return site.app.signature("included.square", (key, 2))


def test_a_chord_whose_member_is_dropped_fails_and_does_not_hang(site, admin, key):
    with site.held(key):
        header = [square(site, key), square(site, f"other-{key}")]
        result = chord(header, app=site.app)(site.app.signature("included.total"))
        site.wait_queued(key, 1)

        (dropped,) = admin.drop(result.parent.results[0].id)

        assert dropped.task == "included.square"
    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=30)


@pytest.mark.parametrize("act", ["release", "wake"])
def test_what_an_operator_releases_or_wakes_is_sent(site, admin, key, act, caplog):
    lock = site.lock(key)
    lock.acquire()
    result = square(site, key).apply_async()
    site.wait_queued(key, 1)
    site.forget_channel(key)
    if act == "wake":
        site.forget(key)

    getattr(admin, act)(key)

    assert "another process may" not in caplog.text
    assert result.get(timeout=30) == 4


def test_a_task_that_the_app_does_not_have_is_dropped_by_force_only(site, admin, intruder, key):
    intruder.park(key, envelope("gone", key), f"{key}:0:0:0")

    with pytest.raises(DistlockError, match=r"was not dropped.*no locked task.*'gone'.*--force"):
        admin.drop(key)
    assert intruder.parked(key)

    assert [each.task_id for each in admin.drop(key, force=True)] == [key]
    assert not intruder.parked(key)


def test_a_module_that_cannot_be_imported_is_said(site, admin, key, monkeypatch):
    monkeypatch.setattr(site.app.loader, "default_modules", ("tests.apps.there_is_none",))

    with pytest.raises(ConfigurationError, match=r"cannot be imported.*there_is_none"):
        admin.wake(key)
