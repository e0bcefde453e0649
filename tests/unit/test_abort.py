"""That a guard leaves nothing behind, at whatever instant its lock is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock.engine import abort, loops
from celery_distlock.engine.abort import Guard
from celery_distlock.engine.hold import Hold, HoldState, Terms
from celery_distlock.engine.lease import Lease
from celery_distlock.errors import LockLostError
from celery_distlock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

LOSSES = 3000

pytestmark = pytest.mark.usefixtures("quick_turns")

spared = pytest.mark.skipif(abort.LEAVES_MUTEXES, reason="nothing is thrown into a thread")
wheres = pytest.mark.parametrize(
    "where", ["the main thread", pytest.param("another thread", marks=spared)]
)


@pytest.fixture
def no_callbacks_of_gc() -> Iterator[None]:
    """Python drops an exception that strikes in one, and Hypothesis has one."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


class Losses:
    """Loses each hold that it is given, at some moment soon after, in a thread of its own."""

    def __init__(self) -> None:
        self.hold: Hold | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = None
        while not self._ended.is_set():
            hold = self.hold
            if hold is None or hold is last:
                continue
            last = hold
            for _ in range(random.randrange(400)):
                pass
            hold.lose("test")

    def close(self) -> None:
        self._ended.set()
        self._thread.join(60)


def new_hold() -> Hold:
    hold = Hold(open_store("memory://"), "k", Terms(), label="test")
    hold.state, hold.valid_until = HoldState.HELD, 1e18
    return hold


def lose_while_guarded(losses: Losses, errors: list[str]) -> None:
    hold = new_hold()

    def work() -> None:
        losses.hold = hold
        for _ in range(random.randrange(400)):
            pass

    try:
        Guard((hold,)).run(work)
    except LockLostError as error:
        if type(error) is not LockLostError:
            errors.append(f"{type(error)} does not pickle")
    if hold.on_lost is not None:
        errors.append("it still subscribed")


def in_thread(where: str, body: Callable[[], None]) -> None:
    if where == "the main thread":
        body()
    else:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join(90)
        assert not thread.is_alive()


class Slow:
    """Ends slowly; Python drops what is raised meanwhile."""

    def __del__(self) -> None:
        for _ in range(1000):
            pass


@wheres
def test_a_loss_that_python_has_dropped_is_raised_again(monkeypatch, where):
    monkeypatch.setattr(abort, "AGAIN", 0.001)
    hold, raised = new_hold(), threading.Event()

    def work() -> None:
        threading.Timer(0.1, hold.lose, ("test",)).start()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            Slow()

    def guarded() -> None:
        with pytest.raises(LockLostError):
            Guard((hold,)).run(work)
        raised.set()

    in_thread(where, guarded)
    assert raised.is_set()


@pytest.mark.usefixtures("no_callbacks_of_gc")
@pytest.mark.usefixtures("lupa")
def test_a_guard_that_was_left_listens_no_more_and_raises_what_pickles():
    losses, errors = Losses(), []

    def lose_often() -> None:
        for _ in range(LOSSES):
            lose_while_guarded(losses, errors)

    guarded = threading.Thread(target=lose_often)
    guarded.start()
    guarded.join(90)
    losses.close()

    assert not guarded.is_alive()
    assert errors == []


def do_nothing() -> None:
    pass


@pytest.mark.usefixtures("lupa")
@wheres
def test_a_loss_leaves_no_mutex_locked(monkeypatch, where):
    monkeypatch.setattr(abort, "AGAIN", 0.001)
    losses, left = Losses(), []
    mutex, inner = threading.Lock(), threading.Lock()

    def work(hold: Hold) -> None:
        losses.hold = hold
        while True:
            do_nothing()
            with mutex, inner:
                pass

    def lose_often() -> None:
        for _ in range(300):
            hold = new_hold()
            with pytest.raises(LockLostError):
                Guard((hold,)).run(functools.partial(work, hold))
            for lock in mutex, inner:
                if lock.locked():
                    left.append(hold)
                    lock.release()

    in_thread(where, lose_often)
    losses.close()

    assert left == []


