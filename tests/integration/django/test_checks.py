"""The system checks: of the settings, and of the store before a deployment."""

from __future__ import annotations

import pytest

AWAY = {"CELERY_DISTLOCK_URL": "redis://127.0.0.1:1/0"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"CELERY_DISTLOCK_LEESE": 20}, "CELERY_DISTLOCK_LEASE"),
        ({"CELERY_LOCK_LEASE": 20}, "CELERY_DISTLOCK_LEASE"),
        ({"CELERY_DISTLOCK_LEASE": -1}, "distlock_lease"),
    ],
)
def test_a_wrong_setting_is_named(project, settings, said):
    done = project.manage("check", settings=settings, status=1)

    assert "(celery_distlock.E001)" in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_store_is_asked_before_a_deployment_only(project):
    assert "no issues" in project.manage("check", settings=AWAY).stdout

    done = project.manage("check", "--deploy", settings=AWAY, status=1)

    assert "(celery_distlock.E002)" in done.stderr
    assert "127.0.0.1:1" in done.stderr


def test_a_store_that_answers_is_no_error(project):
    done = project.manage("check", "--deploy", "--tag", "celery")

    assert "celery_distlock.E" not in done.stderr


def test_a_wrong_setting_is_reported_once_before_a_deployment(project):
    wrong = {"CELERY_DISTLOCK_LEESE": 20, **AWAY}
    done = project.manage("check", "--deploy", "--tag", "celery", settings=wrong, status=1)

    assert done.stderr.count("celery_distlock.E") == 1
