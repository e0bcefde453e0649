"""
What servers push: grants to blocked waiters, parked runs to workers.

A push can be lost, so nobody may rely on one; a waiter looks for itself now and then, and a sweep
finds the runs.
"""

import collections
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

from redis.connection import Connection
from redis.exceptions import MovedError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.log_lines import say
from celery_distlock.stores.channels import DeliveryChannel, Inbox
from celery_distlock.stores.values import WokenTask

from .cluster_slots import slot_of
from .connections import TIMEOUT, ConnectionFactory, known
from .topology import PushTarget, Topology

__all__ = ["PubSubChannel", "WaiterSubscriptions", "woken_task_of"]

logger = logging.getLogger(__name__)

IDLE_PING = 5.0  # seconds after which a silent connection is asked whether it is still there
RESTED = 60.0  # seconds after which a connection that nobody has read from is made anew
JOIN = 0.5  # seconds that a waiter gives the server to confirm that it will push
AT_ONCE = 8  # waiters of a process that look again when messages may have been lost
CLOSING = 0.25  # seconds that a delivery channel waits at its end for the threads that listen
PAUSE = (0.2, 1.0)  # seconds between attempts to connect; spread, for all try at once


class PubSubConnection:
    """
    Channels of one server, heard over one connection at a time, by one thread at a time.

    Args:
        connect: Makes connections.
        on_message: Called with each message.
        on_heard: Called when a channel is heard; with True if messages may have been lost before.
    """

    def __init__(
        self,
        connect: ConnectionFactory,
        on_message: Callable[[bytes], None],
        on_heard: Callable[[bool], None],
    ) -> None:
        self._connect = connect
        self._on_message = on_message
        self._on_heard = on_heard
        self._connection: Connection | None = None
        self._wanted: dict[str, PushTarget] = {}
        self._heard: set[str] = set()
        self._heard_at = self._pinged_at = self._opened_at = 0.0
        self._doubtful = self._gap = False
        # Of what is wanted, and of telling the server. A signal's handler may want a channel
        # while its thread has it.
        self._mutex = threading.RLock()

    def want(self, place: PushTarget) -> None:
        """Begin to listen to the channel of *place*: its messages come once `hears` says so."""
        with self._mutex:
            if place.channel not in self._wanted:
                self._wanted[place.channel] = place
                connection = self._connection
                if connection is not None:
                    self._doubtful = True  # if this fails, redis-py forgets the others' channels
                    connection.send_command(_verb(place), place.channel)
                    self._doubtful = False

    def hears(self, channel: str) -> bool:
        """Whether the server has confirmed that it sends us what comes on *channel*."""
        return channel in self._heard

    def listen(self, timeout: float) -> None:
        """
        Take one message, if one comes within *timeout* seconds.

        Raises:
            RedisError: The connection broke, or cannot be made; the next call makes another.
            OSError: Likewise.
        """
        connection = self._connection
        if connection is not None and (
            self._doubtful or self._connect.is_stale(connection, self._opened_at)
        ):
            self.close()
            connection = None
        try:
            if connection is None:
                connection = self._open()
            if connection.can_read(min(timeout, IDLE_PING)):
                self._hear(connection)
            else:
                self._ping(connection)
        except BaseException:
            # Also when a time limit's exception strikes: half a message may be left in there.
            self.close()
            raise

    def refresh(self) -> None:
        """Make sure that the connection, which nobody has read from for a while, is not dead."""
        while self._connection is not None and self._connection.can_read(0):
            self.listen(0)
        if not self.fresh:
            self.close()

    @property
    def fresh(self) -> bool:
        """Whether the server was heard from so lately that the connection is taken for alive."""
        return clock.monotonic() < self._heard_at + RESTED

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        self._heard.clear()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.disconnect()

    def _open(self) -> Connection:
        self._opened_at = clock.monotonic()
        connection = self._connect()
        connection.connect()
        with self._mutex:
            self._doubtful = False
            self._connection = connection  # first, so that what such a handler wants is told to it
            for channel, place in list(self._wanted.items()):
                connection.send_command(_verb(place), channel)
        self._note_life()
        return connection

    def _hear(self, connection: Connection) -> None:
        try:
            message = connection.read_response()
        except ResponseError as error:
            moved = known(error)
            if not isinstance(moved, MovedError):
                raise
            self._lose([c for c in list(self._wanted) if slot_of(c.encode()) == moved.slot_id])
        else:
            self._take(message)

    def _lose(self, channels: Sequence[str]) -> None:
        """Want *channels* no more: their slot has moved, and who waits there looks where to."""
        for channel in channels:
            self._wanted.pop(channel, None)
            self._heard.discard(channel)
        self._on_heard(True)

    def _note_life(self) -> None:
        self._heard_at, self._pinged_at = clock.monotonic(), 0.0

    def _ping(self, connection: Connection) -> None:
        now = clock.monotonic()
        if self._pinged_at and now > self._pinged_at + TIMEOUT:
            raise RedisTimeoutError("no answer to a ping")
        if not self._pinged_at and now > self._heard_at + IDLE_PING:
            self._pinged_at = now
            connection.send_command("PING", check_health=False)

    def _take(self, message: Any) -> None:
        self._note_life()
        kind, channel, payload = message if len(message) == 3 else (b"", b"", b"")
        if kind in (b"message", b"smessage"):
            self._on_message(payload)
        elif kind in (b"subscribe", b"ssubscribe"):
            self._heard.add(channel.decode())
            self._on_heard(self._gap)
            if self._heard.issuperset(self._wanted):
                self._gap = True  # from now on, another connection means that some were lost
        elif kind == b"sunsubscribe":
            self._lose([channel.decode()])


