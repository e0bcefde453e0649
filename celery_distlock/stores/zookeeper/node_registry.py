"""What this process has in an ensemble, and the thread that ends it in time."""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.process.log_lines import say
from celery_distlock.stores.values import Ownership

from .node_data import Facts
from .sessions import FAILURES, Session, WatchInbox, words

__all__ = ["NodeRegistry", "RegisteredNode"]

logger = logging.getLogger(__name__)

LOOK = 1.0  # seconds; no timer sleeps longer, for it may be the machine that slept


@dataclass
class RegisteredNode:
    """One node of this process's own."""

    name: str
    owner: str
    path: str = ""  # empty: there is none, or its making was not answered
    session: Session | None = None
    token: int = 0
    capacity: int = 1  # this, the slot and the lease: as the node says
    slot: int = -1
    lease: float = 0.0
    believed_until: float = -math.inf  # the end of what was granted or renewed
    until: float = math.inf  # when it is ended; not while its owner asks or waits for the key
    asked: bool = False  # its making may have been sent
    held: bool = False
    doomed: bool = False  # its end has come
    leftover: bool = False  # what is there of its owner is an earlier request's
    inbox: WatchInbox | None = None

    def found(self, session: Session, path: str, facts: Facts, token: int) -> None:
        self.session, self.path, self.token = session, path, token
        self.capacity, self.slot, self.lease = facts.capacity, facts.slot, facts.seconds
        self.believed_until, self.held = -math.inf, False

    @property
    def lost(self) -> bool:
        return self.session is not None and self.session.lost


class NodeRegistry:
    """Keeps the nodes of this process, and calls *end* for each when its time has come."""

    def __init__(self, end: Callable[[RegisteredNode], None]) -> None:
        self._end = end
        self._nodes: dict[tuple[str, str], RegisteredNode] = {}
        self._mutex = threading.Lock()
        self._next = math.inf
        self._news = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def find(self, name: str, owner: str) -> RegisteredNode | None:
        return self._nodes.get((name, owner))

    def knows(self, node: RegisteredNode) -> bool:
        """Whether it is the node of its owner still."""
        return self.find(node.name, node.owner) is node

    def asked_for(self, name: str, owner: str) -> RegisteredNode:
        """Note that *owner* asks for *name*: his node does not end meanwhile."""
        with self._mutex:
            node = self._nodes.get((name, owner))
            if node is None or node.doomed or node.lost:
                node = RegisteredNode(name, owner, leftover=node is not None)
                self._nodes[name, owner] = node
            node.until = math.inf
            return node

    def granted(self, node: RegisteredNode, until: float) -> None:
        with self._mutex:
            node.held = True
            node.believed_until = node.until = max(until, node.believed_until)
        self._see_to(node.until)

    def put_off(self, hold: Ownership, session: Session, now: float) -> str:
        """Put a hold's end off; return its node's path, or "" if there is none in that session."""
        with self._mutex:
            node = self.find(slot_name(hold.key), hold.owner)
            if node is None or node.session is not session or not node.held:
                return ""
            if node.doomed or node.until <= now:
                return ""
            node.believed_until = now + min(hold.lease, session.timeout)
            node.until = max(node.until, node.believed_until)
            return node.path

    def woken(self, node: RegisteredNode, until: float) -> None:
        """Note that a waiter has to come, or lose his turn."""
        with self._mutex:
            if node.held:
                return
            node.until = until
        self._see_to(until)

    def end_at(self, node: RegisteredNode, until: float) -> None:
        with self._mutex:
            node.until = until
        self._see_to(until)

    def add(self, node: RegisteredNode, until: float) -> None:
        with self._mutex:
            self._nodes[node.name, node.owner] = node
        self.end_at(node, until)

    def forget(self, node: RegisteredNode) -> None:
        with self._mutex:
            if self.knows(node):
                del self._nodes[node.name, node.owner]
        if node.inbox is not None and node.session is not None:
            node.session.unwatch(node.inbox)

    def drop(self, name: str, owner: str) -> None:
        self._nodes.pop((name, owner), None)

    def close(self) -> None:
        self._closed = True
        self._news.set()

    def _see_to(self, at: float) -> None:
        if at < self._next:
            self._news.set()
        with self._mutex:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="distlock-zookeeper-nodes", daemon=True
                )
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._closed:
            self._next = math.inf  # whatever comes while we look is looked at again
            try:
                self._tend()
            except Exception:  # noqa: BLE001  # it is said
                text = "unexpected error while expiring ZooKeeper nodes; trying again"
                say(logger, logging.ERROR, text, exc_info=True)
                self._news.wait(LOOK)
            with self._mutex:
                self._next = min((node.until for node in self._nodes.values()), default=math.inf)
            left = self._next - clock.monotonic()
            self._news.wait(min(max(0.0, left), LOOK) if left < math.inf else None)
            self._news.clear()

    def _tend(self) -> None:
        with self._mutex:
            now = clock.monotonic()
            overdue = [node for node in self._nodes.values() if node.until <= now]
            for node in overdue:
                node.doomed = True
        for node in overdue:
            try:
                if not node.lost:
                    self._end(node)
            except FAILURES as error:
                logger.debug("%s is ended later: %s", node.path, words(error))
                node.until = clock.monotonic() + LOOK
            else:
                self.forget(node)
