"""
The store over a ZooKeeper ensemble, 3.5 or later.

A lock is a queue of nodes, each ephemeral and numbered by the ensemble. The node with the lowest
number holds the key. Each of the others watches only the node before it.

If a key is shared, the next nodes hold it as well. A node is admitted by a write to its data, once
all nodes before it hold the key and leave a unit. Only the first waiter watches holders, as many as
its capacity: there is no room for it until one of these is gone. A process that joins also admits
the nodes before its own that fit and have not been admitted yet.

The sign of life is the session: a process that dies keeps its keys until its session ends, however
short their leases are. A process ends a shorter lease itself. A longer lease is refused.

Every request that grants or confirms a hold has gone through the quorum, because a server that has
lost its leader still answers reads. With one server, the session then lasts for its whole timeout
from there. In an ensemble the leader learns of it with the next ping: if a follower is cut off
between its answer and that ping, the session may end up to a third earlier than believed. A session
of 1.5 leases or more makes up for that, for a process that runs normally. A process that was itself
stopped for most of a session is not covered.

The token is the transaction that created the node. Numbers and transactions rise together, so
tokens rise with every grant, also after the key's folder was deleted. A node that joins other
holders gets their token.
"""

import logging
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.process.notifications import log
from celery_distlock.stores.base import batches, forget_after_fork
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.findings import Finding, Severity, clock_finding
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import (
    Ability,
    Completion,
    KeyState,
    Ownership,
    ParkRequest,
    Release,
    RenewOutcome,
    Reply,
    Status,
    Waiter,
    WokenTask,
)

from .acquisition import GRANT, Attempt
from .completions import Completions
from .ensembles import described, find_doubts, locate
from .node_data import Facts
from .node_registry import NodeRegistry, RegisteredNode
from .queues import Place, Queue, digest, escaped, find, look_at, unescaped
from .sessions import FAILURES, TIMEOUT, Exchange, SessionManager, WatchInbox, words

logger = logging.getLogger(__name__)

CLAIM = 5.0  # seconds; the shortest time that a run has to become settled
BATCH = 100  # keys in one request


@dataclass
class _Departure:
    """A release; `sent`: an earlier attempt may have been executed."""

    name: str
    owner: str
    keep_for: tuple[str, float] | None
    sent: bool = False


