"""celery-once: the sender takes the lock, the worker deletes it when the task has ended."""

from typing import Any

from celery import Celery
from celery_once import QueueOnce

NAME = "celery-once"


def declare(app: Celery, url: str) -> Any:
    settings = {"url": url, "default_timeout": 30}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}

    @app.task(base=QueueOnce, name="once")
    def once(number: int) -> None:
        """Do nothing."""

    return once
