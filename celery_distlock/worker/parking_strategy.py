"""The Celery strategy of tasks that park: which of their messages wait for a key."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery.worker.strategy import default

from celery_distlock.engine.wants import want_of
from celery_distlock.key import Key
from celery_distlock.policies import Requeue
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.lock_header import LockHeader
from celery_distlock.runtime.plans import Plan
from celery_distlock.stores import Ability
from celery_distlock.stores.values import ALONE, Want

from .arrival import Arrival, keys_of, may_run_at_once, wants_of
from .in_flight import in_flight

__all__ = ["strategy"]

logger = logging.getLogger(__name__)


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return what Celery calls with every message for *task*."""
    handle: Callable[..., Any] = default(task, app, consumer, **options)
    runtime = Runtime.of(app)
    plan = runtime.plans.get(task.name)
    if plan is None or not runtime.settings.enabled:
        return handle
    may_park = _may_park(task, plan, runtime)
    parking_strategy = _ParkingStrategy(task, plan, runtime)

    def on_woken(message: Any, header: LockHeader, go_on: Callable[[], Any]) -> Any:
        parking = runtime.parking_thread
        if may_park and parking is not None:
            answer = parking.start_woken(parking_strategy.places(message, header), message, go_on)
        else:
            answer = go_on()
        runtime.keep_fetched(message, header)
        return answer

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any
    ) -> Any:
        parking = runtime.parking_thread
        go_on = functools.partial(handle, message, body, ack, reject, callbacks, **more)
        if body is None and (header := LockHeader.of(message.headers)).woken:  # its turn has come
            return on_woken(message, header, go_on)
        if body is None and parking is not None and may_park:
            keys = parking_strategy.keys(message)
            wants = wants_of(keys)
            if parking_strategy.has_to_wait(message, wants):
                acknowledge = functools.partial(ack, logger, consumer.connection_errors)
                return parking.take(Arrival(task, message, keys, acknowledge, go_on))
            with in_flight.entering(wants, message.headers["id"]):
                return go_on()
        return go_on()

    return on_message


def _may_park(task: Any, plan: Plan, runtime: Runtime) -> bool:
    # Users' key functions run where their tasks do. Rate limits are for Celery to keep.
    return (
        type(plan.policy) is Requeue
        and plan.unique is None  # whether it is a second one, the pool asks
        and plan.rule.runs_no_code
        and not task.rate_limit
        and Ability.QUEUE in runtime.store.abilities
    )


class _ParkingStrategy:
    """Tells the keys of one task's messages, and which messages have to wait for them."""

    def __init__(self, task: Any, plan: Plan, runtime: Runtime) -> None:
        self._task = task
        self._plan = plan
        self._runtime = runtime
        self._shares = not all(want_of(key) == ALONE for key in plan.rule.declared)

    def places(self, message: Any, header: LockHeader) -> dict[str, Want]:
        """Return the slot names of a woken task's keys, and how much it wants of each."""
        # Where all are wanted alone, the arguments need not be read.
        wants = wants_of(self.keys(message)) if self._shares else {}
        return {name: wants.get(name, ALONE) for name in header.places}

    def keys(self, message: Any) -> tuple[Key, ...]:
        """Return the keys of *message*; see `keys_of`."""
        return keys_of(message, self._plan.rule)

    def has_to_wait(self, message: Any, wants: Mapping[str, Want]) -> bool:
        """
        Whether one of the keys is taken here, so that the message is parked.

        That is: this worker's unfinished tasks leave no room for what it wants; or another one
        goes first, which is being parked just now or, where the key has a rate, begins.
        """
        parking = self._runtime.parking_thread
        taken = any(
            parking.holds(name) or not in_flight.lets_in(name, want) for name, want in wants.items()
        )
        return taken and may_run_at_once(message) and self._returns(message)

    def _returns(self, message: Any) -> bool:
        """Whether *message* would be sent to its queue again; else its process waits with it."""
        where = message.delivery_info or {}
        exchange, routing_key = where.get("exchange") or "", where.get("routing_key") or ""
        return self._runtime.trust.knows_route(self._task.name, exchange, routing_key)
