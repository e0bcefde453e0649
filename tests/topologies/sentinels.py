"""A master and its replicas, with real sentinels that watch over them."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import redis

from tests.servers import LACKS
from tests.topologies.node import Node, Topology, userinfo
from tests.topologies.replicated import Replicated
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

_DOWN_AFTER = 1000  # ms
_FAILOVER_TIMEOUT = 2000  # ms
# Seconds for each step. Without SENTINEL DEBUG, as on Redis 6.2, a step takes up to 25 by itself.
_PATIENCE = 90.0

# Sentinels look and report every 1 to 10 s by default, so each step takes seconds; these do not.
# At the replicas of a master that is down, though, they look once a second whatever is said here.
# They choose none of which they know nothing for three info periods or five ping periods, and they
# demote a master of which the leader, which looks first, reports nothing in four publish periods.
# A sentinel that was stopped for 2 s does nothing for a while, which is short here.
_HASTE = {  # ms
    "info-period": 400,
    "ping-period": 400,
    "ask-period": 100,
    "publish-period": 500,
    "tilt-period": 1000,
}


class _Sentinel(Node):
    def start(self) -> None:
        super().start()
        if "SENTINEL DEBUG" not in LACKS:
            self.ask("SENTINEL", "DEBUG", *(each for pair in _HASTE.items() for each in pair))


class Sentinels(Topology):
    """
    A master, *replicas*, and *sentinels* of which a majority decides.

    Servers and sentinels may be paused, killed and started again by their own methods.

    Args:
        name: What the sentinels call the master.
        password: Of the servers with data.
        sentinel_password: Of the sentinels.
    """

    def __init__(
        self,
        sentinels: int = 3,
        replicas: int = 2,
        name: str = "locks",
        *,
        password: str = "",
        sentinel_password: str = "",
        options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.password = password
        self.sentinel_password = sentinel_password
        self.sentinels: list[Node] = []
        self._count = sentinels
        self._data = Replicated(replicas, password=password, options=options)

    def url(self, db: int = 0) -> str:
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        query = {"service": self.name}
        if self.sentinel_password:
            query["sentinel_password"] = self.sentinel_password
        return f"sentinel://{userinfo(self.password)}{hosts}/{db}?{urlencode(query)}"

    @property
    def celery_url(self) -> str:
        """For Celery's broker or result backend, together with `celery_options`."""
        secret = userinfo(self.password)
        return ";".join(f"sentinel://{secret}{each.address}" for each in self.sentinels)

    @property
    def celery_options(self) -> dict[str, Any]:
        """For ``broker_transport_options`` or ``result_backend_transport_options``."""
        secret = {"password": self.sentinel_password} if self.sentinel_password else {}
        return {"master_name": self.name, "sentinel_kwargs": secret}

    @property
    def master(self) -> Node:
        """The server that all sentinels that answer take for the master."""
        return wait_until(
            self._agreed, timeout=_PATIENCE, what="the sentinels to agree on a master"
        )

    @property
    def replicas(self) -> list[Node]:
        master = self.master
        return [server for server in self.servers if server is not master]

    def fail_over(self) -> Node:
        """Have the sentinels put a replica in the master's place, as `replicas`; return it."""
        old = self.master
        wait_until(
            self._begin_failover, timeout=_PATIENCE, what="the sentinels to begin a failover"
        )
        new = self.wait_for_new_master(old)
        self.settle()
        return new

    def wait_for_new_master(self, old: Node) -> Node:
        """Return the server that took the place of *old*, once the sentinels agree on it."""

        def new() -> Node | None:
            found = self._agreed()
            if found is None or found is old or found.ask("ROLE")[0] != "master":
                return None
            return found

        return wait_until(new, timeout=_PATIENCE, what=f"another master than {old!r}")

    def restore(self, server: Node) -> None:
        """Start or resume a server or a sentinel, and `settle`."""
        server.start()
        server.resume()
        self.settle()

    def settle(self) -> None:
        """Wait until all that answer are in sync with the master, and the sentinels know it."""
        wait_until(
            self._settled, timeout=_PATIENCE, what="the sentinels and their servers to settle"
        )

    def _start(self) -> None:
        self._closing.enter_context(self._data)
        self.servers = self._data.servers
        name, port = self.name, self._data.master.port
        lines = [
            f"monitor {name} 127.0.0.1 {port} {self._count // 2 + 1}",
            f"down-after-milliseconds {name} {_DOWN_AFTER}",
            f"failover-timeout {name} {_FAILOVER_TIMEOUT}",
        ]
        if self.password:
            lines.append(f"auth-pass {name} {self.password}")
        if self.sentinel_password:
            lines.append(f"sentinel-pass {self.sentinel_password}")
        self.sentinels = [
            self._started(
                _Sentinel(
                    options={"sentinel": lines},
                    password=self.sentinel_password,
                    arguments=["--sentinel"],
                )
            )
            for _ in range(self._count)
        ]
        self.settle()

    def _agreed(self) -> Node | None:
        named = {
            tuple(sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name))
            for sentinel in self.sentinels
            if sentinel.answers
        }
        return self._at(":".join(named.pop())) if len(named) == 1 else None

    def _begin_failover(self) -> bool:
        asked = next(sentinel for sentinel in self.sentinels if sentinel.answers)
        # It refuses while it has not looked after the replicas since the last failover.
        with suppress(redis.ResponseError):
            asked.ask("SENTINEL", "FAILOVER", self.name)
            return True
        return False

    def _settled(self) -> bool:
        master = self._agreed()
        if master is None:
            return False
        up = [server for server in self.servers if server.answers and server is not master]
        return all(self._follows(server, master) for server in up) and all(
            self._sees(sentinel, up) for sentinel in self.sentinels if sentinel.answers
        )

    def _follows(self, server: Node, master: Node) -> bool:
        info = server.info("replication")
        return info.get("master_port") == master.port and info["master_link_status"] == "up"

    def _sees(self, sentinel: Node, replicas: list[Node]) -> bool:
        master = _fields(sentinel.ask("SENTINEL", "MASTER", self.name))
        healthy = {
            replica["port"]
            for replica in map(_fields, sentinel.ask("SENTINEL", "REPLICAS", self.name))
            if replica["flags"] == "slave" and replica["master-link-status"] == "ok"
        }
        others = [
            {"s_down", "disconnected"}.isdisjoint(other["flags"].split(","))
            for other in map(_fields, sentinel.ask("SENTINEL", "SENTINELS", self.name))
        ]
        return (
            master["flags"] == "master"
            and healthy == {str(replica.port) for replica in replicas}
            and others.count(True) == sum(each.answers for each in self.sentinels) - 1
        )


def _fields(flat: list[str]) -> dict[str, str]:
    """What sentinels send as a list of names and values in turn."""
    return dict(pair for i, pair in enumerate(pairwise(flat)) if i % 2 == 0)
