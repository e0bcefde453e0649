"""celery-singleton: the sender takes the lock, the worker deletes it when the task has ended."""

from typing import Any

from celery import Celery
from celery_singleton import Singleton

NAME = "celery-singleton"


def declare(app: Celery, url: str) -> Any:
    app.conf.update(singleton_backend_url=url, singleton_lock_expiry=30)

    @app.task(base=Singleton, name="singleton")
    def singleton(number: int) -> None:
        """Do nothing."""

    return singleton
