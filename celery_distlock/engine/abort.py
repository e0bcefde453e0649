"""
Raise the loss of a lock, or a recall, in the code that runs under it, while it runs.

In the main thread of a process this uses a signal, which also ends a sleep or a wait for input. In
another thread it uses an asynchronous exception, which is raised at the next Python instruction. In
a greenlet of gevent or eventlet it throws into the greenlet. Code inside a C call gets the
exception when the call returns. In Python 3.11, a thread that the guarded thread is just starting
may get the asynchronous exception instead.

Python drops an exception that is raised in a finalizer or in a callback of the garbage collector;
it is then raised again. An asyncio event loop may keep the exception, in a callback or in a task
other than the one that the loop is run for; that main task is then cancelled as well.

In Python 3.14, an exception from outside may arrive after a call of ``__enter__`` and before its
block (CPython's gh-148874; not in 3.15): a mutex that was just taken would stay locked for ever. On
that version the signal handler defers it. Other threads learn of it from their event loop and at
their next call of ``self.lock.ensure_held()``; of a loss also at the end of the body.
"""

import asyncio
import contextlib
import ctypes
import dis
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, ClassVar, TypeVar

from celery_distlock.errors import Interruption, LockLostError, RecalledError
from celery_distlock.process.forks import ForkStage, at_fork
from celery_distlock.process.threads import DaemonThread, eventlet_patched, gevent_patched

from .hold import LOST, Hold
from .loops import Main, frame_of, task_of_loop, wake_loop

T = TypeVar("T")

