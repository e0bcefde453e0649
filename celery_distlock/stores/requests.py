"""What a store is asked to do with a key: one value for each request."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .channels import Inbox
from .values import ALONE, Completion, OwnChannel, ParkRequest, Route, Want, WokenTask

__all__ = ["AcquireRequest", "Identity", "ReleaseRequest", "SendRequest", "StandRequest"]


class AcquireRequest(NamedTuple):
    """
    What is asked of a store to take a key; see :meth:`celery_distlock.stores.Store.acquire`.

    Attributes:
        key: Any text but the empty one.
        owner: Names this acquisition, see :func:`~celery_distlock.stores.new_owner`.
        lease: Seconds.
        queue: An inbox, to wait in the queue while the caller blocks; a park request, to leave
            *run* in the queue; None: do not queue.
        run: Names what runs under the lock, the same for every delivery of one task message.
        redelivered: The run's message may have been delivered before.
        retain: The store alone has the run's message (it was pushed to a worker), and keeps it
            until the run has ended: to send it again if the run's process dies.
        arrival: When the caller came, by :meth:`~celery_distlock.stores.Store.time`, or as an
            earlier `Reply` told; 0: it comes now.
        want: How much of the key; see `Want.needs`.
    """

    key: str
    owner: str
    lease: float
    queue: Inbox | ParkRequest | None = None
    run: str = ""
    redelivered: bool = False
    retain: bool = False
    arrival: int = 0
    want: Want = ALONE

    @property
    def may_have_ended(self) -> bool:
        """Whether the store has to ask if another delivery of the run has ended."""
        return self.redelivered and bool(self.run)


class ReleaseRequest(NamedTuple):
    """
    What is asked of a store to release a key; see :meth:`celery_distlock.stores.Store.release`.

    Attributes:
        key: The key.
        owner: That of the request by which it was acquired.
        run: Likewise.
        completion: Whether a second delivery of the run is to be dropped.
        inbox: The inbox of a waiter that gives up.
        keep_for: A run and seconds: the key stays locked for it instead of becoming free; if it is
            parked there already, it is handed the key now.
        started: Whether what was taken was for anything, where starts are counted. False: nothing
            has begun under it, and it counts no more.
        own_channel: Of the worker that asks. A store may leave it alone.
    """

    key: str
    owner: str
    run: str = ""
    completion: Completion = Completion.NO
    inbox: Inbox | None = None
    keep_for: tuple[str, float] | None = None
    started: bool | None = None
    own_channel: OwnChannel | None = None


class StandRequest(NamedTuple):
    """
    A request that a run takes all of its keys, or waits for them.

    See :meth:`celery_distlock.stores.queue_parts.Parking.try_all`.

    Attributes:
        run: As in `AcquireRequest`.
        route: All of its keys.
        arrival: As in `AcquireRequest`.
        park_request: What is kept of it; None: the store has that.
        owners: Of each key the owner that holds it for the run, and gives it up so, or empty.
        givers: The runs that gave up a key for it, as far as that is known.
        comes: It is here, and takes its keys itself if all are reserved for it.
        timeout: If it is given, there is one attempt of so many seconds.
    """

    run: str
    route: Route
    arrival: int = 0
    park_request: ParkRequest | None = None
    owners: Sequence[str] = ()
    givers: Sequence[str] = ()
    comes: bool = False
    timeout: float | None = None


class Identity(NamedTuple):
    """
    What makes two calls of one key the same: while one has it, the other is a second one.

    A run has it exactly while it is there: while it waits, for its turn or its time, or is on its
    way; and for as long as `until` says. There is nothing that would have to be given back.

    Attributes:
        name: Any text.
        until: ``"started"``: no longer; ``"finished"``: also while the run has its key, with its
            retries; a number: also so many seconds from now, whatever becomes of the run.
        replaces: The run that is known to have it and may lose it. The same run: if it waits, it
            gets this envelope, want and delay, and keeps its place. ``"*"``: whoever has it keeps
            it, and this run goes without.
        most: Seconds after the first call of a run after which no update delays it any more.
        expires: Seconds from now after which a run that has not begun has no identity any more, as
            it will not run.
        silent: Its result is not stored.
        fixed: Its message is not to be replaced: somebody waits for just this one.
        beside: It is sent beside the run that it replaces, though that waits.
    """

    name: str
    until: str | float = "started"
    replaces: str = ""
    most: float | None = None
    expires: float = math.inf
    silent: bool = False
    fixed: bool = False
    beside: bool = False


class SendRequest(NamedTuple):
    """
    What is asked of a store to take in a run as it is sent.

    See :meth:`celery_distlock.stores.queue_parts.Calls.send`.

    Attributes:
        key: The key.
        run: As in `AcquireRequest`.
        park_request: What is kept of it.
        want: As in `AcquireRequest`.
        delay: Seconds before which it does not join the queue.
        published: Other runs, of any keys, of which `mark_published` is to be noted besides.
        identity: Which the run is to have.
        paced: It does not join the queue before its rates let it start, so that nobody waits behind
            it for them.
    """

    key: str
    run: str
    park_request: ParkRequest
    want: Want = ALONE
    delay: float = 0.0
    published: Sequence[WokenTask] = ()
    identity: Identity | None = None
    paced: bool = False
