"""What the tests of a quorum look at and prepare at single nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Ownership, RenewOutcome, Status
from tests.servers import grant, owner_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.topologies import Masters, Node

PREFIX = "test"
NO_GRANT = grant("").decode()


def owners(masters: Masters, key: str = "k") -> list[str | None]:
    """Which owner has each node's vote; None for one that does not answer."""
    return [
        owner_of(node.ask("HGET", record(key, "lock"), "x") or NO_GRANT) if node.answers else None
        for node in masters.servers
    ]


def tokens(nodes: Sequence[Node], key: str = "k") -> list[int]:
    """The token of each node's vote; 0 if there is none."""
    return [int(node.ask("HGET", record(key, "lock"), "token") or 0) for node in nodes]


def record(key: str, name: str) -> str:
    return f"{PREFIX}:{{{slot_name(key)}}}:{name}"


def vote(node: Node, key: str, owner: str, lease: float = 30.0) -> None:
    """Let a node alone vote for an owner."""
    store = RedisStore(node.url, PREFIX)
    assert store.acquire(AcquireRequest(key, owner, lease)).status is Status.GRANTED
    store.close()


def take(store: Store, owner: str, key: str = "k", lease: float = 30.0, **more: object) -> int:
    reply = store.acquire(AcquireRequest(key, owner, lease, **more))  # type: ignore[arg-type]
    assert reply.status is Status.GRANTED
    return reply.token


def renewed(store: Store, owner: str, key: str = "k", lease: float = 30.0) -> RenewOutcome:
    ((outcome, _),) = store.renew([Ownership(key, owner, lease)], 5.0)
    return outcome
