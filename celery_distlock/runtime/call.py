"""One call that goes through the store, as its key's queue gets it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_distlock import signals
from celery_distlock.engine.wants import want_of
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
from celery_distlock.stores import ParkRequest, QueueStore, SendRequest, Sent
from celery_distlock.stores.requests import Identity
from celery_distlock.unique import Throttle

from .app import Runtime
from .current import Task
from .lock_header import LockHeader
from .messages import Content, seal_call
from .plans import Plan

__all__ = ["Call"]

_NONE = Identity("")


@dataclass(frozen=True, slots=True)
class Call:
    """
    One call, and where it goes.

    Attributes:
        delay: Seconds before which it is not to start.
        must_go: It is sent whatever the rules say: a link, a retry, or with ``lock_unique=None``.
        terms: The identity that it is to have.
    """

    task: Task
    runtime: Runtime
    plan: Plan
    store: QueueStore
    key: Key
    delay: float
    must_go: bool
    terms: Identity = _NONE

    @property
    def name(self) -> str:
        return slot_name(self.key.template)

    def tell(self, signal: str, task_id: str) -> None:
        """Tell receivers what has become of it."""
        facts = {"key": self.key.template, "task_id": task_id}
        signals.send(signal, self.task, self.store, **facts)

    def send(
        self,
        header: LockHeader,
        content: Content,
        how: Mapping[str, Any],
        identity: Identity | None,
        destination: str,
    ) -> Sent:
        """Give the message to the store, and let in whom that lets in besides."""
        envelope = seal_call(content, how, header)
        signed = self.runtime.trust.sign(self.name, header.run, envelope)
        park_request = ParkRequest(signed, task=str(self.task.name), destination=destination)
        request = SendRequest(
            self.key.template,
            header.run,
            park_request,
            want_of(self.key),
            self.delay,
            self.runtime.published.take(),
            identity,
            paced=isinstance(self.plan.unique, Throttle),
        )
        reply = self.store.calls.send(request)
        self.store.dispatch(reply.wake)
        return reply.sent
