"""Tasks whose calls are published as their key is free, and what is before them in the queue."""

from __future__ import annotations

from typing import Any

from celery_distlock import LockedTask, install
from celery_distlock.unique import Debounce
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(
    __name__, distlock_sweep_interval=0.5, task_ignore_result=True, worker_prefetch_multiplier=1
)
install(app)
journal = Journal.of_environment()


@app.task(shared=False)
def plain(name: str, note: Any, gate: str = "") -> None:
    """The work of others, without a lock."""
    journal.write(name, note)
    if gate:
        journal.pass_gate(gate)


def declare(name: str, **options: Any) -> Any:
    """Declare a task of which each call has a key of its own, if *options* name no other."""
    options = {"lock_key": "{name}:{number}", **options}

    @app.task(name=name, base=LockedTask, shared=False, **options)
    def sent(name: str, number: int) -> None:
        journal.write(name, number)

    return sent


sent = {
    "store": declare("by_store", lock_via="store"),
    "finished": declare("finished", lock_unique="finished"),
    "late": declare("late", lock_via="store", acks_late=True),
    "debounce": declare("debounce", lock_unique=Debounce(0.2)),
    "one key": declare("of_one_key", lock_key="{name}:one", lock_via="store"),
}
