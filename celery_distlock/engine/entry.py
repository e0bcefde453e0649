"""
Where an exception from outside would skip the ``__exit__`` of a ``with`` block, in Python 3.14.

Python looks for what signals and other threads raise when a call is over, before it jumps back, and
where a function begins. In 3.14 it looks also when the call of ``__enter__`` is over, and is not in
the block yet (CPython's gh-148874; 3.15 does not): a mutex that was just taken would stay locked.
"""

import ctypes
import dis
import gc
import sys
import threading
import time
from types import FrameType

from celery_distlock.process.forks import ForkStage, PerProcess

__all__ = ["frame_of", "has_just_entered", "throw_into", "time_in_call"]

_CONCERNED = sys.version_info[:2] == (3, 14)
_COLLECTS = sys.version_info[:2] == (3, 11)
_looking = PerProcess(threading.RLock, ForkStage.IDENTITY)  # who has no garbage collected
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


def _opcodes(*names: str) -> frozenset[int]:
    return frozenset(dis.opmap[name] for name in names if name in dis.opmap)


_CACHE, _EXTENDED_ARG = 0, dis.EXTENDED_ARG
_ENTER = bytes((dis.opmap.get("LOAD_SPECIAL", 0), 0))  # and the next instruction calls it
_CALLS = _opcodes("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_LOOKS = _CALLS | _opcodes("JUMP_BACKWARD", "RESUME")
_LEAVES = _opcodes("RETURN_VALUE", "RETURN_GENERATOR", "YIELD_VALUE")
_STOPS = _LOOKS | _LEAVES | _opcodes("RAISE_VARARGS", "RERAISE")
_BACK = _opcodes("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_ALWAYS = _BACK | _opcodes("JUMP_FORWARD")
_JUMPS = frozenset(dis.hasjrel)


def has_just_entered(frame: FrameType | None) -> bool:
    """Whether an exception in *frame* now would skip an ``__exit__``: in a signal's handler."""
    return (
        _CONCERNED
        and frame is not None
        and frame.f_code.co_code[frame.f_lasti - 2 : frame.f_lasti] == _ENTER
    )


def frame_of(thread: int) -> FrameType | None:
    """
    Return the frame that *thread* is in.

    Python 3.11 may collect garbage while it looks for that and has its list of threads locked
    (CPython's gh-106883). If a finalizer then lets another thread go on that starts one, all stand
    still for ever.
    """
    if not _COLLECTS:
        return sys._current_frames().get(thread)
    with _looking.value:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


def throw_into(thread: int, error: type[BaseException], *, anyway: bool) -> bool | None:
    """
    Have *error* raised in *thread* soon; return whether there is such a thread.

    None: not now, unless *anyway*, as it may skip an ``__exit__``; that is hardly ever overlooked.
    A thread that was stopped to let us run has looked already, and looks again at the end of its
    next call or turn.
    """
    target, exception = ctypes.c_ulong(thread), ctypes.py_object(error)
    frame = sys._current_frames().get(thread) if _CONCERNED and not anyway else None
    if frame is not None:
        instruction = frame.f_lasti
        if _may_enter_next(frame):
            return None
        has_gone_on = sys._current_frames().get(thread) is not frame
        # From here on, Python lets no other thread go on before that one has the exception.
        if has_gone_on or frame.f_lasti != instruction:
            return None
    return bool(_set_exception(target, exception))


def time_in_call(thread: int) -> int | None:
    """
    Return the CPU time (ns) of a living *thread* that is at a call of anything but ``__enter__``.

    If it is the same a while later, the thread blocks in that call, and looks when the call is
    over. None: it is elsewhere, or this Python needs no care.
    """
    frame = sys._current_frames().get(thread) if _CONCERNED else None
    if frame is None or has_just_entered(frame):
        return None
    if frame.f_lasti < 0 or frame.f_code.co_code[frame.f_lasti] not in _CALLS:
        return None
    return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))


def _may_enter_next(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None:
        if has_just_entered(frame):
            return True
        enters, leaves = _ahead(frame.f_code.co_code, frame.f_lasti)
        if enters or not leaves:
            return enters
        frame = frame.f_back
    return False


def _ahead(code: bytes, start: int) -> tuple[bool, bool]:
    """Whether an ``__enter__`` may follow *start* before Python looks, and whether a return may."""
    leaves = False
    seen: set[int] = set()
    ahead = _successors(code, start)
    while ahead:
        at = ahead.pop()
        if code[at : at + 2] == _ENTER:
            return True, leaves
        leaves |= code[at] in _LEAVES
        if at not in seen and code[at] not in _STOPS:
            seen.add(at)
            ahead += _successors(code, at)
    return False, leaves


def _successors(code: bytes, at: int) -> list[int]:
    argument, shift, before = code[at + 1], 8, at - 2
    while before >= 0 and code[before] == _EXTENDED_ARG:
        argument |= code[before + 1] << shift
        shift, before = shift + 8, before - 2
    after = at + 2
    while after < len(code) and code[after] == _CACHE:
        after += 2
    if code[at] not in _JUMPS:
        return [after] if after < len(code) else []
    target = after + 2 * (-argument if code[at] in _BACK else argument)
    return [target] if code[at] in _ALWAYS else [target, after]
