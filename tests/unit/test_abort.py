"""That a guard leaves nothing behind, at whatever instant its lock is lost or recalled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest

from celery_distlock.engine import abort, loops
from celery_distlock.engine.abort import Guard
from celery_distlock.engine.hold import Hold, HoldState, Terms
from celery_distlock.engine.lease import Lease
from celery_distlock.errors import Interruption, LockLostError, RecalledError
from celery_distlock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

# For each kind, in each thread.
INTERRUPTIONS = int(os.environ.get("DISTLOCK_TEST_INTERRUPTIONS", "3000"))


class Kind(NamedTuple):
    """A kind of interruption."""

    name: str
    error: type[Interruption]
    interrupt: Callable[[Hold], None]


def lose(hold: Hold) -> None:
    hold.lose("test")


LOSS = Kind("loss", LockLostError, lose)
RECALL = Kind("recall", RecalledError, Hold.recall)

pytestmark = pytest.mark.usefixtures("quick_turns")

kinds = pytest.mark.parametrize("kind", [LOSS, RECALL], ids=lambda kind: kind.name)
spared = pytest.mark.skipif(abort.LEAVES_MUTEXES, reason="nothing is thrown into a thread")
wheres = pytest.mark.parametrize(
    "where", ["the main thread", pytest.param("another thread", marks=spared)]
)


@pytest.fixture
def no_callbacks_of_gc() -> Iterator[None]:
    """Python drops an exception that is raised in one, and Hypothesis has one."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


class Interrupter:
    """Calls *interrupt* with each hold that it is given, some moment later, in a thread."""

    def __init__(self, interrupt: Callable[[Hold], None]) -> None:
        self.hold: Hold | None = None
        self._interrupt = interrupt
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        last = None
        while not self._ended.is_set():
            hold = self.hold
            if hold is None or hold is last:
                continue
            last = hold
            for _ in range(random.randrange(400)):
                pass
            self._interrupt(hold)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)


def new_hold() -> Hold:
    hold = Hold(open_store("memory://"), "k", Terms(), label="test")
    hold.state, hold.valid_until, hold.stops = HoldState.HELD, 1e18, True
    hold.on_event = lambda *_, **__: None
    return hold


def work_for_a_moment() -> None:
    for _ in range(random.randrange(400)):
        pass


def be_interrupted(interrupter: Interrupter, kind: Kind, errors: list[str], *, waits: bool) -> None:
    """Interrupt while a body runs, or about when it ends, unless it *waits* for that."""
    hold = new_hold()

    def work() -> None:
        interrupter.hold = hold
        if not waits:
            work_for_a_moment()
            return
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass
        errors.append("lost")

    if not waits and random.random() < 0.5:
        interrupter.hold = hold
    try:
        try:
            Guard((hold,)).run(work)
        except kind.error as error:
            if type(error) is not kind.error:
                errors.append(f"{type(error)} does not pickle")
        work_for_a_moment()
    except Interruption as error:
        errors.append(f"stray: {error!r}")
    if hold.on_interrupted is not None:
        errors.append("it still subscribed")
    if threading.get_ident() in abort._innermost:
        errors.append("its guard is still there")


def in_thread(where: str, body: Callable[[], None]) -> None:
    if where == "the main thread":
        body()
    else:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join(90 * max(1, INTERRUPTIONS / 3000))
        assert not thread.is_alive()


class Slow:
    """Ends slowly; Python drops what is raised until then."""

    def __del__(self) -> None:
        for _ in range(1000):
            pass


@wheres
@kinds
def test_what_python_has_dropped_is_raised_again(monkeypatch, kind, where):
    monkeypatch.setattr(abort, "AGAIN", 0.001)
    hold, raised = new_hold(), threading.Event()

    def work() -> None:
        threading.Timer(0.1, kind.interrupt, (hold,)).start()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            Slow()

    def guarded() -> None:
        with pytest.raises(kind.error):
            Guard((hold,)).run(work)
        raised.set()

    in_thread(where, guarded)
    assert raised.is_set()


@pytest.mark.usefixtures("no_callbacks_of_gc")
@pytest.mark.usefixtures("lupa")
@wheres
@kinds
def test_an_interruption_at_any_instant_is_neither_stray_nor_lost(kind, where):
    errors: list[str] = []

    def be_interrupted_often() -> None:
        for number in range(INTERRUPTIONS):
            be_interrupted(interrupter, kind, errors, waits=number % 20 == 0)

    with Interrupter(kind.interrupt) as interrupter:
        in_thread(where, be_interrupted_often)

    assert errors == []


