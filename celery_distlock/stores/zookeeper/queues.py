"""
The queue of one key: the nodes in its folder, in the order of their numbers.

A node's name is ``<digest of its owner>-<number>``. The node of a key that is reserved for a run
has a nonce after the digest, which makes its name unique.
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

DIGITS = 32  # of a digest
LAST_NUMBER = 2**31 - 1  # of a key's nodes; after it ZooKeeper repeats the same number
MOST_AT_ONCE = 100  # nodes in one transaction
ROUNDS = 20  # reads of a queue that keeps changing, in one attempt
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
    """The queue of the key *name*, in one exchange."""

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
        """Return the line, including all that other processes and unanswered requests have done."""
        self._talk.catch_up(self._locks)
        return self.line()

    def join(self, node: RegisteredNode, facts: Facts) -> list[Place]:
        """Create the node; return the line after that, or [] if there was no folder."""
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
                f"{self.folder} has no more numbers; it is deleted when it was empty for a minute,"
                " or delete it yourself when it is empty"
            )
        return self._line(self._talk.result(looking))

    def replace(self, place: Place, name: str, facts: Facts, *, ephemeral: bool) -> str:
        """Replace a node by another one in one step; return its path, or "" if the old is gone."""
        path = f"{self.folder}/{name}-{place.number:010d}"
        change = self._talk.client.transaction()
        change.delete(place.path)
        change.create(path, facts.data(), ephemeral=ephemeral)
        return path if self._talk.done(change.commit_async()) else ""

    def remove(self, node: RegisteredNode) -> None:
        """Delete the node; if its path is unknown, delete all nodes of its owner."""
        if node.path:
            self._talk.delete(node.path)
        else:
            for place in self.line_up_to_date():
                if place.is_of(node.owner) and self._registry.knows(node):
                    self._talk.delete(place.path)
        node.path, node.held, node.leftover = "", False, False

    def let_in(self, line: Sequence[Place], entries: Sequence[Entry]) -> bool:
        """
        Write to the nodes of *entries*, the first of the line, that they hold the key.

        The first of several entries needs no write: it is known to hold the key. False if not all
        writes were done: a node is gone, or another process has written to it.
        """
        change = self._talk.client.transaction()
        alone = len(entries) == 1
        news = [n for n, entry in enumerate(entries) if not entry.noted and (n or alone)]
        if news[0]:
            # While the node before holds the key, the token is the same. It also precedes all nodes
            # that are admitted here.
            change.check(line[news[0] - 1].path, -1)
        for n in news[:MOST_AT_ONCE]:
            facts, record = entries[n]
            change.set_data(line[n].path, facts.data(), record.stat.version)
        return self._talk.done(change.commit_async()) and len(news) <= MOST_AT_ONCE

    def read(self, place: Place) -> Record | None:
        """Read a node; None if it is gone."""
        got = self._talk.get(place.path)
        return None if got is None else Record.read(got)

    def read_all(self, line: Sequence[Place]) -> list[Record | None]:
        """Read several nodes at once; None for those that are gone."""
        found = self._talk.each(self._talk.client.get_async, [place.path for place in line])
        return [None if got is None else Record.read(got) for got in found]

    def entries(self, line: Sequence[Place]) -> list[Entry] | None:
        """Return the holders in the line; None if one of the nodes is gone by now."""
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
        """Return the facts of a node in the line, with its token; None if it does not hold it."""
        index, read = line.index(own), self.read(own)
        if read is None or (index and not read.facts.token):
            return None
        return read.facts if read.facts.token else holders([read])[0].facts

    def without_holders(self) -> list[Place]:
        """Return the line without the holders."""
        for _ in range(ROUNDS):
            line = self.line()
            held = self.entries(line) if line else []
            if held is not None:
                return line[len(held) :]
        raise zk.OperationTimeoutError("the queue changed too often while it was looked at")

    def remaining(self, place: Place, record: Record) -> float:
        """Return for how many seconds the hold lasts, as far as known."""
        left = record.facts.seconds
        node = self._registry.find(self._name, record.facts.owner)
        if place.kept:
            left = max(0.0, record.came + left - self._talk.session.time())
        elif node is not None and node.held:
            left = max(0.0, min(node.until - clock.monotonic(), self._talk.session.timeout))
        return left

    def waiting(self, line: Sequence[Place]) -> list[Waiter]:
        """Return the waiters in the places of *line*, without those that are gone."""
        return [
            Waiter(each.facts.owner, "", each.came, want=Want(1, each.facts.capacity))
            for each in self.read_all(line)
            if each is not None
        ]

    def state(self, line: Sequence[Place], held: Sequence[Entry]) -> KeyState:
        """Return a snapshot of the key, whose holders are *held*, the first of the line."""
        shown = [
            Holder(facts.owner, facts.run, 1, facts.slot, record.since, left)
            for place, (facts, record) in zip(line, held, strict=False)
            if (left := self.remaining(place, record)) or not place.kept
        ]
        if not shown:
            return FREE
        owner, run, _, _, since, left, *_ = shown[0]
        state = KeyState(owner, held[0].facts.token, run, since, left, 0)
        if held[0].facts.alone:
            return state
        capacity = held[-1].facts.capacity
        return state._replace(
            holders=tuple(shown[:MOST_HOLDERS]), used=len(shown), capacity=capacity
        )


def look_at(talk: Exchange, queues: Sequence[Queue]) -> list[KeyState]:
    """Return snapshots of several keys: two requests for each exclusive one, all sent at once."""
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
            state = _state(queue, line, [found[place.path] for place in line[:2]])
            if state is not None:
                states[queue] = state
    raise zk.OperationTimeoutError("a queue changed too often while it was looked at")


def _state(queue: Queue, line: Sequence[Place], found: Sequence[Any]) -> KeyState | None:
    """Return the state of a line whose first two nodes are *found*; None if a node is gone."""
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
    """Return *name* as a node's name: unique for each name, and readable where possible."""
    text = quote(name, safe=":,=@+!~", errors="surrogatepass")
    return text.replace(".", "%2E") if text in {".", ".."} else text


def unescaped(node: str) -> str:
    """Return the name that was `escaped`."""
    return unquote(node, errors="surrogateescape")  # another program's name may contain %FF


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
