"""Requests to a store: one class for each kind."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .channels import Inbox
from .values import ALONE, Completion, OwnChannel, ParkRequest, Route, Want, WokenTask

__all__ = ["AcquireRequest", "Identity", "ReleaseRequest", "SendRequest", "StandRequest"]


class AcquireRequest(NamedTuple):
    """
    A request to take a key; see :meth:`celery_distlock.stores.Store.acquire`.

    Attributes:
        key: Any text but the empty one.
        owner: Names this acquisition, see :func:`~celery_distlock.stores.new_owner`.
        lease: Seconds.
        queue: An inbox, to wait in the queue while the caller blocks; a park request, to leave
            *run* in the queue; None: do not queue.
        run: Names the execution under the lock; the same for every delivery of one task message.
        redelivered: The run's message may have been delivered before.
        retain: Only the store has the run's message (it was pushed to a worker). The store keeps
            it until the run has ended, to send it again if the run's process dies.
        arrival: When the caller came, by :meth:`~celery_distlock.stores.Store.time` or by the
            `arrival` of an earlier `Reply`; 0: it comes now.
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
        """Whether the store must check if another delivery of the run has ended."""
        return self.redelivered and bool(self.run)


class ReleaseRequest(NamedTuple):
    """
    A request to release a key; see :meth:`celery_distlock.stores.Store.release`.

    Attributes:
        key: The key.
        owner: The owner that acquired the key.
        run: The run that acquired the key.
        completion: Whether a second delivery of the run must be dropped.
        inbox: The inbox of a waiter that gives up.
        keep_for: A run and seconds: the key stays locked for that run instead of becoming free. If
            the run is parked there already, it gets the key now.
        started: Where starts are counted: whether anything has begun under the lock. False: the
            start is not counted.
        own_channel: The delivery channel of the calling worker. A store may ignore it.
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
    A request to reserve all keys of a run, or to wait for them.

    See :func:`celery_distlock.stores.queue_store.reserve_or_queue`.

    Attributes:
        run: As in `AcquireRequest`.
        route: All of its keys.
        arrival: As in `AcquireRequest`.
        park_request: What to keep of the run; None: the store has it already.
        owners: For each key, the owner that holds it for the run and gives it up by this request,
            or empty.
        givers: The runs that released a key for it, as far as known.
        comes: The run is here, and claims its keys itself if all are reserved for it.
        timeout: If given, there is one attempt of that many seconds.
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
    The identity of a call: of calls of one key with the same identity, later ones are duplicates.

    A run has its identity while the store has the run: while it waits, for its turn or for its
    delay, or is dispatched; and then for as long as `until` says. It never has to be released.

    Attributes:
        name: Any text.
        until: ``"started"``: no longer than that; ``"finished"``: also while the run holds its key,
            including retries; a number: also for that many seconds from now, in any case.
        replaces: The run that is expected to have the identity and may lose it. The same run: if
            it waits, it gets this envelope, want and delay, and keeps its place. ``"*"``: the run
            that has the identity keeps it, and this run has none.
        most: Seconds after the first call of a run from which on updates no longer delay it.
        expires: Seconds from now after which a run that has not started loses its identity, since
            it will not execute.
        silent: Its result is not stored.
        fixed: Its message must not be replaced: a caller waits for this very call.
        beside: It is sent in addition to the run that it replaces, even if that run waits.
        recalls: ``"all"``: the run that had the identity before, and runs or is dispatched, is
            asked to leave. ``"free"``: not if that one is `fixed`. Empty: it is not asked.
    """

    name: str
    until: str | float = "started"
    replaces: str = ""
    most: float | None = None
    expires: float = math.inf
    silent: bool = False
    fixed: bool = False
    beside: bool = False
    recalls: str = ""


class SendRequest(NamedTuple):
    """
    A request to add a run to the store when it is sent.

    See :meth:`celery_distlock.stores.queue_parts.Calls.send`.

    Attributes:
        key: The key.
        run: As in `AcquireRequest`.
        park_request: What to keep of the run.
        want: As in `AcquireRequest`.
        delay: Seconds after which it joins the queue.
        published: Other runs, of any keys, to record as published in the same request.
        identity: The identity that the run gets.
        paced: It does not join the queue before its rates allow it to start, so that no other run
            waits behind it because of them.
    """

    key: str
    run: str
    park_request: ParkRequest
    want: Want = ALONE
    delay: float = 0.0
    published: Sequence[WokenTask] = ()
    identity: Identity | None = None
    paced: bool = False