@pytest.mark.usefixtures("no_callbacks_of_gc")
@pytest.mark.usefixtures("lupa")
@wheres
def test_a_loss_wins_over_a_recall_at_the_same_time(where):
    errors: list[str] = []

    def interrupt(hold: Hold) -> None:
        hold.recall()
        for _ in range(random.randrange(100)):
            pass
        hold.lose("test")

    def be_interrupted_twice() -> None:
        hold, recalls, was_lost = new_hold(), [], []

        def work() -> None:
            interrupter.hold = hold
            while True:
                try:
                    while True:
                        do_nothing()
                except RecalledError as error:
                    recalls.append(error)
                    if random.random() < 0.5:
                        work_for_a_moment()
                        was_lost.append(hold.state is HoldState.LOST)
                        raise

        try:
            Guard((hold,)).run(work)
        except LockLostError:
            pass
        except RecalledError:
            if was_lost[-1]:
                errors.append("the recall won")
        if len(recalls) > 1:
            errors.append("recalled twice")

    def be_interrupted_often() -> None:
        for _ in range(100):
            be_interrupted_twice()

    with Interrupter(interrupt) as interrupter:
        in_thread(where, be_interrupted_often)

    assert errors == []


@pytest.mark.usefixtures("no_callbacks_of_gc")
@pytest.mark.usefixtures("lupa")
@wheres
def test_a_recall_that_the_inner_of_two_guards_does_not_raise_the_outer_raises(where):
    errors: list[str] = []

    def be_interrupted_once() -> None:
        hold, caught = new_hold(), []

        def work() -> None:
            interrupter.hold = hold
            try:
                Guard((hold,)).run(work_for_a_moment)
                end = time.monotonic() + 60
                while time.monotonic() < end:
                    do_nothing()
                errors.append("lost")
            except RecalledError as error:
                caught.append(error)
                work_for_a_moment()

        try:
            Guard((hold,)).run(work)
        except RecalledError:
            errors.append("raised twice")
        if len(caught) != 1:
            errors.append(f"raised {len(caught)} times")
        if threading.get_ident() in abort._innermost:
            errors.append("a guard is still there")

    def be_interrupted_often() -> None:
        for _ in range(100):
            be_interrupted_once()

    with Interrupter(Hold.recall) as interrupter:
        in_thread(where, be_interrupted_often)

    assert errors == []


@pytest.mark.parametrize("part", ["_disarm", "finish"])
@wheres
@kinds
def test_an_interruption_where_a_guard_ends_leaves_nothing(monkeypatch, kind, where, part):
    hold = new_hold()
    guard, raised = Guard((hold,)), []

    def be_interrupted(*_: object) -> None:
        monkeypatch.undo()
        raised.append(part)
        raise guard.interruption()

    def work() -> None:
        with contextlib.suppress(Interruption):
            kind.interrupt(hold)
            for _ in range(3000):
                time.sleep(0.01)
        owner = Guard if part == "_disarm" else type(guard._deliver)
        monkeypatch.setattr(owner, part, be_interrupted)

    def guarded() -> None:
        with pytest.raises(kind.error):
            guard.run(work)
        raised.append(threading.get_ident() in abort._innermost)

    in_thread(where, guarded)

    assert raised == [part, False]
    assert guard._sender is not None
    guard._sender.join(60)
    assert not guard._sender.is_alive()


@wheres
@kinds
def test_a_guard_that_interrupts_the_inner_one_where_it_leaves_removes_both(
    monkeypatch, kind, where
):
    outer, inner, left = new_hold(), Guard((new_hold(),)), []

    def interrupt(guard: Guard, late: bool) -> None:
        monkeypatch.undo()
        kind.interrupt(outer)
        for _ in range(100_000):
            do_nothing()
        guard._leave(late)

    def work() -> None:
        monkeypatch.setattr(Guard, "_leave", interrupt)
        inner.run(do_nothing)

    def guarded() -> None:
        with pytest.raises(kind.error):
            Guard((outer,)).run(work)
        left.append(abort._innermost.get(threading.get_ident()))

    in_thread(where, guarded)

    assert left == [None]


@kinds
def test_an_interruption_that_came_before_the_body_began_is_raised(kind):
    hold = new_hold()
    kind.interrupt(hold)

    with pytest.raises(kind.error):
        Guard((hold,)).run(lambda: time.sleep(60))


