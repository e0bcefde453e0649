"""
Finds out whether the broker's queues have messages: what may be among them is not sent again.

A queue that is not empty may have any message that it was given. One that is empty has lost those
that are with no worker; a worker keeps what it has fetched from being sent elsewhere, see
:mod:`celery_distlock.worker.registration`.

What is asked about was given to it a minute ago or more, so it is lost also if the queue was empty
some seconds ago. Without that, of many that are lost the first that are sent again would be taken
for the others.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from celery_distlock.process import forks

__all__ = ["Backlog"]

logger = logging.getLogger(__name__)

LOOKED_FOR = 1.0  # seconds for which a queue counts as one that has messages
EMPTY_FOR = 10.0  # seconds for which it counts as empty


class Backlog:
    """See the module. One for each app; asked in threads that may wait for the broker."""

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