# Seconds until an exception that Python dropped, or that was deferred, is raised again.
AGAIN = 0.05
SIGNAL = signal.SIGURG  # ignored by default, and not used by Celery
# An exception may be raised between a call and its block.
LEAVES_MUTEXES = sys.version_info[:2] == (3, 14)
_ENTER = bytes((dis.opmap.get("LOAD_SPECIAL", 0), 0))  # and the next instruction calls it
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Guard:
    """
    Raises an interruption in the guarded thread as soon as one of *holds* has one.

    That is the loss of a hold, or a recall. Each is raised once, and no recall after a loss. Once
    :meth:`run` has returned, nothing more is raised. :meth:`run` raises a loss that was not
    delivered by then, unless the body itself raised; a recall that was not concerns the code around
    the body, if that runs under the same hold.
    """

    def __init__(self, holds: tuple[Hold, ...]) -> None:
        self._holds = holds
        # Reentrant: a signal handler may find a hold lost while its thread has this.
        self._mutex = threading.RLock()
        self._armed = False
        self._due: Interruption | None = None
        self._delivered: Interruption | None = None  # what was due when it was raised last
        self.raised: object = None  # the error raised, or its class
        self.again = False  # raise it again: Python dropped it, or it was deferred
        self._cancels = False  # whether a loop may have kept it, and its task is cancelled
        self._cancelled: Main | None = None  # that task, once it is cancelled
        self._sender: DaemonThread | None = None
        self._deliver: Any = None
        self.outer: Guard | None = None  # the guard around this one, in the same thread
        self._before: dict[Hold, Callable[[Hold], None] | None] = {}

    def run(self, body: Callable[[], T]) -> T:
        """
        Return what *body* returns.

        Raises:
            LockLostError: A hold was lost while it ran.
            RecalledError: A hold was recalled, and *body* raised that or its cancellation.
        """
        late = False
        # All in one frame: an asynchronous exception may also be raised where a function begins.
        try:
            try:
                self._listen()
                result = body()
            finally:
                late = self._disarm()
        except (Interruption, asyncio.CancelledError, BaseExceptionGroup) as error:
            ending = self._ending(error)
            if ending is error:
                raise
            raise ending from None if isinstance(error, Interruption) else error
        finally:
            self._leave(late)
        self._raise_undelivered_loss(late)
        return result

    def _listen(self) -> None:
        thread = threading.get_ident()
        self.outer, _innermost[thread] = _innermost.get(thread), self
        self._deliver = _delivery(self)
        self._armed = True
        for hold in self._holds:
            self._before[hold], hold.on_interrupted = hold.on_interrupted, self._on_interrupted
            # Before the callback was set. A recall was raised in the code around this, if any.
            is_recalled = hold.recalled and self._before[hold] is None
            if hold.state is LOST or is_recalled:
                self._on_interrupted(hold)

    def _disarm(self) -> bool:
        """Raise nothing from now on; return whether something still was raised."""
        with self._mutex:
            self._armed = False
        return self._deliver is not None and bool(self._deliver.finish())

    def _ending(self, error: BaseException) -> BaseException:
        """
        Return what ends the body that raised *error*.

        Raises:
            LockLostError: It is a recall, and a hold was lost as well.
        """
        ending = getattr(error, "made_for", error)
        if not isinstance(error, Interruption):
            wraps = self._cancels or isinstance(error, BaseExceptionGroup)
            if self._due is None or not wraps:
                return error
            ending = self.interruption()
        if isinstance(error, BaseExceptionGroup):  # a TaskGroup wraps it or its cancellation
            _, others = error.split(Interruption)
            if others is not None:  # no code around a task handles what is not an `Exception`
                return error if isinstance(error, Exception) else others
        if isinstance(ending, RecalledError):
            self._ensure_held()
        return ending

    def _leave(self, late: bool) -> None:
        """Restore the outer guard; pass on a recall that came too late."""
        for hold, outer in self._before.items():
            hold.on_interrupted = outer
        thread = threading.get_ident()
        if self in _guards_here():  # perhaps not innermost: it may interrupt one that leaves
            if self.outer is None:
                del _innermost[thread]
            else:
                _innermost[thread] = self.outer
        if self._armed:  # the interruption was raised where `_disarm` began
            self._disarm()
        is_cancelled = self._cancelled is not None
        if isinstance(self._due, RecalledError) and not (is_cancelled or self._is_delivered(late)):
            for hold, outer in self._before.items():
                if outer is not None:
                    outer(hold)

    def _raise_undelivered_loss(self, late: bool) -> None:
        if not isinstance(self._due, LockLostError):
            self._ensure_held()
        elif self._cancels or not self._is_delivered(late):
            raise self.interruption()

    def _is_delivered(self, late: bool) -> bool:
        """Whether what is due was raised in the body; *late*: it was raised after that."""
        return self._delivered is self._due and not (late or self.again)

    def _ensure_held(self) -> None:
        for hold in self._holds:
            if not (hold.held or hold.is_parents):
                hold.ensure_held()

    def _on_interrupted(self, hold: Hold) -> None:
        due = hold.interruption()
        with self._mutex:
            if self._armed:
                self._give(due)
                return
        outer = self._before.get(hold)
        if outer is not None and isinstance(due, RecalledError):  # it came after the body's end
            outer(hold)

    def _give(self, due: Interruption | None) -> None:
        if due is None or isinstance(self._due, (LockLostError, type(due))):
            return
        self._due, self.again, self._cancelled = due, False, None
        _DropHook.install()
        if self._sender is None:
            self._sender = DaemonThread("distlock-abort", self._send_again)
            with contextlib.suppress(RuntimeError):  # no thread can be started
                self._sender.start()
        self._send()

    def _send(self) -> None:
        if self._deliver.is_certain:  # before: it may be raised in this very thread
            self._delivered = self._due
        self._deliver.send()

    def _send_again(self) -> None:
        while self._armed:
            time.sleep(AGAIN)
            with self._mutex:
                if self._armed and self.again:
                    self.again, self._delivered = False, None
                    self._send()

    def interruption(self) -> Interruption:
        """Return a new error for what is due."""
        assert self._due is not None
        return type(self._due)(*self._due.args)

    def take(self) -> Interruption | None:
        """Return the error to raise in the guarded thread now; only once."""
        due = self._due
        if self._armed and due is not None and self._delivered is not due:
            self._delivered, self.again = due, False
            self.raised = error = type(due)(*due.args)
            return error
        return None

    def cancel_task_of_loop(self, frame: FrameType | None, *, always: bool = False) -> None:
        """Cancel the task that a loop runs, if the loop keeps what is raised in *frame*."""
        main = task_of_loop(frame, self.is_around, always=always)
        if main is not None:
            self._cancels = True
            # The loop is closed: the body goes on without it.
            with contextlib.suppress(RuntimeError):
                # Twice: an exception thrown into a thread that waits in C code may be raised in the
                # first.
                for _ in range(2):
                    main.get_loop().call_soon_threadsafe(self._cancel, main)

    def is_around(self, frame: FrameType) -> bool:
        """Whether *frame* is that of this guard's `run`."""
        return frame.f_code is Guard.run.__code__ and frame.f_locals["self"] is self

    def _cancel(self, main: Main) -> None:
        if not self._armed or self._cancelled is main:
            return
        if main.cancel(str(self._due)):
            self._cancelled = main
        else:
            self.again = True  # the task has ended, and the body goes on

    def defer(self) -> None:
        """Defer what there is to raise in the guarded thread, for a short time."""
        if self._armed and self._due is not None and self._delivered is not self._due:
            self.again = True


_innermost: dict[int, Guard] = {}  # the innermost guard of each thread


def _guards_here() -> Iterator[Guard]:
    """Yield the guards that this thread runs in, innermost first."""
    guard = _innermost.get(threading.get_ident())
    while guard is not None:
        yield guard
        guard = guard.outer


class _DropHook:
    """Notes when Python drops an exception of a guard; passes all others to the previous hook."""

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    @classmethod
    def install(cls) -> None:
        """Install the hook, again if another hook has replaced it since."""
        if not isinstance(sys.unraisablehook, cls):
            sys.unraisablehook = cls(sys.unraisablehook)

    def __call__(self, unraisable: Any, /) -> None:
        error = unraisable.exc_value
        guard = _innermost.get(threading.get_ident())
        while guard is not None:
            if error is not None and guard.raised in (error, type(error)):
                # No call may follow: what is raised again must not be raised in here.
                guard.again = True
                return
            guard = guard.outer
        self._before(unraisable)


