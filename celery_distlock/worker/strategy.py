"""
The Celery strategy of locked tasks, which a worker calls with each message that it receives.

- Of a broadcast, a message that one worker sent again to itself is dropped by the others.
- A task that must wait for a key is parked if it can be, see `celery_distlock.worker.parking`.
- A ``"skip"`` or ``"fail"`` task is checked now, see `celery_distlock.worker.skip_on_arrival`.
- All others go to the pool.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery.utils.imports import symbol_by_name
from celery.worker.strategy import default

from celery_distlock.engine.hold import want_of
from celery_distlock.policies import Fail, Requeue, Skip, bounds
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import LockHeader, addressee_of
from celery_distlock.runtime.plans import Plan
from celery_distlock.runtime.routing import taken_queues
from celery_distlock.stores import Ability
from celery_distlock.stores.values import ALONE, Want

from .arrival import Arrival, Delivery, Receiver, keys_of, may_run_at_once, wants_of
from .in_flight import in_flight
from .parking import Parking
from .request import locked_request
from .skip_on_arrival import SkipOnArrival

__all__ = ["strategy"]

logger = logging.getLogger(__name__)


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return the function that Celery calls with every message for *task*."""
    task.Request = locked_request(symbol_by_name(task.Request))  # it may be a user's own
    handle: Callable[..., Any] = default(task, app, consumer, **options)
    runtime = Runtime.of(app)
    plan = runtime.plans.get(task.name)
    receiver: Receiver | None = None
    if plan is not None and runtime.settings.enabled:
        receiver = _receiver(task, plan, runtime, consumer)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any
    ) -> Any:
        queue = addressee_of(message.headers) if body is None else ""
        if queue and queue not in taken_queues(app):
            return ack(logger, consumer.connection_errors)

        def go_on(ack: Any = ack, reject: Any = reject) -> Any:
            return handle(message, body, ack, reject, callbacks, **more)

        if receiver is None or body is not None:
            return go_on()
        return receiver.receive(message, Delivery(go_on, ack, reject))

    return on_message


def _receiver(task: Any, plan: Plan, runtime: Runtime, consumer: Any) -> Receiver:
    receiver = Receiver
    # Users' key functions run only in the pool. Celery's own rate limits must apply first.
    if plan.rule.runs_no_code and not task.rate_limit:
        if type(plan.policy) in (Skip, Fail):
            receiver = SkipOnArrival
        # For a call with an identity, the pool checks for a duplicate.
        elif type(plan.policy) is Requeue and plan.unique is None:
            parks = Ability.QUEUE in runtime.store.abilities
            receiver = _ParkOnArrival if parks else Receiver
    return receiver(task, plan, runtime, consumer)


class _ParkOnArrival(Receiver):
    """Parks messages that must wait for a key."""

    @functools.cached_property
    def _shares(self) -> bool:
        return not all(want_of(key) == ALONE for key in self._plan.rule.declared)

    def _receive_new(self, message: Any, delivery: Delivery) -> Any:
        parking = self._runtime.parking_thread
        if parking is None:
            return delivery.go_on()
        keys = keys_of(message, self._plan.rule)
        wants = wants_of(keys)
        if self._has_to_wait(parking, message, wants):
            errors = self._consumer.connection_errors
            acknowledge = functools.partial(delivery.acknowledge, logger, errors)
            arrival = Arrival(self._task, message, keys, acknowledge, delivery.go_on)
            arrival.bounds = bounds(self._plan.policy)
            return parking.take(arrival)
        with in_flight.entering(wants, message.headers["id"]):
            return delivery.go_on()

    def _receive_woken(self, message: Any, header: LockHeader, delivery: Delivery) -> Any:
        parking = self._runtime.parking_thread
        if parking is None:
            return delivery.go_on()
        # If all keys are exclusive, the arguments need not be read.
        wants = wants_of(keys_of(message, self._plan.rule)) if self._shares else {}
        places = {name: wants.get(name, ALONE) for name in header.places}
        return parking.start_woken(places, message, delivery.go_on)

    def _has_to_wait(self, parking: Parking, message: Any, wants: Mapping[str, Want]) -> bool:
        """
        Whether one of the keys is taken in this worker, so that the message must be parked.

        That is the case if this worker's unfinished tasks leave no room for its request; or if
        another task goes first, which is being parked or, where the key has a rate, is starting.
        """
        taken = any(
            parking.holds(name) or not in_flight.lets_in(name, want) for name, want in wants.items()
        )
        return taken and may_run_at_once(message) and self._returns(message)

    def _returns(self, message: Any) -> bool:
        """Whether *message* can be sent to its queue again; else its process waits for the key."""
        where = message.delivery_info or {}
        exchange, routing_key = where.get("exchange") or "", where.get("routing_key") or ""
        return self._runtime.trust.knows_route(self._task.name, exchange, routing_key)
