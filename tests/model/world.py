"""
Executions around a store in this process: what may happen next, and what has to be true then.

The store is asked as the package asks it, and executes the scripts themselves. All of it can be
saved and restored.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.queue_parts import Sent, Settled
from celery_distlock.stores.queue_store import ready, reserve_or_queue
from celery_distlock.stores.redis.delivery_channel import Pushes
from celery_distlock.stores.requests import Identity, SendRequest, StandRequest
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    Limit,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Reply,
    Route,
    Status,
    WokenTask,
)

from .models import Event, Execution, Fault, Model, Place
from .records import (
    ROUNDING,
    canonical,
    copied,
    instants,
    is_due,
    is_known,
    is_paused,
    leftovers,
    limit,
    places,
    queue,
)
from .server import BrokenError, ModelServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .records import Data

__all__ = ["World"]

LEASE = 10.0
EPOCH = 1_700_000_000_000_001  # µs
BEFORE = 12_000  # µs between a renewal of all leases and the next change
CHANNEL = f"p:channel:{0:032x}"
INBOX: Any = SimpleNamespace(address="inbox")
LIMITS = {"pause": Limit(0), "pause for 3 s": Limit(0, until=3.0), "limit to 1": Limit(1)}


class World:
    """See the module."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.keys = sorted({key for plan in model.plans for key in plan.keys})
        self.store = MemoryStore("memory://", "p")
        self.server = ModelServer(self, model.changes)
        self.store._servers.server = self.server
        self.now = EPOCH
        self.executions = [Execution() for _ in model.plans]
        self.starts: tuple[int, ...] = ()  # recent ones, where there are rates
        self.tokens = dict.fromkeys(self.keys, 0)
        self.faults, self.copies, self.delays = model.faults, model.copies, model.delays
        self.acts = model.acts
        self.is_cut = False  # a script was ended
        self.doubts = frozenset[str]()  # keys at which a sweep may find something
        self._channel = CHANNEL if model.pushes else ""
        self._pushes = Pushes(CHANNEL, lambda wake: self._wakes([wake], kept=True))

    # Copies

    def save(self) -> tuple[Any, ...]:
        """Return all there is, which must be restored, or something else, before the next event."""
        counts = self.faults, self.copies, self.delays, self.acts, self.is_cut, self.doubts
        return self.server.keys._keys, self.now, self.executions, self.starts, self.tokens, counts

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Make it as it was."""
        data, self.now, executions, self.starts, tokens, counts = saved
        self.server.keys._keys = copied(data)
        self.executions, self.tokens = list(executions), dict(tokens)
        self.faults, self.copies, self.delays, self.acts, self.is_cut, self.doubts = counts

    def faults_left(self, saved: tuple[Any, ...]) -> int:
        """Return how many faults there may be after *saved*."""
        left: int = saved[-1][0]
        return left

    @property
    def data(self) -> Data:
        """The records that have not expired."""
        keys = self.server.keys
        keys.now_us = self.now
        for name in list(keys._keys):
            keys._living(name)
        return keys._keys

    def digest(self) -> bytes:
        """Return the canonical form of this state."""
        plans, order = self.model.plans, [0] * len(self.executions)
        signed = [
            (plans.index(plan), not one.has_begun, one.is_over, *(each.kind for each in one.places))
            for plan, one in zip(plans, self.executions, strict=True)
        ]
        for rank, number in enumerate(sorted(range(len(plans)), key=signed.__getitem__)):
            order[number] = rank
        more = [
            f"r{i} {one._replace(owners=0, arrival=0 if one.is_over else one.arrival)}"
            for i, one in enumerate(self.executions)
        ]
        counts = self.faults, self.copies, self.delays, sorted(self.acts), self.is_cut
        more.append(f"{counts} {sorted(self.doubts)} {self.tokens} {self.starts}")
        memory = round(self.model.memory * 1e6)
        return canonical(self.data, self.now, map(str.encode, more), order, memory)

    # What may happen

    def events(self) -> Iterator[Event]:
        """Yield what may happen next."""
        plans = self.model.plans
        for i, one in enumerate(self.executions):
            is_next = i == 0 or plans[i] != plans[i - 1] or self.executions[i - 1].has_begun
            if not one.has_begun:
                yield from [Event("begins", i)] if is_next else []
                continue
            for place in dict.fromkeys(one.places):
                yield from self._events_at(i, place)
            if not one.is_over and self.copies and plans[i].how != "blocks":
                yield Event("comes_again", i)
            if not one.is_over and "cancel" in self.acts:
                yield Event("cancels", i)
        for key in self.keys:
            yield from [Event("sweeps", key)] if self.model.sweeps else []
            yield from [Event("acts", (act, key)) for act in self.acts & {*LIMITS, "release"}]
            yield from [Event("lifts", key)] if limit(self.data, key) else []
        yield from [Event("ticks")] if self.model.ticks else []
        if (self.delays or not self._is_moving()) and self._next_instant():
            yield Event("time_passes")

    def _events_at(self, i: int, place: Place) -> Iterator[Event]:
        if place.kind == "running":
            put_back = [Completion.NO] if "put back" in self.acts else []
            for each in (*self.model.plans[i].ends, *put_back):
                yield Event("ends", i, place._replace(ended=each))
            yield from [Event("dies", i, place)] if self.faults else []
        elif place.kind in ("message", "asking") or place.called:
            yield Event("asks", i, place)
        elif place.kind != "blocked":
            yield Event("goes_on", i, place)
        if place.kind == "blocked" and "leave" in self.acts:
            yield Event("leaves", i, place)

    def _is_moving(self) -> bool:
        return any(each.is_moving for one in self.executions for each in one.places)

    def _next_instant(self) -> int | None:
        """Return the time (µs) of the next change, and of those within a rounding of it."""
        at = sorted(instants(self.data, self.now))
        return max((each for each in at if each <= at[0] + ROUNDING), default=None)

    # What happens

    def do(self, event: Event, fault: Fault | None = None) -> None:
        """
        Let *event* happen, and see that all is well.

        Raises:
            AssertionError: It is not.
        """
        self.now += 1
        self._paused = {key for key in self.keys if is_paused(self.data, key, self.now)}
        self.server.begin(fault)
        place = event.place
        before = {key: queue(self.data, key) for key in self.keys}
        had_it = place is not None and place.kind == "asking" and is_known(self.data, place.owner)
        self._granted: list[int] = []
        try:
            getattr(self, f"_{event.verb}")(*(each for each in event[1:] if each not in ("", None)))
        except BrokenError:
            self.faults -= 1
            self.is_cut |= fault is not None and fault.write > 0
            self.doubts = frozenset(self.keys)
        self._check_places()
        if event.verb not in ("cancels", "leaves"):
            for key in self.keys:
                self._check_order(key, before[key], had_it=had_it)

    def caller_dies(self, event: Event) -> None:
        """Have the process die that caused *event*, a request of which was not answered."""
        asked = ("asking", "reserving", "ending", "sending")
        found = self.executions[event.subject].places
        one = [each for each in found if each == event.place or each.kind in asked]
        if one:
            self._die(event.subject, one[0])
        self._check_places()

    def _become(self, i: int, before: Place | None, *after: Place, **known: Any) -> None:
        at = list(self.executions[i].places)
        if before is not None:
            at.remove(before)
        at = sorted([*at, *after], key=repr)
        self.executions[i] = self.executions[i]._replace(places=tuple(at), **known)

    def _begins(self, i: int) -> None:
        is_sent = self.model.plans[i].how == "is sent"
        self._become(i, None, begin := Place("sending" if is_sent else "message"), has_begun=True)
        (self._goes_on if is_sent else self._asks)(i, begin)

    def _comes_again(self, i: int) -> None:
        self.copies -= 1
        self._become(i, None, Place("message", again=True))

    def _goes_on(self, i: int, place: Place) -> None:
        {
            "ending": self._release,
            "sending": self._send,
            "settling": self._settle,
            "reserving": self._reserve,
            "waking": self._send_woken,
            "noting": self._note,
        }[place.kind](i, place)

    def _asks(self, i: int, place: Place) -> None:
        plan, one = self.model.plans[i], self.executions[i]
        owner = place.owner or f"o{i}.{one.owners}"
        asking = place._replace(kind="asking", called=False, owner=owner)
        self._become(i, place, asking, owners=one.owners + (not place.owner))
        if len(plan.keys) > 1:
            self._ask_for_all(i, asking)
            return
        waits: Inbox | ParkRequest = self._park_request(i)
        if plan.how == "blocks":
            waits = INBOX
        run = "" if plan.how == "blocks" else f"r{i}"
        how = {"redelivered": place.again, "retain": place.kept, "arrival": one.arrival}
        request = AcquireRequest(plan.keys, owner, LEASE, waits, run, want=plan.want, **how)
        self._take_answer(i, asking, [self.store.acquire(request)])

    def _ask_for_all(self, i: int, asking: Place) -> None:
        plan = self.model.plans[i]
        keys = plan.keys
        wants = () if plan.want == ALONE else [plan.want] * len(keys)
        how = {"run": f"r{i}", "redelivered": asking.again, "retain": asking.kept, "wants": wants}
        replies = self.store.acquire_all(keys, [asking.owner] * len(keys), LEASE, **how)
        if replies is not None:
            self._take_answer(i, asking, replies)
            return
        self._become(i, asking, reserving := asking._replace(kind="reserving"))
        self._reserve(i, reserving)

    def _reserve(self, i: int, reserving: Place) -> None:
        plan, one = self.model.plans[i], self.executions[i]
        route = Route(tuple(plan.keys), "", (plan.want,) * len(plan.keys))
        request = StandRequest(f"r{i}", route, one.arrival, self._park_request(i))
        reply = reserve_or_queue(self.store, request)
        self._take_answer(i, reserving, [reply])

    def _take_answer(self, i: int, asking: Place, replies: list[Reply]) -> None:
        plan, last = self.model.plans[i], replies[-1]
        self._wakes(reply.wake for reply in replies)
        self.executions[i] = self.executions[i]._replace(
            arrival=last.arrival or self.executions[i].arrival
        )
        if last.status is Status.GRANTED:
            self._begin_to_run(i, asking, replies)
        elif plan.how == "blocks":
            self._become(i, asking, asking._replace(kind="blocked"))
        elif last.status is Status.RECALLED:
            assert plan.newest, f"r{i} is asked to leave for no other"
            assert self.executions[i].may_repeat, f"r{i} is asked to leave before it has begun"
            self._become(i, asking, is_over=True)
            drop = WokenTask(plan.keys, f"r{i}", f"<r{i}>".encode())
            self._wakes([self.store.drop(drop).wake])
        elif last.status is Status.DONE:
            self._become(i, asking)
            assert self.executions[i].is_over or self._is_somewhere(i), f"r{i} is answered as ended"
        else:
            has_turn = self.executions[i].has_turn and last.status is Status.RESERVED
            self._become(i, asking, has_turn=has_turn)

    def _begin_to_run(self, i: int, asking: Place, replies: list[Reply]) -> None:
        plan, one = self.model.plans[i], self.executions[i]
        assert not one.is_over or one.may_repeat, f"r{i} runs again"
        for key, reply in zip(plan.keys, replies, strict=True):
            last = self.tokens[key]
            assert reply.token > last or (not plan.want.alone and reply.token == last), (
                "an old token"
            )
            self.tokens[key] = reply.token
        is_exempt = (one.has_turn or asking.again) and not self.model.claims_ask
        assert is_exempt or self._paused.isdisjoint(plan.keys), f"r{i} enters a paused key"
        self._become(i, asking, asking._replace(kind="running"))
        self._granted.append(i)
        self._check_what_fits(plan.keys)
        self._count_start(plan.want.rates)

    def _park_request(self, i: int) -> ParkRequest:
        return ParkRequest(f"<r{i}>".encode(), self._channel)

    def _send(self, i: int, sending: Place) -> None:
        key, want = self.model.plans[i].keys, self.model.plans[i].want
        request = SendRequest(key, f"r{i}", ParkRequest(f"<r{i}>".encode()), want)
        calls = self.store.calls
        if self.model.plans[i].newest:
            request = request._replace(identity=self._identity(key, f"r{i}"))
        asks = functools.partial(type(calls)._ask_to_send, calls)
        with patch.object(calls, "_ask_to_send") as ask:  # it repeats itself what is not answered
            ask.side_effect = lambda *how, repeated: asks(*how, repeated=repeated or sending.again)
            self._become(i, sending, trying := sending._replace(again=True))
            reply = calls.send(request)
        sending = trying
        self._become(i, sending)
        self._supersede(i)
        self._wakes([reply.wake])
        if reply.sent is Sent.GO:
            self.executions[i] = self.executions[i]._replace(has_turn=True)
            self._wakes([WokenTask(key, f"r{i}", f"<r{i}>".encode())])

    def _identity(self, key: str, run: str) -> Identity:
        bearer = self.store.calls.peek(key, "same")
        replaces = bearer.run if bearer and bearer.run != run else ""
        return Identity("same", replaces=replaces, beside=True, recalls="all")

    def _supersede(self, i: int) -> None:
        """Note which executions have to learn that a newer one was sent."""
        if not self.model.plans[i].newest or self.faults < self.model.faults:
            return
        for number, one in enumerate(self.executions):
            is_sent = one.has_begun and not any(each.kind == "sending" for each in one.places)
            if number != i and is_sent and self.model.plans[number].newest and not one.is_over:
                self.executions[number] = one._replace(is_superseded=True)

    def _wakes(self, wakes: Iterable[WokenTask | None], *, kept: bool = False) -> None:
        """Take what the store has woken, which the caller has to send; or what it has pushed."""
        for wake in filter(None, wakes):
            for each in (wake._replace(also=()), *wake.also):
                if each.route is not None and self._is_trying(each):
                    continue  # another process has it try its keys
                self._has_alerted = True
                waking = Place("waking", wake=each)
                place = Place("message", again=True, kept=True) if kept else waking
                self._become(int(each.run[1:]), None, place)

    def _is_trying(self, wake: WokenTask) -> bool:
        places = self.executions[int(wake.run[1:])].places
        return any(place.wake is not None and place.wake.route is not None for place in places)

    def heard(self, channel: str, message: bytes) -> bool:
        """Take what is published; return whether there is a listener."""
        self._has_alerted = True
        if channel == CHANNEL:
            self._pushes.take(message)
            return True
        owner = message.decode()
        for i, one in enumerate(self.executions):
            for place in one.places:
                if place.owner == owner and place.kind in ("blocked", "asking"):
                    self._become(i, place, place._replace(called=place.kind == "blocked"))
                    return True
        return False

    def _send_woken(self, i: int, waking: Place) -> None:
        assert waking.wake is not None
        for sent in list(ready(self.store, waking.wake)):
            run = int(sent.run[1:])
            assert sent.envelope == f"<r{run}>".encode()
            self._become(run, None, Place("message", again=True), Place("noting", wake=sent))
        self._become(i, waking)

    def _note(self, i: int, noting: Place) -> None:
        assert noting.wake is not None
        self.store.parking.mark_published(noting.wake)
        self._become(i, noting)

    def _ends(self, i: int, ended: Place) -> None:
        self.acts -= {"put back"} if ended.ended is Completion.NO else set()
        is_over = ended.ended is not Completion.NO or self.model.plans[i].how == "blocks"
        ending = ended._replace(kind="ending")
        self._become(i, ended._replace(ended=Completion.NO), ending)
        self.executions[i] = self.executions[i]._replace(
            is_over=is_over or self.executions[i].is_over
        )
        self._release(i, ending)

    def _release(self, i: int, ending: Place) -> None:
        plan = self.model.plans[i]
        run = "" if plan.how == "blocks" else f"r{i}"
        for key in plan.keys:
            request = ReleaseRequest(key, ending.owner, run, ending.ended)
            self._wakes([self.store.release(request).wake])
        after = []
        if ending.ended is Completion.UNSETTLED:
            after = [ending._replace(kind="settling")]
        elif not self.executions[i].is_over and ending.kept:
            self.store.parking.mark_returned(WokenTask(plan.keys[0], run, b""))
            self.doubts = frozenset(self.keys)  # the next sweep sends it
        elif not self.executions[i].is_over:
            after = [Place("message", again=True)]
        self._become(i, ending, *after)

    def _settle(self, i: int, settling: Place) -> None:
        self._drop_wake(i)
        self._become(i, settling)

    def _drop_wake(self, i: int) -> None:
        self._wakes([self.store.drop(WokenTask(self.model.plans[i].keys[0], f"r{i}", b"")).wake])

    def _leaves(self, i: int, blocked: Place) -> None:
        self.acts -= {"leave"}
        request = ReleaseRequest(self.model.plans[i].keys, blocked.owner, inbox=INBOX)
        self._wakes([self.store.release(request).wake])
        self._become(i, blocked, is_over=True)

    def _dies(self, i: int, running: Place) -> None:
        self.faults -= 1
        self.doubts = frozenset(self.keys)
        self._die(i, running)

    def _die(self, i: int, place: Place) -> None:
        """Have the process die that is at *place*; what the broker gave it comes again."""
        if place.kind in ("waking", "noting"):
            self._become(i, place)
        elif self.model.plans[i].how == "blocks" or place.kind == "sending":
            self._become(i, place, is_over=True, may_repeat=True)
        else:
            message = [] if place.kept else [Place("message", again=True)]
            self._become(i, place, *message, may_repeat=True)

    # Workers and operators

    def _sweeps(self, key: str) -> None:
        self._has_alerted = False
        is_noted = is_due(self.data, key, self.now)
        self._wakes(list(self.store.parking.wake_next(key)))
        found = self._has_alerted and not (is_noted or key in self.doubts)
        assert not found, f"a sweep at {key} has found what was not woken"
        self.doubts -= {key}

    def _ticks(self) -> None:
        claim, again = self.store.timetable.claim_due("t", INBOX, 1.0), dict[str, float | None]()
        if claim.names:
            self._wakes(list(self.store.parking.wake_due(claim.names, again)))
        self.store.timetable.claim_due("t", INBOX, 0.0, Settled(claim.number, again))

    def _acts(self, what: tuple[str, str]) -> None:
        act, key = what
        self.acts -= {act}
        if terms := LIMITS.get(act):
            until = terms.until and self.now / 1e6 + terms.until
            self._wakes([self.store.units.set_limit(key, terms._replace(until=until)).wake])
            return
        for i, one in enumerate(self.executions):
            for place in [each for each in one.places if each.kind == "running"]:
                self._become(i, place, is_over=True)
                self._wakes([self.store.release(ReleaseRequest(key, place.owner)).wake])

    def _lifts(self, key: str) -> None:
        self._wakes([self.store.units.set_limit(key, None).wake])

    def _cancels(self, i: int) -> None:
        self.acts -= {"cancel"}
        cancelled = self.store.parking.cancel(self.model.plans[i].keys[0], f"r{i}")
        if cancelled.released:
            self.executions[i] = self.executions[i]._replace(is_over=True)
        self._wakes([cancelled.wake])

    def _time_passes(self) -> None:
        """Go to the time of the next change; holders renew before that."""
        self.delays -= self._is_moving()
        self.doubts = frozenset(self.keys)
        at = self._next_instant() or self.now
        while holds := self._holds():
            self.now = max(self.now, at - BEFORE)
            for hold, (outcome, _) in zip(holds, self.store.renew(holds, 1.0), strict=True):
                assert outcome.is_held, f"{hold.owner} has lost {hold.key}"
                self._check_recall(hold, outcome)
            renewed, at = at, self._next_instant() or self.now
            if at <= renewed or at > self.now + LEASE * 1e6 - 2 * BEFORE:
                break
        if not holds or at < self.now + LEASE * 1e6 - 2 * BEFORE:
            self.now = at + 1
        for i, one in enumerate(self.executions):
            for place in one.places:
                if place.kind == "blocked":
                    self._become(i, place, place._replace(called=True))
                elif place.kind in ("ending", "settling"):  # its lease may end before that is known
                    self._become(i, None, may_repeat=True)

    def _holds(self) -> list[Ownership]:
        return [
            Ownership(key, place.owner, LEASE)
            for plan, one in zip(self.model.plans, self.executions, strict=True)
            for place in one.places
            if place.kind == "running"
            for key in plan.keys
        ]

    # What has to be true

    def _check_recall(self, hold: Ownership, outcome: RenewOutcome) -> None:
        i = int(hold.owner[1 : hold.owner.index(".")])
        one, is_asked = self.executions[i], outcome is RenewOutcome.RECALLED
        assert is_asked or not one.is_superseded, f"{hold.owner} does not learn of a newer call"
        others = [each for each in self.executions if each.has_begun and each is not one]
        assert not is_asked or (self.model.plans[i].newest and others), (
            f"{hold.owner} is asked to leave for no other"
        )

    def _is_somewhere(self, i: int) -> bool:
        at = self.executions[i].places
        kept = places(self.data, f"r{i}", f"<r{i}>".encode())
        return bool(kept) or any(each.has_message for each in at)

    def _check_places(self) -> None:
        for i, one in enumerate(self.executions):
            need = one.has_begun and not one.is_over and self.model.plans[i].how != "blocks"
            assert not need or self._is_somewhere(i), f"r{i} is nowhere"
            running = [each for each in one.places if each.kind == "running"]
            assert len(running) <= 1, f"r{i} runs twice at once"

    def _check_what_fits(self, keys: str) -> None:
        for key in keys:
            wants = [
                plan.want
                for plan, one in zip(self.model.plans, self.executions, strict=True)
                if key in plan.keys
                for each in one.places
                if each.kind == "running"
            ]
            used, most = (
                sum(each.units for each in wants),
                min(each.capacity or math.inf for each in wants),
            )
            assert used <= most, f"{used} units of {most} are granted at {key}"

    def _count_start(self, rates: Any) -> None:
        for rate in rates:
            begun = [each for each in self.starts if each > self.now - rate.microseconds]
            assert len(begun) < rate.limit, f"{len(begun) + 1} start in {rate.per} s"
            self.starts = (*begun, self.now)

    def _check_order(self, key: str, before: list[tuple[float, str]], *, had_it: bool) -> None:
        """See that of those that want this key alone none has passed one that came before."""
        stays = {name for _, name in queue(self.data, key)}
        passed = [(at, name) for at, name in before if name in stays and self._wants_one_key(name)]
        came = [(at, name) for at, name in before if name not in stays]
        for _, name in came:
            i = int(name[1])
            self.executions[i] = self.executions[i]._replace(has_turn=True)
        for i in [] if had_it else self._granted:
            one = self.executions[i]
            if key in self.model.plans[i].keys and not one.has_turn:
                came.append((one.arrival or self.now, f"r{i}"))
        if self.is_cut or self.copies < self.model.copies:
            return
        for at, name in came:
            earlier = [other for since, other in passed if since < at and other != name]
            assert not earlier, f"{name} has passed {earlier} at {key}"

    def _wants_one_key(self, name: str) -> bool:
        return len(self.model.plans[int(name[1])].keys) == 1

    def is_at_rest(self) -> bool:
        """Say whether all that has begun is over, and nothing of it is left."""
        is_over = all(one.is_over or not one.has_begun for one in self.executions)
        return (
            is_over and not any(one.places for one in self.executions) and not leftovers(self.data)
        )
