"""
Parks a task when its message arrives, if unfinished tasks of the same worker use up its key.

Parking a task in the pool costs ten times as much, and takes a slot from woken tasks. So the
worker's main process parks a task that it knows must wait. All others go to the pool, whose
processes request the key.

- Of the tasks of one key that came to this worker, the pool only has those that can hold it at the
  same time: one, or as many as its units allow. The others wait in the key's queue, in the order in
  which they were received (`celery_distlock.worker.parker`).
- A task may be parked before the first one has acquired the key. If the first ends without the key,
  no release wakes the next task; this module does.
- A woken task waits here while an earlier task of its key waits for a slot of the pool; and for at
  most a second while an earlier task has begun that may not have requested the key yet. It does
  not wait if the key has room for all of them, and no rate.
- The event loop makes the key of a small message and hands it to a thread that parks it. It waits
  at most 20 ms for that. A message that takes longer stays unacknowledged in the thread, while the
  loop continues (see `celery_distlock.worker.event_loop`).
- A message is parked only after its state is stored, so that a late write of the state overwrites
  no result.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from celery import bootsteps
from celery.exceptions import InvalidTaskError
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import Received
from celery_distlock.stores.values import Want

from .arrival import PATIENCE, Arrival, ArrivalTimes, can_park
from .delivery import Precedence
from .event_loop import BoundedCaller, LoopCalls
from .in_flight import DeferredCalls, in_flight
from .parker import Parker

__all__ = ["MOST_HELD", "Parking", "ParkingStep"]

LOOP_WAIT = 0.02  # seconds that the event loop waits for a message to be parked
NO_WAIT = 30.0  # seconds after a timeout for which the loop does not wait at all
MOST_HELD = 1000  # messages in the thread for which the prefetch is raised
STALE_AFTER = 60.0  # seconds after which the broker may have given a message to another worker


class ParkingStep(bootsteps.StartStopStep):
    """Parks messages, or checks their keys, while the worker consumes."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = Runtime.of(parent.app)

    def include_if(self, parent: Any) -> bool:
        """Whether there are locked tasks."""
        return self._runtime.settings.enabled and any(self._runtime.plans.values())

    def start(self, parent: Any) -> None:
        """Start the thread that checks keys and, if the store can park, the one that parks."""
        # A check needs no result backend, and must not wait for requests to it.
        self._runtime.inspection_thread = Parking(parent, self._runtime)
        if can_park(self._runtime):
            self._runtime.parking_thread = parking = Parking(parent, self._runtime)
            parking.begin()

    def stop(self, parent: Any) -> None:
        """Stop parking; the broker delivers unacknowledged messages again."""
        parts = self._runtime.parking_thread, self._runtime.inspection_thread
        self._runtime.parking_thread = self._runtime.inspection_thread = None
        for part in parts:
            if part is not None:
                part.close()

    terminate = shutdown = stop


