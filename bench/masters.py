"""How grants spread over the masters of a cluster."""

import sys
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Part, Row
from many import Work

from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.base import Store
from celery_distlock.testing import EmbeddedServer

MASTERS = 1, 3, 6
GRANTS = 12_000
WARM = 1_000  # grants before it is measured
PREFIX = "spread"
PATIENT = {
    "cluster-node-timeout": "15000"
}  # ms: on a busy machine, too, no master is taken for dead

sys.path.append(str(Path(__file__).parents[1]))  # the cluster is that of the tests


def masters(_server: EmbeddedServer, scale: float) -> Iterator[Part]:
    yield Part(
        "masters",
        "Grants of as many keys, over the masters of a cluster",
        "grants a second / of one master",
        ["at most a second", "server CPU a grant", "busiest master's share", "sent to another"],
        list(_rows(int(GRANTS * scale))),
    )


def _rows(grants: int) -> Iterator[Row]:
    alone = 0.0
    for size in MASTERS:
        cpu, foreign = _measured(size, grants)
        most = grants / max(cpu)  # where each master has a core, and the busiest one uses it up
        alone = alone or most
        figures = (
            Figure(most, "", 0),
            Figure(sum(cpu) / grants * 1e6, "µs", 0),
            Figure(max(cpu) / sum(cpu)),
            Figure(foreign, "", 0, at_most=0),
        )
        yield Row(f"{size} master{'s' * (size > 1)}", Figure(most / alone), figures)


def _measured(size: int, grants: int) -> tuple[list[float], int]:
    """Return each master's CPU seconds, and how many requests came to one without the key."""
    from tests.topologies.cluster import Cluster

    with Cluster(size, replicas=0, options=PATIENT) as cluster:
        store = open_store(cluster.url, PREFIX)
        _grant(store, "warm", WARM)  # scripts are loaded, and slots known
        before = [_work(server) for server in cluster.servers]
        _grant(store, "key", grants)
        after = [_work(server) for server in cluster.servers]
        store.close()
    cpu = [now.cpu - then.cpu for (now, _), (then, _) in zip(after, before, strict=True)]
    return cpu, sum(moved for _, moved in after) - sum(moved for _, moved in before)


def _grant(store: Store, stem: str, grants: int) -> None:
    for number in range(grants):
        store.acquire(AcquireRequest(f"{stem}:{number}", "owner", 60.0))
        store.release(ReleaseRequest(f"{stem}:{number}", "owner"))


def _work(server: EmbeddedServer) -> tuple[Work, int]:
    """Return a master's work, and how many requests it has sent to another one."""
    with server.client(socket_timeout=None) as client:
        moved = client.info("errorstats").get("errorstat_MOVED", {}).get("count", 0)
        return Work.of(client), int(moved)
