"""celery-heimdall: the worker counts starts in a window, and retries what is too early."""

from typing import Any

from celery import Celery
from celery_heimdall import HeimdallTask, RateLimit

NAME = "celery-heimdall"


def declare(app: Celery, start: Any, limit: int) -> Any:
    rate = RateLimit((limit, 1))

    @app.task(base=HeimdallTask, name="heimdall", heimdall={"rate_limit": rate, "key": "heimdall"})
    def heimdall() -> None:
        """Note that it has begun."""
        start()

    return heimdall
