"""
Django app for projects with locked tasks: put it into ``INSTALLED_APPS``.

It has system checks, ``manage.py locks`` and pages in Django's admin. It has no table, and needs no
migration.
"""

from typing import Any

from celery import Celery, _state

from celery_distlock.errors import ConfigurationError


def celery_app() -> Celery:
    """
    Return the project's Celery app.

    Raises:
        ConfigurationError: The project has imported none.
    """
    state: Any = _state  # current_app would make one up
    app: Celery | None = state._tls.current_app or state.default_app
    if app is None:
        raise ConfigurationError(
            "no Celery app is known here: import it in the project's __init__.py"
        )
    return app