def _verb(place: PushTarget) -> str:
    return "SSUBSCRIBE" if place.sharded else "SUBSCRIBE"


class WaiterSubscriptions:
    """
    Carries grants to this process's waiters, over one connection for all of them.

    There is no thread of its own for those who block: one of them reads for all, and hands that on
    when it goes. So the one who waits alone is woken by nobody but the server. Coroutines cannot
    read; while some wait there is a thread that takes its turn in reading, one for all of them.
    """

    def __init__(self, connect: ConnectionFactory) -> None:
        self._ear = PubSubConnection(connect, self._call, self._heard)
        self._inboxes: WeakValueDictionary[str, Attendant] = WeakValueDictionary()
        # Who reads for all, if anybody does. A dictionary, because to take the place and to note
        # who has it must be one step: a time limit's exception may strike between two.
        self._reader: dict[None, ref[Attendant]] = {}
        self._mutex = threading.RLock()  # a signal's handler may wait while its thread has it
        self._broken_until = 0.0
        self._to_call: collections.deque[ref[Attendant]] = collections.deque()
        self._do_not_block: WeakSet[PubSubInbox] = WeakSet()
        self._thread: threading.Thread | None = None

    def join(self, inbox: "PubSubInbox", place: PushTarget) -> None:
        """Let *inbox* be called from now on; return when the server knows, if it answers."""
        self._inboxes[inbox.owner] = inbox
        try:
            if self._reads(inbox):
                self._ear.refresh()
        except (RedisError, OSError):
            self._ear.close()
        finally:
            self._stop_reading(inbox)
        if not self._ear.hears(place.channel):
            with contextlib.suppress(RedisError, OSError):
                self._ear.want(place)
            self.attend(inbox, lambda: self._ear.hears(place.channel), JOIN)

    def hears(self, channel: str) -> bool:
        """Whether what comes on *channel* is heard now, as far as can be known without asking."""
        return self._ear.fresh and self._ear.hears(channel)

    def leave(self, inbox: "PubSubInbox") -> None:
        """Call *inbox* no more."""
        self._inboxes.pop(inbox.owner, None)
        self._do_not_block.discard(inbox)
        self._stop_reading(inbox)  # again, if an exception came between
        self._call_next()
        self._hand_on()

    def read_for(self, inbox: "PubSubInbox") -> None:
        """See that somebody reads for *inbox*, whose waiter does not block, until it leaves."""
        self._call_next()
        with self._mutex:
            self._do_not_block.add(inbox)
            if self._thread is None:
                self._thread = thread = threading.Thread(
                    target=self._attend, name="distlock-pushes", daemon=True
                )
                try:
                    thread.start()
                except BaseException:
                    self._thread = None
                    raise

    def _attend(self) -> None:
        attendant = Attendant("the thread of those who do not block")
        self._inboxes[attendant.owner] = attendant
        while True:
            try:
                self.attend(attendant, lambda: not self._do_not_block, math.inf)
            except Exception:  # noqa: BLE001  # it is said
                text = "unexpected error while reading pushes; going on"
                say(logger, logging.ERROR, text, exc_info=True)
            with self._mutex:
                if not self._do_not_block:
                    self._thread = None
                    return

    def attend(self, inbox: "Attendant", done: Callable[[], bool], timeout: float) -> None:
        """Return when *done*, or after *timeout* seconds; read for all, if nobody does."""
        deadline = clock.monotonic() + timeout
        inbox.attends = True
        self._call_next()
        try:
            while not done() and (left := deadline - (now := clock.monotonic())) > 0:
                if not self._reads(inbox):
                    inbox.doze(left)
                elif now < self._broken_until:
                    inbox.doze(min(left, self._broken_until - now))
                else:
                    self._read(left)
        finally:
            inbox.attends = False
            self._stop_reading(inbox)

    def _reads(self, inbox: "Attendant") -> bool:
        """Whether *inbox* is the one who reads, or has become it now."""
        reader = self._reader.setdefault(None, inbox.me)
        if reader() is None:  # its thread was torn out of it, and never came to leave
            self._vacate(reader)
            reader = self._reader.setdefault(None, inbox.me)
        return reader is inbox.me

    def _stop_reading(self, inbox: "Attendant") -> None:
        self._vacate(inbox.me)
        self._hand_on()

    def _vacate(self, reader: "ref[Attendant]") -> None:
        with self._mutex:
            # Without a call in between, after which such a handler could come.
            if None in self._reader and self._reader[None] is reader:
                del self._reader[None]

    def _hand_on(self) -> None:
        """WokenTask one who waits, if nobody reads for those who do."""
        if self._inboxes and not self._reader:
            for inbox in self._present():
                if inbox.attends:
                    inbox.event.set()
                    return

    def _present(self) -> "list[Attendant]":
        """Who waits now. Others come and go meanwhile, which an iteration would not bear."""
        found = (inbox() for inbox in self._inboxes.valuerefs())
        return [inbox for inbox in found if inbox is not None]

    def _read(self, timeout: float) -> None:
        try:
            self._ear.listen(timeout)
        # The last two: it was closed while it was read.
        except (RedisError, OSError, ValueError, AttributeError) as error:
            if not self._broken_until:
                logger.warning("no pushes for now, the subscription broke: %s", error)
            self._broken_until = clock.monotonic() + clock.jitter(*PAUSE)
        else:
            self._broken_until = 0.0

    def _call(self, owner: bytes) -> None:
        inbox = self._inboxes.get(owner.decode(errors="replace"))
        if inbox is not None:
            inbox.call()

    def _heard(self, gap: bool) -> None:
        if gap:  # whoever waits may have been called, or forgotten by the server
            self._to_call = collections.deque(
                inbox.me for inbox in self._present() if isinstance(inbox, PubSubInbox)
            )
            for _ in range(AT_ONCE):
                self._call_next()
        else:
            for inbox in self._present():
                inbox.event.set()  # it may have waited for this

    def _call_next(self) -> None:
        """Call one of those who have to look: when one is back, the next."""
        with contextlib.suppress(IndexError):
            while (inbox := self._to_call.popleft()()) is None:
                pass
            inbox.call()

    def close(self) -> None:
        """Give the connection back."""
        self._ear.close()


