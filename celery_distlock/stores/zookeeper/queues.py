"""
The queue of one key: the nodes in its folder, in the order of their numbers.

A node is called ``<digest of its owner>-<number>``. That of a key that is kept for a run has a
nonce behind the digest, to be like no other's.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.stores.values import KeyState, Waiter

from .node_registry import NodeRegistry, RegisteredNode
from .sessions import Exchange, zk

__all__ = [
    "ROUNDS",
    "Facts",
    "Place",
    "Queue",
    "digest",
    "escaped",
    "find",
    "look_at",
    "unescaped",
]

DIGITS = 32  # of a digest
LAST_NUMBER = 2**31 - 1  # of a key's nodes, after which ZooKeeper gives the same one again
ROUNDS = 20  # looks at a queue that changes under our eyes, in one attempt
FREE = KeyState("", 0, "", 0.0, 0.0, 0)
_NAME = re.compile(rf"([0-9a-f]{{{DIGITS}}})([0-9a-f]*)-(\d{{10}})")


class Facts(NamedTuple):
    """What a node's data say."""

    owner: str = ""
    run: str = ""
    seconds: float = 0.0  # its lease, or how long the key is kept
    token: int = 0  # 0: the transaction that made the node

    def data(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @property
    def are_ours(self) -> bool:
        words = isinstance(self.owner, str) and isinstance(self.run, str)
        lasts = isinstance(self.seconds, int | float) and 0 <= self.seconds < math.inf
        return words and lasts and type(self.token) is int and 0 <= self.token < 2**63


def facts_of(data: bytes) -> Facts:
    """Return what *data* say; nothing if it was not us who made them."""
    try:
        facts = Facts(**json.loads(data))
    except (TypeError, ValueError, RecursionError):
        return Facts()
    return facts if facts.are_ours else Facts()


class Place(NamedTuple):
    """One node in a queue."""

    number: int
    digest: str
    nonce: str
    path: str

    @property
    def kept(self) -> bool:
        return bool(self.nonce)

    def is_of(self, owner: str) -> bool:
        return self.digest == digest(owner)

    def is_kept_for(self, run: str) -> bool:
        return self.kept and bool(run) and self.is_of(f"parked:{run}")


def find(line: Sequence[Place], owner: str) -> Place | None:
    """Return the place where *owner* queues."""
    return next((place for place in line if place.is_of(owner) and not place.kept), None)


class Queue:
    """The queue of the key *name*, in one talk."""

    def __init__(self, talk: Exchange, locks: str, name: str, registry: NodeRegistry) -> None:
        self.folder = f"{locks}/{escaped(name)}"
        self._talk = talk
        self._locks = locks
        self._name = name
        self._registry = registry

    def line(self) -> list[Place]:
        return self._line(self._talk.children(self.folder))

    def _line(self, names: Sequence[str]) -> list[Place]:
        ours = filter(None, map(_NAME.fullmatch, names))
        return sorted(Place(int(n[3]), n[1], n[2], f"{self.folder}/{n[0]}") for n in ours)

    def line_up_to_date(self) -> list[Place]:
        """Return the line with what others, or lost requests of ours, have done to it by now."""
        self._talk.catch_up(self._locks)
        return self.line()

    def join(self, node: RegisteredNode, facts: Facts) -> list[Place]:
        """Make the node; return the line as it is then, or [] if there was no folder."""
        client = self._talk.client
        making = client.create_async(
            f"{self.folder}/{digest(node.owner)}-",
            facts.data(),
            ephemeral=True,
            sequence=True,
            include_data=True,
        )
        looking = client.get_children_async(self.folder)
        made = self._talk.found(making)
        if made is None:
            self._talk.create_container(self.folder)
            return []
        path, stat = made
        node.found(self._talk.session, path, stat.czxid, facts.seconds)
        if int(path[-10:]) >= LAST_NUMBER:
            self._talk.delete(path)
            raise StoreError(
                f"{self.folder} has no more numbers; it goes when nobody is there for a minute, or"
                " delete it then"
            )
        return self._line(self._talk.result(looking))

    def replace(self, place: Place, name: str, facts: Facts, *, ephemeral: bool) -> str:
        """Put a node where another one is, in one step; return its path, or "" if that is gone."""
        path = f"{self.folder}/{name}-{place.number:010d}"
        change = self._talk.client.transaction()
        change.delete(place.path)
        change.create(path, facts.data(), ephemeral=ephemeral)
        return path if self._talk.done(change.commit_async()) else ""

    def remove(self, node: RegisteredNode) -> None:
        """Delete the node, or whatever else is there of its owner."""
        if node.path:
            self._talk.delete(node.path)
        else:
            for place in self.line_up_to_date():
                if place.is_of(node.owner) and self._registry.knows(node):
                    self._talk.delete(place.path)
        node.path, node.held, node.leftover = "", False, False

    def read(self, place: Place) -> tuple[Facts, Any] | None:
        """Return what a node says, with its token, and its stat; None if it is gone."""
        got = self._talk.get(place.path)
        return None if got is None else _read(got)

    def waiting(self, line: Sequence[Place]) -> list[Waiter]:
        """Return who waits in the places of *line*, but for those who are gone."""
        paths = [place.path for place in line]
        reads = [_read(got) for got in self._talk.each(self._talk.client.get_async, paths) if got]
        return [Waiter(facts.owner, "", stat.ctime / 1000) for facts, stat in reads]

    def state(self, head: Place) -> KeyState | None:
        """Return what the first node means for the key; None if it is gone."""
        read = self.read(head)
        return None if read is None else self._meant(head, *read)

    def _meant(self, head: Place, facts: Facts, stat: Any) -> KeyState:
        since, left = stat.ctime / 1000, facts.seconds
        node = self._registry.find(self._name, facts.owner)
        if head.kept:
            left = max(0.0, since + left - self._talk.session.time())
        elif node is not None and node.held:
            left = max(0.0, min(node.until - clock.monotonic(), self._talk.session.timeout))
        return KeyState(facts.owner, facts.token, facts.run, since, left, 0)

    def _told(self, line: Sequence[Place], found: Sequence[Any]) -> KeyState | None:
        """Return what a line means, its first two nodes as *found*; None if one of them is gone."""
        if None in found:
            return None
        if not line:
            return FREE
        state = self._meant(line[0], *_read(found[0]))
        if line[0].kept and not state.remaining:
            state = FREE
        oldest = found[1][1].ctime / 1000 if len(found) > 1 else 0.0
        return state._replace(waiting=len(line) - 1, oldest=oldest)


def look_at(talk: Exchange, queues: Sequence[Queue]) -> list[KeyState]:
    """Look at several keys, with two questions for each, of which all go at once."""
    states: dict[Queue, KeyState] = {}
    for _ in range(ROUNDS):
        left = [queue for queue in queues if queue not in states]
        if not left:
            return [states[queue] for queue in queues]
        names = talk.each(talk.client.get_children_async, [queue.folder for queue in left])
        lines = [queue._line(each or ()) for queue, each in zip(left, names, strict=True)]
        heads = [place.path for line in lines for place in line[:2]]
        found = dict(zip(heads, talk.each(talk.client.get_async, heads), strict=True))
        for queue, line in zip(left, lines, strict=True):
            state = queue._told(line, [found[place.path] for place in line[:2]])
            if state is not None:
                states[queue] = state
    raise zk.OperationTimeoutError("a queue changed too often while it was looked at")


def _read(got: Any) -> tuple[Facts, Any]:
    facts = facts_of(got[0])
    return facts._replace(token=facts.token or got[1].czxid), got[1]


def escaped(name: str) -> str:
    """Return *name* as a node's name; different for different names, readable where it can be."""
    text = quote(name, safe=":,=@+!~", errors="surrogatepass")
    return text.replace(".", "%2E") if text in {".", ".."} else text


def unescaped(node: str) -> str:
    """Return the name that was `escaped`."""
    return unquote(node, errors="surrogateescape")  # a name that is none of ours, say %FF


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
