"""An app's queues, as far as it knows them: where a message comes to, and what they have."""

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
    """Return the queues that *app* knows now; another thread may add one meanwhile."""
    return list(dict.values(app.amqp.queues))


def queues_at(app: Celery, exchange: str, routing_key: str) -> list[Queue]:
    """Return the queues of *app* to which a message to *exchange* with *routing_key* comes."""
    if exchange:
        return [queue for queue in known_queues(app) if _leads_to(queue, exchange, routing_key)]
    # All are bound to the broker's default exchange, by name. `queues[...]` would make up one.
    queue = dict.get(app.amqp.queues, routing_key)
    return [] if queue is None else [queue]


def queue_names(app: Celery, exchange: str, routing_key: str) -> list[str]:
    """Return the names of the queues to which such a message comes, be they of *app* or not."""
    if not exchange:
        return [routing_key]
    return [queue.name for queue in queues_at(app, exchange, routing_key)]


def taken_queues(app: Celery) -> set[str]:
    """Return the names of the queues that this worker takes from, be they given by an alias."""
    return {queue.name for queue in list(dict.values(app.amqp.queues.consume_from))}


def exchange_type(app: Celery, exchange: str) -> str:
    """Return the type of an exchange that a queue of *app* is bound to; empty: of none."""
    queues = known_queues(app) if exchange else ()
    places = (place for queue in queues for place, _ in _bindings(queue))
    return next((str(place.type) for place in places if place.name == exchange), "")


def copied_queue(app: Celery, exchange: str) -> str:
    """Return the queue by which this worker gets its copies of a fanout *exchange*; empty: none."""
    taken = taken_queues(app)
    return next((name for name in queue_names(app, exchange, "") if name in taken), "")


def _bindings(queue: Any) -> list[tuple[Any, str]]:
    """Return the exchanges that *queue* is bound to, each with the routing key."""
    pairs = [(queue.exchange, queue.routing_key)]
    pairs += [(bound.exchange, bound.routing_key) for bound in queue.bindings or ()]
    return [(place, key or "") for place, key in pairs if place is not None]


def _leads_to(queue: Any, exchange: str, routing_key: str) -> bool:
    if exchange.endswith(CELERY_DELAYED_DELIVERY_EXCHANGE):  # RabbitMQ itself kept its countdown
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
    return True  # fanout, headers, and those of plugins go by something else


@functools.lru_cache(maxsize=1000)
def _topic(binding: str) -> re.Pattern[str]:
    """Return what *binding* matches: ``*`` is one word, ``#`` any number of them."""
    pattern = re.escape(binding).replace(r"\*", r"[^.]*")
    pattern = pattern.replace(r"\.\#", r"(?:\..*)?").replace(r"\#\.", r"(?:.*\.)?")
    return re.compile(pattern.replace(r"\#", ".*"), re.DOTALL)


logger = logging.getLogger(__name__)

LOOKED_FOR = 1.0  # seconds for which a queue counts as one that has messages
EMPTY_FOR = 10.0  # seconds for which it counts as empty


class Backlog:
    """
    Finds out whether the broker's queues have messages: what may be among them is not sent again.

    A queue that is not empty may have any message that it was given. One that is empty has lost
    those that are with no worker; a worker keeps what it has fetched from being sent elsewhere, see
    :mod:`celery_distlock.worker.registration`.

    What is asked about was given to it a minute ago or more, so it is lost also if the queue was
    empty some seconds ago. Without that, of many that are lost the first that are sent again would
    be taken for the others. One for each app; asked in threads that may wait for the broker.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._known: dict[str, tuple[float, bool]] = {}

    def is_in(self, queues: Iterable[str]) -> bool:
        """
        Whether one of *queues* has messages, or may have some: the broker is away.

        False also where the broker keeps or shows no number of them.
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
        """Return how many messages are ready in *queue*, as far as the broker says."""
        with forks.no_fork(), self._app.connection_or_acquire() as connection:
            try:
                # A channel of its own: a broker closes the one on which a queue was not found.
                with connection.channel() as channel:
                    return _ready(channel, queue)
            except Exception as error:  # noqa: BLE001  # each client has its own
                logger.debug("the broker does not say what is in queue %r: %s", queue, error)
                return isinstance(error, (OperationalError, *connection.connection_errors))


def _ready(channel: Any, queue: str) -> int:
    if isinstance(channel, virtual.Channel):
        # To declare it passively fails with a `global_keyprefix`, as if it were gone.
        return int(channel._size(queue) or 0)
    return int(channel.queue_declare(queue=queue, passive=True).message_count or 0)
