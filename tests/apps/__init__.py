"""
Celery apps for tests, one a module: ``app = make_app(__name__)`` and its tasks.

A test imports them with the `load_app` fixture, and a worker process by ``-A``; both find broker,
result backend and key prefix in the environment. There ``DISTLOCK_TEST_AMQP`` names another broker
than the Redis that the rest lives in, and ``DISTLOCK_TEST_STORE`` another lock store.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery


def make_app(name: str, **settings: Any) -> Celery:
    """Make an app with *settings*; its keys at broker, backend and store have the test's prefix."""
    prefix = os.environ["DISTLOCK_TEST_PREFIX"]
    amqp = os.environ.get("DISTLOCK_TEST_AMQP")
    app = Celery(name)
    app.conf.update(
        broker_url=amqp or os.environ["DISTLOCK_TEST_BROKER"],
        result_backend=os.environ["DISTLOCK_TEST_BACKEND"],
        broker_transport_options={
            **({} if amqp else {"global_keyprefix": f"{prefix}:broker:"}),
            **json.loads(os.environ.get("DISTLOCK_TEST_TRANSPORT", "{}")),
        },
        result_backend_transport_options={"global_keyprefix": f"{prefix}:result:"},
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=True,
        distlock_url=os.environ.get("DISTLOCK_TEST_STORE"),
        distlock_prefix=f"{prefix}:lock",
    )
    app.conf.update(settings)
    return app
