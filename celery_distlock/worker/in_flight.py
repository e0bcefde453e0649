"""
The unfinished tasks of this worker by key, with their requests; and calls that wait for them.

- A task is added when it goes to the pool. It counts until Celery has forgotten it, except while it
  waits for its ETA.
- Celery knows a task only after it has been handed over, and in a pool without an event loop other
  threads may ask before that. So it counts from the beginning, see `InFlightKeys.entering`.
- `DeferredCalls` polls, because Celery does not report every start and end of a task.
"""

import collections
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery.worker import state

from celery_distlock import clock
from celery_distlock.stores.values import Want

__all__ = ["DeferredCalls", "InFlightKeys", "free_slots", "has_room", "in_flight"]

logger = logging.getLogger(__name__)

ASKS_WITHIN = 1.0  # seconds from its start within which a task is assumed to request its key

# Seconds between polls for finished tasks, while others wait for them; the pause grows while none
# finishes.
POLL, MAX_POLL = 0.002, 0.1

# Before Celery 5.7, only its timer knows the tasks that wait for an ETA.
_scheduled: Collection[Any] = getattr(state, "scheduled_requests", ())


class InFlightKeys:
    """
    The ids of this worker's unfinished tasks, by the slot name of their key.

    Attributes:
        followers: The ids of woken tasks that wait for earlier tasks of their key to begin.
    """

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, Want]] = {}
        self._entering: dict[str, int] = collections.defaultdict(int)
        self._served: set[str] = set()
        self._next_purge = 1000
        self._mutex = threading.Lock()  # without an event loop there are several threads here
        self.followers: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether an unfinished task has the key of that slot name."""
        return bool(self.ids(name))

    def has_room(self, name: str, want: Want) -> bool:
        """
        Whether a request *want* could be granted in addition to those of all such tasks.

        Judged as by a store, as if they held what they want and no other process held anything.
        """
        wants = self._wants(name).values()
        return not wants or has_room(want, wants)

    def lets_in(self, name: str, want: Want) -> bool:
        """
        Whether there is room, and none of them will request the key after a task that comes now.

        That matters where the key has a rate: the first request starts, the others wait. A task
        that began longer ago than the rate's spacing is not waited for, so that no start is late.
        """
        if want.rates:
            distance = max(rate.per / rate.limit for rate in want.rates)
            asks = functools.partial(self._is_about_to_ask, within=min(ASKS_WITHIN, distance))
            if any(map(asks, self.ids(name))):
                return False
        return self.has_room(name, want)

    def has_earlier(self, name: str, identity: str, arrival: int) -> bool:
        """
        Whether one of them precedes the woken task *identity*, which came at *arrival*.

        That is one that came earlier, or at an unknown time, and waits for a slot; or one that came
        earlier and began within the last second, so that it may not have asked yet.
        """
        return any(self._is_earlier(each, arrival) for each in self.ids(name) - {identity})

    def _is_earlier(self, identity: str, arrival: int) -> bool:
        request = state.requests.get(identity)
        if request is None:
            return identity in self._entering
        if identity in self._served:  # even if its process has not yet reported that it began
            return False
        came = getattr(request, "arrival", 0)
        if request not in state.active_requests:
            return came < arrival or not (came and arrival)
        begun = request.time_start or 0.0
        return 0 < came < arrival and abs(clock.wall() - begun) <= ASKS_WITHIN

    def _is_about_to_ask(self, identity: str, within: float) -> bool:
        """Whether a task waits for a slot, or has begun less than *within* seconds ago."""
        request = state.requests.get(identity)
        if request is None:
            return identity in self._entering
        begun: float | None = request.time_start
        return begun is None or abs(clock.wall() - begun) < within

    def note_served(self, identity: str) -> None:
        """Note that a task has held and released its key; it may not have ended yet."""
        if identity in state.requests:
            self._served.add(identity)

    def ids(self, name: str) -> set[str]:
        """Return the ids of the unfinished tasks of the key with that slot name."""
        return set(self._wants(name))

    def first_of(self, name: str, but: str) -> str:
        """Return name and id of the first unfinished task of a key, except *but*; empty: none."""
        found = (state.requests.get(each) for each in self._wants(name) if each != but)
        first = next((each for each in found if each is not None), None)
        return "" if first is None else f"{first.name}[{first.id}] of this worker"

    def wants(self, name: str, identities: Iterable[str]) -> list[Want]:
        """Return the requests of the unfinished tasks of a key that have these *identities*."""
        wants = self._wants(name)
        return [wants[each] for each in identities if each in wants]

    def _wants(self, name: str) -> dict[str, Want]:
        with self._mutex:
            known = self._ids.get(name)
            if known is None:
                return {}
            finished = self._finished(known)
            for each in finished:
                del known[each]
            self._served -= finished
            return known.copy()

    @contextmanager
    def entering(self, wants: Mapping[str, Want], identity: str) -> Iterator[None]:
        """
        Add a task to its keys, while the block hands it to the pool.

        *wants* are its requests, by the slot names of its keys.
        """
        with self._mutex:
            self._entering[identity] += 1
            self._served.discard(identity)
            for name, want in wants.items():
                self._add(name, identity, want)
        try:
            yield
        finally:
            with self._mutex:
                self._entering[identity] -= 1
                if not self._entering[identity]:
                    del self._entering[identity]

    def _finished(self, identities: Iterable[str]) -> set[str]:
        return {each for each in identities if not _is_unfinished(each)} - self._entering.keys()

    def _add(self, name: str, identity: str, want: Want) -> None:
        known = self._ids.setdefault(name, {})
        known[identity] = want
        if len(known) + len(self._ids) > self._next_purge:
            self._purge()

    def _purge(self) -> None:
        for name, known in list(self._ids.items()):
            for each in self._finished(known):
                del known[each]
            if not known:
                del self._ids[name]
        self._served &= set().union(*self._ids.values())
        self._next_purge = max(1000, 4 * len(self._ids))


def _is_unfinished(identity: str) -> bool:
    """Whether Celery knows a task with that id, and does not hold it for its ETA."""
    request = state.requests.get(identity)
    return request is not None and request not in _scheduled


def has_room(want: Want, others: Iterable[Want], used: int = 0) -> bool:
    """Whether request *want* fits in addition to the requests *others*, and to *used* units."""
    others = list(others)
    if want.alone or any(other.alone for other in others):
        return not (others or used)
    if not want.capacity:
        return True
    used += sum(other.counted() for other in others)
    return used + want.counted() <= want.capacity


in_flight = InFlightKeys()


class _Deferred(NamedTuple):
    busy: Callable[[], bool]
    call: Callable[[], object]


class DeferredCalls:
    """
    Calls that wait for other tasks of their key. Those of one key run in order.

    Args:
        timer: The worker's.
    """

    def __init__(self, timer: Any) -> None:
        self._timer = timer
        self._waiting: dict[str, collections.deque[_Deferred]] = {}
        self._mutex = threading.Lock()  # without an event loop there are several threads here
        self._polls = False
        self._pause = POLL
        self._closed = False

    def has(self, name: str) -> bool:
        """Whether a call waits at the key of that slot name."""
        return name in self._waiting

    def put(self, name: str, busy: Callable[[], bool], call: Callable[[], object]) -> None:
        """Run *call* once *busy* returns false, after the earlier calls of the key."""
        with self._mutex:
            self._waiting.setdefault(name, collections.deque()).append(_Deferred(busy, call))
            begins, self._polls = not self._polls, True
            self._pause = POLL
        if begins:
            self._poll_later()

    def close(self) -> None:
        """Drop all waiting calls."""
        self._closed = True
        self._waiting.clear()

    def _poll_later(self) -> None:
        self._timer.call_after(self._pause, self._poll)

    def _poll(self) -> None:
        self._pause = min(1.5 * self._pause, MAX_POLL)
        for name, calls in list(self._waiting.items()):
            if not calls[0].busy():
                self._call_next(name)
                self._pause = POLL
        with self._mutex:
            self._polls = bool(self._waiting) and not self._closed
        if self._polls:
            self._poll_later()

    def _call_next(self, name: str) -> None:
        with self._mutex:
            calls = self._waiting.get(name)
            if not calls:
                return
            deferred = calls.popleft()
            if not calls:
                del self._waiting[name]
        try:
            deferred.call()
        except Exception:
            logger.exception(
                "unexpected error while starting a task that waited at %r; the sweeper sends it",
                name,
            )


def free_slots(pool: Any) -> int:
    """Return how many tasks the worker could begin now; 0 without a pool."""
    if pool is None:
        return 0
    # Before Celery 5.7, `num_processes` of gevent's pool counts running greenlets.
    slots = pool.limit if pool.is_green else pool.num_processes
    return max(0, int(slots or 0) - len(state.reserved_requests))
