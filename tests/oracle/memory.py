"""
A store within one process: for eager mode, for users' own tests, and for workers without processes.

A real store that keeps the whole contract, waiters and parked runs included; it just ends with the
process. ``memory://`` and ``memory://name`` are different stores.
"""

import enum
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError
from celery_distlock.keys import slot_name
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.findings import Finding
from celery_distlock.stores.queue_parts import Channels, Parking
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest, StandRequest
from celery_distlock.stores.urls import redact
from celery_distlock.stores.values import (
    ALONE,
    FIRST,
    Ability,
    Completion,
    Ownership,
    ParkRequest,
    Release,
    RenewOutcome,
    Reply,
    Route,
    Status,
    Want,
    WokenTask,
)
from tests.oracle.memory_capacity import MemoryCapacity
from tests.oracle.memory_inspection import MemoryInspection
from tests.oracle.memory_key import (
    AHEAD,
    CLAIM,
    DONE,
    DOUBLINGS,
    GRANT,
    LOOK,
    UNSENT,
    MemoryKey,
    Standing,
    microseconds,
)
from tests.oracle.memory_sending import (
    MemorySending,
    forget_ended_calls,
    free_identity,
)
from tests.oracle.memory_timing import MemoryInbox

__all__ = ["MemoryStore"]

RESEND = 60.0
RESENDS = 4  # times
LAST_RESENDS = 30  # more, one a day
DAY = 86400.0
REST = 3.0  # times what a sweep took: for so long nobody sweeps after it


class _Turn(enum.Enum):
    """What became of handing a key over, if nobody is to be sent."""

    NOBODY = "nobody waits"
    OWN = "it is one's own turn"
    WAITS = "the first has to wait"
    KNOWS = "who has it knows"


_Handed: TypeAlias = WokenTask | _Turn


class NoChannels(Channels):
    """It pushes to no worker."""

    def open_channel(self, receive: object) -> None:
        return None

    def register_channel(self, queues: object, peer: object, seconds: float) -> None:
        """There is none."""

    def find_channels(self, queues: object, near: object = ()) -> list[Any]:
        return []

    def push(self, wake: WokenTask, addresses: object) -> bool:
        return False


