"""The remote control commands ``celery inspect locks`` and ``celery control release_lock``."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from celery.worker.control import control_command, inspect_command

from celery_distlock import clock
from celery_distlock.engine.acquisition import defaults
from celery_distlock.engine.watchdog import watchdog
from celery_distlock.errors import DistlockError
from celery_distlock.naming import printable
from celery_distlock.ops.acts import this_user
from celery_distlock.ops.admin import Admin
from celery_distlock.ops.looks import lock_info
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import AcquireRequest, Store
from celery_distlock.stores.holders import HoldInfo
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import KeyState, Status

from .event_loop import PATIENCE, BoundedCaller

__all__ = ["locks", "release_lock"]

RELEASE_LEASE = 3.0  # seconds for which one of all the workers asked is in charge of a release


_caller = BoundedCaller("distlock-control", patience=PATIENCE)


def _in_time(command: Callable[..., Any]) -> Callable[..., Any]:
    """Run *command* in a thread; answer with its result, or after `PATIENCE` with an error."""

    @functools.wraps(command)
    def answer(state: Any, **arguments: Any) -> Any:
        asked = _caller.ask(functools.partial(command, state, **arguments))
        if asked.done():
            return asked.result()
        return {
            "error": f"no answer from the lock store in {PATIENCE:g} s; the worker keeps trying"
        }

    return answer


@inspect_command(args=[("pattern", str)], signature="[PATTERN]")
@_in_time
def locks(state: Any, pattern: str = "*", **_: Any) -> Any:
    """List the locks that the worker's tasks hold, with keys that match PATTERN."""
    store = Runtime.of(state.app).store
    held = defaultdict(set)
    for key, owner in _held_here(store):
        if fnmatchcase(key, pattern):
            held[key].add(owner)
    try:
        until = clock.monotonic() + PATIENCE
        looks = {key: store.inspect(key, max(0.01, until - clock.monotonic())) for key in held}
    except DistlockError as error:
        return {"error": printable(str(error))}
    return [
        _described(key, info, hold)
        for key, info in ((key, lock_info(key, state)) for key, state in looks.items())
        for hold in info.holds
        if hold.who.owner in held[key]
    ]


def _held_here(store: Store) -> Iterator[tuple[str, str]]:
    """Yield key and owner of each hold of this worker's processes in *store*; perhaps twice."""
    for hold in watchdog(store).holds():
        yield hold.key, hold.owner
    if defaults.shared_holds is not None:
        for noted in defaults.shared_holds.recorded():
            if noted.store == store.identity:
                yield noted.key, noted.owner


def _described(key: str, info: KeyState, hold: HoldInfo) -> dict[str, Any]:
    return {
        "key": key,
        "task": hold.who.task,
        "task_id": hold.who.task_id,
        "pid": hold.who.pid,
        "since": hold.since or None,
        "remaining": hold.remaining if math.isfinite(hold.remaining) else None,  # has no end
        "token": info.token,
        "mode": info.mode,
        "units": hold.units,
        "slot": hold.slot if hold.slot >= 0 else None,
        "waiting": info.waiting,
    }


@control_command(args=[("key", str), ("reason", str)], signature="KEY [REASON]")
@_in_time
def release_lock(state: Any, key: str, reason: str = "", **_: Any) -> dict[str, str]:
    """Release KEY, in whatever worker its holder is; once, even if several workers are asked."""
    admin = Admin(state.app)
    author = f"remote control, carried out by {getattr(state, 'hostname', '') or this_user()}"
    try:
        seen = admin.store.inspect(key, PATIENCE)  # first, since it has the shortest timeout
        if not seen.token:
            return {"ok": f"no task holds {key!r}"}
        turn = Runtime.of(state.app).turns.acquire(
            AcquireRequest(key, new_owner("release_lock"), RELEASE_LEASE)
        )
        if turn.status is not Status.GRANTED:
            return {"ok": "another worker is releasing it, or has just done so"}
        done = admin.release(key, token=seen.token, author=author, reason=reason)
    except (DistlockError, ValueError) as error:
        return {"error": printable(str(error))}
    if not done.done:
        return {"ok": f"no task holds {key!r}"}
    then = f"{done.after.holder} has it now" if done.after.holder else "it is free now"
    outcome = f"which was held by {done.before.holder}; {then}"
    return {"ok": f"released {key!r}, {printable(outcome)}"}
