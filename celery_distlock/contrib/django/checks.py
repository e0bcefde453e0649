"""System checks: the settings, and with ``manage.py check --deploy`` the lock store."""

from typing import Any

from django.core import checks

from celery_distlock.errors import ConfigurationError, DistlockError
from celery_distlock.runtime.app import Runtime

from . import celery_app


@checks.register("celery")
def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Report a ``CELERY_DISTLOCK_*`` setting that is unknown, misspelt or has a wrong value."""
    try:
        Runtime.of(celery_app()).settings  # noqa: B018  # the first use reads and checks them
    except ConfigurationError as error:
        return [checks.Error(str(error), id="celery_distlock.E001")]
    return []


@checks.register("celery", deploy=True)
def check_store(**_: Any) -> list[checks.CheckMessage]:
    """Report a lock store that does not answer or refuses locks, and doubts about it."""
    if check_settings():
        return []
    try:
        doubts = Runtime.of(celery_app()).store.check()
    except DistlockError as error:
        remedy = getattr(error, "remedy", "") or None
        return [checks.Error(str(error), remedy, id="celery_distlock.E002")]
    return [
        checks.Warning(
            f"{doubt.subject}: {doubt.message}", doubt.remedy or None, id="celery_distlock.W001"
        )
        for doubt in doubts
    ]