class MemoryStore(MemoryInspection, MemorySending, MemoryCapacity, Parking, QueueStore):
    """See the module; *url* only names the store."""

    abilities = frozenset({Ability.RECOGNISE, Ability.SEVERAL, Ability.QUEUE})

    def __init__(self, url: str, prefix: str, **options: str) -> None:
        if "?" in url or options:
            given = f" ({', '.join(options)})" if options else f", as in {redact(url)!r}"
            raise ConfigurationError(f"a store in memory has no options{given}")
        super().__init__()
        self.parking = self.calls = self.timetable = self.units = self
        self.channels = NoChannels()
        self.address = url
        self.identity = f"{url}#{prefix}"
        self._keys: dict[str, MemoryKey] = {}
        self._inboxes: dict[str, MemoryInbox] = {}
        self._mutex = threading.RLock()
        self._sweep_from = -math.inf
        self._epoch = clock.wall() - clock.monotonic()  # what arrivals are told from
        self._counts: Counter[str] = Counter()
        self._forget_times()

    def _known(self, name: str) -> MemoryKey:
        """Return a key's state, to be looked at."""
        return self._keys.get(name, MemoryKey()).prune()

    def _entered(self, name: str) -> MemoryKey:
        """Return a key's state, to be changed."""
        return self._keys.setdefault(name, MemoryKey()).prune()

    def acquire(self, request: AcquireRequest) -> Reply:
        asked_at = clock.monotonic()
        with self._mutex:
            state = self._entered(slot_name(request.key))
            answer = self._answer_who_has_it(state, request, asked_at)
            answer = answer or self._answer_who_comes(state, request, asked_at)
            if answer.status is Status.GRANTED:
                self._note_opening(slot_name(request.key), state)
            return answer

    def _answer_who_has_it(
        self, state: MemoryKey, request: AcquireRequest, asked_at: float
    ) -> Reply | None:
        """Answer an owner that has the key, or whose run it is kept for; None: it is neither."""
        owner, run = request.owner, request.run
        share, kept = state.shares.get(owner), state.share_for(run)
        its_turn = kept or (share and run and share.run != run)
        if kept:
            state.leave_queue(f"b:{owner}")  # it waited, and comes by what is kept for its run
        if its_turn and request.redelivered and state.knows_end(run):  # the first one has ended
            self._leave_all(state, owner, run)
            reply = state.second_delivery(request, asked_at)
            return reply._replace(wake=self._hand_on(slot_name(request.key), state)[1])
        first = "" if state.is_alone else state.holds(run)
        if its_turn and first not in ("", owner):  # both were served, and the other has come first
            self._leave_all(state, owner, run)
            wake = self._hand_on(slot_name(request.key), state)[1]
            return state.put_off(request, first, asked_at)._replace(wake=wake)
        retained = request.lease if request.retain else None
        if share is not None:
            if kept:
                state.leave(f"parked:{run}")  # a run has one part, and was handed this one as well
            share.lengthen(request.lease)
            if not state.log.begin(owner, owner, microseconds()) and share.due:
                state.start(owner, request.want)  # an operator says only since then how often
            share.due, changed = 0, bool(run) and share.run != run
            if changed or not share.alone:
                state.pass_on(owner, owner, run or share.run, request.lease)
            if changed:
                state.arrive(run, retained)
        elif kept is not None and self._may_claim(state, request):
            self._claim(state, request)
            state.arrive(run, retained)
            state.shares[owner].again |= isinstance(request.queue, ParkRequest)
        else:
            return None
        return self._let_others_in(state, request, state.granted(owner, asked_at))

    def _leave_all(self, state: MemoryKey, owner: str, run: str) -> None:
        """Give up what is kept for a run, and what was handed to who had not said it is his."""
        state.leave(f"parked:{run}")
        if (share := state.shares.get(owner)) is not None and share.run != run:
            state.leave(owner)

    def _may_claim(self, state: MemoryKey, request: AcquireRequest) -> bool:
        kept = f"parked:{request.run}" in state.log.reserved
        may_start = kept or not state.starts_in(request.want)
        return may_start and self._is_wanted(state, request)

    def _claim(self, state: MemoryKey, request: AcquireRequest) -> None:
        own = f"parked:{request.run}"
        if not state.log.begin(own, request.owner, microseconds()):
            state.start(request.owner, request.want)
        state.pass_on(own, request.owner, request.run, request.lease)

    def _is_wanted(self, state: MemoryKey, request: AcquireRequest) -> bool:
        """Whether what is kept for the run is what it wants now: it may have changed its mind."""
        kept, want = state.share_for(request.run), request.want
        assert kept is not None
        if kept.alone or want.alone:
            return kept.alone and want.alone
        if state.wants.get(f"p:{request.run}") == want:
            return True
        fits = want.capacity == 0 or state.used <= want.capacity
        return fits and want.counted() <= kept.units

    def _let_others_in(self, state: MemoryKey, request: AcquireRequest, reply: Reply) -> Reply:
        if request.want.alone and reply.slot < 0:
            return reply
        return reply._replace(wake=self._hand_on(slot_name(request.key), state)[1])

    def _answer_who_comes(
        self, state: MemoryKey, request: AcquireRequest, asked_at: float
    ) -> Reply:
        key, owner, lease, queue, run, redelivered, retain, arrival, want = request
        name = slot_name(key)
        if (kept := state.share_for(run)) is not None:  # it wants something else now, or is early
            early = f"parked:{run}" not in state.log.reserved and state.starts_in(want)
            arrival = kept.due or (FIRST if early else arrival)
            state.leave(f"parked:{run}")
        if (redelivered or isinstance(queue, ParkRequest)) and state.knows_end(run):
            state.leave_queue(f"b:{owner}")
            return state.second_delivery(request, asked_at)
        if not state.is_alone and (first := state.holds(run)):
            return state.put_off(request, first, asked_at)
        member = f"b:{owner}" if isinstance(queue, Inbox) else f"p:{run}" if run else ""
        stands = state.arrivals.get(run) or min(arrival, microseconds() + AHEAD)
        overtakes = self._overtakes(state, stands, want)
        wake = None
        if not state.is_alone:
            turn: _Handed = _Turn.NOBODY
            if not overtakes and not (want.alone and not state.shares and run in state.woken):
                own = member, f"p:{run}"  # it may stand there twice, parked and blocked
                turn, wake = self._hand_on(name, state, own, stands)
            if owner in state.shares:  # it stands in the queue as well, and was handed it just now
                state.pass_on(owner, owner, run, lease)
                state.log.begin(owner, owner, microseconds())
                return state.granted(owner, asked_at)._replace(wake=wake)
            if turn in (_Turn.NOBODY, _Turn.OWN) and state.admits(want):
                state.take(owner, run, want, lease, came=stands)
                if run:
                    state.arrive(run, lease if retain else None)
                state.leave_queue(member)
                granted = state.granted(owner, asked_at)._replace(wake=wake)
                return granted if wake else self._let_others_in(state, request, granted)
        status = Status.BUSY
        if isinstance(queue, ParkRequest):
            status, stands = Status.PARKED, state.park(run, queue, stands, want)
        elif queue is not None:
            stands = state.join(member, stands, want)
        due = self._due(name, state, member, request, leaves=kept is not None)
        reply = state.taken(status, member, asked_at, stands)
        return reply._replace(wake=wake, due=due)

    def _due(
        self, name: str, state: MemoryKey, member: str, request: AcquireRequest, *, leaves: bool
    ) -> float:
        """Return in how many seconds time alone lets one in who is told to wait; 0: it does not."""
        waits = request.queue is not None
        if waits:
            self._note_opening(name, state, here=member)
        if state.place(member):
            if leaves and not waits:  # who stands before may have it now, and was told nothing
                self.note_due({name: LOOK})
            return 0.0
        return (state.opens_in() if waits else state.opens_by_rate(request.want)) or 0.0

    def _overtakes(self, state: MemoryKey, stands: int, want: Want) -> bool:
        """Whether those who came later, and have not come, have made room for one who is here."""
        if stands <= 0 or not state.shares:
            return False
        if not state.is_alone:
            return not state.admits(want) and state.make_room(stands, want)
        ((owner, share),) = state.shares.items()
        if not stands < share.due:
            return False
        state.step_back(owner)
        return True

    def stand_at_all(self, run: str, route: Route) -> None:
        return None

    def mark_all_published(self, wakes: Sequence[WokenTask]) -> None:
        for wake in wakes:
            self.mark_published(wake)

    def keep_reserved(self, wakes: Sequence[WokenTask], seconds: float) -> None:
        """It pushes to none."""

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
        request = AcquireRequest(key, "", 0.0, park_request, run, want=want)
        with self._mutex:
            state = self._entered(slot_name(key))
            if state.share_for(run):
                return Reply(Status.DONE, asked_at)
            if state.knows_end(run):
                return state.second_delivery(request, asked_at)
            if not state.is_alone and (first := state.holds(run)):
                return state.put_off(request, first, asked_at)
            stands = state.arrivals.get(run) or min(arrival, microseconds() + AHEAD)
            stands = state.park(run, park_request, stands, want)
            reply = state.taken(Status.PARKED, f"p:{run}", asked_at, stands)
            if not reply.place and state.admits(want):
                return reply  # a task comes for it, and lets this run in
            self._note_opening(slot_name(key), state)
            return reply._replace(due=(not reply.place and state.opens_in()) or 0.0)

    def time(self, timeout: float) -> int:
        return microseconds()

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
        asked = list(zip(keys, owners, wants or [ALONE] * len(keys), strict=True))
        with self._mutex:
            for key, _, want in asked:
                if not self._is_in_reach(
                    self._known(slot_name(key)), run, want, claims=redelivered
                ):
                    return None
            replies = []
            for key, owner, want in asked:
                state = self._entered(slot_name(key))
                if redelivered:
                    self._claim(state, AcquireRequest(key, owner, lease, run=run, want=want))
                    state.arrive(run, lease if retain else None)
                else:
                    state.take(owner, run, want, lease)
                replies.append(state.granted(owner, asked_at))
            return replies

    def _is_in_reach(self, state: MemoryKey, run: str, want: Want, *, claims: bool) -> bool:
        if not claims:
            free = not (state.queue or state.woken or state.holds(run))
            return free and state.admits(want)
        kept = state.share_for(run)
        if kept is None or run in state.done or run in state.unsettled:
            return False
        keeps_start = f"parked:{run}" in state.log.reserved
        if not keeps_start and state.starts_in(want):
            return False
        if kept.alone or want.alone:
            return kept.alone and want.alone
        return want.counted() <= kept.units

    def stand(self, request: StandRequest) -> Reply:
        name, run, route, arrival, park_request, owner, _ = request
        asked_at = clock.monotonic()
        with self._mutex:
            state = self._entered(name)
            if name == route.names[0]:
                away = park_request is None and run not in state.routes
                if run in state.done or away:
                    kept = state.share_for(run)
                    known = kept or state.holds(run) or run in state.envelopes
                    self._forget_if_idle(name, state)
                    waits = away and known and run not in state.done
                    return Reply(Status.BUSY if waits else Status.DONE, asked_at)
                arrival = state.arrivals.get(run) or state.stamp_of(run) or arrival
            state.envelopes.setdefault(run, b"")
            if park_request is not None:
                state.receive(run, park_request)
                state.begun.discard(run)
                state.sends.pop(run, None)
            state.routes[run], state.names[run] = route, route.task
            state.woken.pop(run, None)
            if (at := state.arrivals.get(run)) is None or at != arrival:
                state.leave_queue(f"p:{run}")
            want = route.want(name)
            stands = state.arrivals[run] = state.join(f"p:{run}", arrival, want)
            wake = self._stand_here(name, state, run, owner)
            self._note_opening(name, state)
            kept = state.share_for(run)
            status = Status.RESERVED if kept else Status.PARKED
            reply = state.taken(status, f"p:{run}", asked_at, stands)
            return reply._replace(wake=wake, place=state.place(f"p:{run}"))

    def _stand_here(self, name: str, state: MemoryKey, run: str, owner: str) -> WokenTask | None:
        """Have a run take its part of the key if it is its turn; return who else was woken."""
        member, stands, want = f"p:{run}", state.arrivals[run], state.wants[f"p:{run}"]
        own = f"parked:{run}"
        if owner in state.shares:
            state.log.refund(owner)
            state.leave(owner)
        if state.is_alone:
            ((holder, share),) = state.shares.items()
            later = holder not in ("", own) and holder == f"parked:{share.run}"
            overtakes = later and share.run in state.routes and stands < share.due
            if overtakes or (holder == own and state.queue[0].member != member):
                state.leave(holder)  # kept for one who came later; or our own
        if (kept := state.share_for(run)) is not None:
            if not kept.stamp:  # once: others may ask for it again and again
                kept.lengthen(CLAIM)
                kept.due = kept.stamp = stands
            return None
        if state.is_alone:
            return None
        if state.shares and not state.admits(want):
            state.make_room(stands, want)
        turn, wake = self._hand_on(name, state, (member,))
        if turn is _Turn.OWN and state.admits(want):
            state.keep_for(run, stands, CLAIM, want).stamp = stands
        return wake

    def _advance(self, wake: WokenTask, route: Route) -> Iterator[WokenTask]:
        with self._mutex:  # in one step
            wakes = list(super()._advance(wake, route))
        yield from wakes

    def depart(self, name: str, run: str, *, first: bool) -> Release:
        with self._mutex:
            state = self._known(name)
            kept = state.share_for(run)
            if kept is None:
                return Release(False)
            claim = CLAIM * 2 ** min(len(state.woken), DOUBLINGS)
            if kept.alone:
                kept.until = clock.monotonic() + claim
            else:
                kept.lengthen(claim)
            if not first:
                state.unpark(run)
                return Release(True)
            state.lapsed.discard(run)
            if state.routes.pop(run, None) is None:
                return Release(True)
            state.leave_queue(f"p:{run}")
            state.woken[run] = clock.monotonic() + UNSENT
            return Release(True, WokenTask(name, run, state.envelopes[run]))

    def _hand_on(
        self, name: str, state: MemoryKey, own: Collection[str] = (), stands: int = 0
    ) -> tuple[_Handed, WokenTask | None]:
        """
        Give what is free to as many of those who wait as may have it, in their order.

        Returns what became of the last one, and all who are to be sent.
        """
        if state.upgrading:
            if len(state.shares) == 1:
                owner = state.upgrading
                state.become_alone(owner, 0.0)
                if owner in self._inboxes:
                    self._inboxes[owner].call()
            return _Turn.WAITS, None
        wakes: list[WokenTask] = []
        handed: _Handed = _Turn.WAITS
        while not state.is_alone:
            handed = self._hand_over(name, state, own, stands)
            if isinstance(handed, WokenTask):
                wakes.append(handed)
            elif handed is not _Turn.KNOWS:
                break
        wake = wakes[0]._replace(also=tuple(wakes[1:])) if wakes else None
        return handed, wake

    def _hand_over(self, name: str, state: MemoryKey, own: Collection[str], stands: int) -> _Handed:
        """Give the key to the first that is alive, if it may have it; or to who *stands* there."""
        passed = 0
        while passed < len(state.queue):
            head = state.next_in_line(passed)
            member, arrival = head.member, head.arrival
            kind, _, who = member.partition(":")
            if member in own or 0 < stands < arrival:
                return _Turn.OWN
            if kind == "p" and who in state.routes and state.share_for(who):
                passed += 1  # it has its part here, and waits for another key
            elif kind == "p" and (first := state.holds(who)):
                state.set_aside(who, state.shares[first].until)
            elif kind == "p" and who not in state.envelopes:
                state.queue.remove(head)
            elif not state.admits(state.wants.get(member, ALONE)):
                return _Turn.WAITS
            elif kind == "p":
                return self._hand_to_run(name, state, head)
            else:
                want = state.wants.get(member, ALONE)
                state.leave_queue(member)
                if (inbox := self._inboxes.get(who)) is not None:
                    state.reserve(who, "", want, GRANT, arrival)
                    inbox.call()
                    return _Turn.KNOWS
        return _Turn.NOBODY

    def _hand_to_run(self, name: str, state: MemoryKey, head: Standing) -> _Handed:
        run, want = head.member.removeprefix("p:"), state.wants.get(head.member, ALONE)
        if run in state.routes:
            state.keep_for(run, head.arrival, UNSENT, want)
            return WokenTask(name, run, b"", state.routes[run])
        state.queue.remove(head)
        claim = CLAIM * 2 ** min(len(state.woken), DOUBLINGS)
        state.reserve(f"parked:{run}", run, want, claim, head.arrival)
        if run in state.woken:
            return _Turn.KNOWS  # it stepped back, and is on its way already
        state.woken[run] = clock.monotonic() + UNSENT
        return WokenTask(name, run, state.envelopes[run])

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        return [self._renew(hold) for hold in holds]

    def _renew(self, hold: Ownership) -> tuple[RenewOutcome, float]:
        asked_at = clock.monotonic()
        with self._mutex:
            state = self._known(slot_name(hold.key))
            share = state.shares.get(hold.owner)
            if share is not None:
                share.lengthen(hold.lease)
                return RenewOutcome.RENEWED, asked_at
            return RenewOutcome.HELD if state.is_alone else RenewOutcome.LOST, asked_at

    def release(self, request: ReleaseRequest) -> Release:
        key, owner, run, ended, inbox, keep_for, started, _ = request
        name = slot_name(key)
        with self._mutex:
            state = self._entered(name)
            if started is False:
                state.log.refund(owner)
            self._note_end(state, run, ended)
            waited = inbox is not None and state.leave_queue(f"b:{owner}")
            share, wake = state.shares.get(owner), None
            if keep_for is not None and share is not None and state.put_first(keep_for[0]):
                keep_for = None  # its message came before, and nobody else would send it
            elif keep_for is not None and state.holds(keep_for[0]) not in ("", owner):
                keep_for = None  # that run has its part already
            if share is not None and keep_for is not None:
                kept_run, seconds = keep_for
                state.log.leave(f"parked:{kept_run}")
                state.pass_on(owner, f"parked:{kept_run}", kept_run, 0.0)
                state.shares[f"parked:{kept_run}"].until = clock.monotonic() + seconds
            elif share is not None or waited:  # those behind one who waited may fit
                state.leave(owner)
                wake = self._hand_on(name, state)[1]
            self._note_opening(name, state)
            self._forget_if_idle(name, state)
            return Release(share is not None or wake is not None, wake)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        with self._mutex:
            state = self._known(wake.name)
            kept = state.share_for(wake.run)
            if not kept and wake.run not in state.woken | state.unsettled:
                return Release(False)
            state.unpark(wake.run)
            if mark:
                state.note_end(wake.run)
            return self._free(wake.name, state, f"parked:{wake.run}")

    def _free(self, name: str, state: MemoryKey, owner: str) -> Release:
        """Take from an owner what it has, for the next ones."""
        state.leave(owner)
        wake = self._hand_on(name, state)[1]
        self._note_opening(name, state)
        self._forget_if_idle(name, state)
        return Release(True, wake)

    def _note_end(self, state: MemoryKey, run: str, ended: Completion) -> None:
        holder = state.holds(run)
        now = clock.monotonic()
        left = state.shares[holder].until - now if holder else 0.0
        if run and ended is Completion.UNSETTLED:
            until = now + max(left, CLAIM)
            state.unsettled[run] = until
            if run in state.envelopes:
                state.set_aside(run, until)
        elif run and ended is not Completion.NO:
            parked = state.unpark(run)
            again = any(share.again for share in state.shares.values() if share.run == run)
            if parked or again or ended is Completion.YES_AND_MAY_COME_AGAIN:
                state.note_end(run)
        elif holder and not state.is_alone and run in state.woken:
            state.woken[run] = now  # what was set aside as its second delivery

    def _forget_if_idle(self, name: str, state: MemoryKey) -> None:
        now = clock.monotonic()
        state.done = {run: at for run, at in state.done.items() if at > now - DONE}
        state.unsettled = {run: at for run, at in state.unsettled.items() if at > now}
        state.copies = {run: at for run, at in state.copies.items() if at > now}
        known = state.calls or state.later or state.done or state.unsettled or state.log.in_use
        if not (state.in_use or state.woken or known):
            self._keys.pop(name, None)

    def inbox(self, key: str, owner: str) -> Inbox:
        return MemoryInbox(owner, self._inboxes)

    def mark_published(self, wake: WokenTask) -> None:
        with self._mutex:
            state = self._keys.get(wake.name)
            if state is not None and wake.run in state.woken:
                times = state.sends[wake.run] = state.sends.get(wake.run, 0) + 1
                pause = RESEND * 2 ** (times - 1) if times <= RESENDS else DAY
                state.woken[wake.run] = clock.monotonic() + pause
                if times > 1:
                    state.expect_copy(wake.run)

    def mark_awaited(self, wake: WokenTask, destination: str) -> None:
        with self._mutex:
            state = self._known(wake.name)
            if wake.run in state.woken:
                state.woken[wake.run] = clock.monotonic() + RESEND

    def mark_left(self, wake: WokenTask) -> None:
        with self._mutex:
            state = self._known(wake.name)
            if wake.run in state.woken:
                state.woken[wake.run] = clock.monotonic()
                if state.share_for(wake.run):
                    self._free(wake.name, state, f"parked:{wake.run}")

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
        state = self._entered(name)
        for run, due in [each for each in state.woken.items() if each[1] <= now]:
            if holder := state.holds(run):
                if due > -math.inf:  # else it came back, and its process is being ended
                    state.woken[run] = state.shares[holder].until
                continue
            if any(waiter.member == f"p:{run}" for waiter in state.queue):
                del state.woken[run]  # it stepped back, and its turn comes again
                continue
            forgotten = state.sends.get(run, 0) >= RESENDS + LAST_RESENDS
            if forgotten and not state.share_for(run):
                state.unpark(run)
                continue
            state.woken[run] = now + UNSENT
            returned, published = run in state.begun, run in state.sends
            if not published:
                state.expect_copy(run)
            envelope = state.envelopes[run]
            yield WokenTask(name, run, envelope, returned=returned, published=published)
        for run in sorted(state.later, key=state.later.__getitem__):
            if state.later[run] > now:
                break
            del state.later[run]  # its time has come
            state.arrivals[run] = state.join(f"p:{run}")
        wake = self._hand_on(name, state)[1]
        if wake is not None:
            yield from (wake._replace(also=()), *wake.also)
        self._note_opening(name, state)
        forget_ended_calls(state)
        self._forget_if_idle(name, state)

    def cancel(self, key: str, run: str) -> Release:
        name = slot_name(key)
        with self._mutex:
            state = self._known(name)
            may_come = run in state.sends
            if state.holds(run) or state.knows_end(run) or not state.unpark(run):
                return Release(False)
            free_identity(state, run)
            if may_come:
                state.expect_copy(run)
            state.note_end(run)
            return self._free(name, state, f"parked:{run}")

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

    def start_over(self, name: str) -> None:
        """Be another store, and empty: what anybody had here before is not his any more."""
        with self._mutex:
            self.address, self.identity = name.partition("#")[0], name
            self._keys.clear()
            self._inboxes.clear()
            self._counts.clear()
            self._sweep_from = -math.inf
            self._forget_times()

    def check(self) -> list[Finding]:
        return []

    def close(self) -> None:
        """Nothing to give back: what the store holds ends with the process."""
