"""Wait for a key in its queue: ask, pause until a push or for a while, and ask again."""

from collections.abc import Callable
from typing import TypeAlias

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.identities import ExecutionId
from celery_distlock.stores.values import Reply, Status

from .hold import Hold
from .pending_releases import release_later

BACKSTOP = 1.0  # seconds, times the position in the queue, after which a waiter asks without a push
PATIENCE = 30.0  # seconds for which a queued waiter tolerates a store that does not answer
OUTAGE_PAUSE = 0.25  # seconds between its attempts

Ask: TypeAlias = Callable[[Hold, Inbox], Reply]


class Waiter:
    """
    A waiter in the queue of a key: its requests between two pauses.

    Args:
        hold: The hold that waits.
        deadline: When to stop waiting, by the local clock.
        ask: Asks for the key once, see :func:`celery_distlock.engine.acquisition.ask`.
        answered: Whether the store has already answered that the key is held. A store that has
            answered may stay silent for a while.

    Attributes:
        inbox: Where pushes arrive.
        pause: Seconds after which it asks again without a push.
    """

    def __init__(self, hold: Hold, deadline: float, ask: Ask, *, answered: bool) -> None:
        self.inbox = hold.store.inbox(hold.key, hold.owner)
        self.pause = 0.0
        self._hold = hold
        self._deadline = deadline
        self._ask = ask
        self._answered = answered
        self._silent_since: float | None = None

    def ask(self) -> Reply | None:
        """
        Ask once. None: the key is held, or the store silent; ask again after a push or `pause`.

        Raises:
            StoreError: The store refuses, or has been silent for too long.
        """
        hold, pause = self._hold, OUTAGE_PAUSE
        try:
            reply = self._ask(hold, self.inbox)
            self._silent_since, self._answered = None, True
        except StoreUnavailableError:
            if not self._answered:
                raise
            now = clock.monotonic()
            self._silent_since = self._silent_since or now
            if now > min(self._deadline, self._silent_since + PATIENCE):
                raise
        else:
            if reply.status is not Status.BUSY:
                return reply
            if clock.monotonic() >= self._deadline:
                hold.store.dispatch(hold.store.release(self.departure).wake)
                return reply
            pause = _backstop(reply, hold.run)
        self.pause = max(0.0, min(pause, self._deadline - clock.monotonic()))
        return None

    @property
    def departure(self) -> ReleaseRequest:
        """The request that removes this waiter from the queue."""
        hold = self._hold
        return ReleaseRequest(hold.key, hold.owner, inbox=self.inbox, started=hold.started)


def wait_for(hold: Hold, deadline: float, ask: Ask, *, answered: bool) -> Reply:
    """Wait in the queue of the key; arguments as for `Waiter`. Return the store's last answer."""
    waiter = Waiter(hold, deadline, ask, answered=answered)
    try:
        while (reply := waiter.ask()) is None:
            waiter.inbox.wait(waiter.pause)
        return reply
    except BaseException:
        release_later(hold.store, waiter.departure)
        raise
    finally:
        waiter.inbox.close()


def _backstop(reply: Reply, run: str) -> float:
    # The first waiter asks when the holder's lease ends, the others one after another behind it. A
    # retry asks early at any position: the key may be reserved for it, and no push announces that.
    place = 0 if ExecutionId.parse(run).retries else reply.place
    return min(reply.remaining + 0.01, BACKSTOP) + BACKSTOP * place
