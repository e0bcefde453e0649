"""Where a message comes to, as far as an app knows: its queues, and the exchanges of these."""

import functools
import re
from typing import Any

from celery import Celery
from kombu import Queue
from kombu.transport.native_delayed_delivery import CELERY_DELAYED_DELIVERY_EXCHANGE

__all__ = [
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
