"""Where a Redis store's records are: on one server, on whichever is the master, on a cluster."""

import binascii
import contextlib
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from redis.connection import Connection
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_distlock import clock

from .wires import ANSWERLESS, TIMEOUT, Call, Connect, Node, NodeSettings, command, limits

__all__ = ["Cluster", "OneServer", "Place", "Sentinels", "Servers", "slot_of"]

SLOTS = 16384
REDIRECTIONS = 5  # that one request follows, as clients of a cluster do
MAP_TIMEOUT = 1.0  # seconds for one node to say which has which slots
SENTINEL_TIMEOUT = 0.25  # seconds for a sentinel to say which server is the master
FRESH = 1.0  # seconds for which that is believed
SILENT = 5.0  # seconds for which one that did not answer is not asked again
SLOW = 0.02  # seconds after which an answer is doubted: its server may have stood still meanwhile
MAP_AGE = 0.1  # seconds that a cluster's map has to be old before it is asked for again

Where = tuple[str, int]  # a host and its port


class Place(NamedTuple):
    """Where pushes about a key are sent: a server, and a channel that it may be told to use."""

    node: Hashable
    channel: str

    @property
    def sharded(self) -> bool:
        """Whether it is a channel of one slot. The scripts know it by the brace, too."""
        return "{" in self.channel


class Servers(ABC):
    """
    One or more servers that are one place for locks.

    Attributes:
        address: For people, without passwords; equal for equal places.
        in_order: Whether calls that are sent together are executed in their order.
    """

    address: str
    in_order = True

    @abstractmethod
    def exchange(self, calls: Sequence[Call], timeout: float) -> list[Any]:
        """
        Send *calls* and return their answers.

        A refusal is an answer, and so is one of `ANSWERLESS` where there was none.

        Raises:
            RedisError: A connection was refused.
        """

    @abstractmethod
    def place(self, key: bytes, channel: str) -> Place:
        """Return where pushes about *key* go, for one who listens to *channel*."""

    @abstractmethod
    def connect(self, node: Hashable) -> Connect:
        """Return what makes connections to the server of a :class:`Place`."""

    def nodes(self) -> Sequence[Hashable]:
        """Return the servers that have keys, as a :class:`Place` names them."""
        return (None,)

    def share(self, keys: Sequence[bytes]) -> bool:
        """Return whether one script may use all of *keys*."""
        return True

    def check(self) -> list[str]:
        """Return what is wrong with how the servers go together, in words."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Give all connections back."""

    @abstractmethod
    def after_fork(self) -> None:
        """Drop what a fork inherited, without a word to the servers: it is the parent's."""


class OneServer(Servers):
    """A server at a fixed address."""

    def __init__(self, address: str, node: NodeSettings) -> None:
        self.address = address
        self._settings = node
        self._node = Node(*node)

    def exchange(self, calls: Sequence[Call], timeout: float) -> list[Any]:
        try:
            return self._node.wire(timeout).exchange(calls)
        except ANSWERLESS as error:
            return [error] * len(calls)

    def place(self, key: bytes, channel: str) -> Place:
        return Place(None, channel)

    def connect(self, node: Hashable) -> Connect:
        return self._node.connect(TIMEOUT)

    def close(self) -> None:
        self._node.close()

    def after_fork(self) -> None:
        self._node = Node(*self._settings)


class _ToMaster(Connect):
    def __init__(self, master: "_Master", settings: dict[str, Any]) -> None:
        super().__init__(master.connection_class, settings)
        self._master = master

    def __call__(self) -> Connection:
        host, port = self._master.find()
        return self._class(**{**self._settings, "host": host, "port": port})

    def is_stale(self, connection: Any) -> bool:
        return self._master.known not in (None, (connection.host, connection.port))


