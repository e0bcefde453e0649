"""
Parks a task when its message arrives, if it would only find its key taken by its neighbours.

A way through the pool, to park there, costs ten times as much, and keeps the pool from the tasks
that are woken. So the main process parks what it can tell has to wait: a task whose key one of its
own unfinished tasks is for. Everything else goes to the pool, which asks for the key as always.

That keeps the order, too: of the tasks of one key that came to this worker only the first is in the
pool, the others stand in the key's queue by when they were received. It may be parked before the
first one has the key, then; if that ends without it, the next one is woken from here. A woken task
that comes while one before it waits for a slot waits here.

The event loop makes the key of a small message, and gives it to a thread to be parked (see
`celery_distlock.worker.event_loop`). Where the lock store or the result backend takes its time, the
message stays with that thread, unacknowledged, while the loop goes on; so it is never parked before
its state is stored, however long that takes, and a state that is stored late overwrites no result.
"""

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from celery import bootsteps
from celery.exceptions import InvalidTaskError
from celery.worker import state
from celery.worker.strategy import default
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.policies import Requeue
from celery_distlock.process import forks
from celery_distlock.process.background import BackgroundNotifier
from celery_distlock.runtime.app import Plan, Runtime
from celery_distlock.runtime.execution import PARKED, seconds_until
from celery_distlock.runtime.messages import LockHeader, Noted, execution_id_of, seal_message
from celery_distlock.runtime.reporting import Report
from celery_distlock.stores import Ability, Store
from celery_distlock.stores.base import ParkRequest, Reply, Route, Status
from celery_distlock.stores.several_keys import begin_at_first_key

from .arrival_times import Arrivals
from .event_loop import BoundedCaller, LoopCalls
from .in_flight import ElderQueue, in_flight
from .precedence import Precedence

__all__ = ["ParkingStep", "strategy"]

logger = logging.getLogger(__name__)

GLIMPSE = 0.02  # seconds that the event loop waits for a message to be parked
HURRY = 30.0  # seconds for which it then does not wait: messages are parked while it goes on
PATIENCE = 1.0  # seconds that the lock store has for an answer; then the pool has to ask
REST = 5.0  # seconds for which it then is not asked, and the pool parks
UNSHOWN = 30.0  # seconds for which no state is stored after the backend did not take one
MOST_HELD = 1000  # messages in the thread beside which as many others are fetched from the broker
STALE = 60.0  # seconds after which the broker may have thought better of whom it gave a message to
LARGE = 64 * 1024  # bytes of a body whose key is made in the pool

# What decodes to plain values: others may run users' code when a template looks into them.
PLAIN_CONTENT = frozenset({"application/json", "application/x-msgpack"})

_notifier = BackgroundNotifier("distlock-parked-signals")


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return what Celery calls with every message for *task*."""
    handle: Callable[..., Any] = default(task, app, consumer, **options)
    runtime = Runtime.of(app)
    plan = runtime.plans.get(task.name)
    if plan is None or not runtime.settings.enabled or not _may_park(task, plan, runtime):
        return handle
    lobby = _ParkingStrategy(task, plan, runtime)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any
    ) -> Any:
        parking = runtime.parking
        if body is None and parking is not None:
            go_on = functools.partial(handle, message, body, ack, reject, callbacks, **more)
            passage = LockHeader.of(message.headers)
            if passage.woken:  # its turn has come
                return parking.follow(passage.places, message, go_on)
            keys = lobby.keys_to_wait_for(message)
            if keys:
                acknowledge = functools.partial(ack, logger, consumer.connection_errors)
                return parking.take(Arrival(task, message, keys, acknowledge, go_on))
        return handle(message, body, ack, reject, callbacks, **more)

    return on_message


def _may_park(task: Any, plan: Plan, runtime: Runtime) -> bool:
    # Users' key functions run where their tasks do. Rate limits are for Celery to keep.
    return (
        type(plan.policy) is Requeue
        and plan.rule.runs_no_code
        and not task.rate_limit
        and Ability.PARK in runtime.store.abilities
    )


class ParkingStep(bootsteps.StartStopStep):
    """Parks what arrives while the worker consumes, or looks at its key."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = Runtime.of(parent.app)

    def include_if(self, parent: Any) -> bool:
        """Whether there are locked tasks."""
        return self._runtime.settings.enabled and any(self._runtime.plans.values())

    def start(self, parent: Any) -> None:
        """Begin to park, if the store does, and to look."""
        # What is only looked at needs no result backend, and is not to stand behind what does.
        self._runtime.looking = Parking(parent, self._runtime)
        if parks(self._runtime):
            self._runtime.parking = parking = Parking(parent, self._runtime)
            parking.begin()

    def stop(self, parent: Any) -> None:
        """Park no more; what is not acknowledged by now, the broker delivers again."""
        parts = self._runtime.parking, self._runtime.looking
        self._runtime.parking = self._runtime.looking = None
        for part in parts:
            if part is not None:
                part.close()

    terminate = shutdown = stop


