"""Locked tasks that are declared with types, and the same without."""

from __future__ import annotations

from celery_distlock import LockedTask, install
from celery_distlock.typing import locked_task
from tests.apps import make_app

app = make_app(__name__)
install(app)

OPTIONS = {"lock_key": "stock:{sku}", "lock_lease": 5.0, "lock_wait": 0.0, "acks_late": True}


class Audited(LockedTask):
    """A base of a user's own."""

    abstract = True
    auditor = "none"


def reserve(sku: str, quantity: int = 1) -> list[str | int]:
    """Reserve some."""
    return [sku, quantity]


def look(self: LockedTask, sku: str) -> tuple[str, ...]:
    """Say what is locked."""
    return self.lock.keys


typed = locked_task(app, name="typed", shared=False, **OPTIONS)(reserve)
untyped = app.task(base=LockedTask, name="untyped", shared=False, **OPTIONS)(reserve)
typed_bound = locked_task(app, name="typed_bound", bind=True, base=Audited, **OPTIONS)(look)
untyped_bound = app.task(name="untyped_bound", bind=True, base=Audited, **OPTIONS)(look)


@locked_task(app, lock_key="stock:{sku}", shared=False)
def named_by_its_function(sku: str) -> None:
    """It needs no name."""


@locked_task(lock_key="stock:{sku}", bind=True)
def shared(self: LockedTask, sku: str) -> tuple[str, ...]:
    return self.lock.keys
