"""The lock of this package."""

from celery_distlock import Lock

NAME = "celery-distlock"
TERMS = "lease of 30 s, with watchdog"


def open_lock(url: str, key: str) -> Lock:
    return Lock(key, store=url)
