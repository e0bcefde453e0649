"""
A store within one process: for eager mode, for users' own tests, and for workers without processes.

A real store that keeps the whole contract, waiters and parked runs included; it just ends with the
process. ``memory://`` and ``memory://name`` are different stores.
"""

import bisect
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError
from celery_distlock.keys import key_of, slot_name

from .channels import EventInbox, Inbox
from .findings import Finding
from .identities import task_id_of
from .listing import CountingStore
from .requests import AcquireRequest, ReleaseRequest, StandRequest
from .several_keys import SeveralKeys
from .urls import redact
from .values import (
    ALONE,
    Ability,
    Completion,
    KeyState,
    Ownership,
    ParkRequest,
    Release,
    RenewOutcome,
    Reply,
    Route,
    Status,
    Waiter,
    Want,
    WokenTask,
)

__all__ = ["MemoryStore"]

# Seconds; what each is for stands in lua/queue.lua, which this module mirrors.
GRANT = 1.0
CLAIM = 5.0
DOUBLINGS = 2
UNSENT = 2.0
RESEND = 60.0
RESENDS = 4  # times
LAST_RESENDS = 30  # more, one a day
DAY = 86400.0
DONE = 3600.0
AHEAD = 1_000_000  # µs
REST = 3.0  # times what a sweep took: for so long nobody sweeps after it


_token_mutex = threading.Lock()
_last_token = 0


def _next_token() -> int:
    """Return the time (µs), or more: never the same twice, so that no key need keep its last."""
    global _last_token  # noqa: PLW0603
    with _token_mutex:
        _last_token = max(_last_token + 1, time.time_ns() // 1000)
        return _last_token


def _microseconds() -> int:
    return round(clock.monotonic() * 1e6)


@dataclass(order=True)
class _Waiter:
    arrival: int  # µs, by the local clock
    member: str  # "p:<run>" or "b:<owner>"


@dataclass
class _Key:
    owner: str = ""
    token: int = 0
    run: str = ""
    since: float = 0.0
    until: float = -math.inf
    due: int = 0  # when the one came who was handed the key and has not come for it
    again: bool = False  # the holder asked to be parked twice: another message of it is on its way
    queue: list[_Waiter] = field(default_factory=list)
    envelopes: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of tasks
    arrivals: dict[str, int] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)  # of those that stand at several keys
    lapsed: set[str] = field(default_factory=set)  # for whom of those the key was kept before
    stamps: dict[str, int] = field(default_factory=dict)  # when those came that it was kept for
    sends: dict[str, int] = field(default_factory=dict)
    woken: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    unsettled: dict[str, float] = field(default_factory=dict)  # until when they are held back

    @property
    def holder(self) -> str:
        return self.owner if clock.monotonic() < self.until else ""

    @property
    def in_use(self) -> bool:
        return bool(self.holder or self.queue or self.travelling)

    @property
    def travelling(self) -> list[str]:
        running = self.run if self.holder and self.owner != f"parked:{self.run}" else None
        return [run for run in self.woken if run != running]

    def grant(self, owner: str, run: str, lease: float, due: int = 0) -> None:
        self.due, self.again = due, False
        self.stamps.clear()
        self.token = _next_token()
        self.owner, self.run, self.since = owner, run, clock.wall()
        self.until = clock.monotonic() + lease

    def knows_end(self, run: str) -> bool:
        return run in self.done or clock.monotonic() < self.unsettled.get(run, -math.inf)

    def keeps_for(self, run: str) -> bool:
        """Whether the key is kept for a run that has not ended, as far as is known."""
        kept = bool(run) and self.holder == f"parked:{run}"
        return kept and run not in self.done and run not in self.unsettled

    def claim(self, owner: str, run: str, lease: float, *, retain: bool) -> None:
        """Give a run the key that is kept for it."""
        self.owner, self.due, self.run = owner, 0, run
        self.until = clock.monotonic() + lease
        self.arrive(run, lease if retain else None)

    def keep(self, run: str, park_request: ParkRequest) -> None:
        self.envelopes[run] = park_request.envelope
        self.names[run] = park_request.task

    def unpark(self, run: str) -> bool:
        if self.envelopes.pop(run, None) is None:
            return False
        self.names.pop(run, None)
        self.arrivals.pop(run, None)
        self.routes.pop(run, None)
        self.lapsed.discard(run)
        self.sends.pop(run, None)
        self.woken.pop(run, None)
        self.leave(f"p:{run}")
        return True

    def arrive(self, run: str, keep: float | None) -> None:
        if keep is None or run not in self.envelopes:
            self.unpark(run)
        else:
            self.leave(f"p:{run}")
            self.woken[run] = clock.monotonic() + keep

    def leave(self, member: str) -> None:
        self.queue = [waiter for waiter in self.queue if waiter.member != member]

    def step_back(self) -> None:
        """Take the key from one who has not come for it; a run has its place back."""
        if self.owner == f"parked:{self.run}" and self.run in self.envelopes:
            self.join(f"p:{self.run}", self.due)
        self.until = -math.inf

    def join(self, member: str, arrival: int = 0) -> int:
        for waiter in self.queue:
            if waiter.member == member:
                return waiter.arrival
        if not arrival:
            last = self.queue[-1].arrival if self.queue else 0
            arrival = max(_microseconds(), last + 1)
        bisect.insort(self.queue, _Waiter(arrival, member))
        return arrival

    def keep_for(self, run: str, arrival: int, seconds: float) -> None:
        """Reserve the key for one who needs others, too, and stays the first in the queue."""
        self.lapsed.add(run)
        self.grant(f"parked:{run}", run, seconds, arrival)

    def next_in_line(self) -> _Waiter:
        """Return the first; before one whose turn has lapsed, who is blocked here goes, once."""
        head = self.queue[0]
        run = head.member.removeprefix("p:")
        if run in self.lapsed:
            self.lapsed.discard(run)
            return next((each for each in self.queue if each.member.startswith("b:")), head)
        return head

    def place(self, member: str) -> int:
        members = [waiter.member for waiter in self.queue]
        return members.index(member) if member in members else len(members)

    def park(self, run: str, park_request: ParkRequest, stands: int) -> int:
        self.keep(run, park_request)
        self.sends.pop(run, None)
        self.woken.pop(run, None)
        self.arrivals[run] = self.join(f"p:{run}", stands)
        return self.arrivals[run]

    def taken(self, status: Status, member: str, asked_at: float, stands: int) -> Reply:
        """Return what one is told who has not got the key."""
        holder, left = self.holder, max(0.0, self.until - clock.monotonic())
        token, run = (self.token, self.run) if holder else (0, "")
        place = self.place(member)
        return Reply(status, asked_at, token, holder, run, left, place, arrival=stands)