@dataclass
class Arrival:
    """A message that has to wait for its key, as far as its worker can tell."""

    task: Any
    message: Any
    keys: tuple[str, ...]  # in the order in which they are taken
    acknowledge: Callable[[], object]
    go_on: Callable[[], object]  # to the pool
    came_at: float = field(default_factory=clock.monotonic)
    stamp: int = 0  # when it came, by the store's clock
    widens: bool = False  # while it is held, one more message is fetched
    came_first: bool = False  # it is parked, and nobody has the key
    look: Callable[[], object] | None = None  # what is done about it instead of parking it

    @property
    def identity(self) -> str:
        """The task's id."""
        return str(self.message.headers["id"])

    @property
    def key(self) -> str:
        """The first key."""
        return self.keys[0]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The keys' slot names."""
        return tuple(map(slot_name, self.keys))


class _ParkingStrategy:
    """Tells which messages for one task have to wait."""

    def __init__(self, task: Any, plan: Plan, runtime: Runtime) -> None:
        self._task = task
        self._plan = plan
        self._runtime = runtime

    def keys_to_wait_for(self, message: Any) -> tuple[str, ...]:
        """Return the keys of *message* if it would find one taken; none: it goes to the pool."""
        if len(message.body) > LARGE or message.content_type not in PLAIN_CONTENT:
            return ()
        try:
            args, kwargs, _ = message.payload
            keys = self._plan.rule.keys(args, kwargs)
        except Exception:  # noqa: BLE001  # whatever is wrong with it, the task is to fail with it
            return ()
        names, parking = [slot_name(key) for key in keys], self._runtime.parking
        taken = any(parking.holds(name) or in_flight.have(name) for name in names)
        if taken and _is_plain(message) and self._returns(message):
            return tuple(sorted(keys))
        in_flight.add_all(names, message.headers["id"])
        return ()

    def _returns(self, message: Any) -> bool:
        """Whether *message* would be sent to its queue again; else its process waits with it."""
        where = message.delivery_info or {}
        exchange, routing_key = where.get("exchange") or "", where.get("routing_key") or ""
        return self._runtime.trust.knows_route(self._task.name, exchange, routing_key)


def run_of(headers: Mapping[str, Any]) -> str:
    """Return the name of the run that a message of these *headers* is for."""
    return execution_id_of(
        headers["id"],
        headers.get("retries") or 0,
        LockHeader.of(headers).requeues,
        headers.get("replaced_task_nesting") or 0,
    )


def _is_plain(message: Any) -> bool:
    """Whether nothing but its key could keep *message* from running at once, for the first time."""
    headers = message.headers
    return not (
        headers.get("eta")
        or _has_expired(headers.get("expires"))
        or headers.get("stamps")
        or (message.delivery_info or {}).get("redelivered")
        or headers["id"] in state.revoked
    )


def _has_expired(expires: Any) -> bool:
    try:
        return bool(expires) and not seconds_until(expires)
    except (TypeError, ValueError, OverflowError):
        return True  # for Celery to say what it thinks of it