class ZooKeeperStore(ListingStore):
    """A store over ZooKeeper, see the module; *url* as for :func:`.ensembles.locate`."""

    abilities = frozenset({Ability.RECOGNISE, Ability.SHARE, Ability.SEVERAL})

    def __init__(self, url: str, prefix: str, **options: str) -> None:
        self._ensemble = locate(url, options)
        self.address = self._ensemble.address
        self.identity = f"{self.address}#{prefix}"
        root = f"{self._ensemble.chroot}/{escaped(prefix)}"
        self._locks = f"{root}/locks"
        self._contact = SessionManager(self._ensemble, self._locks, f"{root}/done")
        self._marks = Completions(self._contact, f"{root}/done")
        self._registry = NodeRegistry(self._end)
        forget_after_fork(self)

    def acquire(self, request: AcquireRequest) -> Reply:
        if isinstance(request.queue, ParkRequest):
            raise StoreError(f"{self.address}: no task can be parked in ZooKeeper")
        key = request.key
        self.check_want(key, request.want)
        node = self._registry.asked_for(slot_name(key), request.owner)
        try:
            reply = self._contact.ask(lambda talk: self._attempt(talk, request, node), key)
        except BaseException:
            # The node may exist in spite of the error. Unless the request is repeated, it must not
            # stay.
            self._registry.end_at(node, max(node.believed_until, clock.monotonic() + GRANT))
            raise
        if not node.path:
            self._registry.forget(node)
        return reply

    def _attempt(self, talk: Exchange, request: AcquireRequest, node: RegisteredNode) -> Reply:
        if request.lease > talk.session.timeout:
            raise StoreError(self._too_long(talk, request.lease))
        queue, inbox = self._queue(talk, node.name), request.queue
        reply = Attempt(talk, queue, request, node, self._registry, self._marks).take()
        if reply.status is not Status.BUSY and isinstance(inbox, WatchInbox):
            talk.session.unwatch(inbox)
        return reply

    def _too_long(self, talk: Exchange, lease: float) -> str:
        asked, given = self._ensemble.session, talk.session.timeout
        cut = f" (not {asked:g} as requested: raise its maxSessionTimeout)" if asked > given else ""
        return (
            f"a lease of {lease:g} s is longer than the session timeout at {self.address},"
            f" {given:g} s{cut}: shorten the lease, or request longer sessions with"
            f" ?session={math.ceil(lease)}"
        )

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        asked_at = clock.monotonic()
        nodes = [self._registry.find(slot_name(hold.key), hold.owner) for hold in holds]
        lost = [node is not None and node.lost for node in nodes]
        if all(lost):
            return [(RenewOutcome.LOST, asked_at)] * len(holds)
        try:
            talk = self._contact.talk(timeout)
            asked_at = clock.monotonic()
            outcomes = self._renewed(talk, holds, asked_at)
        except FAILURES as error:
            log(
                logger,
                logging.WARNING,
                "%s did not answer a renewal: %s",
                self.address,
                words(error),
            )
            outcomes = [RenewOutcome.LOST if each else RenewOutcome.UNKNOWN for each in lost]
        return [(outcome, asked_at) for outcome in outcomes]

    def _renewed(
        self, talk: Exchange, holds: Sequence[Ownership], asked_at: float
    ) -> list[RenewOutcome]:
        paths = [self._registry.extend(hold, talk.session, asked_at) for hold in holds]
        # A read after a write through the quorum is at least as new as that write.
        writing = talk.ask_quorum(self._locks)
        looking = [talk.client.exists_async(path) if path else None for path in paths]
        talk.done(writing)
        there = [each is not None and talk.result(each) is not None for each in looking]
        outcomes = []
        for hold, ours in zip(holds, there, strict=True):
            if ours and hold.lease > talk.session.timeout:
                log(logger, logging.WARNING, "not renewed: %s", self._too_long(talk, hold.lease))
                outcomes.append(RenewOutcome.UNKNOWN)
            else:
                outcomes.append(RenewOutcome.RENEWED if ours else self._not_ours(talk, hold))
        return outcomes

    def _not_ours(self, talk: Exchange, hold: Ownership) -> RenewOutcome:
        """Return the outcome of renewing a key that this process does not hold (any longer)."""
        queue = self._queue(talk, slot_name(hold.key))
        line = queue.line()
        own = find(line, hold.owner)
        if own is not None:
            read = queue.read(own)
            if read is not None and read.stat.ephemeralOwner != talk.session.id:
                return RenewOutcome.UNKNOWN  # another process's node can be read but not extended
            line.remove(own)
        first = queue.read(line[0]) if line else None
        return RenewOutcome.HELD if first and first.facts.alone else RenewOutcome.LOST

    def release(self, request: ReleaseRequest) -> Release:
        key, owner, run, completion, inbox, keep_for, *_ = request
        departure = _Departure(slot_name(key), owner, keep_for)
        node = self._registry.find(departure.name, owner)

        def leave(talk: Exchange) -> bool:
            if isinstance(inbox, WatchInbox):
                talk.session.unwatch(inbox)
            # Marked first, so that a caller that finds the key free also finds the mark.
            if run and completion is Completion.UNSETTLED:
                left = node.until - clock.monotonic() if node is not None and node.held else 0.0
                held_back = max(left, CLAIM) if left < math.inf else CLAIM
                self._marks.make(talk, departure.name, run, held_back)
            elif run and completion is Completion.YES_AND_MAY_COME_AGAIN:
                self._marks.make(talk, departure.name, run)
            return self._leave(talk, departure)

        try:
            return Release(self._contact.ask(leave, key))
        except BaseException:
            if node is not None:
                self._registry.end_at(node, min(node.until, clock.monotonic() + GRANT))
            raise

    def _leave(self, talk: Exchange, departure: _Departure) -> bool:
        """Return whether the owner held the key, now or at an attempt that got no answer."""
        node = self._registry.find(departure.name, departure.owner)
        queue = self._queue(talk, departure.name)
        if node is not None and node.held and node.path and departure.keep_for is None:
            before, departure.sent = departure.sent, True
            released = talk.delete(node.path) or before
        else:
            # The node may have been created by another process, through another server.
            line = queue.line_up_to_date()
            own = [place for place in line if place.is_of(departure.owner)]
            held = queue.held(line, own[0]) if own else None
            released = departure.sent = bool(held) or (departure.sent and not own)
            if held is not None and departure.keep_for is not None:
                released = self._keep(talk, departure, own.pop(0), held)
            for place in own:
                talk.delete(place.path)
        if node is not None:
            self._registry.forget(node)
        return released

    def _keep(self, talk: Exchange, departure: _Departure, own: Place, held: Facts) -> bool:
        """Replace our node by one that outlives this process, for a run to claim."""
        assert departure.keep_for is not None
        run, seconds = departure.keep_for
        queue, nonce = self._queue(talk, departure.name), secrets.token_hex(8)
        facts = held._replace(owner=f"parked:{run}", run=run, seconds=seconds)
        path = queue.replace(own, digest(facts.owner) + nonce, facts, ephemeral=False)
        if path:
            kept = RegisteredNode(departure.name, nonce, path=path, session=talk.session)
            self._registry.add(kept, clock.monotonic() + seconds)
        return bool(path)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        def forget(talk: Exchange) -> bool:
            line = self._queue(talk, wake.name).line()
            kept = [place.path for place in line if place.is_kept_for(wake.run)]
            marks = self._marks.find(talk, wake.name, wake.run)
            unsettled = [each.path for each in marks if each.held_back]
            if mark and (kept or unsettled):
                self._marks.make(talk, wake.name, wake.run)
            for path in kept if mark else kept + unsettled:
                talk.delete(path)
            return bool(kept or unsettled)

        return Release(self._contact.ask(forget, wake.name))

    def subscribed(self, key: str) -> bool:
        return True

    def inbox(self, key: str, owner: str) -> Inbox:
        return WatchInbox(owner)

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        return self._contact.ask(lambda talk: self._look(talk, [key])[0], key, only=timeout)

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        folders = self._contact.ask(self._folders, "the list of keys")
        wanted = [each for each in folders if fnmatchcase(key_of(unescaped(each)), pattern)]
        for some in batches(wanted, BATCH):
            keys = self._contact.ask(partial(self._in_use, folders=some), "the keys")
            if keys:
                yield keys

    def _folders(self, talk: Exchange) -> list[str]:
        talk.catch_up(self._locks)
        return talk.children(self._locks)

    def _in_use(self, talk: Exchange, folders: Sequence[str]) -> list[str]:
        """Return the keys whose *folders* are not empty; empty ones exist until their deletion."""
        stats = talk.each(talk.client.exists_async, [f"{self._locks}/{each}" for each in folders])
        found = zip(folders, stats, strict=True)
        return [key_of(unescaped(each)) for each, stat in found if stat and stat.numChildren]

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        states = []
        for some in batches(keys, BATCH):
            states += self._contact.ask(partial(self._look, keys=some), "the keys")
        return states

    def _look(self, talk: Exchange, keys: Sequence[str]) -> list[KeyState]:
        return look_at(talk, [self._queue(talk, slot_name(key)) for key in keys])

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        name = slot_name(key)
        line = self._contact.ask(lambda talk: self._queue(talk, name).without_holders(), key)
        found = []
        for some in batches(line[first : first + limit], BATCH):
            found += self._contact.ask(partial(self._waiting, name=name, line=some), key)
        return found

    def _waiting(self, talk: Exchange, name: str, line: Sequence[Place]) -> list[Waiter]:
        return self._queue(talk, name).waiting(line)

    def describe(self) -> Iterator[Finding]:
        timeout, ahead = self._contact.ask(self._terms, "the session")
        for server in described(self._ensemble):
            yield Finding(Severity.OK, "server", server)
        message = f"{timeout:g} s, which is the longest lease"
        yield Finding(Severity.OK, "session", message, figures={"timeout": timeout})
        yield clock_finding(ahead)

    def _terms(self, talk: Exchange) -> tuple[float, float]:
        """Return the session timeout, and by how much the ensemble's clock is ahead of ours."""
        asked_at = time.time()
        stat = talk.result(talk.client.set_async(self._locks, b""))
        return talk.session.timeout, stat.mtime / 1000 - (asked_at + time.time()) / 2

    def check(self) -> list[Finding]:
        probe = f"probe:{secrets.token_hex(8)}"
        session = self._contact.ask(lambda talk: talk.session, probe)
        self._try_lock(probe, min(1.0, session.timeout))
        return list(find_doubts(self._ensemble, session.timeout))

    def close(self) -> None:
        """End the session and with it all its holds; the next use opens another."""
        registry, self._registry = self._registry, NodeRegistry(self._end)
        registry.close()
        self._contact.close()

    def forget_connections(self) -> None:
        """Drop the session inherited by a fork; send nothing, since it is the parent's."""
        self._registry = NodeRegistry(self._end)
        self._contact.after_fork()

    def _queue(self, talk: Exchange, name: str) -> Queue:
        return Queue(talk, self._locks, name, self._registry)

    def _end(self, node: RegisteredNode) -> None:
        self._queue(self._contact.talk(TIMEOUT), node.name).remove(node)
