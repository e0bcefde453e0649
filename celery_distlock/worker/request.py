"""A request that hands what the main process knows of its message to the process that runs it."""

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
from celery_distlock.runtime.lock_header import HEADER, LockHeader, execution_id, without_ours
from celery_distlock.runtime.messages import destination_of, seconds_until
from celery_distlock.runtime.received import PLAIN_CONTENT, Received
from celery_distlock.runtime.requeueing import Postponed
from celery_distlock.runtime.routing import copied_queue, exchange_type, queue_names
from celery_distlock.stores.values import WokenTask
from celery_distlock.telemetry import events

__all__ = ["LockedRequest", "locked_request", "woken_requests"]

logger = logging.getLogger(__name__)

# Content that kombu serializes again just as it was, if the body is not kept as it came. YAML's
# dumper refuses Celery's signatures, and a signed body would be signed in the worker's name.
_SERIALIZED_AGAIN = frozenset(
    {"application/json", "application/x-python-serialize", "application/x-msgpack"}
)


# By delivery tag, those of woken tasks that Celery still has. Its own table lacks those that wait
# for a rate limit, and is by task id, which second deliveries share.
woken_requests: "WeakValueDictionary[Any, LockedRequest]" = WeakValueDictionary()


class LockedRequest(Request):
    """A request whose message can be parked, and sent again, just as it came."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        app, facts = options["app"], self.request_dict
        where = facts["delivery_info"]
        place = exchange, _ = where.get("exchange") or "", where.get("routing_key") or ""
        kind = exchange_type(app, exchange)
        header = LockHeader.of(facts)
        facts.pop(HEADER, None)  # else the task would see it, and hand it on
        if header.returned:
            where["redelivered"] = True  # as a broker says of what came back to it
        noted = Received.noted_on(message)
        self._received = received = noted._replace(
            arrival=self._stamp() if noted.arrival is None else noted.arrival,
            returns=self._runtime.trust.knows_route(facts["task"], *place),
            exchange_type=kind,
            copy_of=copied_queue(app, exchange) if kind == "fanout" else "",
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            body=self._kept_body(message, decoded=options.get("decoded", False)),
            headers=_as_they_came(options.get("headers") or message.headers),
            header=header,
            delivery_address=self._runtime.delivery_address,
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
            # The pool's process gets this very object beside the facts, so pickle sends it once.
            return self.body
        return None if message.content_type in _SERIALIZED_AGAIN else message.body

    def _destination(self, app: Celery, exchange: str, routing_key: str) -> str:
        """Return where it was sent, if this worker still takes what is sent there; else nothing."""
        queues = queue_names(app, exchange, routing_key)
        is_taken = any(queue in self._runtime.delivery_queues for queue in queues)
        return destination_of(exchange, routing_key) if is_taken else ""

    def _stamp(self) -> int:
        """Return when it arrived, in µs by the store's clock; 0: it counts from the acquisition."""
        parking = self._runtime.parking_thread
        return 0 if parking is None or self.eta is not None else parking.stamp()

    def _forget_a_past_eta(self) -> None:
        """
        Have Celery start a woken task at once whose ETA is over, as one that never had any.

        It gives the others to its timer, which hands them to the pool behind all that was fetched
        meanwhile. What the task sees as its request's ETA, and what is parked again, stay.
        """
        eta = self.eta
        if eta is not None and not seconds_until(eta):
            self._eta = None

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Note whether the task was only postponed, which Celery reports as a failure."""
        error = exc_info.exception
        self._postponed = isinstance(getattr(error, "exc", error), Postponed)
        return super().on_failure(exc_info, *args, **options)

    def acknowledge(self) -> None:
        """Acknowledge to the broker, or to the store, unless that pushed the task and keeps it."""
        if self._received.pushed and getattr(self, "_postponed", False):
            self.acknowledged = True
        else:
            super().acknowledge()

    def cancel(self, *args: Any, **options: Any) -> None:
        """End it as after a lost connection; as a broker would, the store sends it again."""
        super().cancel(*args, **options)
        # Not by reject(): if it was too late and the task succeeds, that is still acknowledged.
        if self._received.pushed and self.task.acks_late and not self.acknowledged:
            self.on_reject(logger, self.connection_errors, True)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  # as Celery has it
        """Name the state of a revoked task that was parked: what it was shown as outranks that."""
        if type == "task-revoked" and self._was_woken:
            fields["state"] = states.REVOKED
        super().send_event(type, **fields)

    @property
    def waits(self) -> bool:
        """Whether its task has neither begun nor been given up."""
        return not (self.time_start or self.acknowledged)

    @property
    def arrival(self) -> int:
        """When it arrived, in µs by the store's clock; 0 if that is not known."""
        return self._received.arrival or 0

    @property
    def _runtime(self) -> Runtime:
        app: Any = self.app
        return Runtime.of(app)

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
        """Whether the attempt before may have left its keys to it, and they can be made here."""
        plan = self._runtime.plans.get(self.type)
        return (
            plan is not None
            and plan.settings.hold_on_retry
            and bool(self.request_dict.get("retries"))
            and plan.rule.runs_no_code
            and self.content_type in PLAIN_CONTENT
        )

    def _reserved(self) -> list[WokenTask]:
        """Return its run at each of the keys that may be reserved for it."""
        names = self._received.header.places if self._was_woken else self._own_names()
        return [WokenTask(name, self.run, b"") for name in names]

    def _own_names(self) -> list[str]:
        """Return the slot names of its keys, by its template."""
        plan = self._runtime.plans[self.type]
        assert plan is not None
        try:
            keys = plan.rule.keys(self.args, self.kwargs)
        except (LockKeyError, TypeError):  # the attempt before had other arguments
            return []
        return [slot_name(key.template) for key in keys]


@functools.cache
def locked_request(kind: type[Request]) -> type[Request]:
    """Return a class of requests that are of *kind*, which may be a user's own, and ours."""
    if issubclass(kind, LockedRequest):
        return kind
    return type(kind.__name__, (LockedRequest, kind), {})


def _as_they_came(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return *headers* but for ours; a task changes none of what they hold."""
    return {
        name: copy.deepcopy(value) if isinstance(value, dict | list) else value
        for name, value in without_ours(headers).items()
    }


def _event_source(options: dict[str, Any]) -> str:
    """Return the name by which the worker sends events; empty while it sends none."""
    eventer = options.get("eventer")
    if eventer is None or not eventer.enabled:
        return ""
    groups = eventer.groups  # none: all of them
    return str(eventer.hostname) if not groups or "task" in groups else ""