class Parking:
    """
    Parks what arrives, in the order of arrival, in a thread of its own.

    Made, asked and closed by the event loop, that of one consumer.
    """

    def __init__(self, consumer: Any, runtime: Runtime) -> None:
        self._consumer = consumer
        self._runtime = runtime
        self._helper = BoundedCaller("distlock-lobby", patience=GLIMPSE, pause=HURRY)
        self._calls = LoopCalls(consumer.hub, consumer.call_soon)
        self._arrivals = Arrivals(runtime.store)
        self._turns = ElderQueue(consumer.timer, in_flight.queue)
        self._endings = ElderQueue(consumer.timer, in_flight.have)
        self._first = Precedence(getattr(consumer, "controller", None))
        self._held: Counter[str] = Counter()
        self._rests_until = self._unshown_until = 0.0
        self._closed = self._reading = False
        options = consumer.app.conf.broker_transport_options or {}
        self._stale = min(STALE, float(options.get("visibility_timeout", STALE)) / 2)

    def begin(self) -> None:
        """Read the store's clock, before the first message comes; for a moment at most."""
        with contextlib.suppress(TimeoutError):
            self._helper.ask(self._read_clock).result(PATIENCE)

    def stamp(self) -> int:
        """Return when a message that is received now has come, see `Arrivals`."""
        if self._arrivals.inexact and not self._reading:
            self._reading = True
            self._helper.ask(self._read_clock)
        return self._arrivals.stamp()

    def holds(self, name: str) -> bool:
        """Whether a message for the key of that slot name is being parked, or waits, just now."""
        return name in self._held or self._turns.wait(name)

    def follow(
        self,
        names: Sequence[str],
        message: Any,
        go_on: Callable[[], object],
        passed: tuple[str, ...] = (),
    ) -> None:
        """Hand a woken task to the pool, when those of its keys that are there have begun."""
        identity = message.headers["id"]
        for name in names:
            if name not in passed and self._has_elders(name, identity):
                in_flight.followers.add(identity)
                later = functools.partial(self.follow, names, message, go_on, (*passed, name))
                self._turns.put(name, later)
                return
        in_flight.followers.discard(identity)
        in_flight.add_all(names, identity)
        if passed:
            with self._first():
                self._go_on(message, go_on)
        else:
            go_on()

    def _has_elders(self, name: str, identity: str) -> bool:
        return self._turns.wait(name) or in_flight.queue(name, but=identity)

    def take(self, arrival: Arrival) -> None:
        """Park it, or else hand it to the pool: at once, or when that is known."""
        if arrival.look is None:
            arrival.stamp = Noted.on(arrival.message)["arrival"] = self.stamp()
        asked = self._helper.ask(functools.partial(self._park, arrival))
        if asked.done() and not any(map(self.holds, arrival.names)):  # not before its elder
            self._settle(arrival, asked.result())
            return
        self._held.update(arrival.names)
        if self._held.total() <= MOST_HELD:
            # As Celery does for tasks with an ETA: the others are not to wait behind it.
            before = self._consumer.qos.value
            arrival.widens = self._consumer.qos.increment_eventually() > before
        asked.add_done_callback(
            lambda _: self._calls.put(functools.partial(self._settle_held, arrival, asked))
        )

    def close(self) -> None:
        """Park no more, and forget what is held: it is not acknowledged."""
        self._closed = True
        self._calls.close()
        self._turns.close()
        self._endings.close()
        in_flight.followers.clear()
        self._helper.close()

    # In the event loop

    def _settle_held(self, arrival: Arrival, asked: "Future[bool]") -> None:
        self._held -= Counter(arrival.names)
        if arrival.widens:
            self._consumer.qos.decrement_eventually()
        if not self._closed:
            settle = functools.partial(self._settle, arrival, asked.result())
            self._go_on(arrival.message, settle)

    def _go_on(self, message: Any, go_on: Callable[[], object]) -> None:
        """As Celery does where a message is received."""
        try:
            go_on()
        except (InvalidTaskError, ContentDisallowed) as error:
            self._consumer.on_invalid_task(None, message, error)
        except DecodeError as error:
            self._consumer.on_decode_error(message, error)

    def _settle(self, arrival: Arrival, parked: bool) -> None:
        if parked:
            arrival.acknowledge()
            if arrival.came_first and not self._endings.wait(arrival.names[0]):
                # If those before it end without the key, nobody's release would wake it.
                self._endings.put(arrival.names[0], functools.partial(self._wake_next, arrival.key))
        else:
            if arrival.look is None:
                in_flight.add_all(arrival.names, arrival.identity)
            arrival.go_on()

    def _wake_next(self, key: str) -> None:
        self._helper.ask(functools.partial(self._wake_in_thread, key))

    # In the thread

    def _read_clock(self) -> None:
        self._arrivals.read_clock(PATIENCE)
        self._reading = False

    def _wake_in_thread(self, key: str) -> None:
        try:
            for wake in self._runtime.store.wake_next(key):
                self._runtime.store.dispatch(wake)
        except StoreError as error:
            logger.debug("the next one at %r is left to the sweep: %s", shown(key), error)

    def _park(self, arrival: Arrival) -> bool:
        """Whether it is parked now; false: the pool has to see to it."""
        if arrival.look is not None:
            if not self._closed:
                arrival.look()
            self._doubt_if_stale(arrival)
            return False
        reply, doubtful = None, False
        if not self._closed and _is_plain(arrival.message):
            try:
                reply = self._try(arrival)
            except Exception as error:  # noqa: BLE001  # it has to come back to the loop in any case
                words = "for %g s the pool parks what has to wait for its key: %s"
                logger.info(words, REST, error)
                self._rests_until = clock.monotonic() + REST
                doubtful = True
        if reply is not None and reply.status in (Status.PARKED, Status.RESERVED):
            arrival.came_first = not reply.holder
            _notifier.submit(functools.partial(_tell, self._runtime.store, arrival, reply))
            return True
        done = reply is not None and reply.status is Status.DONE
        if doubtful or done:
            # It may have been parked: the pool looks.
            arrival.message.delivery_info["redelivered"] = True
        self._doubt_if_stale(arrival)
        return False

    def _doubt_if_stale(self, arrival: Arrival) -> None:
        if clock.monotonic() > arrival.came_at + self._stale:
            # It may have been delivered elsewhere meanwhile: likewise.
            arrival.message.delivery_info["redelivered"] = True

    def _try(self, arrival: Arrival) -> Reply | None:
        if clock.monotonic() < self._rests_until:
            return None
        self._show(arrival)
        return None if self._closed else self._line_up(arrival)

    def _show(self, arrival: Arrival) -> None:
        # Before it is parked: from then on it may run elsewhere and end before we write.
        task, message = arrival.task, arrival.message
        ignored = message.headers.get("ignore_result")
        if task.ignore_result if ignored is None else ignored:
            return
        if clock.monotonic() < self._unshown_until:
            return
        now = self._runtime.store.inspect(arrival.key, PATIENCE)
        info = {"key": shown(arrival.key), "holder": shown(now.owner), "place": now.waiting}
        # If it is not parked after all, whoever runs it sets its state right.
        Noted.on(message)["shown"] = True
        try:
            with forks.no_fork():
                task.backend.store_result(arrival.identity, info, PARKED)
        except Exception as error:  # noqa: BLE001  # only a state to look at: the task matters more
            words = "for %g s tasks are parked whose state %s is not stored: %s"
            logger.warning(words, UNSHOWN, PARKED, error)
            self._unshown_until = clock.monotonic() + UNSHOWN

    def _line_up(self, arrival: Arrival) -> Reply:
        headers = arrival.message.headers
        passage, run = LockHeader.of(headers), run_of(headers)
        since = passage.since or clock.wall()
        names, store = arrival.names, self._runtime.store
        passage = replace(passage, woken=True, run=run, parked_at=names[0], since=since)
        if len(names) > 1:
            passage = replace(passage, names=names)
        sealed = seal_message(arrival.message, passage)
        envelope = self._runtime.trust.sign(names[0], run, sealed)
        parcel = ParkRequest(envelope, self._runtime.desk, str(arrival.task.name))
        if len(names) == 1:
            return store.line_up(arrival.key, run, parcel, PATIENCE, arrival.stamp)
        # It stands at the first key only: here is no time to go further, and others do that.
        route = Route(names, parcel.task)
        return begin_at_first_key(
            store, run, route, parcel, arrival=arrival.stamp, timeout=PATIENCE
        )


def _tell(store: Store, arrival: Arrival, reply: Reply) -> None:
    # Signals run users' code, so this is not for the event loop, nor for who parks.
    report = Report(arrival.task, arrival.identity, store)
    report.conflict(arrival.message.headers, arrival.key, reply)
    report.parking(arrival.key, reply)


def parks(runtime: Runtime) -> bool:
    """Whether there are locked tasks, and a store that parks."""
    wanted = runtime.settings.enabled and any(runtime.plans.values())
    return wanted and Ability.PARK in runtime.store.abilities
