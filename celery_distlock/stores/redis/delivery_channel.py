"""Receive parked executions that servers push to a worker when their turn comes."""

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable

from redis.exceptions import RedisError

from celery_distlock import clock
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.channels import DeliveryChannel
from celery_distlock.stores.values import WokenTask

from .connections import ConnectionFactory
from .pubsub import IDLE_PING, PAUSE, PubSubConnection
from .topology import PushTarget, Topology

logger = logging.getLogger(__name__)

CLOSING = 0.25  # seconds that closing a delivery channel waits for its threads


class Pushes:
    """
    Handles the messages of a delivery channel.

    Args:
        address: The channel's address.
        receive: Called with each execution.
    """

    def __init__(self, address: str, receive: Callable[[WokenTask], object]) -> None:
        self._address = address
        self._receive = receive

    def take(self, payload: bytes) -> None:
        """Pass on the execution in *payload*; log what is wrong with it."""
        try:
            wake = _pushed(payload)
        except ValueError as error:
            said = shown(str(error))
            logger.warning("ignored a push to %s that is not a task: %s", self._address, said)
            return
        try:
            self._receive(wake)
        except Exception:
            name = shown(key_of(wake.name))
            logger.exception("a push for %r was not handled; the next sweep sends the task", name)


class PubSubChannel(DeliveryChannel):
    """A channel that servers push to, each over a connection that a thread reads."""

    def __init__(
        self, channel: str, servers: Topology, receive: Callable[[WokenTask], object]
    ) -> None:
        self.address = channel
        self._servers = servers
        self._pushes = Pushes(channel, receive)
        self._listeners: dict[Hashable, _Listener] = {}
        self._closed = False
        self._mutex = threading.Lock()

    def attend(self, place: PushTarget, patience: float = 0.0) -> None:
        """Receive pushes to *place*; wait *patience* seconds for its server to confirm that."""
        with self._mutex:
            listener = self._listeners.get(place.node)
            if listener is None and not self._closed:
                for gone in [node for node in self._listeners if not self._servers.has(node)]:
                    self._listeners.pop(gone).close()
                connect = self._servers.connect(place.node)
                listener = self._listeners[place.node] = _Listener(connect, self._pushes.take)
        if listener is not None:
            listener.want(place, patience)

    def close(self) -> None:
        """Close it as promised: afterwards nothing calls `receive`, unless a call hangs."""
        with self._mutex:
            self._closed = True
            listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            listener.close()
        until = clock.monotonic() + CLOSING
        for listener in listeners:
            listener.join(max(0.0, until - clock.monotonic()))


def woken_task_of(record: str, wake: WokenTask) -> bytes:
    """
    Return the payload of a push, as grant.lua makes it; *record* is its key's lock.

    An execution that has already claimed its key is in the list of releasers as itself: workers of
    older versions read that, too.
    """
    name, run = (part.encode("utf-8", "surrogateescape") for part in (record, wake.run))
    givers = run if wake.returned else b""
    head = b"%d %d %d 0 " % (len(name), len(run), len(givers))
    return head + name + run + givers + wake.envelope


def _pushed(payload: bytes) -> WokenTask:
    """Return the execution in a payload; raise :exc:`ValueError` if it has none."""
    *head, rest = payload.split(b" ", 4)
    lock_length, run_length, givers_length, arrival = map(int, head)
    run_ends = lock_length + run_length
    givers_end = run_ends + givers_length
    if not 0 < lock_length < run_ends <= givers_end <= len(rest):
        raise ValueError("its lengths are not those of its parts")
    name = rest[:lock_length].decode().partition("{")[2].rpartition("}")[0]
    run, givers = rest[lock_length:run_ends].decode(), rest[run_ends:givers_end].decode()
    all_givers = [giver for giver in givers.split("\n") if giver]
    others = tuple(giver for giver in all_givers if giver != run)
    envelope, returned = rest[givers_end:], run in all_givers
    return WokenTask(name, run, envelope, arrival=arrival, givers=others, returned=returned)


class _Listener:
    """A thread that is subscribed at one server."""

    def __init__(self, connect: ConnectionFactory, receive: Callable[[bytes], None]) -> None:
        self._connection = PubSubConnection(connect, receive, self._note_change)
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = DaemonThread("distlock-delivery", self._run)
        self._thread.start()

    def want(self, place: PushTarget, patience: float) -> None:
        if self._connection.is_subscribed(place.channel):
            return
        with contextlib.suppress(RedisError, OSError):  # it subscribes when the server is back
            self._connection.want(place)
        deadline = clock.monotonic() + patience
        while not self._connection.is_subscribed(place.channel) and clock.monotonic() < deadline:
            self._changed.wait(0.1)
            self._changed.clear()

    def close(self) -> None:
        self._closed.set()
        self._connection.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, at most *timeout* seconds; no-op in that thread itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                self._connection.listen(IDLE_PING)
                failures = 0
            except Exception as error:  # noqa: BLE001  # the thread must live on in any case
                if not self._closed.is_set():
                    if not failures:
                        text = "no pushes for now, the subscription broke: %s"
                        log_safely(logger, logging.WARNING, text, error)
                    failures = min(failures + 1, 8)
                    self._closed.wait(failures * clock.jitter(*PAUSE))
        self._connection.close()

    def _note_change(self, gap: bool) -> None:
        self._changed.set()  # and the next sweep finds what was lost