class _BySignal:
    """Delivers to the main thread."""

    is_certain = False  # whether what it sends is raised, unless `finish` reports otherwise
    ready: ClassVar[dict[int, "_BySignal"]] = {}  # by thread, once the handler is in place

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def send(self) -> None:
        signal.pthread_kill(self._thread, SIGNAL)

    def finish(self) -> bool:
        return False

    @staticmethod
    def handle(_signal: int, frame: FrameType | None) -> None:
        if LEAVES_MUTEXES and _has_just_entered(frame):
            for guard in _guards_here():
                guard.defer()
            return
        raise_what_is_due(frame)


def raise_what_is_due(frame: FrameType | None) -> None:
    """Raise what is due in this thread, and was not raised before; *frame* is where."""
    for guard in _guards_here():
        error = guard.take()
        if error is not None:
            guard.cancel_task_of_loop(frame)
            raise error


def ensure_not_recalled(holds: Iterable[Hold]) -> None:
    """Raise :exc:`RecalledError` if one of *holds* is recalled, also if that was raised before."""
    for hold in holds:
        if hold.recalled:
            raise_what_is_due(sys._getframe())
            raise hold.recall_error()


def _has_just_entered(frame: FrameType | None) -> bool:
    """Return whether an exception in *frame* now would skip an ``__exit__``."""
    if frame is None:
        return False
    return frame.f_code.co_code[frame.f_lasti - 2 : frame.f_lasti] == _ENTER


class _ByLoop:
    """Delivers to any other thread of Python 3.14: the event loop cancels the task that it runs."""

    is_certain = False

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._thread = threading.get_ident()

    def send(self) -> None:
        self._guard.cancel_task_of_loop(frame_of(self._thread), always=True)

    def finish(self) -> bool:
        return False


class _ByAsyncException:
    """Delivers to any other thread."""

    is_certain = True

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._thread = threading.get_ident()
        self._sent = False

    def send(self) -> None:
        self._sent = True
        self._guard.raised = thrown = _without_arguments(self._guard.interruption())
        frame = frame_of(self._thread)
        self._guard.cancel_task_of_loop(frame)
        target, exception = ctypes.c_ulong(self._thread), ctypes.py_object(thrown)
        _set_exception(target, exception)
        wake_loop(frame, self._guard.is_around)

    def finish(self) -> bool:
        if not self._sent:
            return False
        try:
            for _ in range(100):  # a pending exception is raised at one of these iterations
                pass
        except Interruption:
            return True
        return False


def _without_arguments(due: Interruption) -> type[Interruption]:
    """Return a class that makes errors like *due*: Python throws a class into a thread."""
    kind = type(due)

    class OneInterruption(kind):  # type: ignore[misc,valid-type]
        made_for = due  # which can be pickled

        def __init__(self) -> None:
            super().__init__(*due.args)

    OneInterruption.__name__ = OneInterruption.__qualname__ = kind.__name__
    return OneInterruption


class _ByGreenlet:
    """Delivers to a greenlet: *soon* makes its loop call a function, and *throw* raises in it."""

    is_certain = False

    def __init__(
        self,
        guard: Guard,
        soon: Callable[[Callable[[], None]], object],
        throw: Callable[[Interruption], object],
    ) -> None:
        self._guard = guard
        self._soon = soon
        self._throw_in = throw

    def send(self) -> None:
        self._soon(self._throw)

    def _throw(self) -> None:
        error = self._guard.take()
        if error is not None:
            self._throw_in(error)

    def finish(self) -> bool:
        return False


def _by_gevent(guard: Guard) -> _ByGreenlet:
    gevent: Any = sys.modules["gevent"]
    return _ByGreenlet(guard, gevent.spawn, functools.partial(gevent.kill, gevent.getcurrent()))


def _by_eventlet(guard: Guard) -> _ByGreenlet:
    """Return a delivery by the hub, as eventlet's own time limits use."""
    hub = sys.modules["eventlet.hubs"].get_hub()
    greenlet: Any = sys.modules["greenlet"].getcurrent()
    return _ByGreenlet(guard, functools.partial(hub.schedule_call_global, 0), greenlet.throw)


def _delivery(guard: Guard) -> _BySignal | _ByLoop | _ByAsyncException | _ByGreenlet:
    thread = threading.get_ident()  # gevent's are others
    if thread in _BySignal.ready:
        return _BySignal.ready[thread]
    if gevent_patched():
        return _by_gevent(guard)
    if eventlet_patched():
        return _by_eventlet(guard)
    if threading.current_thread() is threading.main_thread() and _handles_signal():
        return _BySignal.ready.setdefault(thread, _BySignal())
    return _ByLoop(guard) if LEAVES_MUTEXES else _ByAsyncException(guard)


def _handles_signal() -> bool:
    """Whether this module handles the signal. A handler of other code stays in place."""
    handler = signal.getsignal(SIGNAL)
    if handler in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(SIGNAL, _BySignal.handle)
        return True
    return handler is _BySignal.handle


at_fork(_BySignal.ready.clear, ForkStage.THREADS)
