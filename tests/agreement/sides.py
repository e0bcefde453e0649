"""A store as one side of a comparison: it plays a schedule and says what callers see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_distlock.stores import AcquireRequest, ReleaseRequest, SendRequest
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.values import (
    ALONE,
    KeyState,
    Ownership,
    ParkRequest,
    Reply,
    Status,
    Waiter,
    Want,
    WokenTask,
)

from .schedules import IDENTITY, LEASE

if TYPE_CHECKING:
    from celery_distlock.stores.queue_store import QueueStore

    from .schedules import Step

__all__ = ["StoreSide"]

TICK = 0.001  # seconds that each step takes


class StoreSide:
    """
    See the module.

    Args:
        store: The store.
        number: Of the schedule, whose keys no other one has.
        hears: Whether the calls of waiters are compared, which a server makes a moment later.
        with_model: Whether it is compared with the model, which does not know when time alone
            opens a key.
    """

    def __init__(
        self,
        store: QueueStore,
        number: int,
        *,
        hears: bool = True,
        with_model: bool = False,
    ) -> None:
        self._store: Any = store
        self._number = number
        self._hears = hears
        self._with_model = with_model
        self._requests: dict[str, AcquireRequest] = {}  # by owner
        self._wants: dict[tuple[str, str], Want] = {}  # of runs
        self._inboxes: dict[str, Any] = {}
        self._tokens: dict[str, int] = {}
        self._wakes: dict[tuple[str, str], WokenTask] = {}

    def play(self, step: Step) -> Any:
        """Ask for what *step* says; return what callers see of the answer."""
        return getattr(self, f"_{step.verb}")(*step.facts)

    def close(self) -> None:
        """Close the inboxes."""
        for inbox in self._inboxes.values():
            inbox.close()

    def _name(self, key: str) -> str:
        return f"{key}-{self._number}"

    def _noted(self, wake: WokenTask | None) -> tuple[Any, ...]:
        """Note what was woken, and return what is seen of it."""
        wakes = [] if wake is None else [wake._replace(also=()), *wake.also]
        for each in wakes:
            self._wakes[each.name.partition("-")[0], each.run] = each
        return tuple((each.run, each.envelope, each.returned, each.published) for each in wakes)

    def _ask(self, request: AcquireRequest) -> Any:
        reply = self._store.acquire(request)
        self._requests[request.owner] = request
        if request.run and request.queue:
            self._wants[request.key, request.run] = request.want
        return self._seen(reply, request.key)

    def _seen(self, reply: Reply, key: str) -> tuple[Any, ...]:
        """Return what a reply says but for times; of a token whether it is less than one before."""
        woken = self._noted(reply.wake)
        if reply.status in (Status.DONE, Status.RECALLED):
            return (reply.status, woken)
        if reply.status is Status.GRANTED:
            is_less = reply.token < self._tokens.get(key, 0)
            self._tokens[key] = reply.token
            return (reply.status, woken, reply.slot, is_less)
        waits = bool(reply.holder), reply.place, reply.due > 10 * TICK and not self._with_model
        return (reply.status, woken, *waits)

    def _acquire(
        self, key: str, owner: str, run: str, want: Want, redelivered: bool, retain: bool
    ) -> Any:
        terms = (redelivered, retain) if run else (False, False)
        return self._ask(
            AcquireRequest(self._name(key), owner, LEASE, None, run, *terms, want=want)
        )

    def _park(
        self, key: str, owner: str, run: str, want: Want, redelivered: bool, most: int = 0
    ) -> Any:
        park = ParkRequest(f"envelope of {run}".encode(), max_waiting=most)
        return self._ask(
            AcquireRequest(self._name(key), owner, LEASE, park, run, redelivered, want=want)
        )

    def _line(self, key: str, run: str, want: Want, most: int = 0) -> Any:
        park = ParkRequest(f"envelope of {run}".encode(), max_waiting=most)
        self._wants[self._name(key), run] = want
        reply = self._store.parking.park_if_held(self._name(key), run, park, 5.0, want=want)
        return self._seen(reply, self._name(key))

    def _wait(self, key: str, owner: str, run: str, want: Want, redelivered: bool) -> Any:
        inbox = self._inbox(owner)
        again = redelivered and bool(run)
        return self._ask(
            AcquireRequest(self._name(key), owner, LEASE, inbox, run, again, want=want)
        )

    def _inbox(self, owner: str) -> Any:
        if owner not in self._inboxes:
            self._inboxes[owner] = self._store.inbox("", owner)
        return self._inboxes[owner]

    def _send(
        self,
        key: str,
        run: str,
        want: Want,
        delay: float,
        identity: Any,
        paced: bool,
        most: int = 0,
    ) -> Any:
        park = ParkRequest(f"envelope of {run}".encode(), max_waiting=most)
        self._wants[self._name(key), run] = want
        request = SendRequest(self._name(key), run, park, want, delay, (), identity, paced)
        reply = self._store.calls.send(request)
        if reply.sent is Sent.GO:
            self._wakes[key, run] = WokenTask(self._name(key), run, park.envelope)
        return (reply.sent, self._noted(reply.wake), bool(reply.holder))

    def _both(
        self, one: str, other: str, run: str, wants: Any, redelivered: bool, retain: bool
    ) -> Any:
        names, owners = [self._name("a"), self._name("b")], [one, other]
        terms = {"redelivered": redelivered, "retain": retain} if run else {}
        replies = self._store.acquire_all(names, owners, LEASE, run=run, wants=wants, **terms)
        if replies is None:
            return None
        for name, owner, want in zip(names, owners, wants, strict=True):
            self._requests[owner] = AcquireRequest(name, owner, LEASE, None, run, want=want)
        return [self._seen(reply, name) for name, reply in zip(names, replies, strict=True)]

    def _claim(self, key: str, owner: str, run: str, retain: bool) -> Any:
        """Claim the key as a woken run does, with what it wanted."""
        if (key, run) not in self._wakes:
            return None
        want = self._wants.get((self._name(key), run), ALONE)
        return self._acquire(key, owner, run, want, True, retain)

    def _release(self, owner: str, ended: Any, keep: str, started: bool) -> Any:
        if (request := self._requests.get(owner)) is None:
            return None
        inbox = self._inboxes.pop(owner, None)
        released = self._store.release(
            ReleaseRequest(
                request.key,
                owner,
                request.run,
                ended,
                inbox,
                (keep, LEASE) if keep else None,
                started if request.want.rates else None,
            )
        )
        if inbox:
            inbox.close()
        return (released.released, self._noted(released.wake))

    def _again(self, owner: str) -> Any:
        request = self._requests.get(owner)
        is_there = request and (not isinstance(request.queue, Inbox) or owner in self._inboxes)
        return self._ask(request) if request and is_there else None

    def _renew(self, owner: str) -> Any:
        request = self._requests.get(owner)
        if request is None:
            return None
        return self._store.renew([Ownership(request.key, owner, LEASE)], 5.0)[0][0]

    def _change(self, owner: str, how: str, waits: bool) -> Any:
        if (request := self._requests.get(owner)) is None:
            return None
        inbox = [self._inbox(owner)] if waits and how == "upgrade" else []
        reply = getattr(self._store.units, how)(request.key, owner, LEASE, *inbox)
        return (reply.status, self._noted(reply.wake), reply.slot)

    def _rest(self, owner: str) -> Any:
        request = self._requests.get(owner)
        return request and self._store.units.rest(request.key, owner, LEASE)

    def _recall(self, owner: str) -> Any:
        request = self._requests.get(owner)
        return request and self._store.recall(request.key, owner)

    def _limit(self, key: str, limit: Any, lane: str | None) -> Any:
        return self._noted(self._store.units.set_limit(self._name(key), limit, lane).wake)

    def _woken(self, key: str, run: str, what: str, mark: bool) -> Any:
        """Do what a process does with a run that was woken."""
        if (wake := self._wakes.get((key, run))) is None:
            return None
        if what == "drop":
            dropped = self._store.drop(wake, mark=mark)
            return (dropped.released, self._noted(dropped.wake))
        getattr(self._store.parking, what)(wake)
        return None

    def _cancel(self, key: str, run: str) -> Any:
        gone = self._store.parking.cancel(self._name(key), run)
        return (gone.released, self._noted(gone.wake))

    def _sweep(self, key: str) -> Any:
        return [self._noted(each) for each in self._store.parking.wake_next(self._name(key))]

    def _time(self, _: float) -> None:
        """It passes for all sides at once."""

    def _look(self, key: str) -> Any:
        name = self._name(key)
        called = []
        for owner, inbox in self._inboxes.items() if self._hears else ():
            if inbox.event.is_set():
                called.append(owner)
                inbox.event.clear()
        if self._with_model:  # one that waits may be called to look again
            names = map(self._name, "ab")
            waiting = {each.owner for each_key in names for each in self._store.waiters(each_key)}
            called = [owner for owner in called if owner not in waiting]
        bearer = self._store.calls.peek(name, IDENTITY)
        bearer = bearer and (*bearer[:2], bearer.expires < 1e9, *bearer[3:5], bearer.lasts > 0)
        waiters = _in_line(self._store.waiters(name))
        state = self._store.inspect(name)
        if self._with_model:
            state = state._replace(opens=None)
        return (_state(state), waiters, bearer, sorted(called))


def _in_line(waiters: list[Waiter]) -> tuple[Any, ...]:
    """Return the waiters that were woken, in any order, and those queued, in that of the queue."""
    found = [
        (each.owner, each.run, each.woken, ALONE if each.woken else each.want) for each in waiters
    ]
    return sorted(each for each in found if each[2]), [each for each in found if not each[2]]


def _state(state: KeyState) -> tuple[Any, ...]:
    """Return what a look says but for times; of several holders in any order."""
    holders = sorted((each.owner, each.run, each.units, each.slot) for each in state.holders)
    limit = state.limit and (state.limit.capacity, state.limit.author)
    several = state.used, state.capacity, limit, state.rest > 0, state.starts
    one = ("", "") if holders else (state.owner, state.run)
    times = (state.opens or 0.0) <= TICK, state.identities
    return (one, times, bool(state.token), state.waiting, holders, several)
