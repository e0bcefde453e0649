"""
The queue of one key: the nodes in its folder, in the order of their numbers.

A node is called ``<digest of its owner>-<number>``. That of a key that is kept for a run has a
nonce behind the digest, to be like no other's.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.stores.base import batches
from celery_distlock.stores.values import MOST_HOLDERS, Holder, KeyState, Waiter, Want

from .admission import Entry, holders
from .node_data import Facts, Record
from .node_registry import NodeRegistry, RegisteredNode
from .sessions import Exchange, zk

__all__ = [
    "ROUNDS",
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
MOST_AT_ONCE = 100  # nodes in one transaction
ROUNDS = 20  # looks at a queue that changes under our eyes, in one attempt
FREE = KeyState("", 0, "", 0.0, 0.0, 0)
_NAME = re.compile(rf"([0-9a-f]{{{DIGITS}}})([0-9a-f]*)-(\d{{10}})")


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
        node.found(self._talk.session, path, facts, stat.czxid)
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

    def let_in(self, line: Sequence[Place], entries: Sequence[Entry]) -> bool:
        """
        Note in the nodes of *entries*, the first of the line, that they have the key.

        A first one, of several, is known to have it without that. False if not all of it was done:
        one of them is gone, or somebody else has noted it.
        """
        change = self._talk.client.transaction()
        alone = len(entries) == 1
        news = [n for n, entry in enumerate(entries) if not entry.noted and (n or alone)]
        if news[0]:
            # While that one has it the token is the same, and it comes before all who are let in.
            change.check(line[news[0] - 1].path, -1)
        for n in news[:MOST_AT_ONCE]:
            facts, record = entries[n]
            change.set_data(line[n].path, facts.data(), record.stat.version)
        return self._talk.done(change.commit_async()) and len(news) <= MOST_AT_ONCE

    def read(self, place: Place) -> Record | None:
        """Return what a node says; None if it is gone."""
        got = self._talk.get(place.path)
        return None if got is None else Record.read(got)

    def read_all(self, line: Sequence[Place]) -> list[Record | None]:
        """Read several nodes at once; None for those that are gone."""
        found = self._talk.each(self._talk.client.get_async, [place.path for place in line])
        return [None if got is None else Record.read(got) for got in found]

    def entries(self, line: Sequence[Place]) -> list[Entry] | None:
        """Return those of the line who have the key; None if one of them is gone by now."""
        records: list[Record] = []
        for some in (line[:1], *batches(line[1:], MOST_HOLDERS)):
            for record in self.read_all(some):
                if record is None:
                    return None
                records.append(record)
            held = holders(records)
            if len(held) < len(records) or held[0].facts.alone:
                return held
        return holders(records)

    def held(self, line: Sequence[Place], own: Place) -> Facts | None:
        """Return what is said of one of the line, with its token, if it has the key."""
        index, read = line.index(own), self.read(own)
        if read is None or (index and not read.facts.token):
            return None
        return read.facts if read.facts.token else holders([read])[0].facts

    def those_who_wait(self) -> list[Place]:
        """Return the line without those who have the key."""
        for _ in range(ROUNDS):
            line = self.line()
            held = self.entries(line) if line else []
            if held is not None:
                return line[len(held) :]
        raise zk.OperationTimeoutError("the queue changed too often while it was looked at")

    def remaining(self, place: Place, record: Record) -> float:
        """Return for how many seconds more the key is its own, as far as is known."""
        left = record.facts.seconds
        node = self._registry.find(self._name, record.facts.owner)
        if place.kept:
            left = max(0.0, record.came + left - self._talk.session.time())
        elif node is not None and node.held:
            left = max(0.0, min(node.until - clock.monotonic(), self._talk.session.timeout))
        return left

    def waiting(self, line: Sequence[Place]) -> list[Waiter]:
        """Return who waits in the places of *line*, but for those who are gone."""
        return [
            Waiter(each.facts.owner, "", each.came, want=Want(1, each.facts.capacity))
            for each in self.read_all(line)
            if each is not None
        ]

    def state(self, line: Sequence[Place], held: Sequence[Entry]) -> KeyState:
        """Return what is to be told of the key if *held* have it, the first of the line."""
        told = [
            Holder(facts.owner, facts.run, 1, facts.slot, record.since, left)
            for place, (facts, record) in zip(line, held, strict=False)
            if (left := self.remaining(place, record)) or not place.kept
        ]
        if not told:
            return FREE
        owner, run, _, _, since, left, _ = told[0]
        state = KeyState(owner, held[0].facts.token, run, since, left, 0)
        if held[0].facts.alone:
            return state
        capacity = held[-1].facts.capacity
        return state._replace(holders=tuple(told[:MOST_HOLDERS]), used=len(told), capacity=capacity)


def look_at(talk: Exchange, queues: Sequence[Queue]) -> list[KeyState]:
    """Look at several keys, with two questions for each unshared one, of which all go at once."""
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
            state = _told(queue, line, [found[place.path] for place in line[:2]])
            if state is not None:
                states[queue] = state
    raise zk.OperationTimeoutError("a queue changed too often while it was looked at")


def _told(queue: Queue, line: Sequence[Place], found: Sequence[Any]) -> KeyState | None:
    """Return what a line means, its first two nodes as *found*; None if one of them is gone."""
    if None in found:
        return None
    if not line:
        return FREE
    first, *second = map(Record.read, found)
    if first.facts.alone or not second:
        held: list[Entry] | None = holders([first])
        following = second
    else:
        held = queue.entries(line)
        if held is None:
            return None
        after = queue.read_all(line[len(held) :][:1])
        following = [each for each in after if each is not None]
        if len(following) < len(after):
            return None
    assert held is not None
    oldest = following[0].came if following else 0.0
    return queue.state(line, held)._replace(waiting=len(line) - len(held), oldest=oldest)


def escaped(name: str) -> str:
    """Return *name* as a node's name; different for different names, readable where it can be."""
    text = quote(name, safe=":,=@+!~", errors="surrogatepass")
    return text.replace(".", "%2E") if text in {".", ".."} else text


def unescaped(node: str) -> str:
    """Return the name that was `escaped`."""
    return unquote(node, errors="surrogateescape")  # a name that is none of ours, say %FF


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
