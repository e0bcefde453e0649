"""A call that is sent through the store, and the Celery producer that hands it to the store."""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from kombu.serialization import dumps

from celery_distlock import signals
from celery_distlock.engine.hold import want_of
from celery_distlock.errors import ConfigurationError, QueueFullError, StoreUnavailableError
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
from celery_distlock.policies import Fail, Park, Requeue
from celery_distlock.stores import ParkRequest, QueueStore, SendRequest, Sent, WokenTask
from celery_distlock.stores.queue_parts import SendReply
from celery_distlock.stores.requests import Identity
from celery_distlock.unique import Throttle

from .app import Runtime
from .current import Task
from .message_facts import LockHeader, execution_id
from .messages import Content, destination_of, leaves_in, seal_call, when, with_header
from .plans import Plan
from .publishing import broker_errors, broker_reason

__all__ = ["Call", "ChangedError", "StoreProducer"]

_NONE = Identity("")


class Call(NamedTuple):
    """
    One call, and where it is sent.

    Attributes:
        delay: Seconds before which it must not start.
        must_go: Send it even where its rules would not: a link, a retry, or a call with
            ``lock_unique=None``.
        bounds: How many may wait for the key, for it to be queued, and for how long it may.
        terms: The identity that it asks for.
    """

    task: Task
    runtime: Runtime
    plan: Plan
    store: QueueStore
    key: Key
    delay: float
    must_go: bool
    bounds: Park
    terms: Identity = _NONE

    @property
    def name(self) -> str:
        return slot_name(self.key.template)

    @property
    def refuses(self) -> bool:
        """Whether it raises an error if it cannot be queued."""
        policy = self.plan.policy
        return isinstance(policy, Requeue) and isinstance(policy.then, Fail)

    def notify(self, signal: str, task_id: str) -> None:
        """Send *signal* to its receivers, with the key and *task_id*."""
        facts = {"key": self.key.template, "task_id": task_id}
        signals.send(signal, self.task, self.store, **facts)

    def send(
        self,
        run: str,
        content: Content,
        how: Mapping[str, Any],
        identity: Identity | None,
        destination: str,
        leaves: float | None,
    ) -> SendReply:
        """Hand the message to the store, and dispatch the waiting runs that this admits."""
        signed = self.runtime.trust.sign(self.name, run, seal_call(content, how))
        park_request = ParkRequest(
            signed,
            task=str(self.task.name),
            destination=destination,
            max_waiting=self.bounds.max_waiting or 0,
            leaves=leaves,
        )
        request = SendRequest(
            self.key.template,
            run,
            park_request,
            want_of(self.key),
            self.delay,
            self.runtime.published.take(),
            identity,
            paced=isinstance(self.plan.unique, Throttle),
        )
        reply = self.store.calls.send(request)
        self.store.dispatch(reply.wake)
        return reply


logger = logging.getLogger(__name__)


class ChangedError(Exception):
    """The identity belongs to another run than expected: it changed since it was read."""


