"""
Tells whether the broker's queues have messages, so that what may be among them is not sent again.

A queue that is not empty may have any message that it was given. One that is empty has lost those
that are with no worker; a worker keeps what it has fetched from being sent elsewhere, see
:mod:`celery_distlock.worker.registration`.

What is asked about was given to it a minute ago or more, so it is lost also if the queue was empty
some seconds ago. Without that, of many that are lost the first that are sent again would be taken
for the others.
"""

import time
from collections.abc import Iterable

from celery import Celery
from kombu.transport import virtual

from celery_distlock.process import forks

__all__ = ["Backlog"]

LOOKED_FOR = 1.0  # seconds for which a queue counts as one that has messages
EMPTY_FOR = 10.0  # likewise, as an empty one
NOT_FOUND = 404


class Backlog:
    """See the module. One for each app; asked in threads that may wait for the broker."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._known: dict[str, tuple[float, bool]] = {}

    def is_in(self, queues: Iterable[str]) -> bool:
        """
        Whether one of *queues* has messages; false also where the broker has no number of them.

        Raises:
            Exception: What the broker's client raises where it is away.
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
        """Return how many messages are ready in *queue*; 0: the broker does not know it."""
        with forks.no_fork(), self._app.connection_or_acquire() as connection:
            # Of its own: a broker closes the channel on which a queue was not found.
            channel = connection.channel()
            try:
                if isinstance(channel, virtual.Channel):
                    # To declare it passively fails with a `global_keyprefix`, as if it were gone.
                    return int(channel._size(queue) or 0)
                return int(channel.queue_declare(queue=queue, passive=True).message_count or 0)
            except connection.channel_errors as error:
                if getattr(error, "reply_code", 0) in (NOT_FOUND, str(NOT_FOUND)):
                    return 0
                raise
            finally:
                channel.close()
