"""Where a Redis store's records are: on one server, on whichever is the master, on a cluster."""

import binascii
import contextlib
import functools
import itertools
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from redis.connection import Connection
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.stores.findings import Finding, Severity

from .cluster_nodes import SLOW, ClusterNode, beside
from .connections import (
    ANSWERLESS,
    ASKING,
    TIMEOUT,
    Command,
    ConnectionFactory,
    NodeSettings,
    Server,
    command,
)
from .permissions import missing

__all__ = ["Cluster", "OneServer", "PushTarget", "Sentinels", "Topology", "slot_of"]

SLOTS = 16384
REDIRECTIONS = 5  # that one request follows, as clients of a cluster do
MAP_TIMEOUT = 1.0  # seconds for one node to say which has which slots
SENTINEL_TIMEOUT = 0.25  # seconds for a sentinel to say which server is the master
FRESH = 1.0  # seconds for which that is believed
SILENT = 5.0  # seconds for which one that did not answer is not asked again
MAP_AGE = 0.1  # seconds that a cluster's map has to be old before it is asked for again
NEXT = 0.1  # seconds after which another node is asked for it, too
BRIEF = 0.1  # seconds that a silent node may keep those waiting who have asked others, too

HostPort = tuple[str, int]  # a host and its port


class PushTarget(NamedTuple):
    """Where pushes about a key are sent: a server, and a channel that it may be told to use."""

    node: Hashable
    channel: str

    @property
    def sharded(self) -> bool:
        """Whether it is a channel of one slot. The scripts know it by the brace, too."""
        return "{" in self.channel


class Topology(ABC):
    """
    One or more servers that are one place for locks.

    Attributes:
        address: For people, without passwords; equal for equal places.
        in_order: Whether calls that are sent together are executed in their order.
    """

    address: str
    in_order = True

    def requests(self, before: Sequence[Command], call: Command) -> list[list[Command]]:
        """Return the requests, one after the other, by which *call* is executed after *before*."""
        return [list(before), [call]] if before and not self.in_order else [[*before, call]]

    @abstractmethod
    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        """
        Send *calls* and return their answers.

        A refusal is an answer, and so is one of `ANSWERLESS` where there was none.

        Raises:
            RedisError: A connection was refused.
        """

    @abstractmethod
    def place(self, key: bytes, channel: str) -> PushTarget:
        """Return where pushes about *key* go, for one who subscribed to *channel*."""

    @abstractmethod
    def connect(self, node: Hashable) -> ConnectionFactory:
        """Return what makes connections to the server of a :class:`PushTarget`."""

    def nodes(self) -> Sequence[Hashable]:
        """Return the servers that have keys, as a :class:`PushTarget` names them."""
        return (None,)

    def has(self, node: Hashable) -> bool:
        """Return whether *node*, as in a :class:`PushTarget`, is one of them, as far as known."""
        return True

    def share(self, keys: Sequence[bytes]) -> bool:
        """Return whether one script may use all of *keys*."""
        return True

    def check(self) -> list[Finding]:
        """Return what is wrong with how the servers work together."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Give all connections back."""

    @abstractmethod
    def after_fork(self) -> None:
        """Drop what a fork inherited, without a word to the servers: it is the parent's."""


class OneServer(Topology):
    """A server at a fixed address."""

    def __init__(self, address: str, node: NodeSettings) -> None:
        self.address = address
        self._settings = node
        self._node = Server(*node)

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        try:
            return self._node.pool(timeout).exchange(calls)
        except ANSWERLESS as error:
            return [error] * len(calls)

    def place(self, key: bytes, channel: str) -> PushTarget:
        return PushTarget(None, channel)

    def connect(self, node: Hashable) -> ConnectionFactory:
        return self._node.connect(TIMEOUT)

    def close(self) -> None:
        self._node.close()

    def after_fork(self) -> None:
        self._node = Server(*self._settings)


class _ToMaster(ConnectionFactory):
    def __init__(self, master: "_Master", timeout: float) -> None:
        super().__init__(master, timeout)
        self._master = master

    def __call__(self) -> Connection:
        host, port = self._master.find()
        return self._master.connection_class(**{**self._settings, "host": host, "port": port})

    def is_stale(self, connection: Any, opened_at: float) -> bool:
        return self._master.known not in (None, (connection.host, connection.port))


