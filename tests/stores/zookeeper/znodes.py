"""What these tests have in common: short words for the store, and processes that use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient

from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.values import Ownership, RenewOutcome, Status
from tests.integration.lock.processes import Script
from tests.waiting import wait_until

if TYPE_CHECKING:
    from celery_distlock.stores.channels import Inbox
    from celery_distlock.stores.zookeeper import ZooKeeperStore

GRANTED, BUSY, DONE = Status.GRANTED, Status.BUSY, Status.DONE
RENEWED, _, HELD, LOST, UNKNOWN = RenewOutcome

_PRELUDE = """
from celery_distlock.stores import *
from celery_distlock.stores.zookeeper import ZooKeeperStore
store = ZooKeeperStore(sys.argv[3], sys.argv[2])
"""


def script(source: str, url: str, prefix: str, *arguments: str) -> Script:
    """As a `Script` of the lock's tests, with ``store`` here; *arguments* begin at 4."""
    return Script(_PRELUDE + source, "memory://", prefix, url, *arguments)


def take(store: ZooKeeperStore, key: str, owner: str, lease: float = 30.0, **more: Any) -> int:
    reply = store.acquire(AcquireRequest(key, owner, lease, **more))
    assert reply.status is GRANTED
    return reply.token


def wait_for(store: ZooKeeperStore, key: str, owner: str, **more: Any) -> Inbox:
    """Join the queue of a taken key."""
    inbox = store.inbox(key, owner)
    assert store.acquire(AcquireRequest(key, owner, 30.0, queue=inbox, **more)).status is BUSY
    return inbox


def renew(store: ZooKeeperStore, *holds: tuple[str, str, float]) -> list[RenewOutcome]:
    return [outcome for outcome, _ in store.renew([Ownership(*hold) for hold in holds], 10.0)]


def holder(store: ZooKeeperStore, key: str) -> str:
    return store.inspect(key).owner


def nodes(store: ZooKeeperStore, key: str) -> list[str]:
    """What is in the key's folder."""
    line = store._contact.ask(lambda talk: store._queue(talk, key).line(), key)
    return [place.path for place in line]


def folder(store: ZooKeeperStore, key: str) -> str:
    return f"{store._locks}/{key}"


def end_session(store: ZooKeeperStore) -> None:
    """End the store's session behind its back, and wait until it has noticed."""
    session = store._contact.session
    hosts = store.address.removeprefix("zookeeper://").partition("/")[0]
    thief = KazooClient(hosts, client_id=session.client.client_id)
    thief.start()
    thief.stop()
    thief.close()
    wait_until(lambda: session.lost, what="the loss of the session to be noticed")