@pytest.mark.parametrize("where", ["the main thread", "another thread"])
def test_a_loss_while_a_mutex_is_awaited_leaves_it_unlocked(where):
    hold, mutex, raised = new_hold(), threading.Lock(), []

    def lose() -> None:
        hold.lose("test")
        mutex.release()

    def work() -> None:
        mutex.acquire()
        threading.Timer(0.05, lose).start()
        with mutex:
            pass
        time.sleep(60 if where == "the main thread" else 0.2)

    def guarded() -> None:
        with pytest.raises(LockLostError):
            Guard((hold,)).run(work)
        raised.append(True)

    in_thread(where, guarded)

    assert raised
    assert mutex.acquire(timeout=5)


@wheres
def test_a_loss_ends_a_loop_that_takes_a_mutex_after_each_rest(where):
    hold, mutex, turns = new_hold(), threading.Lock(), []

    def work() -> None:
        threading.Timer(0.1, lambda: hold.lose("test")).start()
        for turn in range(100):
            turns.append(turn)
            time.sleep(0.3)
            with mutex:
                pass

    def guarded() -> None:
        with pytest.raises(LockLostError):
            Guard((hold,)).run(work)

    in_thread(where, guarded)

    assert len(turns) < 30
    assert mutex.acquire(timeout=5)


def test_what_was_put_off_and_has_struck_meanwhile_does_not_strike_again(monkeypatch):
    monkeypatch.setattr(abort, "AGAIN", 0.05)
    entered = iter([True])
    monkeypatch.setattr(abort, "LEAVES_MUTEXES", True)
    monkeypatch.setattr(abort, "_has_just_entered", lambda frame: next(entered, False))
    hold, cleaned_up = new_hold(), []

    def work() -> None:
        try:
            hold.lose("test")
            signal.raise_signal(abort.SIGNAL)  # somebody else's, before ours comes again
            time.sleep(60)
        finally:
            until = time.monotonic() + 5 * abort.AGAIN
            while time.monotonic() < until:
                do_nothing()
            cleaned_up.append(True)

    with pytest.raises(LockLostError):
        Guard((hold,)).run(work)

    assert cleaned_up


@pytest.fixture
def leaves_mutexes(monkeypatch) -> None:
    """Deliver losses as in Python 3.14."""
    monkeypatch.setattr(abort, "LEAVES_MUTEXES", True)


@pytest.mark.usefixtures("leaves_mutexes")
def test_a_thread_of_python_3_14_learns_of_a_loss_at_its_next_call_of_the_lock():
    hold, calls = new_hold(), []

    def work() -> None:
        hold.lose("test")
        for _ in range(1000):
            do_nothing()
        calls.append("before")
        Lease((hold,)).ensure_held()
        calls.append("after")

    def guarded() -> None:
        with pytest.raises(LockLostError):
            Guard((hold,)).run(work)
        calls.append("told")

    in_thread("another thread", guarded)

    assert calls == ["before", "told"]


@pytest.mark.usefixtures("leaves_mutexes")
def test_a_thread_of_python_3_14_learns_of_a_loss_at_the_end_of_the_body():
    hold, told = new_hold(), []

    def guarded() -> None:
        with pytest.raises(LockLostError):
            Guard((hold,)).run(lambda: hold.lose("test"))
        told.append(True)

    in_thread("another thread", guarded)

    assert told


@pytest.mark.usefixtures("leaves_mutexes")
@pytest.mark.parametrize("part", ["rest", "late"])
def test_a_thread_of_python_3_14_learns_of_a_loss_from_its_event_loop(part):
    body, told = InALoop(), []

    def guarded() -> None:
        begin = time.monotonic()
        with pytest.raises(LockLostError):
            Guard((body.hold,)).run(lambda: asyncio.run(getattr(body, part)()))
        told.append(time.monotonic() - begin)

    in_thread("another thread", guarded)

    assert body.cleaned_up
    assert told[0] < 25