class _Master(Server):
    """Whichever server the sentinels say it is."""

    def __init__(self, sentinels: Sequence[Server], service: str, node: NodeSettings) -> None:
        super().__init__(*node)
        self.known: HostPort | None = None
        self._believed_until = -math.inf
        self._sentinels = sentinels
        self._silent_until: dict[Server, float] = {}
        self._failure: Exception | None = None  # of the last sentinel that told nothing
        self._service = service
        self._asking = threading.RLock()  # a signal's handler may ask meanwhile

    def connect(self, timeout: float) -> ConnectionFactory:
        return _ToMaster(self, timeout)

    def find(self, *, anew: bool = False) -> HostPort:
        """
        Return the master; ask for it if the last word is older than a second, or if *anew*.

        While no sentinel answers, the last master may still do.
        """
        asked_at = clock.monotonic()
        with self._asking:
            if self.known is not None and self._believed_until > asked_at + (FRESH if anew else 0):
                return self.known  # somebody else has asked while we waited, or just before
            found = self._ask_all()
            if self.known is not None and self._believed_until > asked_at + FRESH:
                return self.known  # what such a handler was told is newer
            if found is None and self.known is None:
                why = f": {self._failure}" if self._failure else ""
                raise RedisConnectionError(f"no sentinel names a master {self._service!r}{why}")
            # Without an answer, do not ask again for a while: each request would wait for it.
            self._believed_until = clock.monotonic() + (FRESH if found else SILENT)
            before, self.known = self.known, found or self.known
            assert self.known is not None
            if before not in (None, self.known):
                self.close()
            return self.known

    def _ask_all(self) -> HostPort | None:
        """Return the master that most sentinels name; they are asked side by side."""
        question = [command(b"", "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)]
        named: list[HostPort] = []
        under_way = []
        for sentinel in self._sentinels:
            if clock.monotonic() > self._silent_until.get(sentinel, -math.inf):
                pool = sentinel.pool(SENTINEL_TIMEOUT)
                with self._noting_silence(sentinel):
                    under_way.append((sentinel, pool, pool.send(question)))
        for sentinel, pool, connection in under_way:
            with self._noting_silence(sentinel):
                (answer,) = pool.receive(connection, question)
                if isinstance(answer, list) and answer:
                    named.append((answer[0].decode(), int(answer[1])))
                elif isinstance(answer, ResponseError):
                    self._failure = answer
        return max(named, key=named.count, default=None)

    @contextlib.contextmanager
    def _noting_silence(self, sentinel: Server) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            self._failure = error
            self._silent_until[sentinel] = clock.monotonic() + SILENT

    def doubt(self) -> None:
        """Ask before the next request, unless no sentinel has answered just now."""
        if self._believed_until < clock.monotonic() + FRESH:
            self._believed_until = -math.inf


class Sentinels(Topology):
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
        self._nodes = [Server(*settings) for settings in self._sentinels]
        self._master = _Master(self._nodes, self._service, self._settings)

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        try:
            master = self._master.find()
            asked_at = clock.monotonic()
            answers = self._master.pool(timeout).exchange(calls)
            if clock.monotonic() > asked_at + SLOW and self._master.find(anew=True) != master:
                raise RedisConnectionError("the answer is of one that is no master any more")
        except ANSWERLESS as error:
            answers = [error] * len(calls)
        if any(isinstance(answer, Exception) for answer in answers):
            self._master.doubt()
        return answers

    def place(self, key: bytes, channel: str) -> PushTarget:
        return PushTarget(None, channel)

    def connect(self, node: Hashable) -> ConnectionFactory:
        return self._master.connect(TIMEOUT)

    def check(self) -> list[Finding]:
        return [
            Finding(
                Severity.DOUBT,
                "sentinels",
                f"a sentinel does not answer: {_where(node)}",
                "start it: without a majority of them there is no failover",
            )
            for node in self._nodes
            if not _answers(node)
        ]

    def close(self) -> None:
        self._master.close()
        for node in self._nodes:
            node.close()


def _answers(node: Server) -> bool:
    try:
        return node.pool(SENTINEL_TIMEOUT).exchange([command(b"", "PING")]) == [b"PONG"]
    except (RedisError, OSError):
        return False


def _where(node: Server) -> str:
    return f"{node.settings['host']}:{node.settings['port']}"


class _Map(NamedTuple):
    """
    Which node has which slots, as one of them says.

    Attributes:
        owners: Of each slot; None where it has none.
        nodes: Masters and replicas.
        by: The node that says so.
        sharded: Whether channels may be of one slot.
        asked_at: The local clock before it was asked.
    """

    owners: list[HostPort | None]
    nodes: list[HostPort]
    by: HostPort
    sharded: bool
    asked_at: float

    def owner(self, key: bytes) -> HostPort:
        """Return the node that has the slot of *key*, or else one that says that none has."""
        return self.owners[slot_of(key)] or self.by


class Cluster(Topology):
    """
    The masters of a cluster, each with its slots.

    Not redis-py's client for clusters: it repeats requests by itself, and the store has to know
    how often one was sent. Which node has which slots, any node says (``CLUSTER SLOTS``).

    What goes to several nodes is asked in a thread for each, so that one that cannot be reached, or
    does not answer, keeps no request from the others; and once it is known to be silent, nobody who
    has asked others besides waits for it for longer than a moment. So it is with the map: where the
    owner of a key failed, a new one is asked for by those alone who want that owner's keys.
    """

    in_order = False

    def __init__(self, address: str, seeds: Sequence[HostPort], node: NodeSettings) -> None:
        self.address = address
        self._seeds = seeds
        self._settings = node
        self.after_fork()

    def after_fork(self) -> None:
        self._nodes: dict[HostPort, ClusterNode] = {}
        self._map: _Map | None = None
        self._doubted: set[HostPort] = set()  # nodes whose slots may be another's by now
        self._asked_first: list[HostPort] = []
        self._tried_at = -math.inf  # when a map was last asked for, with or without an answer
        self._mutex = threading.RLock()  # a signal's handler may ask for the map meanwhile

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        return self._exchange(calls, _Patience(timeout), REDIRECTIONS)

    def _exchange(self, calls: Sequence[Command], patience: "_Patience", turns: int) -> list[Any]:
        try:
            groups = self._by_owner(calls, patience.until)
        except ANSWERLESS as error:
            return [error] * len(calls)
        if len(groups) == 1:
            (owner,) = groups
            if owner not in self._doubted and not (_are_brief(calls) and self._node(owner).silent):
                return self._ask(owner, calls, patience, turns)
        return self._ask_beside(calls, groups, patience, turns)

    def _by_owner(self, calls: Sequence[Command], until: float) -> dict[HostPort, list[int]]:
        known = self._map or self._new_map(until)
        groups: dict[HostPort, list[int]] = {}
        for number, call in enumerate(calls):
            groups.setdefault(call.node or known.owner(call.key), []).append(number)
        return groups

    def _ask_beside(
        self,
        calls: Sequence[Command],
        groups: dict[HostPort, list[int]],
        patience: "_Patience",
        turns: int,
    ) -> list[Any]:
        """Ask each node in a thread; wait for those that were silent before for a moment only."""
        answers: list[Any] = [None] * len(calls)
        heard: queue.SimpleQueue[tuple[HostPort, Any]] = queue.SimpleQueue()
        awaited, began = set(groups), clock.monotonic()
        hopeful = {owner for owner in groups if not self._node(owner).silent}
        briefly = bool(hopeful) or _are_brief(calls)
        for owner, numbers in groups.items():
            asked = [calls[number] for number in numbers]
            work = functools.partial(self._tell, heard, owner, asked, patience, turns)
            try:
                self._node(owner).ask_beside(patience.timeout, work, sparingly=briefly)
            except ANSWERLESS as error:
                heard.put((owner, [error] * len(asked)))
        brief = began + min(BRIEF, patience.timeout / 4)
        while awaited:
            until = brief if briefly and not hopeful & awaited else patience.until
            try:
                owner, found = heard.get(timeout=max(0.0, until - clock.monotonic()))
            except queue.Empty:
                break
            if isinstance(found, BaseException):
                raise found
            awaited.discard(owner)
            for number, answer in zip(groups[owner], found, strict=True):
                answers[number] = answer
        for owner in awaited:
            self._node(owner).fall_silent()
            self._doubt(owner)
            for number in groups[owner]:
                answers[number] = RedisTimeoutError(f"no answer of {owner[0]}:{owner[1]}")
        return answers

    def _tell(
        self,
        heard: "queue.SimpleQueue[tuple[HostPort, Any]]",
        owner: HostPort,
        calls: Sequence[Command],
        patience: "_Patience",
        turns: int,
    ) -> None:
        """Put what *owner* answers in *heard*, or whoever has taken its place."""
        try:
            if owner in self._doubted and not calls[0].node:
                found = self._ask_successors(calls, patience, turns)
            else:
                found = self._ask(owner, calls, patience, turns)
        except RedisError as error:
            found = [error.with_traceback(None)] * len(calls)  # it would keep all callers' frames
        except BaseException as error:  # noqa: BLE001  # it is raised in the thread that waits
            heard.put((owner, error))
            return
        heard.put((owner, found))

    def _ask_successors(
        self, calls: Sequence[Command], patience: "_Patience", turns: int
    ) -> list[Any]:
        """Ask those who have the keys by a new map; without one, by the last."""
        self._new_map(patience.until)
        answers: list[Any] = [None] * len(calls)
        for owner, numbers in self._by_owner(calls, patience.until).items():
            found = self._ask(owner, [calls[number] for number in numbers], patience, turns)
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        return answers

    def _ask(
        self, owner: HostPort, calls: Sequence[Command], patience: "_Patience", turns: int
    ) -> list[Any]:
        """Ask *owner*, and those that it names instead."""
        keys = [call.key for call in calls if call.node is None]
        confirm = functools.partial(self._confirm, owner, keys, patience.until)
        try:
            answers = self._node(owner).ask(calls, patience.timeout, patience.until, confirm)
        except ANSWERLESS as error:
            self._doubt(owner)
            return [error.with_traceback(None)] * len(calls)
        moved = []
        for number, answer in enumerate(answers):
            if isinstance(answer, AskError):
                answers[number] = self._send_on(owner, answer, calls[number], patience)
            elif isinstance(answer, MovedError):
                self._moved(owner, answer)
                moved.append(number)
        if moved or any(isinstance(answer, (*ANSWERLESS, ClusterDownError)) for answer in answers):
            self._doubt(owner)
        if moved and turns > 1 and clock.monotonic() < patience.until:
            again = self._exchange([calls[number] for number in moved], patience, turns - 1)
            for number, answer in zip(moved, again, strict=True):
                answers[number] = answer
        return answers

    def _confirm(self, owner: HostPort, keys: Sequence[bytes], until: float) -> None:
        """Raise unless another node says by *until*, too, that *owner* has *keys*."""
        others = [where for where in (self._map.nodes if self._map else ()) if where != owner]
        if not others:
            return
        known = self._ask_for_map(others, until)
        self._take(known)
        if any(known.owner(key) != owner for key in keys):
            raise RedisConnectionError("the answer is of one that may be no master any more")

    def _send_on(self, owner: HostPort, ask: AskError, call: Command, patience: "_Patience") -> Any:
        """Send *call* to where its slot is moving to."""
        target = self._node(_named(ask, owner))
        try:
            return target.ask([ASKING, call], patience.timeout, patience.until)[1]
        except ANSWERLESS as error:
            return error.with_traceback(None)

    def _doubt(self, owner: HostPort) -> None:
        """Ask for a new map before this node's keys are asked for; unless the last one is new."""
        if self._map is not None and clock.monotonic() > self._map.asked_at + MAP_AGE:
            self._doubted.add(owner)

    def _moved(self, owner: HostPort, answer: MovedError) -> None:
        target = _named(answer, owner)
        self._asked_first = [target]
        if self._map is not None:
            self._map.owners[answer.slot_id] = target
            if target not in self._map.nodes:
                self._map.nodes.append(target)

    def _new_map(self, until: float) -> _Map:
        """
        Ask for the map, unless somebody else has while we waited for that.

        Without an answer it is the last one.

        Raises:
            RedisConnectionError: There is none at all.
        """
        wanted_at = clock.monotonic()
        with self._mutex:
            before = self._map
            if self._tried_at > wanted_at:
                if before is None:
                    raise RedisConnectionError("no node of the cluster answers")
                return before
            nodes = before.nodes if before is not None else ()
            try:
                known = self._ask_for_map([*self._asked_first, *nodes, *self._seeds], until)
            except ANSWERLESS:
                if before is None:
                    raise
                return before
            finally:
                self._tried_at = clock.monotonic()
            self._asked_first = []
            self._take(known)
            return known

    def _ask_for_map(self, nodes: Iterable[HostPort], until: float) -> _Map:
        """
        Return the map that the first of *nodes* says; whoever takes long is not waited for.

        Those that were heard from last are asked first, and those that do not answer, where there
        are others, not at all.
        """
        by_age = sorted(dict.fromkeys(nodes), key=lambda where: -self._node(where).heard_at)
        left = [where for where in by_age if not self._node(where).failed_lately] or by_age
        left = sorted(left, key=lambda where: where not in self._asked_first)
        heard: queue.SimpleQueue[_Map | Exception] = queue.SimpleQueue()
        failure: Exception = RedisTimeoutError("there was no time left")
        awaited, empty = 0, None
        while (left or awaited) and (now := clock.monotonic()) < until:
            if left:
                beside(functools.partial(self._tell_map, heard, left.pop(0)))
                awaited += 1
            try:
                found = heard.get(timeout=min(NEXT, until - now) if left else until - now)
            except queue.Empty:
                continue
            awaited -= 1
            if isinstance(found, Exception):
                failure = found
            elif found.nodes:
                return found
            else:  # it is new here, or was thrown out
                empty = found
        if empty is not None:
            return empty
        raise RedisConnectionError(f"no node of the cluster answers: {failure}") from failure

    def _tell_map(self, heard: "queue.SimpleQueue[_Map | Exception]", where: HostPort) -> None:
        try:
            heard.put(self._read_map(where))
        except Exception as error:  # noqa: BLE001  # the thread that waits looks at it
            heard.put(error.with_traceback(None))

    def _read_map(self, where: HostPort) -> _Map:
        questions = [command(b"", "CLUSTER", "SLOTS"), command(b"", "COMMAND", "INFO", "SPUBLISH")]
        asked_at = clock.monotonic()
        ranges, known = self._node(where).ask(questions, MAP_TIMEOUT)
        if isinstance(ranges, ResponseError):
            refused = bool(missing(str(ranges)))
            why = "may not be asked for its cluster" if refused else "is not of a cluster"
            raise RedisConnectionError(f"{where[0]}:{where[1]} {why}: {ranges}")
        owners: list[HostPort | None] = [None] * SLOTS
        nodes: dict[HostPort, None] = {}
        for first, last, *served_by in ranges:
            found = [(_host(host, where), port) for host, port, *_ in served_by]
            owners[first : last + 1] = found[:1] * (last + 1 - first)
            nodes.update(dict.fromkeys(found))
        sharded = bool(known[0]) if isinstance(known, list) else False
        return _Map(owners, list(nodes), where, sharded, asked_at)

    def _take(self, known: _Map) -> None:
        """Go by *known* from now on, and forget the nodes that are gone; unless it is too old."""
        if self._map is not None and known.asked_at < self._map.asked_at:
            return  # an answer that was long on its way
        self._map, self._doubted = known, set()
        for where in {*self._nodes}.difference(known.nodes, self._seeds, [known.by]):
            if (node := self._nodes.pop(where, None)) is not None:
                node.close()

    def _node(self, where: HostPort) -> ClusterNode:
        node = self._nodes.get(where)
        if node is None:
            host, port = where
            settings = {**self._settings.settings, "host": host, "port": port}
            made = ClusterNode(NodeSettings(self._settings.connection_class, settings))
            node = self._nodes.setdefault(where, made)
        return node

    def _map_now(self) -> _Map:
        return self._map or self._new_map(clock.monotonic() + MAP_TIMEOUT)

    def place(self, key: bytes, channel: str) -> PushTarget:
        known, tag = self._map_now(), _tag(slot_of(key))
        if known.owner(key) in self._doubted:
            known = self._new_map(clock.monotonic() + MAP_TIMEOUT)
        sharded = f"{channel}:{{{tag}}}" if known.sharded else f"{channel}:{tag}"
        return PushTarget(known.owner(key), sharded)

    def connect(self, node: Any) -> ConnectionFactory:
        return self._node(node).connect(TIMEOUT)

    def nodes(self) -> Sequence[Hashable]:
        try:
            known = self._map_now()
            if self._doubted:
                known = self._new_map(clock.monotonic() + MAP_TIMEOUT)
        except ANSWERLESS:
            return self._seeds[:1]  # the request says what is wrong
        return list(dict.fromkeys(owner for owner in known.owners if owner))

    def has(self, node: Any) -> bool:
        return self._map is None or node in self._map.nodes

    def share(self, keys: Sequence[bytes]) -> bool:
        return len(set(map(slot_of, keys))) == 1

    def check(self) -> list[Finding]:
        missing = self._map_now().owners.count(None)
        if not missing:
            return []
        message = f"{missing} of the cluster's {SLOTS} slots have no node"
        remedy = "mend the cluster: keys of those slots cannot be taken"
        figures = {"slots_without_node": missing}
        return [Finding(Severity.DOUBT, "server", message, remedy, figures)]


class _Patience:
    """
    For how long somebody waits.

    Attributes:
        timeout: Seconds, for one answer.
        until: The local clock when it ends.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.until = clock.monotonic() + timeout


def _are_brief(calls: Sequence[Command]) -> bool:
    """Whether nobody waits for a silent node's answers to *calls* for longer than a moment."""
    return all(call.node or call.brief for call in calls)


def _named(answer: AskError, by: HostPort) -> HostPort:
    """Return the node that *answer* names; without a host, it is the one that has answered."""
    return _host(answer.host.encode(), by), answer.port


def _host(given: bytes | None, by: HostPort) -> str:
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
