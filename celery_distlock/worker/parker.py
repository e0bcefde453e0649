"""The part of parking a message that runs in a thread: requests to lock store and backend."""

import contextlib
import functools
import logging
import sys
from typing import Any

from celery.app.task import Context

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.process import forks
from celery_distlock.process.background import BackgroundNotifier
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import (
    LockHeader,
    Received,
    execution_id,
    is_let_in,
    without_ours,
)
from celery_distlock.runtime.messages import destination_of, leaves_in, seal_message
from celery_distlock.runtime.reporting import PARKED, Report, is_aborted, parked_info
from celery_distlock.runtime.requeueing import route_of
from celery_distlock.stores import QueueStore, StandRequest, Store
from celery_distlock.stores.queue_store import reserve_or_queue_and_send
from celery_distlock.stores.values import ALONE, KeyState, ParkRequest, Reply, Status, Want

from .arrival import PATIENCE, Arrival, look_at, may_run_at_once
from .in_flight import in_flight

__all__ = ["STORE_PAUSE", "Parker"]

logger = logging.getLogger(__name__)

STORE_PAUSE = 5.0  # seconds after an error for which the store gets no request, and the pool parks
BACKEND_PAUSE = 30.0  # seconds after an error of the backend for which no state is stored

_notifier = BackgroundNotifier("distlock-parking-signals")


class Parker:
    """
    Parks one message after the other, in the thread of `Parking`.

    - The state ``PARKED`` is stored before the message is parked. After that the task may run and
      end elsewhere before we write.
    - If the outcome is unknown, the message goes to the pool marked as doubtful, so that the
      process asks the store whether it has run.
    - After `stop` no message is parked.

    Args:
        runtime: The app's runtime.
        stale_after: Seconds after which the broker may have delivered the message again.
        hostname: The worker's host name, which is stored with the state.
    """

    def __init__(self, runtime: Runtime, stale_after: float, hostname: str = "") -> None:
        self._runtime = runtime
        self._hostname = hostname
        self._stale_after = stale_after
        self._store_unreachable_until = self._backend_unreachable_until = 0.0
        self._stopped = False

    def stop(self) -> None:
        """Stop parking."""
        self._stopped = True

    def handle(self, arrival: Arrival) -> bool:
        """Park or check the message; return false if the pool must handle it."""
        if arrival.look is not None:
            if not self._stopped:
                arrival.look()
            parked = uncertain = False
        else:
            parked, uncertain = self._park(arrival)
        if not parked and (uncertain or self._is_stale(arrival)):
            Received.note(arrival.message, doubtful=True)  # the pool asks the store
        return parked

    def wake_next(self, key: str) -> None:
        """Send the next task that is parked at *key*."""
        try:
            store = QueueStore.of(self._runtime.store)
            for wake in store.parking.wake_next(key):
                store.dispatch(wake)
        except StoreError as error:
            words = "the next task parked at %r was not woken; the sweeper wakes it: %s"
            logger.debug(words, shown(key), error)

    def _is_stale(self, arrival: Arrival) -> bool:
        return clock.monotonic() > arrival.came_at + self._stale_after

    def _park(self, arrival: Arrival) -> tuple[bool, bool]:
        """Park the message; return whether it is parked, and whether that is uncertain."""
        if self._stopped or not may_run_at_once(arrival.message) or arrival.has_waited:
            return False, False
        try:
            reply = self._request(arrival)
        except Exception as error:  # noqa: BLE001  # it must return to the loop in any case
            logger.info(
                "task %s[%s] was not parked at %r on arrival; its process requests the key, as do"
                " those of tasks that arrive in the next %g s: %s",
                arrival.task.name,
                arrival.identity,
                shown(arrival.key),
                STORE_PAUSE,
                error,
            )
            self._store_unreachable_until = clock.monotonic() + STORE_PAUSE
            return False, True
        if reply is None or reply.status not in (Status.PARKED, Status.RESERVED):
            return False, reply is not None and reply.status is Status.DONE
        arrival.came_first = reply.is_open
        _notifier.submit(functools.partial(_report, self._runtime.store, arrival, reply))
        return True, False

    def _request(self, arrival: Arrival) -> Reply | None:
        """Ask the store to park the message; None: not now."""
        if clock.monotonic() < self._store_unreachable_until:
            return None
        self._show_parked(arrival)
        return None if self._stopped else self._send_request(arrival)

    def _show_parked(self, arrival: Arrival) -> None:
        task, message = arrival.task, arrival.message
        ignored = message.headers.get("ignore_result")
        if task.ignore_result if ignored is None else ignored:
            return
        if clock.monotonic() < self._backend_unreachable_until:
            return
        key, now = _taken_key(self._runtime.store, arrival)
        wait = None if now.waiting else now.opens  # else it is that of the first waiter
        info = parked_info(key.template, now.owner, now.waiting, wait)
        # If it is not parked after all, the process that runs it corrects its state.
        Received.note(message, shown=True)
        try:
            with forks.no_fork():
                if is_aborted(task, arrival.identity):
                    return
                request = _context_of(message, self._hostname)
                task.backend.store_result(arrival.identity, info, PARKED, request=request)
        except Exception as error:  # noqa: BLE001  # only for display: the task must not fail
            words = (
                "the result backend did not store state %s of task %s[%s]; tasks are parked without"
                " it for %g s: %s"
            )
            name, identity = task.name, arrival.identity
            logger.warning(words, PARKED, name, identity, BACKEND_PAUSE, error)
            self._backend_unreachable_until = clock.monotonic() + BACKEND_PAUSE
            _close_broken_connections()

    def _send_request(self, arrival: Arrival) -> Reply:
        store = QueueStore.of(self._runtime.store)
        request, run = self._sealed(arrival)
        names = arrival.names
        if len(names) == 1:
            want = arrival.wants[names[0]]
            more: dict[str, Want] = {} if want == ALONE else {"want": want}
            return store.parking.park_if_held(
                arrival.key, run, request, PATIENCE, arrival.stamp, **more
            )
        route = route_of(arrival.keys, request.task, request.destination)
        reservation = StandRequest(run, route, arrival.stamp, request, timeout=PATIENCE)
        return reserve_or_queue_and_send(store, reservation)

    def _sealed(self, arrival: Arrival) -> tuple[ParkRequest, str]:
        """Return the request that parks the message, and the execution's id."""
        headers, runtime = arrival.message.headers, self._runtime
        header, run = LockHeader.of(headers), execution_id(headers)
        since = header.since or clock.wall()
        header = header.parked(arrival.names, run, since=since, sent=False)
        sealed = seal_message(arrival.message, header)
        envelope = runtime.trust.sign(header.parked_at, run, sealed)
        terms, (_, _, embedded) = arrival.bounds, arrival.message.payload
        lets_in = terms.max_waiting and is_let_in({**headers, **(embedded or {})})
        where = arrival.message.delivery_info or {}
        return ParkRequest(
            envelope,
            runtime.delivery_address,
            str(arrival.task.name),
            destination_of(where.get("exchange") or "", where.get("routing_key") or ""),
            max_waiting=0 if lets_in else terms.max_waiting or 0,
            leaves=leaves_in(terms.timeout, since, headers.get("expires")),
        ), run


