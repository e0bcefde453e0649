"""Publishing parked messages to the broker, and reporting to the store that this was done."""

import logging
import os
import time
from typing import Any

from amqp.exceptions import ChannelError, MessageNacked
from celery import Celery
from kombu.common import Broadcast
from kombu.exceptions import OperationalError
from kombu.transport import virtual
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_NUMBER_OF_BITS_TO_USE,
    calculate_routing_key,
    level_name,
)

from celery_distlock.errors import StoreError
from celery_distlock.process import forks
from celery_distlock.process.background import BackgroundNotifier
from celery_distlock.stores import QueueStore, WokenTask

from .messages import publishing_of
from .routing import known_queues, queues_at

__all__ = ["Published", "broker_errors", "broker_reason", "is_refusal", "publish"]


def publish(
    app: Celery,
    envelope: bytes,
    *,
    returned: bool = False,
    exchange_type: str = "",
    delay: float = 0.0,
) -> None:
    """
    Publish *envelope* to the queue that it came from.

    Args:
        app: The app.
        envelope: A parked message.
        returned: See `LockHeader`.
        exchange_type: See `Received`.
        delay: Seconds until its ETA.

    Raises:
        MalformedError: The envelope is not a valid message.
        kombu.exceptions.OperationalError: The broker did not accept it within the app's retries.
    """
    built = publishing_of(envelope, returned=returned)
    exchange = built["exchange"]
    # RabbitMQ drops a message to a queue that is gone, kombu's Redis transport one to an exchange
    # that this connection has not declared.
    declare = [_needed_of(queue) for queue in queues_at(app, exchange, built["routing_key"])]
    with forks.no_fork(), app.producer_or_acquire() as producer:
        try:
            if delay >= 1.0 and producer.connection.transport.driver_type == "amqp":
                _leave_with_broker(app, built, exchange_type, delay)
            if exchange and exchange_type and not declare:
                _make_known(producer.channel, exchange, exchange_type)
            producer.publish(
                **built,
                declare=declare,
                retry=app.conf.task_publish_retry,
                retry_policy=app.conf.task_publish_retry_policy,
            )
        except OperationalError:
            raise
        except broker_errors(producer.connection) as error:  # not wrapped without retries
            raise OperationalError(str(error)) from error


def broker_errors(connection: Any) -> tuple[type[Exception], ...]:
    """Return the errors that mean that the broker of *connection* did not accept a message."""
    if connection is None:  # its producer's channel was closed
        return (OperationalError,)
    return (
        OperationalError,
        *connection.connection_errors,
        *connection.channel_errors,
        *connection.recoverable_connection_errors,  # amqp: the message was refused
        *connection.recoverable_channel_errors,
    )


def is_refusal(error: OperationalError) -> bool:
    """Whether the broker answered, and refused the message."""
    return isinstance(error.__cause__, (MessageNacked, ChannelError))


def broker_reason(error: BaseException) -> str:
    """Return the type and text of a broker's or connection's error; some have no text."""
    cause = (isinstance(error, OperationalError) and error.__cause__) or error
    return ": ".join(filter(None, (type(cause).__name__, str(cause))))


def _leave_with_broker(
    app: Celery, built: dict[str, Any], exchange_type: str, delay: float
) -> None:
    """
    Let RabbitMQ hold a message until its ETA, for quorum queues, as Celery does with calls.

    A message that a worker holds until its ETA uses up its prefetch of such a queue. Celery's
    workers declare the exchanges that this needs. Direct exchanges are not supported.
    """
    exchange, routing_key = built["exchange"], built["routing_key"]
    was_kept = exchange.endswith(CELERY_DELAYED_DELIVERY_EXCHANGE)
    if was_kept:
        routing_key = routing_key.split(".", MAX_NUMBER_OF_BITS_TO_USE)[-1]
    known = was_kept or exchange_type not in ("", "direct")
    if known and routing_key and _has_quorum_queues(app):
        built["exchange"] = level_name(MAX_NUMBER_OF_BITS_TO_USE - 1)
        built["routing_key"] = calculate_routing_key(int(delay), routing_key)


def _has_quorum_queues(app: Celery) -> bool:
    arguments = (queue.queue_arguments or {} for queue in known_queues(app))
    return any(each.get("x-queue-type") == "quorum" for each in arguments)


def _needed_of(queue: Any) -> Any:
    """Return what must be declared so that *queue* receives the message."""
    # Each process has its own queue of a broadcast: one declared here would have no consumer.
    return queue.exchange if isinstance(queue, Broadcast) else queue


def _make_known(channel: Any, exchange: str, exchange_type: str) -> None:
    """Declare an exchange to a virtual transport of kombu; other brokers know their own."""
    if isinstance(channel, virtual.Channel) and exchange not in (channel.state.exchanges or ()):
        # Durable, as kombu's default: it refuses to declare an exchange twice differently.
        channel.exchange_declare(exchange, exchange_type, durable=True)


logger = logging.getLogger(__name__)

PAUSE = 0.2  # seconds to collect more runs; a sweep would send them again after ten times that


class Published:
    """
    Runs that were published, and not yet reported to *store*.

    If the process dies before the report, a run is sent again and recognised as a second delivery.
    """

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._notifier = BackgroundNotifier("distlock-published")
        self._waiting: list[WokenTask] = []
        self._process = os.getpid()
        self._comes = False

    def note(self, wake: WokenTask) -> None:
        """Queue *wake* for the next report to the store, within 0.2 s."""
        if self._process != os.getpid():  # the parent reports what was queued before the fork
            self._waiting, self._comes, self._process = [], False, os.getpid()
        self._waiting.append(wake)
        if not self._comes:
            self._comes = True
            self._notifier.submit(self._report)

    def take(self) -> list[WokenTask]:
        """Remove and return the runs to report; the caller must report them."""
        if not self._waiting or self._process != os.getpid():
            return []
        waiting, self._waiting = self._waiting, []
        return waiting

    def _report(self) -> None:
        time.sleep(PAUSE)
        self._comes = False
        try:
            self._store.parking.mark_all_published(self.take())
        except StoreError as error:
            logger.debug("published messages were not reported to the lock store: %s", error)
