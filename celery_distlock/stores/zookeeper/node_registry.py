"""The nodes of this process in an ensemble, and the thread that deletes them when they are due."""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.values import Ownership

from .node_data import Facts
from .sessions import FAILURES, Session, WatchInbox, words

logger = logging.getLogger(__name__)

LOOK = 1.0  # seconds; the longest sleep, since the machine itself may have been suspended


@dataclass
class RegisteredNode:
    """A node of this process."""

    name: str
    owner: str
    path: str = ""  # empty: there is none, or the answer to its creation was lost
    session: Session | None = None
    token: int = 0
    capacity: int = 1  # this, the slot and the lease: as in the node's data
    slot: int = -1
    lease: float = 0.0
    believed_until: float = -math.inf  # the end of the lease that was granted or renewed
    until: float = math.inf  # when it is deleted; infinite while its owner asks or waits
    asked: bool = False  # its creation may have been sent
    held: bool = False
    doomed: bool = False  # it is due for deletion
    leftover: bool = False  # any node of this owner is from an earlier request
    inbox: WatchInbox | None = None

    def found(self, session: Session, path: str, facts: Facts, token: int) -> None:
        self.session, self.path, self.token = session, path, token
        self.capacity, self.slot, self.lease = facts.capacity, facts.slot, facts.seconds
        self.believed_until, self.held = -math.inf, False

    @property
    def lost(self) -> bool:
        return self.session is not None and self.session.lost


class NodeRegistry:
    """Keeps the nodes of this process, and calls *end* for each when it is due."""

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
        """Whether *node* is still the node of its owner."""
        return self.find(node.name, node.owner) is node

    def asked_for(self, name: str, owner: str) -> RegisteredNode:
        """Note that *owner* asks for *name*; until the request is over, its node does not end."""
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

    def extend(self, hold: Ownership, session: Session, now: float) -> str:
        """Extend a hold's end; return its node's path, or "" if there is none in that session."""
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
        """Note that a waiter must take the key by *until*, or lose its turn."""
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
                thread = DaemonThread("distlock-zookeeper-nodes", self._run)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._closed:
            self._next = math.inf  # so that nodes added from here on wake this thread
            try:
                self._tend()
            except Exception:  # noqa: BLE001  # it is logged
                text = "unexpected error while expiring ZooKeeper nodes; trying again"
                log_safely(logger, logging.ERROR, text, exc_info=True)
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
                logger.debug("%s will be deleted later: %s", node.path, words(error))
                node.until = clock.monotonic() + LOOK
            else:
                self.forget(node)