def test_a_recalled_body_is_not_interrupted_again_by_what_it_calls():
    hold = new_hold()

    def clean_up() -> str:
        try:
            hold.recall()
            time.sleep(60)
        except RecalledError:
            return Guard((hold,)).run(lambda: "clean")
        return "late"

    assert Guard((hold,)).run(clean_up) == "clean"


def test_a_recall_that_an_inner_body_has_caught_is_not_raised_in_the_outer():
    hold = new_hold()

    def catch() -> str:
        try:
            hold.recall()
            time.sleep(30)
        except RecalledError:
            return "caught"
        return "late"

    def work() -> str:
        result = Guard((hold,)).run(catch)
        work_for_a_moment()
        return result

    assert Guard((hold,)).run(work) == "caught"


def test_a_body_that_ends_although_it_is_recalled_has_a_result():
    hold = new_hold()

    def stay() -> str:
        with contextlib.suppress(RecalledError):
            hold.recall()
            time.sleep(60)
        return "result"

    assert Guard((hold,)).run(stay) == "result"


def test_a_recalled_body_that_loses_its_lock_while_it_cleans_up_ends_with_the_loss():
    hold, cleaned_up = new_hold(), []

    def work() -> None:
        try:
            hold.recall()
            time.sleep(60)
        finally:
            cleaned_up.append("begun")
            hold.lose("test")
            time.sleep(30)
            cleaned_up.append("ended")

    with pytest.raises(LockLostError):
        Guard((hold,)).run(work)

    assert cleaned_up == ["begun"]


def test_a_recall_that_does_not_stop_is_not_raised():
    hold = new_hold()
    hold.stops = False

    def work() -> bool:
        hold.recall()
        return hold.recalled

    assert Guard((hold,)).run(work)


def do_nothing() -> None:
    pass


@pytest.mark.usefixtures("lupa")
@wheres
@kinds
def test_an_interruption_leaves_no_mutex_locked(monkeypatch, kind, where):
    monkeypatch.setattr(abort, "AGAIN", 0.001)
    left: list[Hold] = []
    mutex, inner = threading.Lock(), threading.Lock()

    def work(hold: Hold) -> None:
        interrupter.hold = hold
        while True:
            do_nothing()
            with mutex, inner:
                pass

    def be_interrupted_often() -> None:
        for _ in range(150):
            hold = new_hold()
            with pytest.raises(kind.error):
                Guard((hold,)).run(functools.partial(work, hold))
            for lock in mutex, inner:
                if lock.locked():
                    left.append(hold)
                    lock.release()

    with Interrupter(kind.interrupt) as interrupter:
        in_thread(where, be_interrupted_often)

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


@kinds
def test_what_was_deferred_and_raised_since_is_not_raised_again(monkeypatch, kind):
    monkeypatch.setattr(abort, "AGAIN", 0.05)
    entered = iter([True])
    monkeypatch.setattr(abort, "LEAVES_MUTEXES", True)
    monkeypatch.setattr(abort, "_has_just_entered", lambda frame: next(entered, False))
    hold, cleaned_up = new_hold(), []

    def work() -> None:
        try:
            kind.interrupt(hold)
            signal.raise_signal(abort.SIGNAL)  # other code's, before ours comes again
            time.sleep(60)
        finally:
            until = time.monotonic() + 5 * abort.AGAIN
            while time.monotonic() < until:
                do_nothing()
            cleaned_up.append(True)

    with pytest.raises(kind.error):
        Guard((hold,)).run(work)

    assert cleaned_up


@pytest.fixture
def leaves_mutexes(monkeypatch) -> None:
    """Deliver losses as in Python 3.14."""
    monkeypatch.setattr(abort, "LEAVES_MUTEXES", True)


@pytest.mark.usefixtures("leaves_mutexes")
@kinds
def test_a_thread_of_python_3_14_is_interrupted_at_its_next_call_of_the_lock(kind):
    hold, calls = new_hold(), []

    def work() -> None:
        kind.interrupt(hold)
        for _ in range(1000):
            do_nothing()
        calls.append("before")
        Lease((hold,)).ensure_held()
        calls.append("after")

    def guarded() -> None:
        with pytest.raises(kind.error):
            Guard((hold,)).run(work)
        calls.append("raised")

    in_thread("another thread", guarded)

    assert calls == ["before", "raised"]


