"""
Runs that need several keys: how they come from one key to the next, without a process of their own.

Such a run stands at its keys in one order, the same for all. At the first that it cannot have it
waits in the queue, by the time when it came to the first of all; and what it has is kept for it.
When it has that one, too, whoever gave it up has it stand at the next, and so on, until it has all:
then it is put on its way, once. So it never gives a key back in order to begin again.

Nobody waits for ever. What is kept for a run that still waits goes to one who came before it and
stands there, so of those that wait the eldest always gets on; and it is kept for some seconds only,
after which the run is still the first in that queue, but one who is blocked there goes before it
once: he may have the key that it waits for.
"""

from collections import deque
from collections.abc import Iterator

from celery_distlock.naming import shown

from .base import Complaints
from .parking import ParkingStore
from .requests import StandRequest
from .values import Release, Reply, Route, Status, WokenTask

__all__ = ["SeveralKeys", "begin_at_first_key"]

MOST_KEYS = 10_000  # who names more is nobody of ours
ATTEMPTS = 10  # to find all kept at once; then it goes on when one is not kept for it any more

_complaints = Complaints()


class SeveralKeys(ParkingStore):
    """See the module: the part of a store that parks."""

    def stand_at_all(self, run: str, route: Route) -> Reply | None:
        """
        Have *run* stand at its keys, as far as it comes, and wake it if it has all: in one step.

        None: it is for :meth:`stand` and :meth:`depart`, as the keys are in several places.
        """
        return None

    def ready(self, wake: WokenTask) -> Iterator[WokenTask]:
        wakes = deque([wake])
        while wakes:
            wake = wakes.popleft()
            route = wake.route
            if route is None:
                yield wake
            elif wake.name in route.names and len(route.names) <= MOST_KEYS:
                wakes.extend(self._advance(wake, route))
            else:
                words = "what stands at %r as %r is nothing of ours"
                _complaints.tell(wake, words, shown(wake.name), shown(wake.run))

    def _advance(self, wake: WokenTask, route: Route) -> Iterator[WokenTask]:
        """Have a run stand at its keys, as far as it comes; if that is all of them, wake it."""
        reply = self.stand_at_all(wake.run, route)
        if reply is None:
            yield from self._advance_by_steps(wake, route)
            return
        yield from _given(reply)
        yield from self._leave(wake, route, reply)

    def _leave(self, wake: WokenTask, route: Route, reply: Reply) -> Iterator[WokenTask]:
        """Free the key that a run has, if that stands no more at its first one."""
        if reply.status is Status.DONE and wake.name != route.names[0]:
            yield from _given(self.drop(wake, mark=False))

    def _advance_by_steps(self, wake: WokenTask, route: Route) -> Iterator[WokenTask]:
        first, *_ = route.names
        for _ in range(ATTEMPTS):
            arrival = 0
            for name in route.names:
                reply = self.stand(StandRequest(name, wake.run, route, arrival))
                arrival = reply.arrival
                yield from _given(reply)
                if reply.status is not Status.RESERVED:
                    yield from self._leave(wake, route, reply)
                    return
            departed = []
            for name in reversed(route.names):  # the first one last: from there it is sent
                departed.append(self.depart(name, wake.run, first=name == first))
                if not departed[-1].released:
                    break
            else:
                yield from _given(departed[-1])
                return
            # One was given to somebody who came before it, and who may need the others, too.
            for name in route.names[-len(departed) :]:
                yield from _given(self.stand(StandRequest(name, wake.run, route, arrival)))


def begin_at_first_key(store: ParkingStore, request: StandRequest) -> Reply:
    """Have a run stand at the first of its keys; others have it go on from there."""
    reply = store.stand(request)
    if reply.status is Status.RESERVED:
        store.dispatch(WokenTask(request.name, request.run, b"", request.route))
    store.dispatch(reply.wake)
    return reply


def _given(answer: Release | Reply) -> Iterator[WokenTask]:
    if answer.wake is not None:
        yield answer.wake
