"""How messages are sent by the broker, what that says, and how the store learns of it."""

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
    Send *envelope* to the queue that it came from.

    Args:
        app: The app.
        envelope: The envelope.
        returned: As in `LockHeader`.
        exchange_type: As in `Received`.
        delay: Seconds until its ETA.

    Raises:
        MalformedError: It cannot be sent: it is spoilt.
        kombu.exceptions.OperationalError: The broker does not take it, by the app's retry policy.
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
        except broker_errors(producer.connection) as error:  # as they come without retries
            raise OperationalError(str(error)) from error


def broker_errors(connection: Any) -> tuple[type[Exception], ...]:
    """Return what is raised where the broker of *connection* does not take a message."""
    if connection is None:  # its producer's channel was closed
        return (OperationalError,)
    return (
        OperationalError,
        *connection.connection_errors,
        *connection.channel_errors,
        *connection.recoverable_connection_errors,  # here amqp has that it was refused
        *connection.recoverable_channel_errors,
    )


def is_refusal(error: OperationalError) -> bool:
    """Whether the broker is there, and says that it does not take the message."""
    return isinstance(error.__cause__, (MessageNacked, ChannelError))


def broker_reason(error: BaseException) -> str:
    """Return what the broker, or the way to it, has said; some of these errors have no text."""
    cause = (isinstance(error, OperationalError) and error.__cause__) or error
    return ": ".join(filter(None, (type(cause).__name__, str(cause))))


def _leave_with_broker(
    app: Celery, built: dict[str, Any], exchange_type: str, delay: float
) -> None:
    """
    Have RabbitMQ keep a message until its ETA, where a quorum queue is, as Celery does with calls.

    Beside what a worker holds until its ETA it fetches no more of such queues. Celery's workers
    declare all that this needs; not for direct exchanges.
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
    """Return what there has to be so that *queue* gets what is sent."""
    # A broadcast's queue is one of each process. Nobody would take from one that a sender has made.
    return queue.exchange if isinstance(queue, Broadcast) else queue


def _make_known(channel: Any, exchange: str, exchange_type: str) -> None:
    """Let kombu know an exchange where it delivers messages itself; a broker knows its own."""
    if isinstance(channel, virtual.Channel) and exchange not in (channel.state.exchanges or ()):
        # Durable as kombu's are by default: it refuses one who declares it otherwise than before.
        channel.exchange_declare(exchange, exchange_type, durable=True)


logger = logging.getLogger(__name__)

PAUSE = 0.2  # seconds in which there may be another request; in ten times that a sweep sends again


class Published:
    """
    What was published and *store* does not know yet.

    What a process that dies has not told is sent again, and recognised as a second delivery.
    """

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._notifier = BackgroundNotifier("distlock-published")
        self._waiting: list[WokenTask] = []
        self._process = os.getpid()
        self._comes = False

    def note(self, wake: WokenTask) -> None:
        """Have it told soon."""
        if self._process != os.getpid():  # what waited when it was forked, the parent tells
            self._waiting, self._comes, self._process = [], False, os.getpid()
        self._waiting.append(wake)
        if not self._comes:
            self._comes = True
            self._notifier.submit(self._tell)

    def take(self) -> list[WokenTask]:
        """Return what is to be told, for the caller to tell."""
        if not self._waiting or self._process != os.getpid():
            return []
        waiting, self._waiting = self._waiting, []
        return waiting

    def _tell(self) -> None:
        time.sleep(PAUSE)
        self._comes = False
        try:
            self._store.parking.mark_all_published(self.take())
        except StoreError as error:
            logger.debug("that messages are with the broker was not noted: %s", error)