class StoreProducer:
    """
    Hand the first message, the call's, to the store; otherwise act as the real producer.

    The real producer is acquired only when it is needed: a call that waits in the store needs none,
    and no connection from the app's pool. It is released at the end of the ``with`` block.

    Args:
        call: The call to send.
        identity: The call's identity, if it has one.
        producer: The real producer, if the caller passed one.
        connection: The connection to make a producer of, if the caller passed one.
        store_is_unreachable: Send the call by the broker.
        number: The `LockHeader.number` of the run that it replaces.
    """

    def __init__(
        self,
        call: Call,
        identity: Identity | None,
        producer: Any,
        connection: Any,
        *,
        store_is_unreachable: bool,
        number: int = 0,
    ) -> None:
        self._call = call
        self._identity = identity
        self._store_is_unreachable = store_is_unreachable
        self._number = number
        self._is_sent = False
        self._is_over = False  # Celery's `apply_async` has returned
        self._acquired: Any = None  # the context of the real producer
        self._producer: Any = None
        self._given = producer
        if connection is not None:
            self._given = call.task.app.amqp.Producer(connection, auto_declare=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over, self._producer = True, None
        acquired, self._acquired = self._acquired, None
        if acquired is not None:
            acquired.__exit__(*exc_info)

    @property
    def _real(self) -> Any:
        # No cached property: before Python 3.12 all instances share its mutex. A thread that holds
        # it would wait for the pool, whose producers may be held by threads that wait for it.
        if self._producer is None:
            found = self._call.task.app.producer_or_acquire(self._given)
            self._producer = found.__enter__()
            self._acquired = found
        return self._producer

    @property
    def connection(self) -> Any:
        """The real producer's connection; before that is acquired, the pool's template for it."""
        if self._given is None and self._producer is None:
            return self._original
        return self._real.connection

    @property
    def _original(self) -> Any:
        """The connection that the pool clones for its producers; never opened itself."""
        return self._call.task.app.amqp.producer_pool.connections.connection

    def revive(self, channel: Any) -> None:
        """Revive the real producer, on its own connection if *channel* is the pool's template."""
        own = channel is self._original
        self._real.revive(self._real.connection if own else channel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def publish(self, body: Any, **how: Any) -> Any:
        """
        Send the call, or publish a later message, such as an event about it.

        Raises:
            ConfigurationError: The call has an identity, and `apply_async` has returned: the
                store's answer may be outdated.
        """
        if not self._is_over:
            return self._publish_next(body, how)
        if self._is_sent:
            # An event. Celery holds its mutex for events here, and callers that hold all producers
            # of the pool may wait for that mutex.
            return None
        if self._identity is not None:
            raise ConfigurationError(
                f"task {self._call.task.name}: with lock_unique a call is published before"
                " apply_async returns, and this app's send_task defers it; defer it in the"
                " apply_async of a base class of the task"
            )
        with self:
            return self._publish_next(body, how)

    def _publish_next(self, body: Any, how: dict[str, Any]) -> Any:
        if self._is_sent:
            return self._real.publish(body, **how)
        if "id" not in how["headers"]:
            raise ConfigurationError(
                f"task {self._call.task.name}: {self._call.plan.sent_by} needs Celery's"
                " task_protocol 2"
            )
        serializer = how.pop("serializer", None) or self._real.serializer
        result = self._send(Content(*dumps(body, serializer=serializer)), how)
        self._is_sent = True
        if self._producer is None and self._call.task.app.conf.task_send_sent_event:
            self._acquire_for_event()
        return result

    def _acquire_for_event(self) -> None:
        """
        Acquire the real producer before Celery takes its mutex for events, as Celery itself does.

        Callers that hold all producers of the pool may wait for that mutex.
        """
        with contextlib.suppress(*broker_errors(self.connection)):  # the call is accepted
            self._real  # noqa: B018

    def _send(self, content: Content, how: Mapping[str, Any]) -> Any:
        call, headers = self._call, how["headers"]
        began = LockHeader.of(headers)
        kept = began._replace(postponed=self._number, since=time.time() + call.delay)
        header = kept.parked([call.name], execution_id(headers, kept), sent=True)
        exchange, routing_key = how.get("exchange") or "", how.get("routing_key") or ""
        exchange = str(getattr(exchange, "name", exchange))
        where, declared = (exchange, routing_key), how.get("declare") or ()
        if not call.runtime.trust.knows_route(str(call.task.name), *where, declared=declared):
            return self._publish_in_time(content, how)  # no process would send it later
        if self._store_is_unreachable:
            return self._publish_in_time(content, _as_outage(how, kept))
        marked = {**how, "headers": with_header(headers, header)}
        try:
            leaves = leaves_in(call.bounds.timeout, kept.since, headers.get("expires"))
            to, identity = destination_of(*where), self._identity
            reply = call.send(header.run, content, marked, identity, to, leaves)
        except StoreUnavailableError as error:
            if self._identity is not None and self._identity.replaces == header.run:
                raise  # sent by the broker, it would be a second delivery of the run it replaces
            rule = call.plan.unique
            raises = rule.on_outage == "raise" if rule else call.plan.settings.on_outage == "fail"
            if raises and not call.must_go:  # else the task fails, if still unreachable
                raise
            logger.warning(
                "%s[%s] is sent by the broker, the lock store is unavailable: %s",
                call.task.name,
                headers["id"],
                error,
            )
            # The store may have it nevertheless: then the second delivery is recognised.
            return self._publish_in_time(content, _as_outage(how, kept))
        if reply.sent is Sent.CHANGED:
            raise ChangedError
        if reply.sent is Sent.FULL:
            if call.refuses:
                call.notify("task_refused", str(headers["id"]))
                most = call.bounds.max_waiting or 0
                raise QueueFullError(call.key.template, reply.holder, reply.remaining, most)
            return self._publish_in_time(content, how)  # the policy applies where it runs
        if reply.sent is Sent.GO:
            self._start(content, marked, header.run)
        return None

    def _start(self, content: Content, how: Mapping[str, Any], run: str) -> None:
        """Publish a call that may start now; if that fails, the next sweep publishes it."""
        call = self._call
        try:
            self._publish(content, how)
        except Exception as error:
            if not isinstance(error, broker_errors(self.connection)):
                raise
            logger.warning(
                "%s[%s] is accepted and will be sent later by a worker, the broker refused it: %s",
                call.task.name,
                how["headers"]["id"],
                broker_reason(error),
            )
        else:
            call.runtime.published.note(WokenTask(call.name, run, b""))

    def _publish_in_time(self, content: Content, how: Mapping[str, Any]) -> Any:
        """Publish with an ETA, for the delay that the store would have applied."""
        delay = self._call.delay
        headers = {**how["headers"], "eta": when(delay)} if delay else how["headers"]
        return self._publish(content, {**how, "headers": headers})

    def _publish(self, content: Content, how: Mapping[str, Any]) -> Any:
        kind = {"content_type": content.kind, "content_encoding": content.encoding}
        # A copy of the headers, since kombu adds the compression to them.
        headers = dict(how["headers"])
        return self._real.publish(content.body, **{**how, **kind, "headers": headers})


def _as_outage(how: Mapping[str, Any], header: LockHeader) -> dict[str, Any]:
    """Return how to publish a call by the broker so that it is not treated as a second one."""
    return {**how, "headers": with_header(how["headers"], header._replace(outages=1))}
