"""How a store in memory takes in calls: see :class:`.sending.SendingStore`."""

from typing import Any

from celery_distlock import clock
from celery_distlock.keys import slot_name

from .memory_key import MemoryKey
from .memory_timing import MemoryTiming
from .requests import SendRequest
from .sending import SendingStore, SendReply, Sent
from .values import WokenTask

__all__ = ["MemorySending"]


class MemorySending(MemoryTiming, SendingStore):
    """See the module. What it needs is set by the class that inherits from it."""

    def _entered(self, name: str) -> MemoryKey:
        raise NotImplementedError

    def _hand_on(self, name: str, state: MemoryKey) -> tuple[Any, WokenTask | None]:
        raise NotImplementedError

    def send(self, request: SendRequest) -> SendReply:
        name, run = slot_name(request.key), request.run
        with self._mutex:
            self.mark_all_published(request.published)
            state = self._entered(name)
            if (before := _answered(state, run)) is not None:
                return SendReply(before)
            state.done.pop(run, None)
            if request.delay > 0:
                state.keep(run, request.park_request)
                state.wants[f"p:{run}"] = request.want
                state.later[run] = clock.monotonic() + request.delay
                self.note_due({name: request.delay})
                return SendReply(Sent.LATER)
            state.park(run, request.park_request, 0, request.want)
            wake = self._hand_on(name, state)[1]
            self._note_opening(name, state)
            woken = [wake._replace(also=()), *wake.also] if wake else []
            others = [each for each in woken if each.run != run]
            besides = others[0]._replace(also=tuple(others[1:])) if others else None
            return SendReply(Sent.QUEUED if len(others) == len(woken) else Sent.GO, besides)


def _answered(state: MemoryKey, run: str) -> Sent | None:
    """Return what was answered of a run that is there; None: it is not."""
    if state.holds(run):
        return Sent.QUEUED
    if run not in state.envelopes:
        return None
    if state.share_for(run) and run in state.woken:
        return Sent.GO
    return Sent.LATER if run in state.later else Sent.QUEUED
