"""``celery inspect locks`` and ``celery control release_lock``: what a worker tells and does."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from celery.worker.control import control_command, inspect_command

from celery_distlock import clock, lock
from celery_distlock.admin import Admin, Holder
from celery_distlock.errors import DistlockError
from celery_distlock.runtime import Runtime
from celery_distlock.stores import Store
from celery_distlock.stores.base import KeyState, Status, new_owner
from celery_distlock.watchdog import watchdog

__all__ = ["locks", "release_lock"]

PATIENCE = 0.25  # seconds for an answer: the worker's event loop waits
TURN = 3.0  # seconds in which one of all the workers that are asked releases a key


@inspect_command(args=[("pattern", str)], signature="[PATTERN]")
def locks(state: Any, pattern: str = "*", **_: Any) -> Any:
    """List the locks that the worker's tasks hold, those whose key is like PATTERN."""
    store = Runtime.of(state.app).store
    noted = {key: owner for key, owner in _noted(store) if fnmatchcase(key, pattern)}
    try:
        until = clock.monotonic() + PATIENCE
        looks = [
            (key, owner, store.inspect(key, max(0.01, until - clock.monotonic())))
            for key, owner in noted.items()
        ]
    except DistlockError as error:
        return {"error": str(error)}
    return [_told(key, now) for key, owner, now in looks if now.owner == owner]


def _noted(store: Store) -> Iterator[tuple[str, str]]:
    """Yield key and holder of what this worker's processes hold in *store*, or ask for."""
    for hold in watchdog(store).holds():
        yield hold.key, hold.owner
    if lock.defaults.ledger is not None:
        for noted in lock.defaults.ledger.noted():
            if noted.store == store.identity:
                yield noted.key, noted.owner


def _told(key: str, now: KeyState) -> dict[str, Any]:
    holder = Holder.of(now.owner)
    return {
        "key": key,
        "task": holder.task,
        "task_id": holder.task_id,
        "pid": holder.pid,
        "since": now.since,
        "remaining": now.remaining,
        "token": now.token,
        "waiting": now.waiting,
    }


@control_command(args=[("key", str)], signature="KEY")
def release_lock(state: Any, key: str, **_: Any) -> dict[str, str]:
    """Take KEY from whoever holds it, wherever that is; once, however many workers are asked."""
    admin = Admin(state.app)
    try:
        seen = admin.store.inspect(key, PATIENCE)  # before what is asked with more patience
        if not seen.token:
            return {"ok": f"nobody holds {key!r}"}
        turn = admin.store.acquire(f"release_lock {key}", new_owner("release_lock"), TURN)
        if turn.status is not Status.GRANTED:
            return {"ok": "another worker sees to it, or has just done so"}
        done = admin.release(key, token=seen.token)
    except DistlockError as error:
        return {"error": str(error)}
    if not done.done:
        return {"ok": f"nobody holds {key!r}"}
    then = f"{done.after.holder} has it now" if done.after.holder else "it is free now"
    return {"ok": f"released {key!r}, which was held by {done.before.holder}; {then}"}
