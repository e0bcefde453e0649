"""What the worker's main process knows of a message and hands on to the process that runs it."""

from typing import Any

from celery.worker.request import Request

from celery_distlock import clock
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.messages import LockHeader
from celery_distlock.runtime.received import HEADER, Received
from celery_distlock.runtime.requeueing import Postponed
from celery_distlock.stores.base import WokenTask
from celery_distlock.telemetry import events

__all__ = ["LockedRequest"]

# What kombu writes again just as it has read it. Others are parked as they came: YAML's dumper
# refuses Celery's signatures, and what a sender has signed, a worker would sign in its own name.
_WRITTEN_AGAIN = frozenset(
    {"application/json", "application/x-python-serialize", "application/x-msgpack"}
)


class LockedRequest(Request):
    """A request that lets its task be parked as it came."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        facts = self.request_dict
        where = facts["delivery_info"]
        noted = Received.noted_on(message)
        self._received = received = noted._replace(
            arrival=self._stamp() if noted.arrival is None else noted.arrival,
            returns=self._runtime.trust.knows_route(
                facts["task"], where.get("exchange") or "", where.get("routing_key") or ""
            ),
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            body=None if message.content_type in _WRITTEN_AGAIN else message.body,
            delivery_address=self._runtime.desk,
            received_at=clock.monotonic(),
            events=_as_worker(options),
        )
        events.switch(options["app"], received.events)
        facts["properties"] = {**facts["properties"], HEADER: received.to_properties()}

    def _stamp(self) -> int:
        """When it came, by the store's clock; 0: it comes when it asks for its key."""
        parking = self._runtime.parking
        return 0 if parking is None or self.eta is not None else parking.stamp()

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Note whether the task only waits; Celery tells of that as of a failure."""
        error = exc_info.exception
        self._postponed = isinstance(getattr(error, "exc", error), Postponed)
        return super().on_failure(exc_info, *args, **options)

    def acknowledge(self) -> None:
        """Tell the broker, or the store for a pushed message, unless the task still waits there."""
        if self._received.pushed and getattr(self, "_postponed", False):
            self.acknowledged = True
        else:
            super().acknowledge()

    @property
    def _runtime(self) -> Runtime:
        app: Any = self.app
        return Runtime.of(app)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Let the next have the keys that a revoked or expired task was woken for."""
        super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
        passage = LockHeader.of(self.request_dict)
        forget = self._runtime.forget
        if passage.woken and not terminated and forget is not None:
            for name in passage.places:
                forget(WokenTask(name, passage.run, b""))


def _as_worker(options: dict[str, Any]) -> str:
    """Return the name by which this worker sends events; empty while it sends none."""
    eventer = options.get("eventer")
    if eventer is None or not eventer.enabled:
        return ""
    groups = eventer.groups  # none: all of them
    return str(eventer.hostname) if not groups or "task" in groups else ""
