"""Keeps the lock store's passwords out of ``celery report``, ``inspect conf`` and the like."""

from typing import Any

from celery.app import utils

from celery_distlock.stores.urls import redact

__all__ = ["mask_urls"]

_filter = utils.filter_hidden_settings  # what Celery shows of any app's settings goes through it


def mask_urls() -> None:
    """
    Let Celery show ``distlock_url`` without its passwords, with any namespace before the name.

    Celery masks its own URLs only, and settings whose names sound secret. For all apps: what they
    show must not depend on whether one was installed, or its tasks declared, before it is asked.
    """
    utils.filter_hidden_settings = _masked


def _masked(conf: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = _filter(conf)
    for name, value in shown.items():
        if isinstance(name, str) and name.lower().endswith("distlock_url") and value is not None:
            shown[name] = redact(value) if isinstance(value, str) else "********"
    return shown
