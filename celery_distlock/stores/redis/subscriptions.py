"""How servers push grants to waiters that block until they have a key."""

import collections
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from weakref import WeakSet, WeakValueDictionary, ref

from redis.exceptions import RedisError

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.channels import Inbox

from .connections import ConnectionFactory
from .pubsub import PAUSE, PubSubConnection
from .topology import PushTarget

logger = logging.getLogger(__name__)

JOIN = 0.5  # seconds that a waiter gives the server to confirm the subscription
AT_ONCE = 8  # waiters of a process that ask again when messages may have been lost


class WaiterSubscriptions:
    """
    Carries grants to this process's waiters, over one connection for all of them.

    Waiters that block need no extra thread: one of them reads for all, and passes that on when it
    leaves. So a single waiter is woken directly by the server. Coroutines cannot read; while some
    wait, there is one thread for all of them, which takes its turn in reading.
    """

    def __init__(self, connect: ConnectionFactory) -> None:
        self._connection = PubSubConnection(connect, self._call, self._on_confirmed)
        self._inboxes: WeakValueDictionary[str, Attendant] = WeakValueDictionary()
        # The current reader, if any. A dictionary, because taking the place and recording the
        # reader must be one step: a time limit's exception may come between two.
        self._reader: dict[None, ref[Attendant]] = {}
        # Reentrant: a signal handler may wait while its thread has this.
        self._mutex = threading.RLock()
        self._broken_until = 0.0
        self._to_call: collections.deque[ref[Attendant]] = collections.deque()
        self._do_not_block: WeakSet[PubSubInbox] = WeakSet()
        self._thread: threading.Thread | None = None

    def join(self, inbox: "PubSubInbox", place: PushTarget) -> None:
        """Begin to wake *inbox*; return when the server knows, if it answers."""
        self._inboxes[inbox.owner] = inbox
        try:
            if self._reads(inbox):
                self._connection.refresh()
        except (RedisError, OSError):
            self._connection.close()
        finally:
            self._stop_reading(inbox)
        if not self._connection.is_subscribed(place.channel):
            with contextlib.suppress(RedisError, OSError):
                self._connection.want(place)
            self.attend(inbox, lambda: self._connection.is_subscribed(place.channel), JOIN)

    def is_subscribed(self, channel: str) -> bool:
        """Whether pushes to *channel* are received now, as far as known without asking."""
        return self._connection.fresh and self._connection.is_subscribed(channel)

    def leave(self, inbox: "PubSubInbox") -> None:
        """Stop waking *inbox*."""
        self._inboxes.pop(inbox.owner, None)
        self._do_not_block.discard(inbox)
        self._stop_reading(inbox)  # again, if an exception came between
        self._call_next()
        self._hand_on()

    def read_for(self, inbox: "PubSubInbox") -> None:
        """Provide a reader for *inbox*, whose waiter does not block, until it leaves."""
        self._call_next()
        with self._mutex:
            self._do_not_block.add(inbox)
            if self._thread is None:
                self._thread = thread = DaemonThread("distlock-pushes", self._attend)
                try:
                    thread.start()
                except BaseException:
                    self._thread = None
                    raise

    def _attend(self) -> None:
        attendant = Attendant("the thread of waiters that do not block")
        self._inboxes[attendant.owner] = attendant
        while True:
            try:
                self.attend(attendant, lambda: not self._do_not_block, math.inf)
            except Exception:  # noqa: BLE001  # it is logged
                text = "unexpected error while reading pushes; continuing"
                log_safely(logger, logging.ERROR, text, exc_info=True)
            with self._mutex:
                if not self._do_not_block:
                    self._thread = None
                    return

    def attend(self, inbox: "Attendant", done: Callable[[], bool], timeout: float) -> None:
        """Return when *done*, or after *timeout* seconds; read for all if there is no reader."""
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
        """Whether *inbox* is the reader, or has become it now."""
        reader = self._reader.setdefault(None, inbox.me)
        if reader() is None:  # its thread ended abruptly, without a call of `leave`
            self._vacate(reader)
            reader = self._reader.setdefault(None, inbox.me)
        return reader is inbox.me

    def _stop_reading(self, inbox: "Attendant") -> None:
        self._vacate(inbox.me)
        self._hand_on()

    def _vacate(self, reader: "ref[Attendant]") -> None:
        with self._mutex:
            # Without a call in between, after which a signal handler could run.
            if None in self._reader and self._reader[None] is reader:
                del self._reader[None]

    def _hand_on(self) -> None:
        """Wake one waiter to read, if there is no reader."""
        if self._inboxes and not self._reader:
            for inbox in self._present():
                if inbox.attends:
                    inbox.event.set()
                    return

    def _present(self) -> "list[Attendant]":
        """A snapshot of the waiters; the set changes while it is iterated."""
        found = (inbox() for inbox in self._inboxes.valuerefs())
        return [inbox for inbox in found if inbox is not None]

    def _read(self, timeout: float) -> None:
        try:
            self._connection.listen(timeout)
        except (RedisError, OSError) as error:
            if not self._broken_until:
                logger.warning("no pushes for now, the subscription broke: %s", error)
            self._broken_until = clock.monotonic() + clock.jitter(*PAUSE)
        else:
            self._broken_until = 0.0

    def _call(self, owner: bytes) -> None:
        inbox = self._inboxes.get(owner.decode(errors="replace"))
        if inbox is not None:
            inbox.call()

    def _on_confirmed(self, gap: bool) -> None:
        if gap:  # all waiters may have missed a push, or the server may have forgotten them
            self._to_call = collections.deque(
                inbox.me for inbox in self._present() if isinstance(inbox, PubSubInbox)
            )
            for _ in range(AT_ONCE):
                self._call_next()
        else:
            for inbox in self._present():
                inbox.event.set()  # it may have waited for this

    def _call_next(self) -> None:
        """Wake one waiter that has to ask again; when it is back, the next is woken."""
        with contextlib.suppress(IndexError):
            while (inbox := self._to_call.popleft()()) is None:
                pass
            inbox.call()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Attendant:
    """A possible reader: a waiter, or the thread of the waiters that do not block."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.me = ref(self)
        self.attends = False
        self.event = threading.Event()

    def call(self) -> None:
        """Make it ask for its key, if it waits for one."""

    def doze(self, timeout: float) -> None:
        """Wait until there is something to check, *timeout* seconds at most."""
        if self.event.wait(timeout if timeout < threading.TIMEOUT_MAX else None):
            self.event.clear()


class PubSubInbox(Attendant, Inbox):
    """
    An inbox that is woken by the server that has the key.

    Args:
        owner: The waiter.
        find: Returns the subscriptions at the server that has the key now, and the push target.
    """

    def __init__(
        self, owner: str, find: Callable[[], tuple[WaiterSubscriptions, PushTarget]]
    ) -> None:
        super().__init__(owner)
        self._called = False
        self._on_push: Callable[[], object] | None = None
        self._find = find
        self._subscriptions, place = find()
        self.address = place.channel
        self._subscriptions.join(self, place)

    def call(self) -> None:
        """Wake the waiter."""
        self._called = True
        self.event.set()
        if self._on_push is not None:
            self._on_push()

    def on_push(self, call: Callable[[], object]) -> None:
        self._on_push = call
        self._subscriptions.read_for(self)

    def next_look(self, timeout: float) -> float:
        self._follow()
        self._subscriptions.read_for(self)
        return timeout

    def wait(self, timeout: float) -> None:
        self._follow()
        self._subscriptions.attend(self, lambda: self._called, timeout)
        self._called = False

    def _follow(self) -> None:
        """Join the waiters at the server that has the key now."""
        with contextlib.suppress(StoreUnavailableError):
            subscriptions, place = self._find()
            if subscriptions is not self._subscriptions:  # the key has moved to another server
                self._subscriptions.leave(self)
                self._subscriptions = subscriptions
                subscriptions.join(self, place)

    def close(self) -> None:
        self._subscriptions.leave(self)
