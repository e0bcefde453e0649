"""A Celery request that passes facts about its message to the pool process that runs it."""

import copy
import functools
import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from celery import Celery, states
from celery.worker.request import Request

from celery_distlock import clock
from celery_distlock.errors import LockKeyError
from celery_distlock.keys import slot_name
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import (
    HEADER,
    PLAIN_CONTENT,
    LockHeader,
    Received,
    execution_id,
)
from celery_distlock.runtime.messages import destination_of, seconds_until
from celery_distlock.runtime.requeueing import Postponed
from celery_distlock.runtime.routing import copied_queue, exchange_type, queue_names
from celery_distlock.stores.values import WokenTask
from celery_distlock.telemetry import events

__all__ = ["LockedRequest", "locked_request", "woken_requests"]

logger = logging.getLogger(__name__)

# Content types that kombu serializes to the same bytes, so that the body need not be kept. YAML's
# dumper refuses Celery's signatures, and a signed body would be signed in the worker's name.
_SERIALIZED_AGAIN = frozenset(
    {"application/json", "application/x-python-serialize", "application/x-msgpack"}
)


_CHANGEABLE = (dict, list)
_USUAL: list[Any] = [{}, [], [None, None]]  # headers of most messages; deepcopy() is slow

# The requests of woken tasks that Celery still has, by delivery tag. Celery's own table lacks those
# that wait for a rate limit, and is by task id, which second deliveries share.
woken_requests: "WeakValueDictionary[Any, LockedRequest]" = WeakValueDictionary()