class _Master(Node):
    """Whichever server the sentinels say it is."""

    def __init__(self, sentinels: Sequence[Node], service: str, node: NodeSettings) -> None:
        super().__init__(*node)
        self.known: Where | None = None
        self._believed_until = -math.inf
        self._sentinels = sentinels
        self._silent_until: dict[Node, float] = {}
        self._service = service
        self._asking = threading.Lock()

    def connect(self, timeout: float) -> Connect:
        return _ToMaster(self, {**self.settings, **limits(timeout)})

    def find(self, *, anew: bool = False) -> Where:
        """
        Return the master; ask for it if the last word is older than a second, or if *anew*.

        While no sentinel answers, the last master may still do.
        """
        asked_at = clock.monotonic()
        with self._asking:
            if self.known is not None and self._believed_until > asked_at + (FRESH if anew else 0):
                return self.known  # somebody else has asked while we waited, or just before
            found = self._ask_all()
            if found is None and self.known is None:
                raise RedisConnectionError(f"no sentinel names a master {self._service!r}")
            # Without an answer, do not ask again for a while: each request would wait for it.
            self._believed_until = clock.monotonic() + (FRESH if found else SILENT)
            before, self.known = self.known, found or self.known
            assert self.known is not None
            if before not in (None, self.known):
                self.close()
            return self.known

    def _ask_all(self) -> Where | None:
        """Return the master that most sentinels name; they are asked side by side."""
        question = [command(b"", "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)]
        named: list[Where] = []
        under_way = []
        for sentinel in self._sentinels:
            if clock.monotonic() > self._silent_until.get(sentinel, -math.inf):
                wire = sentinel.wire(SENTINEL_TIMEOUT)
                with self._noting_silence(sentinel):
                    under_way.append((sentinel, wire, wire.send(question)))
        for sentinel, wire, connection in under_way:
            with self._noting_silence(sentinel):
                (answer,) = wire.receive(connection, question)
                if isinstance(answer, list) and answer:
                    named.append((answer[0].decode(), int(answer[1])))
        return max(named, key=named.count, default=None)

    @contextlib.contextmanager
    def _noting_silence(self, sentinel: Node) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError):
            self._silent_until[sentinel] = clock.monotonic() + SILENT

    def doubt(self) -> None:
        """Ask before the next request, unless no sentinel has answered just now."""
        if self._believed_until < clock.monotonic() + FRESH:
            self._believed_until = -math.inf


class Sentinels(Servers):
    """
    The server that Redis Sentinel says is the master.

    A master that was cut off, and comes back, takes requests until it hears that it is a replica.
    So the sentinels are asked again before a request if their last word is older than a second,
    and after one that took long. Not by redis-py's client of theirs: it asks them one after the
    other, and is not safe between threads.
    """

    def __init__(
        self, address: str, service: str, sentinels: Sequence[NodeSettings], node: NodeSettings
    ) -> None:
        self.address = address
        self._service = service
        self._sentinels = sentinels
        self._settings = node
        self.after_fork()

    def after_fork(self) -> None:
        self._nodes = [Node(*settings) for settings in self._sentinels]
        self._master = _Master(self._nodes, self._service, self._settings)

    def exchange(self, calls: Sequence[Call], timeout: float) -> list[Any]:
        try:
            master = self._master.find()
            asked_at = clock.monotonic()
            answers = self._master.wire(timeout).exchange(calls)
            if clock.monotonic() > asked_at + SLOW and self._master.find(anew=True) != master:
                raise RedisConnectionError("the answer is of one that is no master any more")
        except ANSWERLESS as error:
            answers = [error] * len(calls)
        if any(isinstance(answer, Exception) for answer in answers):
            self._master.doubt()
        return answers

    def place(self, key: bytes, channel: str) -> Place:
        return Place(None, channel)

    def connect(self, node: Hashable) -> Connect:
        return self._master.connect(TIMEOUT)

    def check(self) -> list[str]:
        silent = [node for node in self._nodes if not _answers(node)]
        return [f"a sentinel does not answer: {_where(node)}" for node in silent]

    def close(self) -> None:
        self._master.close()
        for node in self._nodes:
            node.close()


def _answers(node: Node) -> bool:
    try:
        return node.wire(SENTINEL_TIMEOUT).exchange([command(b"", "PING")]) == [b"PONG"]
    except (RedisError, OSError):
        return False


def _where(node: Node) -> str:
    return f"{node.settings['host']}:{node.settings['port']}"


class Cluster(Servers):
    """
    The masters of a cluster, each with its slots.

    Not redis-py's client for clusters: it repeats requests by itself, and the store has to know
    how often one was sent. Which node has which slots, any node says (``CLUSTER SLOTS``).
    """

    in_order = False

    def __init__(self, address: str, seeds: Sequence[Where], node: NodeSettings) -> None:
        self.address = address
        self._seeds = seeds
        self._settings = node
        self.after_fork()

    def after_fork(self) -> None:
        self._nodes: dict[Where, Node] = {}
        self._owners: list[Where | None] = []  # of each slot; empty while it has to be asked for
        self._asked_first: list[Where] = []
        self._known: dict[Where, None] = {}  # masters and replicas
        self._mapped_at = -math.inf
        self._sharded = False
        self._mutex = threading.Lock()

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    def exchange(self, calls: Sequence[Call], timeout: float) -> list[Any]:
        answers: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        for _ in range(REDIRECTIONS):
            try:
                groups = self._by_owner(calls, left)
            except ANSWERLESS as error:
                return [error if n in left else answer for n, answer in enumerate(answers)]
            for owner, number, answer in self._send(calls, groups, timeout):
                answers[number] = answer
                if isinstance(answer, AskError):
                    answers[number] = self._send_on(owner, answer, calls[number], timeout)
                elif isinstance(answer, MovedError):
                    self._moved(owner, answer)
            self._learn([answers[number] for number in left])
            left = [number for number in left if isinstance(answers[number], MovedError)]
            if not left:
                break
        return answers

    def _by_owner(self, calls: Sequence[Call], numbers: Sequence[int]) -> dict[Where, list[int]]:
        groups: dict[Where, list[int]] = {}
        for number in numbers:
            owner = calls[number].node or self._owner(calls[number].key)
            groups.setdefault(owner, []).append(number)
        return groups

    def _send(
        self, calls: Sequence[Call], groups: dict[Where, list[int]], timeout: float
    ) -> Iterator[tuple[Where, int, Any]]:
        """Send to every node first, and then listen: they work side by side."""
        asked_at = clock.monotonic()
        under_way = []
        try:
            for owner, group in groups.items():
                wire, asked = self._node(owner).wire(timeout), [calls[number] for number in group]
                try:
                    under_way.append((owner, group, wire, wire.send(asked), asked))
                except ANSWERLESS as error:
                    yield from ((owner, number, error) for number in group)
            while under_way:
                owner, group, wire, connection, asked = under_way.pop()
                try:
                    answers = wire.receive(connection, asked)
                    if clock.monotonic() > asked_at + SLOW:
                        self._confirm(owner, [call.key for call in asked if call.node is None])
                except ANSWERLESS as error:
                    answers = [error] * len(group)
                yield from ((owner, *each) for each in zip(group, answers, strict=True))
        finally:
            for _, _, _, connection, _ in under_way:
                connection.disconnect()  # its answers were not read

    def _confirm(self, owner: Where, keys: Sequence[bytes]) -> None:
        """
        Raise unless another node says, too, that *owner* has *keys*: its answer took long.

        A master that stood still answers what lies in its sockets before it hears that another has
        taken its place.
        """
        others = [where for where in self._known if where != owner]
        for where in others:
            try:
                self._take_map(where)
            except ANSWERLESS:
                continue
            if all(self._owners[slot_of(key)] == owner for key in keys):
                return
            break
        if others:
            raise RedisConnectionError("the answer is of one that may be no master any more")

    def _send_on(self, owner: Where, ask: AskError, call: Call, timeout: float) -> Any:
        """Send *call* to where its slot is moving to."""
        wire = self._node(_named(ask, owner)).wire(timeout)
        try:
            return wire.exchange([command(b"", "ASKING"), call])[1]
        except ANSWERLESS as error:
            return error

    def _learn(self, answers: Sequence[Any]) -> None:
        """Note who has a slot now; ask for the whole map again when it seems to be an old one."""
        moved = [answer for answer in answers if isinstance(answer, MovedError)]
        lost = any(isinstance(answer, (*ANSWERLESS, ClusterDownError)) for answer in answers)
        if (moved or lost) and clock.monotonic() > self._mapped_at + MAP_AGE:
            self._owners = []

    def _moved(self, owner: Where, answer: MovedError) -> None:
        target = _named(answer, owner)
        self._asked_first = [target]
        if owners := self._owners:
            owners[answer.slot_id] = target

    def _owner(self, key: bytes) -> Where:
        owners = self._owners or self._ask_for_map()
        return owners[slot_of(key)] or self._seeds[0]

    def _ask_for_map(self) -> list[Where | None]:
        with self._mutex:
            if self._owners:
                return self._owners
            failure: Exception | None = None
            for where in dict.fromkeys([*self._asked_first, *self._known, *self._seeds]):
                try:
                    self._take_map(where)
                except ANSWERLESS as error:
                    failure = error
                else:
                    self._asked_first = [where]
                    return self._owners
            raise RedisConnectionError(f"no node of the cluster answers: {failure}") from failure

    def _take_map(self, where: Where) -> None:
        questions = [command(b"", "CLUSTER", "SLOTS"), command(b"", "COMMAND", "INFO", "SPUBLISH")]
        ranges, known = self._node(where).wire(MAP_TIMEOUT).exchange(questions)
        if isinstance(ranges, ResponseError):
            raise RedisConnectionError(f"{where[0]}:{where[1]} is not of a cluster: {ranges}")
        owners: list[Where | None] = [None] * SLOTS
        for first, last, *nodes in ranges:
            served_by = [(_host(host, where), port) for host, port, *_ in nodes]
            owners[first : last + 1] = served_by[:1] * (last + 1 - first)
            self._known.update(dict.fromkeys(served_by))
        self._sharded = bool(known[0]) if isinstance(known, list) else False
        self._mapped_at = clock.monotonic()
        self._owners = owners

    def _node(self, where: Where) -> Node:
        node = self._nodes.get(where)
        if node is None:
            host, port = where
            made = NodeSettings(
                self._settings.connection_class,
                {**self._settings.settings, "host": host, "port": port},
            )
            node = self._nodes.setdefault(where, Node(*made))
        return node

    def place(self, key: bytes, channel: str) -> Place:
        owner, tag = self._owner(key), _tag(slot_of(key))
        return Place(owner, f"{channel}:{{{tag}}}" if self._sharded else f"{channel}:{tag}")

    def connect(self, node: Any) -> Connect:
        return self._node(node).connect(TIMEOUT)

    def nodes(self) -> Sequence[Hashable]:
        try:
            owners = self._owners or self._ask_for_map()
        except ANSWERLESS:
            return self._seeds[:1]  # the request says what is wrong
        return list(dict.fromkeys(owner for owner in owners if owner))

    def share(self, keys: Sequence[bytes]) -> bool:
        return len(set(map(slot_of, keys))) == 1

    def check(self) -> list[str]:
        owners = self._ask_for_map()
        missing = owners.count(None)
        return [f"{missing} of the cluster's {SLOTS} slots have no node"] if missing else []


def _named(answer: AskError, by: Where) -> Where:
    """Return the node that *answer* names; without a host, it is the one that has answered."""
    return _host(answer.host.encode(), by), answer.port


def _host(given: bytes | None, by: Where) -> str:
    return by[0] if given in (None, b"", b"?") else given.decode()


def slot_of(key: bytes) -> int:
    """Return the slot of *key*, as the cluster's specification says."""
    _, brace, rest = key.partition(b"{")
    tag, end, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if brace and end and tag else key, 0) % SLOTS


# Tags of four letters out of sixteen that differ in four bits: as a CRC is linear, every checksum
# is that of one of them, and is found from the checksums of their halves.
_PAIRS = [bytes(pair) for pair in itertools.product(b"@ABCDEFGHIJKLMNO", repeat=2)]
_FRONTS = {binascii.crc_hqx(pair + b"@@", 0): pair for pair in _PAIRS}
_BACKS = {binascii.crc_hqx(b"@@" + pair, 0): pair for pair in _PAIRS}
_MIDDLE = binascii.crc_hqx(b"@@@@", 0)


def _tag(slot: int) -> str:
    """Return a short text that falls in *slot*: channels are in slots, too."""
    for checksum in range(slot, 1 << 16, SLOTS):
        for front, pair in _FRONTS.items():
            back = _BACKS.get(front ^ checksum ^ _MIDDLE)
            if back is not None:
                return (pair + back).decode()
    raise ValueError(f"there is no slot {slot}")
