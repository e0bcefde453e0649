"""Sends tasks with everything that a message can carry, and reports how two arrivals differ."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_distlock.runtime.app import Runtime
from tests.waiting import wait_until

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from tests.worker.conftest import Site

SERIALIZERS = ("json", "pickle", "yaml", "msgpack")
ROUTES = {
    "default": {"queue": "celery"},
    "topic": {"queue": "stock", "routing_key": "stock.books.red"},
}
COMPRESSIONS = (None, "zlib")
EXPIRES = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
UNREAD = "unread"  # a queue that no worker consumes

# What may differ, in milliseconds: it counts from the moment of sending. The date of the expiry is
# in the headers, and may not.
EXPIRATION = "expiration"
TOLERANCE = 300_000

_KEY = re.compile("key-[0-9a-f]{8}")


class Kind(NamedTuple):
    """One way to write and to send a task."""

    serializer: str
    route: str
    compression: str | None
    full: bool  # with everything that a message can carry, or with nothing that one may omit


KINDS = [
    *itertools.starmap(Kind, itertools.product(SERIALIZERS, ROUTES, COMPRESSIONS, [True])),
    *(Kind(serializer, "default", None, full=False) for serializer in SERIALIZERS),
]


def send_straight(site: Site, task: str = "echo_requeue", *, plain: bool = False) -> list[str]:
    """Send one of every kind, each to a key that is free; return their ids."""
    keys = _new_keys(len(KINDS))
    pairs = zip(keys, KINDS, strict=True)
    return [_send(site, task, key, kind, plain=plain).id for key, kind in pairs]


def wait_for_a_key_of_ours(site: Site, way: str, task: str = "echo_requeue") -> list[str]:
    """Send one of every kind, each to a key that this process has until they wait; return ids."""
    keys = _new_keys(len(KINDS))
    with ExitStack() as held:
        for key in keys:
            held.enter_context(site.held(key))
        pairs = zip(keys, KINDS, strict=True)
        results = [_send(site, task, key, kind) for key, kind in pairs]
        for key, result in zip(keys, results, strict=True):
            if way == "retry":
                # What is sent again passes a message of low priority, until its pauses are longer.
                parked = lambda result=result: result.state == "PARKED"  # noqa: E731
                wait_until(parked, timeout=90.0, what="a conflict")
            else:
                site.wait_queued(key)
            if way == "broker":
                site.forget_channel(key)
    return [result.id for result in results]


def wait_for_a_neighbours_key(site: Site, way: str) -> list[str]:
    """Send one of every kind, to one key that a task of the same worker has; return ids."""
    (key,) = _new_keys(1)
    site.tasks.block.delay(key, key)
    site.journal.wait(key)
    results = [_send(site, "echo_requeue", key, kind, plain=True) for kind in KINDS]
    site.wait_queued(key, len(KINDS))
    if way == "broker":
        site.forget_channel(key)
    site.journal.open(key)
    return [result.id for result in results]


def send_via_store(site: Site, way: str) -> list[str]:
    """Send one of every kind through the store, to a key that is taken; return their ids."""
    keys = _new_keys(len(KINDS))
    with ExitStack() as held:
        for key in keys:
            held.enter_context(site.held(key))
        pairs = zip(keys, KINDS, strict=True)
        results = [_send(site, "echo_requeue", key, kind, lock_via="store") for key, kind in pairs]
        for key in keys:
            assert site.look(key).waiting == 1
            if way == "broker":
                site.forget_channel(key)
        if way == "channel":
            _wait_for_a_free_slot(site)
    return [result.id for result in results]


def _wait_for_a_free_slot(site: Site) -> None:
    """Wait until a call would be pushed: none is to a worker that may be full."""
    runtime = Runtime.of(site.app)
    queues = [each["queue"] for each in ROUTES.values()]

    def found() -> bool:
        peers = [runtime.store.channels.find_channels([queue]) for queue in queues]
        return all(any(map(runtime.relay._has_room, each)) for each in peers)

    wait_until(found, what="a free slot")


def send_free_via_store(site: Site) -> list[str]:
    """The same, each to a key that is free."""
    pairs = zip(_new_keys(len(KINDS)), KINDS, strict=True)
    return [_send(site, "echo_requeue", key, kind, lock_via="store").id for key, kind in pairs]


PARK = {"pool": wait_for_a_key_of_ours, "main process": wait_for_a_neighbours_key}


def table(site: Site, straight: list[str], waited: list[str]) -> dict[Kind, dict[str, Any]]:
    """The differences of every kind that has any."""
    pairs = zip(KINDS, straight, waited, strict=True)
    found = {kind: differences(site, *pair) for kind, *pair in pairs}
    return {kind: different for kind, different in found.items() if different}


def came_by(site: Site, parked: list[str]) -> tuple[str, str]:
    """
    Which process parked these tasks, and what way they came then.

    What is slow to reach the channel comes by the broker, too; and what a slow main process
    cannot park, the pool does.
    """
    pushed = [any(site.journal.read(f"{each}:pushed")) for each in parked]
    by_pool = [not all(site.journal.read(f"{each}:woken")) for each in parked]
    return ("pool" if all(by_pool) else "main process", "channel" if any(pushed) else "broker")


def _send(
    site: Site, task: str, key: str, kind: Kind, *, plain: bool = False, **how: Any
) -> AsyncResult:
    """
    Send *task*; a *plain* one has neither stamps nor an expiry.

    Those two go to the pool whatever they find: see `celery_distlock.worker.parking`.
    """
    args: list[Any] = [1, 2.5, None, "ü\n", {"a": [True, {"b": None}]}]
    if kind.serializer == "pickle":
        args += [(1, 2), b"\x00\xff", datetime.date(2024, 2, 29), {3, 4}]
    options: dict[str, Any] = {**ROUTES[kind.route], **how}
    if kind.full:
        options |= _full_options(site, kind)
    if kind.full and not plain:
        options |= {
            "expires": EXPIRES,
            "stamped_headers": ["tenant"],
            "tenant": "shop-7",
        }
    return site.app.tasks[task].apply_async(
        (key, *args), {"word": "né", "empty": ""}, serializer=kind.serializer, **options
    )


def _full_options(site: Site, kind: Kind) -> dict[str, Any]:
    return {
        "headers": {"x-tenant": "shop-7", "x-trace": {"ids": [1, 2]}, "_trace": "of-7"},
        "priority": 5,
        "delivery_mode": 1,
        "retries": 2,
        "time_limit": 300,
        "soft_time_limit": 200,
        "shadow": "shop.echo",
        "reply_to": "somebody",
        "message_id": "message-1",
        "group_id": "group-1",
        "group_index": 3,
        "chord": _note(site, "chord"),
        "chain": [_note(site, "second"), _note(site, "first")],
        "link": [_note(site, "link")],
        "link_error": [_note(site, "error")],
        "compression": kind.compression,
    }


def _note(site: Site, name: str) -> dict[str, Any]:
    # Nothing but JSON's types, which every serializer can write; and not to be run.
    signature = site.tasks.note.si(None, "canvas").set(task_id=f"{name}-1", queue=UNREAD)
    plain: dict[str, Any] = json.loads(json.dumps(signature))
    return plain


def differences(site: Site, expected: str, waited: str) -> dict[str, Any]:
    """
    What is not the same in the task that *waited*: in its message, and in what its body saw.

    Only ids, keys (of `_new_keys`) and delivery tags may differ. Waits until both have run.
    """
    different: dict[str, Any] = {}
    for part in ("received", "ran"):
        pair = [_facts(site, task_id, part) for task_id in (expected, waited)]
        for name in pair[0].keys() | pair[1].keys():
            values = [facts.get(name, "nothing") for facts in pair]
            if values[0] != values[1] and not _near(name, values):
                different[f"{part}: {name}"] = values
    return different


def _facts(site: Site, task_id: str, part: str) -> dict[str, Any]:
    site.journal.wait(f"{task_id}:ran", timeout=60)
    runs = site.journal.read(f"{task_id}:ran")
    assert len(runs) == 1, f"{task_id} ran {len(runs)} times"
    notes = runs if part == "ran" else site.journal.read(f"{task_id}:received")
    masked = _KEY.sub("<key>", json.dumps(notes[-1])).replace(task_id, "<id>")
    facts: dict[str, Any] = json.loads(masked)
    return {
        f"{group} {name}": value
        for group, values in facts.items()
        for name, value in values.items()
    }


def _near(name: str, values: list[Any]) -> bool:
    if not name.endswith(EXPIRATION):
        return False
    return all(values) and abs(int(values[0]) - int(values[1])) < TOLERANCE


def _new_keys(count: int) -> list[str]:
    return [f"key-{uuid.uuid4().hex[:8]}" for _ in range(count)]
