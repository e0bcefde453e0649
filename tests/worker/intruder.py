"""An intruder that may write to the lock store, and to nothing else."""

from __future__ import annotations

import base64
import json
import uuid
from typing import TYPE_CHECKING, Any

import redis

from celery_distlock.keys import slot_name
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import HEADER, LockHeader
from celery_distlock.stores.identities import task_id_of
from tests import parked_runs
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.worker.conftest import Locks


def envelope(task: str, *args: Any, **other: Any) -> bytes:
    """A message as workers park them."""
    body = [list(args), {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    made = str(uuid.uuid4())
    message = {
        "headers": {
            "lang": "py",
            "task": task,
            "id": made,
            "root_id": made,
            "parent_id": None,
            "group": None,
            "argsrepr": "",
            "kwargsrepr": "",
            "origin": "x",
            "retries": 0,
            "ignore_result": True,
        },
        "properties": {"delivery_mode": 2, "delivery_info": {}, "correlation_id": made},
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "body": base64.b64encode(json.dumps(body).encode()).decode(),
        "text": True,
        "exchange": "",
        "routing_key": "celery",
        **other,
    }
    return json.dumps(message).encode()


def parked_as(run: str, key: str, envelope: bytes) -> bytes:
    """Return *envelope* as a worker parks it, as *run* at *key*."""
    message = json.loads(envelope)
    message["headers"]["id"] = task_id_of(run)
    way = LockHeader(woken=True, run=run, parked_at=slot_name(key))
    message["headers"][HEADER] = way.to_header(message["headers"])
    return json.dumps(message).encode()


class Intruder:
    """Writes records and pushes, as the store's own scripts do."""

    def __init__(self, site: Locks) -> None:
        self.prefix = Runtime.of(site.app).settings.prefix
        self._client = redis.Redis.from_url(site.app.conf.result_backend)

    def close(self) -> None:
        self._client.close()

    def park(self, key: str, envelope: bytes, run: str = "") -> str:
        """Leave *envelope* in the queue of *key*; return the run that it is."""
        run = run or f"{uuid.uuid4()}:0:0:0"
        parked_runs.park(self._client, self.prefix, key, run, envelope)
        return run

    def parked(self, key: str) -> dict[str, bytes]:
        """What is parked at *key* or in flight: envelopes by their runs."""
        return parked_runs.envelopes(self._client, f"{self.prefix}:{{{key}}}:tasks")

    def wait_left(self, key: str, run: str, times: int = 3) -> None:
        """Wait until workers have swept up *run* so often, and each time left it to others."""
        record, seen = f"{self.prefix}:{{{key}}}:woken", set()

        def left() -> bool:
            seen.add(self._client.zscore(record, run))
            return len(seen - {None}) >= times

        wait_until(left, what=f"{run} to be left {times} times")

    def channels(self) -> list[bytes]:
        return self._client.pubsub_channels(f"{self.prefix}:channel:*")

    def push(self, channel: bytes, key: str, envelope: bytes, run: str = "") -> None:
        run = run or f"{uuid.uuid4()}:0:0:0"
        lock = f"{self.prefix}:{{{key}}}:lock"
        park_request = f"{len(lock)} {len(run)} 0 0 {lock}{run}".encode() + envelope
        assert self._client.publish(channel, park_request) == 1

    def keys(self, pattern: str) -> list[bytes]:
        return list(self._client.scan_iter(pattern))
