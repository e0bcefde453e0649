"""Tasks that wait in the store while no worker runs: for a key, for a rate, for their time."""

from __future__ import annotations

from celery_distlock import Key, LockedTask, install
from tests.apps import make_app

app = make_app(__name__)
install(app)


@app.task(base=LockedTask, lock_key="{key}", lock_via="store", shared=False, name="book")
def book(key: str) -> str:
    return key


@app.task(
    base=LockedTask,
    lock_key=Key("{key}", capacity=1, rate="30/m"),
    lock_via="store",
    shared=False,
    name="paced",
)
def paced(key: str) -> str:
    return key
