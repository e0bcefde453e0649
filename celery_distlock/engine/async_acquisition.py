"""
Acquire, wait for and release keys in coroutines.

Each request is made in a thread, by the code that threads use. Waiting is done in the event loop: a
push resolves a future, from whichever thread reads it. So any number of waiting coroutines need no
more threads than one.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, WeakValueDictionary

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.naming import shown
from celery_distlock.process.forks import ForkStage, at_fork
from celery_distlock.process.request_threads import RequestThreads
from celery_distlock.stores import Store
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.values import Reply, Status

from .acquisition import ask, conclude, give_back, give_up, record
from .hold import Hold, HoldState
from .upgrading import UpgradeWaiter, leaving
from .waiting import PATIENCE, Waiter

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds that a request may take: three attempts of 5 s each. Also, where a server hangs and
# requests queue for the threads, the seconds that a request may wait for its thread.
LIMIT = 16.0


async def acquire(hold: Hold, *, timeout: float | None) -> Reply:
    """
    Ask for the key of *hold*; begin to hold and to renew it if it is granted.

    Args:
        hold: A new hold.
        timeout: Seconds to wait for the key; 0 does not wait, None waits for ever.

    Returns:
        The store's last answer. If it is not ``GRANTED``, nothing is left in the store.

    Raises:
        StoreError: What the store may have granted is released in the background; so it is if this
            coroutine is cancelled.
    """
    deadline = float("inf") if timeout is None else clock.monotonic() + timeout
    while True:
        attempt = _Attempt(hold, deadline, waits=timeout != 0)
        reply = await attempt.run()
        attempt.close()
        concluded = conclude(hold, reply, deadline)
        if concluded is not None:
            return concluded


async def release(hold: Hold, *, succeeded: bool = False) -> HoldState:
    """
    Stop holding and release the key in the store; return the state before.

    *succeeded* is as in :func:`celery_distlock.engine.acquisition.release`. Never raises because of
    the store. If it is cancelled, or the store does not answer, the release continues in the
    background.
    """
    rest = hold.rest(succeeded=succeeded)
    hold.begun = True
    before = hold.end()

    def request() -> HoldState:
        return give_back(hold, before, rest=rest)

    try:
        return await _threads_of(hold.store).call(request, timeout=LIMIT)
    except TimeoutError:
        logger.warning("%r is released later, or its lease ends: no answer", shown(hold.key))
        return before


async def upgrade(hold: Hold, *, timeout: float | None) -> Reply:
    """
    Upgrade *hold* from shared to exclusive; see :func:`celery_distlock.engine.upgrading.upgrade`.

    If it is cancelled, the hold stays as it was.
    """
    deadline = float("inf") if timeout is None else clock.monotonic() + timeout
    attempt = _Upgrade(hold, deadline, waits=timeout != 0)
    reply = await attempt.run()
    attempt.close()
    if reply.status is Status.GRANTED:
        attempt.settle()
    return reply


async def leave(hold: Hold) -> None:
    """Share again what an inner acquisition has upgraded, after that was undone; in any case."""
    if (share := leaving(hold)) is not None:
        await report_in_thread(hold.store, share)


async def call(store: Store, request: Callable[[], T]) -> T:
    """
    Return the answer to a request that changes nothing.

    Raises:
        StoreError: There is no answer.
    """
    try:
        return await _threads_of(store).call(request, undo=lambda: None, timeout=LIMIT)
    except TimeoutError:
        raise _silent(store) from None


async def report_in_thread(store: Store, report: Callable[[], object]) -> None:
    """Run *report* in a thread: its receivers may block."""
    with suppress(TimeoutError):
        await _threads_of(store).call(report, timeout=LIMIT)


def _silent(store: Store) -> StoreUnavailableError:
    return StoreUnavailableError(f"{store.address} did not answer within {LIMIT:g} s")


class _Attempt:
    """One hold's attempt to acquire its key: requests in threads, pauses in the event loop."""

    def __init__(self, hold: Hold, deadline: float, *, waits: bool) -> None:
        self._hold = hold
        self._deadline = deadline
        self._waits = waits
        self._waiter: Waiter | UpgradeWaiter | None = None
        self._pause = 0.0
        self._loop = asyncio.get_running_loop()
        self._pushed = asyncio.Event()
        self._mutex = threading.Lock()
        self._has_asked = self._given_up = False

    async def run(self) -> Reply:
        """Return the store's last answer; if anything is raised, everything is undone."""
        try:
            reply = await self._ask_first()
            while reply is None:
                await self._rest()
                left = max(0.0, self._deadline - clock.monotonic())
                reply = await self._ask_in_thread(min(left, PATIENCE) + LIMIT)
        except TimeoutError:
            raise _silent(self._hold.store) from None
        return reply

    async def _ask_first(self) -> Reply | None:
        """Ask for the first time, after earlier callers of this loop that want to wait."""
        if not self._waits:
            return await self._ask_in_thread(LIMIT)
        hold, came_at = self._hold, clock.monotonic()
        entrance = _entrances(self._loop).setdefault((hold.store.identity, hold.key), _Entrance())
        left = None if math.isinf(self._deadline) else max(0.0, self._deadline - came_at)
        try:
            async with asyncio.timeout(left):
                await entrance.acquire()
        except TimeoutError:
            return await self._ask_in_thread(LIMIT)  # one request, with no time to wait
        try:
            if entrance.silent_at > came_at:
                raise TimeoutError
            return await self._ask_in_thread(LIMIT)
        except TimeoutError:
            entrance.silent_at = clock.monotonic()
            raise
        finally:
            entrance.release()

    async def _ask_in_thread(self, limit: float) -> Reply | None:
        self._pushed.clear()
        threads = _threads_of(self._hold.store)
        return await threads.call(self._ask, undo=self._undo, timeout=limit)

    def close(self) -> None:
        """Stop waiting."""
        if (inbox := self._inbox) is not None:
            inbox.close()

    @property
    def _inbox(self) -> Inbox | None:
        return None if self._waiter is None else self._waiter.inbox

    def _ask(self) -> Reply | None:
        """Ask, in a thread; None: the key is held."""
        hold, waiter = self._hold, self._waiter
        if waiter is None:
            self._has_asked = True
            record(hold)
            answered = not (self._waits and hold.store.subscribed(hold.key))
            if answered:
                reply = ask(hold, None)
                if reply.status is not Status.BUSY or not self._waits:
                    return reply
            self._waiter = waiter = Waiter(hold, self._deadline, ask, answered=answered)
            self._listen(waiter.inbox)
        return self._ask_at(waiter)

    def _listen(self, inbox: Inbox) -> None:
        # The store keeps the callback, which must not keep the waiter.
        push = WeakMethod(self._push)
        inbox.on_push(lambda: (call := push()) is not None and call())

    def _ask_at(self, waiter: Waiter | UpgradeWaiter) -> Reply | None:
        found = waiter.ask()
        if found is None:
            assert waiter.inbox is not None
            self._pause = waiter.inbox.next_look(waiter.pause)
        return found

    async def _rest(self) -> None:
        """Return after a push, or when it is time to ask without one."""
        timer = self._loop.call_later(self._pause, self._pushed.set)
        try:
            await self._pushed.wait()
        except BaseException:
            self._undo()
            raise
        finally:
            timer.cancel()

    def _push(self) -> None:
        """Handle a push, in any thread."""
        try:
            self._loop.call_soon_threadsafe(self._pushed.set)
        except RuntimeError:  # the loop is closed: its waiter will not continue
            self._undo()

    def _undo(self) -> None:
        with self._mutex:
            if self._given_up:
                return
            self._given_up = True
        if self._has_asked:
            self._give_up()
            self.close()

    def _give_up(self) -> None:
        give_up(self._hold, self._inbox)