@pytest.mark.usefixtures("leaves_mutexes")
def test_a_thread_of_python_3_14_learns_of_a_loss_at_the_end_of_the_body():
    hold, ended = new_hold(), []

    def guarded() -> None:
        with pytest.raises(LockLostError):
            Guard((hold,)).run(lambda: hold.lose("test"))
        ended.append(True)

    in_thread("another thread", guarded)

    assert ended


@pytest.mark.usefixtures("leaves_mutexes")
@pytest.mark.parametrize("part", ["rest", "late"])
@kinds
def test_a_thread_of_python_3_14_is_interrupted_by_its_event_loop(kind, part):
    body, after = InALoop(kind), []

    def guarded() -> None:
        begin = time.monotonic()
        with pytest.raises(kind.error):
            Guard((body.hold,)).run(lambda: asyncio.run(getattr(body, part)()))
        after.append(time.monotonic() - begin)

    in_thread("another thread", guarded)

    assert body.cleaned_up
    assert after[0] < 25


def test_a_forked_child_that_leaves_the_body_has_lost_nothing():
    hold = new_hold()

    def fork() -> str:
        hold._process = object()  # as it looks in a child
        return "left"

    assert Guard((hold,)).run(fork) == "left"


class InALoop:
    """A body that runs a loop and is interrupted while a part of it is being executed."""

    def __init__(self, kind: Kind) -> None:
        self.hold = new_hold()
        self.cleaned_up = False
        self._interrupt = functools.partial(kind.interrupt, self.hold)
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # Not started by the interrupted one: Python 3.11 may make a KeyError of what it raises.
        threading.Thread(target=self._interrupt_when_wanted, daemon=True).start()

    def _interrupt_when_wanted(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._wanted.get(timeout=60)
            self._interrupt()

    def be_interrupted(self) -> None:
        """Be interrupted from outside; ends only by that."""
        self._wanted.put(True)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass

    async def be_interrupted_in_task(self) -> None:
        self.be_interrupted()

    async def wait(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True

    async def task(self) -> None:
        helper = asyncio.create_task(self.be_interrupted_in_task())
        await self.wait()
        await helper

    async def rest(self) -> None:
        threading.Timer(0.1, self._interrupt).start()
        await self.wait()

    async def late(self) -> None:
        self._interrupt()
        await self.wait()

    async def callback(self) -> None:
        asyncio.get_running_loop().call_soon(self.be_interrupted)
        await self.wait()

    async def child(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.be_interrupted_in_task())
            await self.wait()

    async def parent(self) -> None:
        try:
            async with asyncio.TaskGroup():
                self.be_interrupted()
        finally:
            self.cleaned_up = True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@wheres
@pytest.mark.parametrize("part", ["task", "callback", "child", "parent", "rest"])
@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
@kinds
def test_an_interruption_ends_the_loop_that_a_body_runs_whatever_that_is_at(
    kind, library, part, where
):
    """What a helper raises, or a callback, asyncio keeps, and goes on."""
    new_loop = pytest.importorskip(library).new_event_loop
    raised = threading.Event()

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main)

    def guarded() -> None:
        body = InALoop(kind)
        begin = time.monotonic()
        with pytest.raises(kind.error, match="'k'"):
            Guard((body.hold,)).run(lambda: run(getattr(body, part)()))
        assert body.cleaned_up
        assert time.monotonic() - begin < 25
        raised.set()

    in_thread(where, guarded)
    assert raised.is_set()


def test_a_cancellation_that_has_nothing_to_do_with_a_loss_is_the_body_s():
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        Guard((new_hold(),)).run(lambda: asyncio.run(work()))


@kinds
def test_an_error_that_comes_with_an_interruption_in_a_group_is_not_hidden(kind):
    hold = new_hold()

    def work() -> None:
        try:
            kind.interrupt(hold)
            time.sleep(60)
        except kind.error as error:
            raise BaseExceptionGroup("both", [error, ValueError("other")]) from None

    with pytest.raises(ExceptionGroup):  # which Celery takes as a failure
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # other tests' threads do not matter here
def test_a_forked_child_looks_again_for_its_main_thread():
    Guard((new_hold(),)).run(lambda: None)
    assert threading.get_ident() in abort._BySignal.ready

    pid = os.fork()
    if pid == 0:
        os._exit(len(abort._BySignal.ready))

    assert os.waitpid(pid, 0)[1] == 0
