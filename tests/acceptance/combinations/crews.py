"""The workers that a combination is tried on, and where their broker and their locks are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Crew(NamedTuple):
    """
    Workers of one kind.

    Attributes:
        workers: The arguments of `tests.workers.WorkerProcess`, for each of them.
        settings: What is in `app.conf` besides the defaults.
        transport: And in its `broker_transport_options`.
        store: The locks' place, if it is not the broker: a URL, or a fixture that has one.
        broker: A fixture that has its URL and more such options, if it is not Redis.
    """

    workers: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = {}
    transport: Mapping[str, Any] = {}
    store: str = ""
    broker: str = ""


def one(slots: int = 4, *args: str, pool: str = "prefork") -> list[dict[str, Any]]:
    return [{"pool": pool, "concurrency": slots, "args": args}]


LATE = {"task_acks_late": True, "task_reject_on_worker_lost": True}
CONFIRMED = {"confirm_publish": True}
# Now and then a worker of Celery's hangs for ever when it is stopped cold while it writes to
# its pool. What it has not acknowledged comes again after this. kombu looks every 100 s, by itself.
SOON_AGAIN = {
    "visibility_timeout": 10,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
QUORUM = {
    "task_default_queue": "of-a-quorum",
    "task_default_queue_type": "quorum",
    "task_default_exchange_type": "topic",
    "worker_detect_quorum_queues": True,
}

CREWS = {
    "prefork": Crew(one()),
    "one slot": Crew(one(1)),
    "two workers": Crew(one(2) * 2),
    "sixteen slots": Crew(one(16)),
    "threads": Crew(one(pool="threads")),
    "solo": Crew(one(1, pool="solo")),
    "gevent": Crew(one(40, pool="gevent")),
    "short-lived children": Crew(one(2, "--max-tasks-per-child", "5")),
    "autoscale": Crew(one(4, "--autoscale", "4,1")),
    "prefetch of one, late": Crew(one(), {**LATE, "worker_prefetch_multiplier": 1}),
    "classic queues": Crew(one(), transport=CONFIRMED, broker="rabbitmq"),
    "quorum queues": Crew(one(), {**LATE, **QUORUM}, transport=CONFIRMED, broker="rabbitmq"),
    "files": Crew(one(), {"worker_enable_remote_control": False}, broker="files"),
    "SQS": Crew(one(), {**LATE, "worker_enable_remote_control": False}, broker="sqs"),
    "SQS, first in, first out": Crew(
        one(),
        {**LATE, "worker_enable_remote_control": False, "task_default_queue": "in-order.fifo"},
        broker="sqs",
    ),
    "PGMQ": Crew(one(), broker="pgmq"),
    "memory": Crew(one(pool="threads"), store="memory://"),
    "sentinels": Crew(one(), store="shared_sentinels"),
    "replicas": Crew(one(), {"distlock_replicas": 1}, store="shared_replicated"),
    "cluster": Crew(one(), store="shared_cluster"),
    "deployed": Crew(one(2) * 2, {**LATE, "worker_prefetch_multiplier": 1}, SOON_AGAIN),
}