class Attendant:
    """One who may read for all: one who waits, or the thread of those who do not block."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.me = ref(self)
        self.attends = False
        self.event = threading.Event()

    def call(self) -> None:
        """Have it look at its key, if it waits for one."""

    def doze(self, timeout: float) -> None:
        """Wait until there is something to look at, *timeout* seconds at most."""
        if self.event.wait(timeout if timeout < threading.TIMEOUT_MAX else None):
            self.event.clear()


class PubSubInbox(Attendant, Inbox):
    """
    An inbox that is called by the server that has the key.

    Args:
        address: The channel that this process subscribed to, for any key.
        owner: Who waits.
        find: Returns the post of the server that has the key now, and the place that it pushes to.
    """

    def __init__(
        self, owner: str, find: Callable[[], tuple[WaiterSubscriptions, PushTarget]]
    ) -> None:
        super().__init__(owner)
        self._called = False
        self._on_push: Callable[[], object] | None = None
        self._find = find
        self._post, place = find()
        self.address = place.channel
        self._post.join(self, place)

    def call(self) -> None:
        """Wake who waits."""
        self._called = True
        self.event.set()
        if self._on_push is not None:
            self._on_push()

    def on_push(self, call: Callable[[], object]) -> None:
        self._on_push = call
        self._post.read_for(self)

    def next_look(self, timeout: float) -> float:
        self._follow()
        self._post.read_for(self)
        return timeout

    def wait(self, timeout: float) -> None:
        self._follow()
        self._post.attend(self, lambda: self._called, timeout)
        self._called = False

    def _follow(self) -> None:
        """Join those who wait at the server that has the key now."""
        with contextlib.suppress(StoreUnavailableError):
            post, place = self._find()
            if post is not self._post:  # the key has moved to another server
                self._post.leave(self)
                self._post = post
                post.join(self, place)

    def close(self) -> None:
        self._post.leave(self)


class PubSubChannel(DeliveryChannel):
    """A channel that servers push to, each over a connection that a thread reads."""

    def __init__(
        self, channel: str, servers: Topology, receive: Callable[[WokenTask], object]
    ) -> None:
        self.address = channel
        self._servers = servers
        self._receive = receive
        self._ears: dict[Hashable, _Listener] = {}
        self._closed = False
        self._mutex = threading.Lock()

    def attend(self, place: PushTarget, patience: float = 0.0) -> None:
        """Take what is pushed to *place*; wait *patience* seconds until its server knows."""
        with self._mutex:
            listener = self._ears.get(place.node)
            if listener is None and not self._closed:
                for gone in [node for node in self._ears if not self._servers.has(node)]:
                    self._ears.pop(gone).close()
                connect = self._servers.connect(place.node)
                listener = self._ears[place.node] = _Listener(connect, self._take)
        if listener is not None:
            listener.want(place, patience)

    def close(self) -> None:
        """As promised; when it returns nobody calls `receive` any more, unless that hangs."""
        with self._mutex:
            self._closed = True
            listeners, self._ears = list(self._ears.values()), {}
        for listener in listeners:
            listener.close()
        until = clock.monotonic() + CLOSING
        for listener in listeners:
            listener.join(max(0.0, until - clock.monotonic()))

    def _take(self, payload: bytes) -> None:
        try:
            wake = _pushed(payload)
        except ValueError as error:
            said = shown(str(error))
            logger.warning("what was pushed to %s is no run, and not taken: %s", self.address, said)
            return
        try:
            self._receive(wake)
        except Exception:
            name = shown(key_of(wake.name))
            logger.exception("what was pushed for %r was not taken; the next sweep sends it", name)


def woken_task_of(record: str, wake: WokenTask) -> bytes:
    """
    Return what is pushed of a run, as grant.lua makes it; *record* is its key's lock.

    One that has come for its key before has given it up for itself: workers of older versions read
    that, too.
    """
    name, run = (part.encode("utf-8", "surrogateescape") for part in (record, wake.run))
    givers = run if wake.returned else b""
    head = b"%d %d %d 0 " % (len(name), len(run), len(givers))
    return head + name + run + givers + wake.envelope


def _pushed(payload: bytes) -> WokenTask:
    """Return the run that was pushed; raise :exc:`ValueError` if it is none."""
    *head, rest = payload.split(b" ", 4)
    lock_length, run_length, givers_length, arrival = map(int, head)
    run_ends = lock_length + run_length
    givers_end = run_ends + givers_length
    if not 0 < lock_length < run_ends <= givers_end <= len(rest):
        raise ValueError("its lengths are not those of its parts")
    name = rest[:lock_length].decode().partition("{")[2].rpartition("}")[0]
    run, givers = rest[lock_length:run_ends].decode(), rest[run_ends:givers_end].decode()
    told = [giver for giver in givers.split("\n") if giver]
    others = tuple(giver for giver in told if giver != run)
    envelope, returned = rest[givers_end:], run in told
    return WokenTask(name, run, envelope, arrival=arrival, givers=others, returned=returned)


class _Listener:
    """A thread that subscribed to one server."""

    def __init__(self, connect: ConnectionFactory, receive: Callable[[bytes], None]) -> None:
        self._ear = PubSubConnection(connect, receive, self._note_change)
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distlock-delivery", daemon=True)
        self._thread.start()

    def want(self, place: PushTarget, patience: float) -> None:
        if self._ear.hears(place.channel):
            return
        with contextlib.suppress(RedisError, OSError):  # it is told when it is back
            self._ear.want(place)
        deadline = clock.monotonic() + patience
        while not self._ear.hears(place.channel) and clock.monotonic() < deadline:
            self._changed.wait(0.1)
            self._changed.clear()

    def close(self) -> None:
        self._closed.set()
        self._ear.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, *timeout* seconds at most; it may be the one that asks."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                self._ear.listen(IDLE_PING)
                failures = 0
            except Exception as error:  # noqa: BLE001  # whatever it is, the thread has to live on
                if not self._closed.is_set():
                    if not failures:
                        text = "no pushes for now, the subscription broke: %s"
                        say(logger, logging.WARNING, text, error)
                    failures = min(failures + 1, 8)
                    self._closed.wait(failures * clock.jitter(*PAUSE))
        self._ear.close()

    def _note_change(self, gap: bool) -> None:
        self._changed.set()  # and what was lost is found by the next sweep
