"""
Checks the key of a ``"skip"`` or ``"fail"`` task when its message arrives.

- A task that begins at once checks its key itself. A task that waits for a slot of the pool would
  check too late, when the holder at its arrival may be done. So its key is checked here.
- A key is taken if it has a holder, or if an earlier task that wants it waits for a slot. A key
  with several units is taken if holders and tasks that wait for a slot leave no room.
- The result goes with the message to the pool. The pool's process applies the policy as to any
  conflict, so that links, chords and signals remain Celery's.
- As in `celery_distlock.worker.parking`, a thread sends the requests to the store, and only the
  pool handles large messages and keys that users' code makes.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery.worker import state

from celery_distlock import clock
from celery_distlock.key import Key
from celery_distlock.runtime.message_facts import Received, Taken, execution_id

from .arrival import Arrival, Delivery, Receiver, keys_of, look_at, wants_of
from .in_flight import free_slots, has_room, in_flight
from .parker import STORE_PAUSE
from .parking import MOST_HELD

__all__ = ["SkipOnArrival"]

logger = logging.getLogger(__name__)


@dataclass
class _Lookup:
    """One check of the keys of a message, and its result."""

    message: Any
    keys: Sequence[Key]
    delivery: Delivery
    found: Taken | None = None
    used: dict[str, int] = field(default_factory=dict)  # units of keys that several may hold


class SkipOnArrival(Receiver):
    """Checks, for messages of one task, whether their key is taken. For the event loop."""

    _store_unreachable_until = 0.0

    def _receive_new(self, message: Any, delivery: Delivery) -> Any:
        """Hand *message* to the pool: at once, or when its key has been checked."""
        keys, looking = self._keys(message), self._runtime.inspection_thread
        if not keys or looking is None:
            return delivery.go_on()
        if not self._waits():
            return self._let_run(message, keys, delivery)
        if (taken := _queued_before(message, keys)) is not None:
            return self._refuse(taken, delivery, message)
        lookup = _Lookup(message, keys, delivery)
        look, settle = partial(self._look, lookup), partial(self._settle, lookup)
        arrival = Arrival(self._task, message, (keys[0],), _nothing, settle, look=look)
        return looking.take(arrival)

    def _keys(self, message: Any) -> Sequence[Key]:
        """Return the keys of *message*; none, if only the pool may check them."""
        headers = message.headers
        if (
            headers.get("eta")  # the key may be free by then
            or (message.delivery_info or {}).get("redelivered")  # it may have the key itself
        ):
            return ()
        return keys_of(message, self._plan.rule)

    def _waits(self) -> bool:
        """Whether a task that comes now must wait for others to end."""
        return not free_slots(self._consumer.pool)

    def _let_run(self, message: Any, keys: Sequence[Key], delivery: Delivery) -> Any:
        with in_flight.entering(wants_of(keys), message.headers["id"]):
            return delivery.go_on()

    def _refuse(self, taken: Taken, delivery: Delivery, message: Any) -> Any:
        """Pass *message* on with the result; fetch one more message until it is acknowledged."""
        Received.note(message, taken=taken)
        narrow = _widen(self._consumer.qos)

        def after(call: Callable[..., Any]) -> Callable[..., Any]:
            def narrow_and_call(*args: Any, **options: Any) -> Any:
                narrow()
                return call(*args, **options)

            return narrow_and_call

        return delivery.go_on(ack=after(delivery.acknowledge), reject=after(delivery.reject))

    # In the thread

    def _look(self, lookup: _Lookup) -> None:
        """Check which of its keys is taken, as far as the store answers."""
        if clock.monotonic() < self._store_unreachable_until:
            return
        message, run = lookup.message, execution_id(lookup.message.headers)
        try:
            for key, want in zip(lookup.keys, wants_of(lookup.keys).values(), strict=True):
                now, is_open = look_at(self._runtime.store, key, want, run)
                if is_open:
                    lookup.used[key.template] = now.used
                    continue
                left = now.remaining or now.rest
                lookup.found = Taken(key.template, now.owner, now.run, left)
                return
        except Exception as error:  # noqa: BLE001  # the pool asks again, and reports errors
            words = (
                "the key of task %s[%s] was not checked on arrival; its process checks it, as do"
                " those of tasks that arrive in the next %g s: %s"
            )
            name, identity = self._task.name, message.headers["id"]
            logger.info(words, name, identity, STORE_PAUSE, error)
            self._store_unreachable_until = clock.monotonic() + STORE_PAUSE

    # In the event loop again

    def _settle(self, lookup: _Lookup) -> Any:
        """Hand the message to the pool, with the result."""
        # An earlier task may have been in the thread as well when this one came.
        taken = lookup.found or _queued_before(lookup.message, lookup.keys, lookup.used)
        if taken is not None:
            return self._refuse(taken, lookup.delivery, lookup.message)
        return self._let_run(lookup.message, lookup.keys, lookup.delivery)


def _queued_before(
    message: Any, keys: Sequence[Key], used: Mapping[str, int] | None = None
) -> Taken | None:
    """
    Return a key for which earlier tasks that wait for a slot of the pool leave no room.

    *used* has the units of keys that are in use already.
    """
    for key, (name, want) in zip(keys, wants_of(keys).items(), strict=True):
        queued = _queued(name, message.headers["id"])
        others = in_flight.wants(name, queued)
        if others and not has_room(want, others, (used or {}).get(key.template, 0)):
            identity, request = next(iter(queued.items()))
            holder = f"{request.name}[{identity}], which waits for a process"
            return Taken(key.template, holder, request.run, 0.0)
    return None


def _queued(name: str, but: str) -> dict[str, Any]:
    """Return the unfinished tasks of a key that wait for a slot, by id; without *but*."""
    found = {each: state.requests.get(each) for each in in_flight.ids(name) - {but}}
    return {
        identity: request
        for identity, request in found.items()
        if request is not None
        and request in state.reserved_requests
        and request not in state.active_requests
    }


_widened = 0
_widening = threading.Lock()


def _widen(qos: Any) -> Callable[[], None]:
    """
    Raise the prefetch by one message, and return the function that undoes it; see `MOST_HELD`.

    Otherwise tasks that only wait to be skipped would keep later ones in the broker.
    """
    global _widened  # noqa: PLW0603  # a worker has one pool
    with _widening:
        before = qos.value
        wider = _widened < MOST_HELD and qos.increment_eventually() > before
        _widened += wider
    left = [None] * wider

    def narrow() -> None:
        global _widened  # noqa: PLW0603
        with _widening:
            if left:
                left.pop()
                _widened -= 1
                qos.decrement_eventually()

    return narrow


def _nothing() -> None:
    """Do nothing: the pool acknowledges the message."""