class MemoryStore(SeveralKeys, CountingStore):
    """See the module; *url* only names the store."""

    abilities = frozenset({Ability.WAIT, Ability.RECOGNISE})

    def __init__(self, url: str, prefix: str, **options: str) -> None:
        if "?" in url or options:
            given = f" ({', '.join(options)})" if options else f", as in {redact(url)!r}"
            raise ConfigurationError(f"a store in memory has no options{given}")
        self.address = url
        self.identity = f"{url}#{prefix}"
        self._keys: dict[str, _Key] = {}
        self._inboxes: dict[str, _MemoryInbox] = {}
        self._mutex = threading.RLock()
        self._sweep_from = -math.inf
        self._epoch = clock.wall() - clock.monotonic()  # what arrivals are told from
        self._counts: Counter[str] = Counter()

    def acquire(self, request: AcquireRequest) -> Reply:
        key, owner, lease, queue, run, redelivered, retain, arrival, want = request
        asked_at = clock.monotonic()
        with self._mutex:
            name = slot_name(key)
            state = self._keys.setdefault(name, _Key())
            claims = bool(run) and state.holder == f"parked:{run}"
            granted = claims or (bool(run) and state.holder == owner and state.run != run)
            if granted and redelivered and state.knows_end(run):
                # Its turn came, but the first delivery has ended.
                state.until = -math.inf
                handed = self._hand_over(name, state)
                reply = _second_delivery(state, run, queue, asked_at)
                return reply._replace(wake=handed if isinstance(handed, WokenTask) else None)
            if claims:
                state.claim(owner, run, lease, retain=retain)
                state.again |= isinstance(queue, ParkRequest)
                return Reply(Status.GRANTED, asked_at, state.token)
            if state.holder == owner:
                state.due, state.until = 0, max(state.until, clock.monotonic() + lease)
                if run and state.run != run:
                    state.run = run
                    state.arrive(run, lease if retain else None)
                return Reply(Status.GRANTED, asked_at, state.token)
            if (redelivered or isinstance(queue, ParkRequest)) and state.knows_end(run):
                state.leave(f"b:{owner}")
                return _second_delivery(state, run, queue, asked_at)
            member = f"b:{owner}" if isinstance(queue, Inbox) else f"p:{run}" if run else ""
            stands = state.arrivals.get(run) or min(arrival, _microseconds() + AHEAD)
            overtakes = bool(state.holder) and 0 < stands < state.due
            wake = None
            if overtakes:
                state.step_back()
            if not state.holder:
                straight = overtakes or run in state.woken
                handed = None if straight else self._hand_over(name, state, member, stands)
                if handed is None or handed is True:
                    state.grant(owner, run, lease)
                    state.arrive(run, lease if retain else None)
                    state.leave(member)
                    return Reply(Status.GRANTED, asked_at, state.token)
                wake = handed if isinstance(handed, WokenTask) else None
            status = Status.BUSY
            if isinstance(queue, ParkRequest):
                status, stands = Status.PARKED, state.park(run, queue, stands)
            elif queue is not None:
                stands = state.join(member, stands)
            return state.taken(status, member, asked_at, stands)._replace(wake=wake)

    def park_if_held(
        self,
        key: str,
        run: str,
        park_request: ParkRequest,
        timeout: float,
        arrival: int = 0,
        want: Want = ALONE,
    ) -> Reply:
        asked_at = clock.monotonic()
        with self._mutex:
            state = self._keys.setdefault(slot_name(key), _Key())
            if state.holder == f"parked:{run}":
                return Reply(Status.DONE, asked_at)
            if state.knows_end(run):
                return _second_delivery(state, run, park_request, asked_at)
            stands = state.arrivals.get(run) or min(arrival, _microseconds() + AHEAD)
            stands = state.park(run, park_request, stands)
            return state.taken(Status.PARKED, f"p:{run}", asked_at, stands)

    def time(self, timeout: float) -> int:
        return _microseconds()

    def acquire_all(
        self,
        keys: Sequence[str],
        owners: Sequence[str],
        lease: float,
        *,
        run: str = "",
        redelivered: bool = False,
        retain: bool = False,
        wants: Sequence[Want] = (),
    ) -> list[Reply] | None:
        asked_at = clock.monotonic()
        with self._mutex:
            known = [self._keys.get(slot_name(key)) for key in keys]
            if redelivered:
                kept = [each for each in known if each and each.keeps_for(run)]
                if len(kept) < len(known):
                    return None
                for state, owner in zip(kept, owners, strict=True):
                    state.claim(owner, run, lease, retain=retain)
                return [Reply(Status.GRANTED, asked_at, state.token) for state in kept]
            if any(each and (each.holder or each.queue or each.envelopes) for each in known):
                return None
            states = [self._keys.setdefault(slot_name(key), _Key()) for key in keys]
            for state, owner in zip(states, owners, strict=True):
                state.grant(owner, run, lease)
            return [Reply(Status.GRANTED, asked_at, state.token) for state in states]

    def stand(self, request: StandRequest) -> Reply:
        name, run, route, arrival, park_request, owner, _ = request
        asked_at = clock.monotonic()
        with self._mutex:
            state = self._keys.setdefault(name, _Key())
            if name == route.names[0]:
                away = park_request is None and run not in state.routes
                if run in state.done or away:
                    known = state.run == run or run in state.envelopes
                    self._forget_if_idle(name, state)
                    waits = away and known and run not in state.done
                    return Reply(Status.BUSY if waits else Status.DONE, asked_at)
                arrival = state.arrivals.get(run) or state.stamps.get(run) or arrival
            state.envelopes.setdefault(run, b"")
            if park_request is not None:
                state.keep(run, park_request)
            state.routes[run], state.names[run] = route, route.task
            state.woken.pop(run, None)
            if (at := state.arrivals.get(run)) is None or at != arrival:
                state.leave(f"p:{run}")
            stands = state.arrivals[run] = state.join(f"p:{run}", arrival)
            own = f"parked:{run}"
            later = state.owner == f"parked:{state.run}" and state.run in state.routes
            overtakes = state.holder not in ("", own) and later and stands < state.due
            gives_way = state.holder == own and state.queue[0].member != f"p:{run}"
            if (owner and state.holder == owner) or overtakes or gives_way:
                state.until = -math.inf  # kept for one who came later; or our own
            wake, kept = None, state.holder == own
            if not state.holder:
                handed = self._hand_over(name, state, f"p:{run}")
                kept = handed is True
                if kept:
                    state.keep_for(run, stands, CLAIM)
                wake = handed if isinstance(handed, WokenTask) else None
            elif kept and run not in state.stamps:  # once: others may ask for it again and again
                state.until = max(state.until, clock.monotonic() + CLAIM)
                state.due = stands
            if kept:
                state.stamps[run] = stands
            return Reply(
                Status.RESERVED if kept else Status.PARKED,
                asked_at,
                state.token,
                state.holder,
                state.run,
                max(0.0, state.until - clock.monotonic()),
                state.place(f"p:{run}"),
                wake,
                stands,
            )

    def _advance(self, wake: WokenTask, route: Route) -> Iterator[WokenTask]:
        with self._mutex:  # in one step
            wakes = list(super()._advance(wake, route))
        yield from wakes

    def depart(self, name: str, run: str, *, first: bool) -> Release:
        with self._mutex:
            state = self._keys.get(name, _Key())
            if state.holder != f"parked:{run}":
                return Release(False)
            state.until = clock.monotonic() + CLAIM * 2 ** min(len(state.woken), DOUBLINGS)
            if not first:
                state.unpark(run)
                return Release(True)
            state.lapsed.discard(run)
            if state.routes.pop(run, None) is None:
                return Release(True)
            state.leave(f"p:{run}")
            state.woken[run] = clock.monotonic() + UNSENT
            return Release(True, WokenTask(name, run, state.envelopes[run]))

    def _hand_over(
        self, name: str, state: _Key, own: str = "", stands: int = 0
    ) -> WokenTask | bool | None:
        """
        Return None: nobody waits. True: *own* is next, or one who *stands* there since then.

        False: somebody has it who knows.
        """
        while state.queue:
            head = state.next_in_line()
            member, arrival = head.member, head.arrival
            if member == own or 0 < stands < arrival:
                return True
            kind, _, who = member.partition(":")
            if kind == "p" and who in state.routes:
                state.keep_for(who, arrival, UNSENT)
                return WokenTask(name, who, b"", state.routes[who])
            state.queue.remove(head)
            if kind == "p" and who in state.envelopes:
                claim = CLAIM * 2 ** min(len(state.woken), DOUBLINGS)
                state.grant(f"parked:{who}", who, claim, arrival)
                if who in state.woken:
                    return False  # it stepped back, and is on its way already
                state.woken[who] = clock.monotonic() + UNSENT
                return WokenTask(name, who, state.envelopes[who])
            inbox = self._inboxes.get(who)
            if kind == "b" and inbox is not None:
                state.grant(who, "", GRANT, arrival)
                inbox.call()
                return False
        return None

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        return [self._renew(hold) for hold in holds]

    def _renew(self, hold: Ownership) -> tuple[RenewOutcome, float]:
        asked_at = clock.monotonic()
        with self._mutex:
            state = self._keys.get(slot_name(hold.key), _Key())
            if state.holder == hold.owner:
                state.until = max(state.until, clock.monotonic() + hold.lease)
                return RenewOutcome.RENEWED, asked_at
            return RenewOutcome.HELD if state.holder else RenewOutcome.LOST, asked_at

    def release(self, request: ReleaseRequest) -> Release:
        key, owner, run, ended, inbox, keep_for = request
        with self._mutex:
            return self._release(slot_name(key), owner, run, ended, inbox, keep_for)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        with self._mutex:
            state = self._keys.get(wake.name, _Key())
            reserved = state.holder == f"parked:{wake.run}"
            if not reserved and wake.run not in state.woken | state.unsettled:
                return Release(False)
            state.unpark(wake.run)
            state.unsettled.pop(wake.run, None)
            if mark:
                state.done[wake.run] = clock.monotonic()
            return self._release(wake.name, f"parked:{wake.run}", "", Completion.NO)._replace(
                released=True
            )

    def _release(
        self,
        name: str,
        owner: str,
        run: str,
        ended: Completion,
        inbox: Inbox | None = None,
        keep_for: tuple[str, float] | None = None,
    ) -> Release:
        state = self._keys.setdefault(name, _Key())
        if run and ended is Completion.UNSETTLED:
            until = clock.monotonic() + max(state.until - clock.monotonic(), CLAIM)
            state.unsettled[run] = until
            if run in state.envelopes:
                state.leave(f"p:{run}")
                state.woken[run] = until
        elif run and ended is not Completion.NO:
            parked = state.unpark(run)
            again = bool(state.holder) and state.again
            if parked or again or ended is Completion.YES_AND_MAY_COME_AGAIN:
                state.done[run] = clock.monotonic()
        if inbox is not None:
            state.leave(f"b:{owner}")
        released = state.holder == owner
        wake = None
        if released and keep_for is not None:
            state.owner, state.run = f"parked:{keep_for[0]}", keep_for[0]
            state.until = clock.monotonic() + keep_for[1]
        elif released:
            state.until = -math.inf
            handed = self._hand_over(name, state)
            wake = handed if isinstance(handed, WokenTask) else None
        self._forget_if_idle(name, state)
        return Release(released, wake)

    def _forget_if_idle(self, name: str, state: _Key) -> None:
        now = clock.monotonic()
        state.done = {run: at for run, at in state.done.items() if at > now - DONE}
        state.unsettled = {run: at for run, at in state.unsettled.items() if at > now}
        if not (state.holder or state.queue or state.woken or state.done or state.unsettled):
            self._keys.pop(name, None)

    def inbox(self, key: str, owner: str) -> Inbox:
        return _MemoryInbox(owner, self._inboxes)

    def mark_published(self, wake: WokenTask) -> None:
        with self._mutex:
            state = self._keys.get(wake.name)
            if state is not None and wake.run in state.woken:
                times = state.sends[wake.run] = state.sends.get(wake.run, 0) + 1
                pause = RESEND * 2 ** (times - 1) if times <= RESENDS else DAY
                state.woken[wake.run] = clock.monotonic() + pause

    def mark_left(self, wake: WokenTask) -> None:
        with self._mutex:
            state = self._keys.get(wake.name)
            if state is not None and wake.run in state.woken:
                state.woken[wake.run] = clock.monotonic()
                if state.holder == f"parked:{wake.run}":
                    self._release(wake.name, state.owner, "", Completion.NO)

    def mark_returned(self, wake: WokenTask) -> None:
        with self._mutex:
            state = self._keys.get(wake.name)
            if state is not None and wake.run in state.woken:
                state.unsettled.pop(wake.run, None)
                state.sends.pop(wake.run, None)
                state.woken[wake.run] = -math.inf

    def sweep(self, interval: float) -> Iterator[WokenTask]:
        with self._mutex:
            now = clock.monotonic()
            if now < self._sweep_from:
                return
            wakes = [wake for name in list(self._keys) for wake in self._sweep(name, now)]
            done_at = clock.monotonic()
            self._sweep_from = max(now + interval * 0.9, done_at + REST * (done_at - now))
        yield from wakes

    def wake_next(self, key: str) -> Iterator[WokenTask]:
        name = slot_name(key)
        with self._mutex:
            known = name in self._keys
            wakes = list(self._sweep(name, clock.monotonic())) if known else []
        yield from wakes

    def _sweep(self, name: str, now: float) -> Iterator[WokenTask]:
        state = self._keys[name]
        for run in [run for run, due in state.woken.items() if due <= now]:
            if state.holder and state.run == run and state.owner != f"parked:{run}":
                state.woken[run] = state.until
                continue
            if any(waiter.member == f"p:{run}" for waiter in state.queue):
                del state.woken[run]  # it stepped back, and its turn comes again
                continue
            forgotten = state.sends.get(run, 0) >= RESENDS + LAST_RESENDS
            if forgotten and state.holder != f"parked:{run}":
                state.unpark(run)
                continue
            state.woken[run] = now + UNSENT
            yield WokenTask(name, run, state.envelopes[run])
        if not state.holder:
            wake = self._hand_over(name, state)
            if isinstance(wake, WokenTask):
                yield wake
        self._forget_if_idle(name, state)

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        with self._mutex:
            state = self._keys.get(slot_name(key), _Key())
            oldest = self._epoch + state.queue[0].arrival / 1e6 if state.queue else 0.0
            waits = len(state.queue), oldest, len(state.travelling)
            if not state.holder:
                return KeyState("", 0, "", 0.0, 0.0, *waits)
            left = state.until - clock.monotonic()
            task = state.names.get(state.run, "") if state.owner == f"parked:{state.run}" else ""
            return KeyState(state.owner, state.token, state.run, state.since, left, *waits, task)

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        with self._mutex:
            names = [name for name, state in self._keys.items() if state.in_use]
        yield [key for key in map(key_of, names) if fnmatchcase(key, pattern)]

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        with self._mutex:
            state = self._keys.get(slot_name(key), _Key())
            woken = [self._parked(state, run)._replace(envelope=b"") for run in state.travelling]
            queue = []
            for waiter in state.queue[first : first + limit]:
                kind, _, who = waiter.member.partition(":")
                since = self._epoch + waiter.arrival / 1e6
                if kind == "p":
                    queue.append(Waiter("", who, since, task=state.names.get(who, "")))
                else:
                    queue.append(Waiter(who, "", since))
            return queue if first else woken[:limit] + queue

    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        with self._mutex:
            found = [
                (key_of(name), run)
                for name, state in self._keys.items()
                for run in state.envelopes
                if task_id_of(run) == task_id and key in (None, key_of(name))
            ]
        yield from found

    def parked(self, key: str, run: str) -> Waiter | None:
        with self._mutex:
            state = self._keys.get(slot_name(key), _Key())
            return self._parked(state, run) if run in state.envelopes else None

    def _parked(self, state: _Key, run: str) -> Waiter:
        since = self._epoch + state.arrivals.get(run, 0) / 1e6
        woken, task = run in state.woken, state.names.get(run, "")
        route = state.routes.get(run)
        return Waiter("", run, since, state.envelopes[run], woken, task, route)

    def cancel(self, key: str, run: str) -> Release:
        name = slot_name(key)
        with self._mutex:
            state = self._keys.get(name, _Key())
            reserved = state.holder == f"parked:{run}"
            if (state.holder and state.run == run and not reserved) or state.knows_end(run):
                return Release(False)
            if not state.unpark(run):
                return Release(False)
            state.done[run] = clock.monotonic()
            handed = self._release(name, f"parked:{run}", "", Completion.NO) if reserved else None
            return Release(True, handed.wake if handed else None)

    def wake_again(self, key: str) -> Iterator[WokenTask]:
        name = slot_name(key)
        with self._mutex:
            state = self._keys.get(name)
            if state is None:
                return
            for run in state.travelling:
                if not state.knows_end(run):
                    state.woken[run] = -math.inf
                    state.sends.pop(run, None)
            wakes = list(self._sweep(name, clock.monotonic()))
        yield from wakes

    def count(self, counts: Mapping[str, float]) -> None:
        with self._mutex:
            self._counts.update(counts)

    def counts(self) -> dict[str, float]:
        with self._mutex:
            return dict(self._counts)

    def start_over(self, name: str) -> None:
        """Be another store, and empty: what anybody had here before is not his any more."""
        with self._mutex:
            self.address, self.identity = name.partition("#")[0], name
            self._keys.clear()
            self._inboxes.clear()
            self._counts.clear()
            self._sweep_from = -math.inf

    def check(self) -> list[Finding]:
        return []

    def close(self) -> None:
        """Nothing to give back: what the store holds ends with the process."""


def _second_delivery(
    state: _Key, run: str, queue: Inbox | ParkRequest | None, asked_at: float
) -> Reply:
    if run in state.done:
        return Reply(Status.DONE, asked_at)
    until = state.unsettled[run]
    status = Status.BUSY
    if isinstance(queue, ParkRequest):
        state.keep(run, queue)
        state.woken[run] = until
        status = Status.PARKED
    return Reply(status, asked_at, holder_run=run, remaining=until - clock.monotonic())


class _MemoryInbox(EventInbox):
    def __init__(self, owner: str, inboxes: dict[str, "_MemoryInbox"]) -> None:
        super().__init__(owner)
        self._inboxes = inboxes
        inboxes[owner] = self

    def wait(self, timeout: float) -> None:
        if clock.wait(self.event, timeout):
            self.event.clear()

    def close(self) -> None:
        self._inboxes.pop(self.address, None)