class LockedRequest(Request):
    """A request whose message can be parked and sent again unchanged."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        app, facts = options["app"], self.request_dict
        self._runtime = runtime = Runtime.of(app)
        where = facts["delivery_info"]
        place = exchange, _ = where.get("exchange") or "", where.get("routing_key") or ""
        kind = exchange_type(app, exchange)
        header = LockHeader.of(facts)
        facts.pop(HEADER, None)  # else the task would see it, and pass it on
        if header.returned:
            where["redelivered"] = True  # as a broker marks a message that came back to it
        self._received = received = Received.noted_on(
            message,
            arrival=self._stamp(),
            returns=runtime.trust.knows_route(facts["task"], *place),
            exchange_type=kind,
            copy_of=copied_queue(app, exchange) if kind == "fanout" else "",
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            body=self._kept_body(message, decoded=options.get("decoded", False)),
            headers=_as_they_came(options.get("headers") or message.headers),
            header=header,
            delivery_address=runtime.delivery_address,
            destination=self._destination(app, *place),
            received_at=clock.monotonic(),
            events=_event_source(options),
        )
        events.set_source(app, received.events)
        facts["properties"] = received.attach_to(facts["properties"])
        if received.pushed:
            self._forget_a_past_eta()
        if self._was_woken:
            woken_requests[message.delivery_tag] = self

    def _kept_body(self, message: Any, *, decoded: bool) -> Any:
        if not decoded:
            # The pool's process gets the same object with the facts, so pickle sends it once.
            return self.body
        return None if message.content_type in _SERIALIZED_AGAIN else message.body

    def _destination(self, app: Celery, exchange: str, routing_key: str) -> str:
        """Return its exchange and routing key if this worker still consumes such a queue; or ""."""
        queues = queue_names(app, exchange, routing_key)
        is_taken = any(map(self._runtime.delivery_queues.__contains__, queues))
        return destination_of(exchange, routing_key) if is_taken else ""

    def _stamp(self) -> int:
        """Return its arrival time in µs by the store's clock; 0: it arrives when it acquires."""
        parking = self._runtime.parking_thread
        return 0 if parking is None or self.eta is not None else parking.stamp()

    def _forget_a_past_eta(self) -> None:
        """
        Make Celery start a woken task at once if its ETA has passed, as if it had none.

        Otherwise Celery would pass it to its timer, and so to the pool after all that was fetched
        by then. The ETA that the task sees, and that is parked again, does not change.
        """
        eta = self.eta
        if eta is not None and not seconds_until(eta):
            self._eta = None

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Record whether the task was only postponed, which Celery reports as a failure."""
        error = exc_info.exception
        self._postponed = isinstance(getattr(error, "exc", error), Postponed)
        return super().on_failure(exc_info, *args, **options)

    def acknowledge(self) -> None:
        """Acknowledge to the broker or the store; not a pushed task that the store still keeps."""
        if self._received.pushed and getattr(self, "_postponed", False):
            self.acknowledged = True
        else:
            super().acknowledge()

    def cancel(self, *args: Any, **options: Any) -> None:
        """Cancel it as after a lost connection; the store sends it again, as a broker would."""
        super().cancel(*args, **options)
        # Not by reject(): if the task succeeds nevertheless, it must still be acknowledged.
        if self._received.pushed and self.task.acks_late and not self.acknowledged:
            self.on_reject(logger, self.connection_errors, True)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  # as Celery has it
        """Add the state to a parked task's revocation: its last shown state would outrank it."""
        if type == "task-revoked" and self._was_woken:
            fields["state"] = states.REVOKED
        super().send_event(type, **fields)

    @property
    def waits(self) -> bool:
        """Whether its task has neither begun nor been acknowledged."""
        return not (self.time_start or self.acknowledged)

    @property
    def arrival(self) -> int:
        """Its arrival time in µs by the store's clock; 0 if that is not known."""
        return self._received.arrival or 0

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Free the keys that are reserved for a revoked or expired task."""
        super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
        drop = self._runtime.drop_reserved
        if drop is not None and not terminated and (self._was_woken or self._may_be_kept_for):
            drop(self._reserved)

    @property
    def run(self) -> str:
        """Its execution's id."""
        return execution_id(self.request_dict, self._received.header)

    @property
    def _was_woken(self) -> bool:
        return self._received.header.woken

    @property
    def _may_be_kept_for(self) -> bool:
        """Whether the previous attempt may have kept its keys for it, and they can be made here."""
        plan = self._runtime.plans.get(self.type)
        return (
            plan is not None
            and plan.settings.hold_on_retry
            and bool(self.request_dict.get("retries"))
            and plan.rule.runs_no_code
            and self.content_type in PLAIN_CONTENT
        )

    def _reserved(self) -> list[WokenTask]:
        """Return its run at each key that may be reserved for it."""
        names = self._received.header.places if self._was_woken else self._own_names()
        return [WokenTask(name, self.run, b"") for name in names]

    def _own_names(self) -> list[str]:
        """Return the slot names of its keys, made from its template."""
        plan = self._runtime.plans[self.type]
        assert plan is not None
        try:
            keys = plan.rule.keys(self.args, self.kwargs)
        except (LockKeyError, TypeError):  # the previous attempt had other arguments
            return []
        return [slot_name(key.template) for key in keys]


@functools.cache
def locked_request(kind: type[Request]) -> type[Request]:
    """Return a subclass of *kind*, which may be a user's own class, and of `LockedRequest`."""
    if issubclass(kind, LockedRequest):
        return kind
    return type(kind.__name__, (LockedRequest, kind), {})


def _as_they_came(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return *headers* without ours, copied so that a task cannot change them."""
    return {
        name: _copied(value) if isinstance(value, _CHANGEABLE) else value
        for name, value in headers.items()
        if name != HEADER
    }


def _copied(value: Any) -> Any:
    return value.copy() if value in _USUAL else copy.deepcopy(value)


def _event_source(options: dict[str, Any]) -> str:
    """Return the name under which the worker sends events; empty while it sends none."""
    eventer = options.get("eventer")
    if eventer is None or not eventer.enabled:
        return ""
    groups = eventer.groups  # none: all of them
    return str(eventer.hostname) if not groups or "task" in groups else ""
