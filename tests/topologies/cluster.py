"""A real cluster: its joining, its failovers, and slots on the move."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from itertools import combinations, takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple

from redis.crc import key_slot

from tests.topologies.node import Node, Topology, userinfo
from tests.topologies.replicated import REPLICATION
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SLOTS = 16384

# The bus is 10000 higher, and there too below the range from which outgoing connections get their
# port: the others dial it while a node is down, and one of them could end up connected to itself.
_PORTS = range(20000, 22700)
_PORT_ATTEMPTS = 20
_NODE_TIMEOUT = 1000  # ms
_MIGRATE_TIMEOUT = 5000  # ms
_KEYS_AT_ONCE = 100


class _Seen(NamedTuple):
    """A node as another one sees it."""

    id: str
    address: str
    flags: frozenset[str]
    master: str  # its id, or "-"
    slots: frozenset[int]


class Move:
    """A slot that moves from one master to another."""

    def __init__(self, cluster: Cluster, slot: int, source: Node, target: Node) -> None:
        self.slot = slot
        self.source = source
        self.target = target
        self._cluster = cluster
        self._finished = False
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID"))

    def migrate(self, *keys: str) -> None:
        """Take *keys*, or else all of the slot, to the target."""
        if keys:
            self._migrate(list(keys))
            return
        while found := self.source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, _KEYS_AT_ONCE):
            self._migrate(found)

    def finish(self) -> None:
        """Take what is left to the target and notify all nodes; do nothing if that is done."""
        if self._finished:
            return
        self.migrate()
        target = self.target.ask("CLUSTER", "MYID")
        others = [node for node in self._cluster.masters if node is not self.target]
        for node in [self.target, *others]:  # or else no node has it for a moment
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", target)
        self._finished = True

    def _migrate(self, keys: list[str]) -> None:
        to = ["127.0.0.1", self.target.port, "", 0, _MIGRATE_TIMEOUT]
        secret = ["AUTH", self.target.password] if self.target.password else []
        self.source.ask("MIGRATE", *to, *secret, "KEYS", *keys)


class Cluster(Topology):
    """
    A cluster of *masters*, with *replicas* for each.

    Servers may be paused, killed and started again by their own methods.

    Args:
        sharded: Whether the slots are dealt out. If not, every key is refused (``CLUSTERDOWN``).
        options: Of all servers, over those that a quick cluster needs.
    """

    def __init__(
        self,
        masters: int = 3,
        replicas: int = 1,
        *,
        sharded: bool = True,
        password: str = "",
        options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._masters = masters
        self._replicas = replicas
        self._sharded = sharded
        self._password = password
        self._options = {
            **REPLICATION,
            "cluster-enabled": "yes",
            "cluster-announce-ip": "127.0.0.1",
            "cluster-node-timeout": str(_NODE_TIMEOUT),
            # A replica takes over however long it has not heard from its master.
            "cluster-replica-validity-factor": "0",
            # Replicas stay with their master, unless a test takes them elsewhere.
            "cluster-allow-replica-migration": "no",
            **(options or {}),
        }

    @property
    def url(self) -> str:
        hosts = ",".join(server.address for server in self.servers)
        return f"redis+cluster://{userinfo(self._password)}{hosts}/0"

    @property
    def masters(self) -> list[Node]:
        """Those that answer and take themselves for masters."""
        return [server for server in self._answering() if server.ask("ROLE")[0] == "master"]

    def replicas_of(self, master: Node) -> list[Node]:
        """Those that answer and follow *master*, which may be down."""
        seen = self._seen()
        return [
            server
            for server in self._answering()
            if seen[server.address].master == seen[master.address].id
        ]

    def node_of(self, key: str | bytes) -> Node:
        """The master that has the slot of *key*, once all that answer agree on it."""
        return self.node_of_slot(slot_of(key))

    def node_of_slot(self, slot: int) -> Node:
        def owner() -> Node | None:
            named = {self._owner(server, slot) for server in self._answering()}
            address = named.pop() if len(named) == 1 else None
            return self._at(address) if address else None

        return wait_until(owner, what=f"all to agree on the owner of slot {slot}")

    def slots_from(self, slot: int, most: int) -> range:
        """The slots from *slot* on that its master has, up to *most* of them."""
        owner = self.node_of_slot(slot)
        mine = self._seen(owner)[owner.address].slots
        span = takewhile(mine.__contains__, range(slot, slot + most))
        return range(slot, slot + len(list(span)))

    @contextmanager
    def moving(self, slot: int, to: Node) -> Iterator[Move]:
        """
        Begin to move *slot*: the source asks for what it no longer has at the target (``ASK``).

        Keys move by the `Move` in the block; what is not finished there is finished at its end.
        """
        move = Move(self, slot, self.node_of_slot(slot), to)
        yield move
        move.finish()
        self._wait_for_owner([slot], to)

    def move_slot(self, slot: int, to: Node) -> None:
        """Move *slot* and its keys, the classic way: key by key."""
        with self.moving(slot, to):
            pass

    def reshard(self, slots: range, to: Node) -> None:
        """Move *slots*, which one master has, as `move_slot` does."""
        source = self.node_of_slot(slots[0])
        for slot in slots:
            Move(self, slot, source, to).finish()
        self._wait_for_owner(slots, to)

    def reshard_at_once(self, slots: range, to: Node) -> None:
        """Move *slots*, which one master has, as Valkey 9 can: in one step, without ``ASK``."""
        source, target = self.node_of_slot(slots[0]), to.ask("CLUSTER", "MYID")
        where = ["SLOTSRANGE", slots[0], slots[-1], "NODE", target]
        source.ask("CLUSTER", "MIGRATESLOTS", *where)
        self._wait_for_owner(slots, to)

    def fail_over(self, master: Node, how: Literal["kill", "pause", "request"] = "kill") -> Node:
        """
        Have a replica take over from *master*; return it once all others know it.

        By ``request`` the two change places in an orderly way, and none is down in between.
        """
        replicas = self.replicas_of(master)
        if how == "request":
            wait_until(replicas[0].in_sync, what=f"{replicas[0]!r} to be in sync")
            replicas[0].ask("CLUSTER", "FAILOVER")
        elif how == "pause":
            master.pause()
        else:
            master.kill()

        def successor() -> Node | None:
            return next((each for each in replicas if each.ask("ROLE")[0] == "master"), None)

        new = wait_until(successor, what=f"a replica to take over from {master!r}")
        self.settle()
        return new

    def restore(self, server: Node) -> None:
        """Start or resume *server*, and `settle`."""
        server.start()
        server.resume()
        self.settle()

    def settle(self) -> None:
        """Wait until all that answer see the same cluster, with replicas in sync, and it works."""
        wait_until(self._settled, what="the cluster to settle")

    def _start(self) -> None:
        count = self._masters * (1 + self._replicas)
        self.servers = [self._started_on_free_ports() for _ in range(count)]
        masters, replicas = self.servers[: self._masters], self.servers[self._masters :]
        for epoch, server in enumerate(self.servers, 1):
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        if self._sharded:
            for i, master in enumerate(masters):
                first, end = (SLOTS * n // self._masters for n in (i, i + 1))
                master.ask("CLUSTER", "ADDSLOTS", *range(first, end))  # also for Redis 6.2
        # Every node meets every other, as gossip would take seconds to spread.
        for one, other in combinations(self.servers, 2):
            one.ask("CLUSTER", "MEET", "127.0.0.1", other.port)
        wait_until(self._acquainted, what="the cluster's nodes to know one another")
        for i, replica in enumerate(replicas):
            master = masters[i % self._masters]
            replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
        self.settle()

    def _started_on_free_ports(self) -> Node:
        for _ in range(_PORT_ATTEMPTS):
            node = Node(options=self._options, password=self._password, port=secrets.choice(_PORTS))
            try:
                return self._started(node)
            except RuntimeError as error:
                if "Address already in use" not in str(error):
                    raise
                node.close()
        raise RuntimeError(f"no free ports for a node of a cluster in {_PORT_ATTEMPTS} attempts")

    def _answering(self) -> list[Node]:
        return [server for server in self.servers if server.answers]

    def _seen(self, by: Node | None = None) -> dict[str, _Seen]:
        """What *by*, or else any that answers, knows of each address."""
        by = by or self._answering()[0]
        lines = by.ask("CLUSTER", "NODES").splitlines()
        return {seen.address: seen for seen in map(_parsed, lines)}

    def _owner(self, by: Node, slot: int) -> str | None:
        found = (seen.address for seen in self._seen(by).values() if slot in seen.slots)
        return next(found, None)

    def _wait_for_owner(self, slots: Iterable[int], to: Node) -> None:
        wanted = frozenset(slots)
        wait_until(
            lambda: all(
                wanted <= self._seen(server)[to.address].slots for server in self._answering()
            ),
            what=f"all to know that {to!r} has {len(wanted)} slots more",
        )

    def _acquainted(self) -> bool:
        return all(
            len(seen) == len(self.servers)
            and not any("handshake" in each.flags for each in seen.values())
            for seen in map(self._seen, self.servers)
        )

    def _settled(self) -> bool:
        up = self._answering()
        state = "ok" if self._sharded else "fail"
        return (
            all(f"cluster_state:{state}" in server.ask("CLUSTER", "INFO") for server in up)
            and len({self._opinion(server) for server in up}) == 1
            and all(server.ask("ROLE")[0] == "master" or server.in_sync() for server in up)
        )

    def _opinion(self, server: Node) -> frozenset[object] | None:
        """Which node is which, and which is down, says *server*; none if it is not sure yet."""
        seen = self._seen(server)
        for other in self.servers:
            flags = seen[other.address].flags
            if other.answers == ("fail" in flags) or "fail?" in flags:
                return None
        return frozenset(
            (each.address, each.master, each.slots, each.flags - {"myself"})
            for each in seen.values()
        )


def slot_of(key: str | bytes) -> int:
    return key_slot(key if isinstance(key, bytes) else key.encode())


def _parsed(line: str) -> _Seen:
    identity, address, flags, master, _, _, _, _, *slots = line.split()
    owned: set[int] = set()
    for each in slots:
        if not each.startswith("["):  # or else a slot on the move
            first, _, last = each.partition("-")
            owned.update(range(int(first), int(last or first) + 1))
    return _Seen(
        identity,
        address.partition("@")[0],
        frozenset(flags.split(",")),
        master,
        frozenset(owned),
    )
