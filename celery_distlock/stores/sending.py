"""A store that takes in calls as they are sent, so that the broker carries only what may start."""

import enum
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from .requests import Identity, SendRequest
from .timing import TimedStore
from .values import Ability, Waiter, WokenTask

__all__ = ["Bearer", "SendReply", "SendingStore", "Sent", "Where"]


class Sent(enum.Enum):
    """What became of a run that was sent."""

    GO = "go"  # its key is kept for it: who sent it publishes its message
    QUEUED = "queued"  # it is in the store, and there is nothing more to do
    LATER = "later"  # likewise, and it joins the queue when its delay is over
    UPDATED = "updated"  # likewise: it was there, and has this envelope now
    CHANGED = "changed"  # nothing was done: another run has its identity than was thought


class Where(enum.Enum):
    """Where a run is that has an identity."""

    WAITING = "waiting"  # in the queue, or until its delay is over
    COMING = "coming"  # on its way to its key; or it has been, and waits again
    RUNNING = "running"
    ENDED = "ended"  # or unknown; its time is not over


class Bearer(NamedTuple):
    """
    The run that has an identity.

    Attributes:
        run: The run.
        where: Where it is.
        expires: In how many seconds it loses the identity if it has not begun.
        silent: Its result is not stored.
        fixed: Its message is not to be replaced.
        lasts: Seconds for which it has it still, whatever becomes of it.
    """

    run: str
    where: Where
    expires: float = math.inf
    silent: bool = False
    fixed: bool = False
    lasts: float = 0.0


class SendReply(NamedTuple):
    """
    The answer to `SendingStore.send`.

    `wake` is whom the request has let in besides, as after a release.
    """

    sent: Sent
    wake: WokenTask | None = None


class SendingStore(TimedStore):
    """
    A store that takes in runs as they are sent, before there is a message of theirs anywhere.

    From the answer on the store has the run, as if it were parked. One that is told ``GO`` is on
    its way: it is for the caller to publish its envelope, and to say so by `mark_published`; if he
    dies or cannot, a sweep sends it.
    """

    _ability: ClassVar[Ability | None] = Ability.SEND

    @abstractmethod
    def send(self, request: SendRequest) -> SendReply:
        """
        Keep the key for a run, or have it join the end of the queue, or wait for its time.

        A run that waits, is on its way, or has the key is not taken in again, and its first
        envelope counts: ``QUEUED`` is the answer then, or what was answered first.
        """

    @abstractmethod
    def peek(self, key: str, identity: str) -> Bearer | None:
        """Return who has an identity; None: nobody. In one attempt; changes nothing."""

    @abstractmethod
    def inherit(self, key: str, identity: Identity, run: str) -> None:
        """
        Have *run* have the identity that an earlier execution of its task had.

        Nothing is changed if another task has it.
        """

    @abstractmethod
    def bearers(self, key: str, limit: int = 100) -> dict[str, Bearer]:
        """
        Return who has which identity: some, at most *limit*, in no order; changes nothing.

        Told is which run, and where it is.
        """

    @abstractmethod
    def delayed(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        """
        Return who joins the queue of *key* later, from number *first* on; who comes first, first.

        Who has come by a message meanwhile may be numbered, and is left out: so there may be more
        behind fewer than *limit*, and behind none. No number is as high as `KeyState.later`, or
        as 50, if that is more.

        Without their envelopes; `Waiter.due` says when.
        """

    def mark_all_published(self, wakes: Sequence[WokenTask]) -> None:
        """Note of some runs what `mark_published` does of one."""
        for wake in wakes:
            self.mark_published(wake)
