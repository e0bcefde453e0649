"""Locked tasks and plain ones; other software may write to their lock store, too."""

from __future__ import annotations

import json
import os
from typing import Any

from celery_distlock import LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(
    __name__,
    distlock_sweep_interval=0.5,
    task_routes={"routed": {"queue": "by-route"}},
    **json.loads(os.environ.get("DISTLOCK_TEST_TRUST", "{}")),
)
if "DISTLOCK_TEST_CERTIFICATES" in os.environ:  # messages are signed, as one of those there
    folder, me = os.environ["DISTLOCK_TEST_CERTIFICATES"], os.environ["DISTLOCK_TEST_ME"]
    app.conf.update(
        security_key=f"{folder}/{me}.key",
        security_certificate=f"{folder}/{me}.pem",
        security_cert_store=f"{folder}/trusted/*.pem",
        security_digest="sha256",
        task_serializer="auth",
        event_serializer="auth",
        accept_content=["auth"],
        task_ignore_result=True,
    )
    app.setup_security()
install(app)
journal = Journal.of_environment()


def _work(self: Any, key: str, note: Any = None) -> Any:
    journal.write(key, note)
    return note


work = app.task(base=LockedTask, bind=True, name="work", lock_key="{key}", shared=False)(_work)
routed = app.task(base=LockedTask, bind=True, name="routed", lock_key="{key}", shared=False)(_work)


@app.task(base=LockedTask, bind=True, lock_key="{key}", lock_on_failure="requeue", shared=False)
def fail_once(self: Any, key: str) -> None:
    if journal.write(key, None) == 1:
        raise ConnectionError("as a server that is busy")


@app.task(base=LockedTask, bind=True, lock_key="{key}", shared=False)
def block(self: Any, key: str) -> None:
    journal.write(key, None)
    journal.pass_gate(key)


if os.environ.get("DISTLOCK_TEST_RELEASE") != "old":
    fresh = app.task(base=LockedTask, bind=True, name="fresh", lock_key="{key}", shared=False)(
        _work
    )


@app.task(name="wipe", shared=False)
def wipe(key: str, note: Any = None) -> None:
    """A task that is not locked."""
    journal.write(key, note)