def _close_broken_connections() -> None:
    """Make Django reconnect: a thread would keep a connection that a database restart broke."""
    db: Any = sys.modules.get("django.db")
    if db is not None:
        with contextlib.suppress(Exception):  # it may be imported without settings
            db.close_old_connections()


def _context_of(message: Any, hostname: str) -> Context:
    """Return the facts that a backend reads of a task: its reply queue, arguments and group."""
    args, kwargs, _ = message.payload
    properties = message.properties
    return Context(
        without_ours(message.headers),
        args=args,
        kwargs=kwargs,
        delivery_info=message.delivery_info,
        reply_to=properties.get("reply_to"),
        correlation_id=properties.get("correlation_id"),
        hostname=hostname,
    )


def _report(store: Store, arrival: Arrival, reply: Reply) -> None:
    # Signals run users' code, so neither the event loop nor the parking thread may send them.
    report = Report(arrival.task, arrival.identity, store)
    key = next(
        (each for each in arrival.keys if slot_name(each.template) == reply.at), arrival.keys[0]
    )
    if reply.status is Status.RESERVED:  # the first of its keys is reserved, it waits for another
        with contextlib.suppress(StoreError):
            key, reply = _where_it_waits(store, arrival)
    report.conflict(arrival.message.headers, key.template, reply)
    name = slot_name(key.template)
    behind = in_flight.first_of(name, but=arrival.identity)
    report.parking(key.template, reply, rated=bool(arrival.wants[name].rates), behind=behind)


def _where_it_waits(store: Store, arrival: Arrival) -> tuple[Key, Reply]:
    """Return the key that a parked task of several keys waits for, and the state of that key."""
    key, now = _taken_key(store, arrival)
    reply = Reply(Status.PARKED, clock.monotonic(), place=max(0, now.waiting - 1))
    if execution_id(arrival.message.headers) in now.runs:  # it holds all of them by now
        return key, reply._replace(place=0)
    return key, reply._replace(holder=now.owner, holder_run=now.run, remaining=now.remaining)


def _taken_key(store: Store, arrival: Arrival) -> tuple[Key, KeyState]:
    """Return the first key that is taken; else the first that unfinished tasks here want."""
    run, found = execution_id(arrival.message.headers), []
    for key, (name, want) in zip(arrival.keys, arrival.wants.items(), strict=True):
        now, is_open = look_at(store, key, want, run)
        if not is_open:
            return key, now
        found.append((key, now, in_flight.has(name)))
    key, now, _ = next((each for each in found if each[2]), found[-1])
    return key, now
