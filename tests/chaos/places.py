"""Where the locks of `make chaos` are, and what can happen to the servers there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import redis

from celery_distlock.testing import EmbeddedServer
from tests.topologies import Cluster, Masters, Node, Sentinels
from tests.zookeeper_server import MISSING, ZooKeeperServer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

# A server that is killed keeps all that it has confirmed; one that a replica replaces has waited
# for that replica (`?replicas=1`). Without these, a restart may forget locks, and is expected to.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


class Place:
    """
    Servers for locks, as a context manager.

    Attributes:
        faults: What can happen to the servers, by name: called with a source of chance, returns
            when they serve again.
    """

    name = ""
    missing = ""  # what it needs and this machine lacks

    def __init__(self) -> None:
        self._servers = self._make()

    def __enter__(self) -> Self:
        self._servers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._servers.__exit__(*error)

    def _make(self) -> Any:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return self._servers.url

    @property
    def faults(self) -> dict[str, Callable[[random.Random], None]]:
        return {"restart": self._restart}

    def _restart(self, choose: random.Random) -> None:
        raise NotImplementedError


class RedisPlace(Place):
    """Servers that speak Redis's protocol."""

    @property
    def faults(self) -> dict[str, Callable[[random.Random], None]]:
        return {**super().faults, "cut": self._cut, "flush": self._forget_scripts}

    @property
    def _masters(self) -> Sequence[EmbeddedServer]:
        raise NotImplementedError

    def _cut(self, choose: random.Random) -> None:
        kinds = choose.choice([["normal"], ["normal", "pubsub"]])
        for kind in kinds:
            self._execute("CLIENT", "KILL", "TYPE", kind)

    def _forget_scripts(self, choose: random.Random) -> None:
        self._execute("SCRIPT", "FLUSH")

    def _execute(self, *command: str) -> None:
        for master in self._masters:
            with suppress(redis.RedisError), master.client(socket_timeout=1.0) as client:
                client.execute_command(*command)


class Server(RedisPlace):
    name = "server"

    def _make(self) -> EmbeddedServer:
        return EmbeddedServer(options=DURABLE)

    @property
    def _masters(self) -> Sequence[EmbeddedServer]:
        return [self._servers]

    def _restart(self, choose: random.Random) -> None:
        self._servers.kill()
        self._servers.start()


class UnderSentinels(RedisPlace):
    name = "sentinels"

    def _make(self) -> Sentinels:
        return Sentinels(replicas=2, options=DURABLE)

    @property
    def url(self) -> str:
        return f"{self._servers.url()}&replicas=1"

    @property
    def _masters(self) -> Sequence[Node]:
        return [self._servers.master]

    def _restart(self, choose: random.Random) -> None:
        """The master dies and comes back: as a replica, if the sentinels were quicker."""
        master = self._servers.master
        master.kill()
        if choose.random() < 0.7:
            self._servers.wait_for_new_master(master)
        self._servers.restore(master)


class OfCluster(RedisPlace):
    name = "cluster"

    def _make(self) -> Cluster:
        return Cluster(masters=3, replicas=1, options=DURABLE)

    @property
    def url(self) -> str:
        return f"{self._servers.url}?replicas=1"

    @property
    def _masters(self) -> Sequence[Node]:
        return self._servers.masters

    def _restart(self, choose: random.Random) -> None:
        """A master dies and comes back, with or without a replica in its place."""
        master = choose.choice(self._servers.masters)
        if choose.random() < 0.5:
            self._servers.fail_over(master, choose.choice(["kill", "request"]))
        else:
            master.kill()
        self._servers.restore(master)


class OfMasters(RedisPlace):
    name = "redlock"

    def _make(self) -> Masters:
        return Masters(5, options=DURABLE)

    @property
    def _masters(self) -> Sequence[Node]:
        return self._servers.servers

    def _restart(self, choose: random.Random) -> None:
        """Up to three of five die at once; with three, no key is granted until one is back."""
        down = choose.sample(self._servers.servers, choose.randrange(1, 4))
        for master in down:
            master.kill()
        for master in down:
            master.start()


class OfZooKeeper(Place):
    name = "zookeeper"
    missing = MISSING

    def _make(self) -> ZooKeeperServer:
        return ZooKeeperServer()

    @property
    def url(self) -> str:
        return f"{self._servers.url}?session=2.5"

    def _restart(self, choose: random.Random) -> None:
        self._servers.kill()
        self._servers.start()


PLACES: dict[str, type[Place]] = {
    place.name: place for place in (Server, UnderSentinels, OfCluster, OfMasters, OfZooKeeper)
}