def test_a_forked_child_that_leaves_the_body_has_lost_nothing():
    hold = new_hold()

    def fork() -> str:
        hold._process = object()  # as it looks in a child
        return "left"

    assert Guard((hold,)).run(fork) == "left"


class InALoop:
    """A body that runs a loop and loses its lock while a part of it is being executed."""

    def __init__(self) -> None:
        self.hold = new_hold()
        self.cleaned_up = False
        self._wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Not started by who is struck: Python 3.11 may make a KeyError of what is raised there.
        threading.Thread(target=self._lose, daemon=True).start()

    def _lose(self) -> None:
        with contextlib.suppress(queue.Empty):
            self.hold.lose(self._wanted.get(timeout=60))

    def lose(self) -> None:
        """Lose the lock from outside; ends only by being struck."""
        self._wanted.put("test")
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass

    async def lose_in_task(self) -> None:
        self.lose()

    async def wait(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True

    async def task(self) -> None:
        helper = asyncio.create_task(self.lose_in_task())
        await self.wait()
        await helper

    async def rest(self) -> None:
        threading.Timer(0.1, self.hold.lose, ("test",)).start()
        await self.wait()

    async def late(self) -> None:
        self.hold.lose("test")
        await self.wait()

    async def callback(self) -> None:
        asyncio.get_running_loop().call_soon(self.lose)
        await self.wait()

    async def child(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.lose_in_task())
            await self.wait()

    async def parent(self) -> None:
        try:
            async with asyncio.TaskGroup():
                self.lose()
        finally:
            self.cleaned_up = True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@wheres
@pytest.mark.parametrize("part", ["task", "callback", "child", "parent", "rest"])
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_loss_ends_the_loop_that_a_body_runs_whatever_that_is_at(kind, part, where):
    """What a helper raises, or a callback, asyncio keeps, and goes on."""
    new_loop = pytest.importorskip(kind).new_event_loop
    told = threading.Event()

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main)

    def guarded() -> None:
        body = InALoop()
        begin = time.monotonic()
        with pytest.raises(LockLostError, match="'k'"):
            Guard((body.hold,)).run(lambda: run(getattr(body, part)()))
        assert body.cleaned_up
        assert time.monotonic() - begin < 25
        told.set()

    in_thread(where, guarded)
    assert told.is_set()


def test_a_cancellation_that_has_nothing_to_do_with_a_loss_is_the_body_s():
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        Guard((new_hold(),)).run(lambda: asyncio.run(work()))


def test_an_error_that_comes_with_a_loss_in_a_group_is_not_hidden():
    hold = new_hold()

    def work() -> None:
        try:
            hold.lose("test")
            time.sleep(60)
        except LockLostError as error:
            raise ExceptionGroup("both", [error, ValueError("other")]) from None

    with pytest.raises(ExceptionGroup):
        Guard((hold,)).run(work)


def test_garbage_that_is_collected_by_then_stops_no_other():
    code = """
import gc, threading, time
from celery_distlock.engine.loops import frame_of

def start_threads():
    while True:
        threading.Thread(target=int).start()

gc.callbacks.append(lambda *_: time.sleep(0.001))  # others go on
gc.set_threshold(1)
threading.Thread(target=start_threads, daemon=True).start()
for _ in range(300):
    frame_of(threading.get_ident())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_search_for_a_frame_prevents_garbage_collection_during_another(monkeypatch):
    begun, both = threading.Event(), threading.Event()
    collects = []

    def look():
        if not begun.is_set():
            begun.set()
            both.wait(0.2)
        else:
            both.set()
            first.join()
            collects.append(gc.isenabled())
        return {}

    monkeypatch.setattr(loops, "_COLLECTS", True)
    monkeypatch.setattr(loops, "sys", SimpleNamespace(_current_frames=look))
    first = threading.Thread(target=loops.frame_of, args=(1,))
    first.start()
    begun.wait()
    loops.frame_of(2)

    assert collects == [False]
    assert gc.isenabled()
