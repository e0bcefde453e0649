"""
Sends a woken task straight to a worker, ahead of what waits in the broker's queue.

Its key is reserved and idle until it runs. So it is pushed to the delivery channel of a live worker
that consumes its broker queue. A task that releases a key pushes to its own worker, where a slot is
about to be free. A worker's main process (sweeps, keys that time opens) pushes to its own worker if
that has free slots: it knows the task, which others may not during a deploy. Other processes push
to a worker with free slots, and so does one whose own worker does not accept it. If no worker
accepts it, it is sent by the broker.

A call that was sent through the store has not waited in the broker's queue. Where no slot is free
for it, it waits there now: thousands may be due at once, and workers fetch only what they can run.
"""

import collections
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from celery import Celery

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.stores import QueueStore, Store
from celery_distlock.stores.values import PeerChannel, WokenTask

from .message_facts import LockHeader
from .routing import queue_names

__all__ = ["Relay", "by_room"]

logger = logging.getLogger(__name__)

MOST_TRIED = 3  # delivery channels that turn out to be closed, before the broker is used
REMEMBERED = 1.0  # seconds for which the workers of a queue are not looked up again
COUNTED_FOR = 2.5  # seconds until a worker's free slots, as remembered, reflect a push

_Asked: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]  # broker queues, own addresses


class Relay:
    """Pushes the woken tasks of one app to workers."""

    def __init__(self, app: Celery, store: Callable[[], Store]) -> None:
        self._app = app
        self._store = store
        # Delivery channel of the worker whose task this process runs, or ran last.
        self.own_address = ""
        # Delivery channel of the worker whose main process this is.
        self.main_address = ""
        self._pushed: collections.deque[tuple[float, str]] = collections.deque()  # when, and where
        # By queues and own addresses: the workers found, and until when they are remembered.
        self._found: dict[_Asked, tuple[list[PeerChannel], float]] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the mutexes: in a child, no thread would release them."""
        self._mutex, self._finding = threading.Lock(), threading.Lock()

    def push(self, woken: WokenTask, message: Mapping[str, Any]) -> bool:
        """
        Push a woken task to a worker; return false if none accepted it, so the broker must send it.

        Args:
            woken: The task.
            message: Its envelope, decoded and checked.
        """
        return bool(self.push_together([(woken, message)]))

    def push_together(self, woken: Iterable[tuple[WokenTask, Mapping[str, Any]]]) -> set[str]:
        """Push each of *woken*, as :meth:`push` does; return the runs that workers accepted."""
        alike: dict[tuple[_Asked, bool], list[WokenTask]] = {}
        for wake, message in woken:
            alike.setdefault(self._kind(message), []).append(wake)
        pushed: set[str] = set()
        try:
            store = QueueStore.of(self._store())
            for (asked, is_call), wakes in alike.items():
                peers = self._remembered(asked)
                if peers:
                    pushed |= self._push_to(peers, wakes, store, is_call=is_call)
                left = [wake for wake in wakes if wake.run not in pushed]
                if left:
                    peers = self._find(asked, store, peers)
                    pushed |= self._push_to(peers, left, store, is_call=is_call)
        except StoreError as error:
            keys = {key_of(wake.name) for wakes in alike.values() for wake in wakes}
            words = "tasks woken at %s are sent by the broker, not straight to a worker: %s"
            logger.debug(words, ", ".join(map(shown, sorted(keys))), error)
        return pushed

    def _kind(self, message: Mapping[str, Any]) -> tuple[_Asked, bool]:
        """Return what decides where *message* goes: what is asked, and if it is that of a call."""
        queues = queue_names(self._app, message["exchange"], message["routing_key"])
        near = dict.fromkeys(filter(None, (self.own_address, self.main_address)))
        return (tuple(queues), tuple(near)), LockHeader.of(message["headers"]).sent

    def _remembered(self, asked: _Asked) -> list[PeerChannel]:
        peers, until = self._found.get(asked, ([], 0.0))
        return peers if clock.monotonic() < until else []

    def _find(
        self, asked: _Asked, store: QueueStore, refused: list[PeerChannel]
    ) -> list[PeerChannel]:
        """Look up the workers, unless a thread just did; *refused* did not accept the task."""
        with self._finding:
            peers = self._remembered(asked)
            if not peers or peers is refused:
                peers, now = store.channels.find_channels(*asked), clock.monotonic()
                others = {each: found for each, found in self._found.items() if found[1] > now}
                self._found = {**others, asked: (peers, now + REMEMBERED)}
        return peers

    def _push_to(
        self, peers: list[PeerChannel], wakes: list[WokenTask], store: QueueStore, *, is_call: bool
    ) -> set[str]:
        """Push each of *wakes* to one of *peers*; return the runs that were accepted."""
        pushes = [(wake, self._choose(peers, is_call=is_call)) for wake in wakes]
        pushed = store.channels.push_all(pushes)
        accepted = {wake.run for wake, is_pushed in zip(wakes, pushed, strict=True) if is_pushed}
        for wake, addresses in pushes:
            if wake.run not in accepted and addresses:
                self._uncount(addresses[0])
        return accepted

    def _choose(self, peers: list[PeerChannel], *, is_call: bool) -> list[str]:
        """Return the addresses to try: this process's own worker if it is there, else by room."""
        main = self.main_address
        peers = sorted(by_room(peers), key=self._distance)
        if is_call:
            own = self.own_address
            peers = [each for each in peers if each.address == own or self._has_room(each)]
        addresses = [peer.address for peer in peers[:MOST_TRIED]]
        if addresses and (is_call or addresses[0] == main):
            with self._mutex:
                self._pushed.append((clock.monotonic(), addresses[0]))
        return addresses

    def _uncount(self, address: str) -> None:
        """Forget a push to *address*, if one was counted."""
        with self._mutex:
            counted = next((each for each in self._pushed if each[1] == address), None)
            if counted is not None:
                self._pushed.remove(counted)

    def _distance(self, peer: PeerChannel) -> int:
        if peer.address == self.own_address:
            return 0
        return 1 if peer.address == self.main_address and self._has_room(peer) else 2

    def _has_room(self, peer: PeerChannel) -> bool:
        """Whether *peer* has more free slots than tasks that this process just pushed to it."""
        with self._mutex:
            while self._pushed and clock.monotonic() > self._pushed[0][0] + COUNTED_FOR:
                self._pushed.popleft()
            return peer.free > sum(address == peer.address for _, address in self._pushed)


def by_room(peers: Iterable[PeerChannel]) -> list[PeerChannel]:
    """Return *peers* in random order, weighted by free slots; those without any come last."""

    def draw(peer: PeerChannel) -> tuple[bool, float]:
        return not peer.free, -math.log(1.0 - clock.jitter(0.0, 1.0)) / (peer.free or 1)

    return sorted(peers, key=draw)
