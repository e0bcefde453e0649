"""What the smoke tests' workers run: on one machine, or in containers."""

from __future__ import annotations

import os

from celery import Celery

from celery_distlock import install

app = Celery("smoke", include=["tests.acceptance.smoke.suite.tasks"])
app.conf.update(
    broker_url=os.environ["CELERY_BROKER_URL"],
    result_backend=os.environ["CELERY_RESULT_BACKEND"],
    broker_connection_retry_on_startup=True,
)
install(app)
