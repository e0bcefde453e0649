"""The queues that an app knows: which of them a message reaches, and whether they are empty."""

import functools
import logging
import re
import time
from collections.abc import Iterable
from typing import Any

from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError
from kombu.transport import virtual
from kombu.transport.native_delayed_delivery import CELERY_DELAYED_DELIVERY_EXCHANGE

from celery_distlock.process import forks

__all__ = [
    "Backlog",
    "copied_queue",
    "exchange_type",
    "known_queues",
    "queue_names",
    "queues_at",
    "taken_queues",
]


def known_queues(app: Celery) -> list[Queue]:
    """Return a copy of the queues that *app* knows; another thread may add one at any time."""
    return list(dict.values(app.amqp.queues))


def queues_at(app: Celery, exchange: str, routing_key: str) -> list[Queue]:
    """Return the queues of *app* that a message to *exchange* with *routing_key* reaches."""
    if exchange:
        return [queue for queue in known_queues(app) if _leads_to(queue, exchange, routing_key)]
    # All are bound to the broker's default exchange, by name. `queues[...]` would create one.
    queue = dict.get(app.amqp.queues, routing_key)
    return [] if queue is None else [queue]


def queue_names(app: Celery, exchange: str, routing_key: str) -> list[str]:
    """Return the names of the queues that such a message reaches, known to *app* or not."""
    if not exchange:
        return [routing_key]
    return [queue.name for queue in queues_at(app, exchange, routing_key)]


def taken_queues(app: Celery) -> set[str]:
    """Return the names of the queues that this worker consumes, with aliases resolved."""
    return {queue.name for queue in list(dict.values(app.amqp.queues.consume_from))}


def exchange_type(app: Celery, exchange: str) -> str:
    """Return the type of an exchange that a queue of *app* is bound to; empty: not known."""
    if not exchange:
        return ""
    places = (place for queue in known_queues(app) for place, _ in _bindings(queue))
    return next((str(place.type) for place in places if place.name == exchange), "")


def copied_queue(app: Celery, exchange: str) -> str:
    """Return the queue by which this worker gets copies from a fanout *exchange*; empty: none."""
    taken = taken_queues(app)
    return next((name for name in queue_names(app, exchange, "") if name in taken), "")


def _bindings(queue: Any) -> list[tuple[Any, str]]:
    """Return the exchanges that *queue* is bound to, each with the routing key."""
    pairs = [(queue.exchange, queue.routing_key)]
    pairs += [(bound.exchange, bound.routing_key) for bound in queue.bindings or ()]
    return [(place, key or "") for place, key in pairs if place is not None]


def _leads_to(queue: Any, exchange: str, routing_key: str) -> bool:
    if exchange.endswith(CELERY_DELAYED_DELIVERY_EXCHANGE):  # RabbitMQ has delayed the message
        return _topic(f"#.{queue.routing_key}").fullmatch(routing_key) is not None
    return any(
        place.name == exchange and _matches(place.type, binding, routing_key)
        for place, binding in _bindings(queue)
    )


def _matches(kind: str, binding: str, routing_key: str) -> bool:
    if kind == "direct":
        return binding == routing_key
    if kind == "topic":
        return _topic(binding).fullmatch(routing_key) is not None
    return True  # fanout, headers and plugins' exchanges do not use the routing key alone


@functools.lru_cache(maxsize=1000)
def _topic(binding: str) -> re.Pattern[str]:
    """Return a pattern for *binding*: ``*`` matches one word, ``#`` any number of words."""
    pattern = re.escape(binding).replace(r"\*", r"[^.]*")
    pattern = pattern.replace(r"\.\#", r"(?:\..*)?").replace(r"\#\.", r"(?:.*\.)?")
    return re.compile(pattern.replace(r"\#", ".*"), re.DOTALL)


logger = logging.getLogger(__name__)

LOOKED_FOR = 1.0  # seconds for which the answer "has messages" is cached
EMPTY_FOR = 10.0  # seconds for which the answer "is empty" is cached


class Backlog:
    """
    Checks whether the broker's queues have messages, which may include one that seems lost.

    A queue that is not empty may have any message that was published to it. If it is empty, the
    messages that no worker has are lost. A worker reports the messages that it has fetched, so that
    they are not sent elsewhere, see :mod:`celery_distlock.worker.registration`.

    A message in question was published at least a minute ago, so it is also lost if the queue was
    empty a few seconds ago. Without that cache, the first lost messages that are sent again would
    be mistaken for the others. One for each app; used in threads that may wait for the broker.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._known: dict[str, tuple[float, bool]] = {}

    def is_in(self, queues: Iterable[str]) -> bool:
        """
        Whether one of *queues* has messages, or may have some because the broker is unreachable.

        Also false if the broker does not report their number.
        """
        return any(map(self._has_messages, queues))

    def _has_messages(self, queue: str) -> bool:
        now = time.monotonic()
        until, has_messages = self._known.get(queue, (now, False))
        if now >= until:
            has_messages = self._count(queue) > 0
            self._known[queue] = now + (LOOKED_FOR if has_messages else EMPTY_FOR), has_messages
        return has_messages

    def _count(self, queue: str) -> int:
        """Return how many messages are ready in *queue*, as far as the broker reports that."""
        with forks.no_fork(), self._app.connection_or_acquire() as connection:
            try:
                # A new channel: the broker closes it if the queue is not found.
                with connection.channel() as channel:
                    return _ready(channel, queue)
            except Exception as error:  # noqa: BLE001  # each transport raises its own
                logger.debug("the broker does not report the length of queue %r: %s", queue, error)
                return isinstance(error, (OperationalError, *connection.connection_errors))


def _ready(channel: Any, queue: str) -> int:
    if isinstance(channel, virtual.Channel):
        # A passive declaration fails with a `global_keyprefix`, as if the queue did not exist.
        return int(channel._size(queue) or 0)
    return int(channel.queue_declare(queue=queue, passive=True).message_count or 0)