class Parking:
    """
    Parks messages in the order of arrival, in a thread of its own.

    Created, used and closed by the event loop of one consumer; only `_read_clock` and the `Parker`
    run in the thread.
    """

    def __init__(self, consumer: Any, runtime: Runtime) -> None:
        self._consumer = consumer
        options = consumer.app.conf.broker_transport_options or {}
        visible = float(options.get("visibility_timeout", STALE_AFTER))
        stale_after = min(STALE_AFTER, visible / 2)
        self._parker = Parker(runtime, stale_after, str(consumer.hostname))
        self._thread = BoundedCaller("distlock-parking", patience=LOOP_WAIT, pause=NO_WAIT)
        self._calls = LoopCalls(consumer.hub, consumer.call_soon)
        self._times = ArrivalTimes(runtime.store)
        self._until_started = DeferredCalls(consumer.timer)
        self._until_ended = DeferredCalls(consumer.timer)
        self._first = Precedence(getattr(consumer, "controller", None))
        self._held: Counter[str] = Counter()  # by slot name: messages that are in the thread
        self._closed = self._reading = False

    def begin(self) -> None:
        """Read the store's clock before the first message arrives; waits at most `PATIENCE` s."""
        with contextlib.suppress(TimeoutError):
            self._thread.ask(self._read_clock).result(PATIENCE)

    def close(self) -> None:
        """Stop parking, and drop the messages held: they are not acknowledged."""
        self._closed = True
        self._parker.stop()
        self._calls.close()
        self._until_started.close()
        self._until_ended.close()
        in_flight.followers.clear()
        self._thread.close()

    def stamp(self) -> int:
        """Return the arrival time for a message received now, see `ArrivalTimes`."""
        if self._times.inexact and not self._reading:
            self._reading = True
            self._thread.ask(self._read_clock)
        return self._times.stamp()

    def _read_clock(self) -> None:
        self._times.read_clock(PATIENCE)
        self._reading = False

    def holds(self, name: str) -> bool:
        """Whether a message for the key of that slot name is being parked, or waits here."""
        return name in self._held or self._until_started.has(name)

    # Woken tasks

    def start_woken(
        self,
        wants: Mapping[str, Want],
        message: Any,
        go_on: Callable[[], object],
        passed: tuple[str, ...] = (),
    ) -> None:
        """
        Hand a woken task to the pool once the earlier tasks of its keys have requested them.

        *wants* as for `InFlightKeys.entering`.
        """
        identity, arrival = message.headers["id"], Received.noted_on(message).arrival or 0
        for name, want in wants.items():
            busy = functools.partial(_goes_behind, name, want, identity, arrival)
            if name not in passed and (self._until_started.has(name) or busy()):
                in_flight.followers.add(identity)
                again = functools.partial(self.start_woken, wants, message, go_on, (*passed, name))
                self._until_started.put(name, busy, again)
                return
        try:
            with in_flight.entering(wants, identity):
                if passed:
                    with self._first():
                        self._go_on(message, go_on)
                else:
                    go_on()
        finally:  # not before Celery has made a request of it: it counts as waiting until then
            in_flight.followers.discard(identity)

    # New messages

    def take(self, arrival: Arrival) -> None:
        """Park the message or hand it to the pool: at once, or when the thread has decided."""
        if arrival.look is None:
            arrival.stamp = self.stamp()
            Received.note(arrival.message, arrival=arrival.stamp)
        asked = self._thread.ask(functools.partial(self._parker.handle, arrival))
        if asked.done() and not any(map(self.holds, arrival.names)):  # not before an earlier one
            self._settle(arrival, asked.result())
            return
        self._held.update(arrival.names)
        if self._held.total() <= MOST_HELD:
            # As Celery does for tasks with an ETA, so that others do not wait behind it.
            before = self._consumer.qos.value
            arrival.widens = self._consumer.qos.increment_eventually() > before
        asked.add_done_callback(
            lambda _: self._calls.put(functools.partial(self._settle_held, arrival, asked))
        )

    def _settle_held(self, arrival: Arrival, asked: "Future[bool]") -> None:
        self._held -= Counter(arrival.names)
        if arrival.widens:
            self._consumer.qos.decrement_eventually()
        if not self._closed:
            settle = functools.partial(self._settle, arrival, asked.result())
            self._go_on(arrival.message, settle)

    def _settle(self, arrival: Arrival, parked: bool) -> None:
        if not parked:
            # A message that was only checked is added to its keys elsewhere, if it may run.
            wants = arrival.wants if arrival.look is None else {}
            with in_flight.entering(wants, arrival.identity):
                arrival.go_on()
            return
        arrival.acknowledge()
        if arrival.came_first and not self._until_ended.has(arrival.names[0]):
            # If the tasks before it end without the key, no release would wake it.
            wake = functools.partial(self._parker.wake_next, arrival.key)
            name = arrival.names[0]
            self._until_ended.put(
                name,
                lambda: not in_flight.lets_in(name, arrival.wants[name]),
                lambda: self._thread.ask(wake),
            )

    def _go_on(self, message: Any, go_on: Callable[[], object]) -> None:
        """Run *go_on* with the error handling of Celery's message callback."""
        try:
            go_on()
        except (InvalidTaskError, ContentDisallowed) as error:
            self._consumer.on_invalid_task(None, message, error)
        except DecodeError as error:
            self._consumer.on_decode_error(message, error)


def _goes_behind(name: str, want: Want, identity: str, arrival: int) -> bool:
    """
    Whether a woken task must let earlier tasks of its key ask for it.

    Not if the key has room for all of them, and no rate: a rate admits the first that asks.
    """
    has_room = not want.rates and in_flight.has_room(name, want)
    return not has_room and in_flight.has_earlier(name, identity, arrival)