class _Upgrade(_Attempt):
    """An attempt to upgrade a hold from shared to exclusive."""

    def __init__(self, hold: Hold, deadline: float, *, waits: bool) -> None:
        super().__init__(hold, deadline, waits=waits)
        # Created here so that numbers follow the order of the tasks.
        self._upgrade = UpgradeWaiter(hold, deadline, waits=waits)
        self._has_asked = True  # also before it asks: it gives up for earlier attempts, too

    def settle(self) -> None:
        """Keep what was granted until its holder changes it."""
        self._upgrade.settle()

    async def _ask_first(self) -> Reply | None:
        return await self._ask_in_thread(LIMIT)

    def _ask(self) -> Reply | None:
        if self._waiter is None:
            self._waiter = waiter = self._upgrade
            waiter.open()
            if waiter.inbox is not None:
                self._listen(waiter.inbox)
        return self._ask_at(self._upgrade)

    def _give_up(self) -> None:
        self._upgrade.give_up_later()


class _Entrance(asyncio.Lock):
    """Lines up the first requests of a loop's callers for one key, one after another."""

    # When a caller last got no answer: those that queued before then need not ask.
    silent_at = -math.inf


def _entrances(loop: asyncio.AbstractEventLoop) -> "_Entrances":
    try:
        return _entrances_of[loop]
    except KeyError:
        return _entrances_of.setdefault(loop, WeakValueDictionary())


def _threads_of(store: Store) -> RequestThreads:
    """Return this process's threads for *store*: one that hangs does not hold up another."""
    try:
        return _threads[store]
    except KeyError:
        return _threads.setdefault(store, RequestThreads("distlock-requests"))


_Entrances: TypeAlias = "WeakValueDictionary[tuple[str, str], _Entrance]"
_entrances_of: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Entrances]" = WeakKeyDictionary()
_threads: "WeakKeyDictionary[Store, RequestThreads]" = WeakKeyDictionary()
at_fork(_threads.clear, ForkStage.THREADS)
