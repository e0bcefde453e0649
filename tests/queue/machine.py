"""
A world of brokers, workers and waiters around a store, in which anything can happen in any order.

What it keeps beside the store is a model: who waits for each key since when, which runs are on
their way, who runs. Every step is one request to the store, or one blow of fate; after each the
store is looked at whole and has to agree with the model.

First come first served means here: a key goes to the one in its queue who came first, of those who
can be reached. A parked run keeps its arrival until it has come and the key was its own; a blocked
waiter loses it when the key was his and he did not take it. Two things go past the queue, and only
they: a run that is on its way already and finds the key free (it had its turn), and a run for which
the key was kept by the one before it.
"""

from __future__ import annotations

import enum
import itertools
import math
import sys
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from celery_distlock.stores.base import Ended, Inbox, Ownership, Parcel, RenewOutcome, Status, Wake

from .places import FAR, Look, Place

LEASE = 30.0
CLAIM, GRANT, UNSENT, DAY = 5.0, 1.0, 2.0, 86400.0  # as in lua/queue.lua
SWEEPS = 2  # after which nobody may be left behind
SLACK = 0.002  # milliseconds are rounded


class Fate(enum.Enum):
    """What becomes of a wake in the hands of the process that is to send it."""

    SENT = enum.auto()
    SENT_AND_SAID_LATE = enum.auto()
    SENT_AND_DIED = enum.auto()
    DIED = enum.auto()


@dataclass(eq=False)
class Run:
    name: str
    key: str
    late: bool  # acknowledged when it has ended, not when it begins
    waits: bool  # blocks for the key before it is parked
    desk: str = ""  # where it was parked from
    ended: bool = False
    end_is_known: bool = False  # to the store: a second delivery has to be dropped
    excused: str = ""  # why it need not run (again)
    revoked: bool = False
    was_parked: bool = False

    @property
    def envelope(self) -> bytes:
        return f"envelope of {self.name}".encode()

    @property
    def over(self) -> bool:
        return self.ended or bool(self.excused)


@dataclass(eq=False)
class Message:
    """One that the broker has, or that was delivered and is not acknowledged."""

    run: Run
    woken: bool = False  # sent by one who was given a wake
    redelivered: bool = False


@dataclass(eq=False)
class Delivery:
    """A process that has a run, or none, and asks for its key."""

    owner: str
    key: str
    run: Run | None = None
    message: Message | None = None
    wake: Wake | None = None  # pushed
    holds: bool = False
    inbox: Inbox | None = None
    stopped: bool = False

    @property
    def member(self) -> str:
        if self.inbox is not None:
            return f"b:{self.owner}"
        return f"p:{self.run.name}" if self.run else ""

    @property
    def woken(self) -> bool:
        return self.wake is not None or (self.message is not None and self.message.woken)

    @property
    def repeated(self) -> bool:
        return self.woken or (self.message is not None and self.message.redelivered)

    @property
    def keep(self) -> bool:
        return self.wake is not None and self.run is not None and self.run.late


@dataclass
class Line:
    """What the model knows of one key."""

    arrivals: dict[str, int] = field(default_factory=dict)
    queued: set[str] = field(default_factory=set)
    woken: set[str] = field(default_factory=set)
    last_token: int = 0

    def forget_run(self, run: Run) -> bool:
        """Whether it was parked or on its way."""
        member = f"p:{run.name}"
        self.queued.discard(member)
        self.woken.discard(run.name)
        return self.arrivals.pop(member, None) is not None

    def forget(self, member: str) -> None:
        self.queued.discard(member)
        self.arrivals.pop(member, None)


picks = st.integers(0, 11)
fates = st.sampled_from([Fate.SENT, Fate.SENT, Fate.SENT, *Fate])


class World(RuleBasedStateMachine):
    def __init__(self, place: Place, statistics: dict[str, int]) -> None:
        super().__init__()
        self.place = place
        self.store = place.store
        self.statistics = statistics
        self.keys: list[str] = []
        self.lines: dict[str, Line] = {}
        self.seen: dict[str, Look] = {}
        self.runs: dict[str, Run] = {}
        self.broker: list[Message] = []
        self.desks: dict[str, list[Wake]] = {}
        self.processes: list[Delivery] = []  # that were granted a key
        self.waiters: list[Delivery] = []  # that are blocked
        self.dead: set[str] = set()  # members whose inbox is gone
        self.unsaid: list[Wake] = []  # sent, to be said
        self.unforgotten: list[Wake] = []  # ended, to be dropped
        self.pushes: list[Wake] = []  # heard, and not accounted for
        self.numbers = itertools.count(1)
        self.error_outside = sys.exc_info()[1]

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        self.statistics["schedules"] = self.statistics.get("schedules", 0) + 1
        for n in range(count):
            key = f"{self.statistics['schedules']}.{n}"
            self.keys.append(key)
            self.lines[key], self.seen[key] = Line(), Look()
        self.open_desk()

    # Arrivals

    @rule(pick=picks, late=st.booleans(), waits=st.sampled_from([False, False, True]), fate=fates)
    def a_run_comes(self, pick: int, late: bool, waits: bool, fate: Fate) -> None:
        run = Run(f"r{next(self.numbers)}", self.keys[pick % len(self.keys)], late, waits)
        self.runs[run.name] = run
        self.arrive(run, Message(run), fate=fate)

    @rule(pick=picks, late=st.booleans(), fate=fates)
    def a_run_is_lined_up(self, pick: int, late: bool, fate: Fate) -> None:
        run = Run(f"r{next(self.numbers)}", self.keys[pick % len(self.keys)], late, waits=False)
        self.runs[run.name] = run
        parcel = self.parcel(run)
        reply = self.store.line_up(run.key, run.name, parcel, 10.0)
        self.observe(run.key)
        if reply.status is Status.PARKED:
            self.is_parked(run, parcel)
        else:
            assert reply.status is Status.FREE
            self.arrive(run, Message(run), fate=fate)

    @precondition(lambda self: self.runs)
    @rule(pick=picks, fate=fates)
    def a_run_comes_a_second_time(self, pick: int, fate: Fate) -> None:
        run = nth(self.runs.values(), pick)
        # Without a trace of its first delivery it would simply be a task that runs twice.
        if run.end_is_known or not run.ended:
            woken = run.was_parked and bool(pick % 2)
            self.arrive(run, Message(run, woken=woken, redelivered=True), fate=fate)

    @rule(pick=picks, fate=fates)
    def a_newcomer_tries(self, pick: int, fate: Fate) -> None:
        key = self.keys[pick % len(self.keys)]
        newcomer = Delivery(self.new_owner(), key)
        if self.ask(newcomer, fate) is Status.GRANTED:
            self.processes.append(newcomer)

    @rule(pick=picks, fate=fates)
    def a_waiter_comes(self, pick: int, fate: Fate) -> None:
        self.wait(Delivery(self.new_owner(), self.keys[pick % len(self.keys)]), fate)

    # Blocked waiters

    @precondition(lambda self: self.waiters)
    @rule(pick=picks, fate=fates)
    def a_waiter_looks(self, pick: int, fate: Fate) -> None:
        waiter = nth(self.waiters, pick)
        if not waiter.stopped:
            self.look_again(waiter, fate)

    @precondition(lambda self: self.waiters)
    @rule(pick=picks, fate=fates)
    def a_waiter_gives_up(self, pick: int, fate: Fate) -> None:
        waiter = nth(self.waiters, pick)
        if not waiter.stopped:
            self.stop_waiting(waiter)
            inbox = waiter.inbox
            self.release(waiter, inbox=inbox, fate=fate)
            waiter.inbox = None
            assert inbox is not None
            self.place.kill_inbox(inbox)
            if waiter.run is not None:
                self.park(waiter, fate)

    @precondition(lambda self: self.waiters)
    @rule(pick=picks, seemingly_alive=st.booleans())
    def a_waiter_dies(self, pick: int, seemingly_alive: bool) -> None:
        waiter = nth(self.waiters, pick)
        if seemingly_alive:  # it is stopped: it can be told, but does nothing any more
            waiter.stopped = True
        else:
            self.kill_waiter(waiter)

    # Ends

    @precondition(lambda self: self.processes)
    @rule(pick=picks, fate=fates)
    def a_process_finishes(self, pick: int, fate: Fate) -> None:
        self.finish(nth(self.processes, pick), fate)

    @precondition(lambda self: any(p.run for p in self.processes))
    @rule(pick=picks, early=st.booleans(), fate=fates)
    def a_run_retries_and_keeps_its_key(self, pick: int, early: bool, fate: Fate) -> None:
        process = nth([p for p in self.processes if p.run], pick)
        assert process.run is not None
        old = process.run
        run = Run(f"r{next(self.numbers)}", process.key, old.late, old.waits)
        self.runs[run.name] = run
        message = Message(run)
        if early:  # it is delivered before the old one has let go
            self.arrive(run, message, fate=fate)
        else:
            self.broker.append(message)
        self.finish(process, fate, keep_for=(run.name, LEASE))

    @precondition(lambda self: any(p.run for p in self.processes))
    @rule(pick=picks, fate=fates)
    def a_run_is_put_back(self, pick: int, fate: Fate) -> None:
        process = nth([p for p in self.processes if p.run], pick)
        self.processes.remove(process)
        self.release(process, fate=fate)
        self.take_back(process)

    @precondition(lambda self: self.processes)
    @rule(pick=picks)
    def a_process_dies(self, pick: int) -> None:
        process = nth(self.processes, pick)
        self.processes.remove(process)
        self.lose_process(process)

    @precondition(lambda self: self.processes)
    @rule(pick=picks, again=st.booleans(), fate=fates)
    def a_process_is_killed_and_buried(self, pick: int, again: bool, fate: Fate) -> None:
        process = nth(self.processes, pick)
        self.processes.remove(process)
        self.release(process, fate=fate, tells_run=False)
        if again:
            self.take_back(process)
        elif process.run is not None and process.run.late:  # it ends with its process
            process.run.excused = "ended with its process"
            if process.wake is not None:
                self.unforgotten.append(process.wake)
        else:
            self.lose_process(process)

    # Messages

    @precondition(lambda self: self.broker)
    @rule(pick=picks, fate=fates)
    def a_message_comes(self, pick: int, fate: Fate) -> None:
        message = nth(self.broker, pick)
        self.broker.remove(message)
        self.arrive(message.run, message, fate=fate)

    @precondition(lambda self: self.broker)
    @rule(pick=picks, fate=fates)
    def a_message_comes_and_will_come_again(self, pick: int, fate: Fate) -> None:
        message = nth(self.broker, pick)
        self.broker.remove(message)
        self.broker.append(Message(message.run, woken=message.woken, redelivered=True))
        self.arrive(message.run, message, fate=fate)

    @precondition(lambda self: self.broker)
    @rule(pick=picks)
    def a_message_is_lost(self, pick: int) -> None:
        message = nth(self.broker, pick)
        self.broker.remove(message)
        self.excuse_if_nowhere(message.run, "purged")

    @precondition(lambda self: self.broker)
    @rule(pick=picks, fate=fates)
    def a_message_is_revoked(self, pick: int, fate: Fate) -> None:
        message = nth(self.broker, pick)
        self.broker.remove(message)
        message.run.revoked = True
        self.arrive(message.run, message, fate=fate)

    @precondition(lambda self: self.unsaid)
    @rule(pick=picks)
    def a_sender_says_so_late(self, pick: int) -> None:
        wake = nth(self.unsaid, pick)
        self.unsaid.remove(wake)
        self.say_sent(wake)

    # Desks

    @precondition(lambda self: any(self.desks.values()))
    @rule(pick=picks, fate=fates)
    def a_pushed_run_is_taken(self, pick: int, fate: Fate) -> None:
        wake = self.take_from_desk(pick)
        self.arrive(self.runs[wake.run], wake=wake, fate=fate)

    @precondition(lambda self: any(self.desks.values()))
    @rule(pick=picks)
    def a_pushed_run_is_not_taken(self, pick: int) -> None:
        self.take_from_desk(pick)

    @precondition(lambda self: any(self.desks.values()))
    @rule(pick=picks)
    def a_pushed_run_is_given_back(self, pick: int) -> None:
        self.come_back(self.take_from_desk(pick))

    @precondition(lambda self: any(self.desks.values()))
    @rule(pick=picks, fate=fates)
    def a_pushed_run_is_revoked(self, pick: int, fate: Fate) -> None:
        wake = self.take_from_desk(pick)
        self.runs[wake.run].revoked = True
        self.arrive(self.runs[wake.run], wake=wake, fate=fate)

    @precondition(lambda self: self.place.has_desks and self.somebody_is_parked())
    @rule(pick=picks)
    def a_desk_dies(self, pick: int) -> None:
        address = nth(self.desks, pick)
        self.place.kill_desk(address)
        del self.desks[address]
        self.open_desk()

    @precondition(lambda self: self.place.has_desks and len(self.desks) < 2)
    @rule()
    def a_desk_opens(self) -> None:
        self.open_desk()

    @precondition(lambda self: self.unforgotten)
    @rule(pick=picks, fate=fates)
    def an_ended_run_is_dropped(self, pick: int, fate: Fate) -> None:
        wake = nth(self.unforgotten, pick)
        self.unforgotten.remove(wake)
        self.drop(wake, fate)

    # Time

    @precondition(lambda self: any(look.owner for look in self.seen.values()))
    @rule(pick=picks)
    def a_lease_ends(self, pick: int) -> None:
        key = nth([key for key, look in self.seen.items() if look.owner], pick)
        self.end_lease(key)

    @precondition(lambda self: any(line.woken for line in self.lines.values()))
    @rule(pick=picks)
    def a_woken_run_is_due(self, pick: int) -> None:
        key, run = nth([(k, run) for k, li in self.lines.items() for run in sorted(li.woken)], pick)
        self.place.make_due(key, run)
        self.observe(key)

    @rule(fate=fates, much_later=st.booleans())
    def somebody_sweeps(self, fate: Fate, much_later: bool) -> None:
        if much_later:
            self.make_all_due()
        self.sweep(fate)

    # What is true at any time

    @invariant()
    def all_is_well(self) -> None:
        self.at_most_one_holds_a_key_and_the_store_knows_who()
        self.no_run_is_nowhere()
        self.the_store_agrees_with_the_model()
        assert not self.pushes

    def at_most_one_holds_a_key_and_the_store_knows_who(self) -> None:
        for key in self.keys:
            holders = [p for p in self.processes if p.key == key and p.holds]
            assert len(holders) <= 1
            for holder in holders:
                look = self.seen[key]
                assert look.owner == holder.owner
                assert look.run == (holder.run.name if holder.run else "")

    def no_run_is_nowhere(self) -> None:
        for run in self.runs.values():
            assert run.over or self.whereabouts(run), f"{run.name} is nowhere"

    def whereabouts(self, run: Run) -> list[str]:
        look = self.seen[run.key]
        found = [f"process {d.owner}" for d in self.processes + self.waiters if d.run is run]
        found += ["message" for message in self.broker if message.run is run]
        if run.name in look.envelopes:
            found += ["queue" for member in look.queue if member == f"p:{run.name}"]
            found += ["woken" for name in look.woken if name == run.name]
        return found

    # What the parts of the world do

    def new_owner(self) -> str:
        return f"o{next(self.numbers)}"

    def open_desk(self) -> None:
        if self.place.has_desks:
            self.desks[self.place.open_desk()] = []

    def somebody_is_parked(self) -> bool:
        return any(look.envelopes for look in self.seen.values())

    def take_from_desk(self, pick: int) -> Wake:
        wakes = nth([wakes for wakes in self.desks.values() if wakes], pick)
        return wakes.pop(0)

    def arrive(
        self, run: Run, message: Message | None = None, wake: Wake | None = None, *, fate: Fate
    ) -> None:
        delivery = Delivery(self.new_owner(), run.key, run, message, wake)
        if run.revoked:
            run.excused = run.excused or "revoked"
            if delivery.woken:
                self.drop(Wake(run.key, run.name, b""), fate)
            return
        status = self.ask(delivery, fate)
        if status is Status.GRANTED:
            self.processes.append(delivery)
        elif status is Status.BUSY:
            if run.waits:
                self.wait(delivery, fate)
            else:
                self.park(delivery, fate)

    def parcel(self, run: Run) -> Parcel:
        addresses = [*self.desks, *self.desks, ""]
        return Parcel(run.envelope, addresses[len(self.runs) % len(addresses)])

    def park(self, delivery: Delivery, fate: Fate) -> None:
        assert delivery.run is not None
        if self.ask(delivery, fate, self.parcel(delivery.run)) is Status.GRANTED:
            self.processes.append(delivery)

    def wait(self, delivery: Delivery, fate: Fate) -> None:
        delivery.inbox = self.place.inbox(delivery.owner)
        self.waiters.append(delivery)
        self.look_again(delivery, fate)

    def look_again(self, waiter: Delivery, fate: Fate) -> None:
        status = self.ask(waiter, fate, waiter.inbox)
        if status is not Status.BUSY:
            assert waiter.inbox is not None
            self.place.kill_inbox(waiter.inbox)
            self.stop_waiting(waiter)
            waiter.inbox = None
        if status is Status.GRANTED:
            self.processes.append(waiter)

    def kill_waiter(self, waiter: Delivery) -> None:
        assert waiter.inbox is not None
        self.place.kill_inbox(waiter.inbox)
        self.dead.add(waiter.member)
        self.stop_waiting(waiter)
        self.lose_process(waiter)

    def stop_waiting(self, waiter: Delivery) -> None:
        self.waiters.remove(waiter)

    def lose_process(self, process: Delivery) -> None:
        """Its machine is gone; what the broker has not been told about it sends again."""
        if process.run is not None:
            if process.run.late and process.message is not None:
                message = process.message
                self.broker.append(Message(message.run, woken=message.woken, redelivered=True))
            self.excuse_if_nowhere(process.run, "its process died")

    def take_back(self, process: Delivery) -> None:
        """Celery asks that the message be delivered again, which it can for late ones."""
        run = process.run
        if run is None:
            return
        if not run.late or process.wake is None:
            self.lose_process(process)
        else:
            self.come_back(process.wake)
            self.excuse_if_nowhere(run, "its process died")

    def excuse_if_nowhere(self, run: Run, why: str) -> None:
        """The store is not to blame: the model knows all that it has to have."""
        if not run.over and not self.whereabouts(run):
            run.excused = why

    # Requests to the store

    def ask(self, delivery: Delivery, fate: Fate, queue: Inbox | Parcel | None = None) -> Status:
        key, run, line = delivery.key, delivery.run, self.lines[delivery.key]
        first = not delivery.repeated and not isinstance(queue, Parcel)
        if run is not None and run.end_is_known and first:
            # A first delivery is a task of its own, though another one of its name has ended.
            run.ended = run.end_is_known = False
        reply = self.store.acquire(
            key,
            delivery.owner,
            LEASE,
            queue=queue,
            run=run.name if run else "",
            repeated=delivery.repeated,
            keep=delivery.keep,
        )
        done = reply.status is Status.DONE
        # What was on its way to a run that has ended meanwhile goes on to the next.
        owner = self.seen[key].owner
        its_own = owner == delivery.owner or (run is not None and owner == f"parked:{run.name}")
        frees = owner if done and its_own else ""
        self.observe(key, asks=delivery, frees=frees, wake=reply.wake)
        if reply.status is Status.GRANTED:
            assert (self.seen[key].owner, self.seen[key].token) == (delivery.owner, reply.token)
            delivery.holds = True
            if run is not None:
                assert not (delivery.repeated and run.end_is_known), f"{run.name} ran twice"
                if delivery.keep and f"p:{run.name}" in line.arrivals:
                    line.queued.discard(f"p:{run.name}")
                    line.woken.add(run.name)
                else:
                    line.forget_run(run)
            line.forget(f"b:{delivery.owner}")
        elif done:
            assert run is not None
            assert run.over, f"{run.name} was dropped before its end"
            line.forget(f"b:{delivery.owner}")
        elif isinstance(queue, Parcel):
            assert run is not None
            assert reply.status is Status.PARKED
            self.is_parked(run, queue)
        else:
            assert reply.status is Status.BUSY
            if queue is not None and delivery.owner != self.seen[key].owner:
                parked = line.arrivals.get(f"p:{run.name}") if run else None
                line.arrivals.setdefault(delivery.member, parked or next(self.numbers))
                line.queued.add(delivery.member)
        if not done:
            assert reply.status is Status.GRANTED or reply.holder == self.seen[key].owner
            self.settled(key)
        self.dispatch(reply.wake, fate)
        return reply.status

    def is_parked(self, run: Run, parcel: Parcel) -> None:
        line = self.lines[run.key]
        run.desk, run.was_parked = parcel.desk, True
        line.arrivals.setdefault(f"p:{run.name}", next(self.numbers))
        line.queued.add(f"p:{run.name}")
        line.woken.discard(run.name)

    def release(
        self,
        process: Delivery,
        *,
        fate: Fate,
        ended: Ended = Ended.NO,
        inbox: Inbox | None = None,
        keep_for: tuple[str, float] | None = None,
        tells_run: bool = True,
    ) -> None:
        key, run, line = process.key, process.run, self.lines[process.key]
        held = self.seen[key].owner == process.owner
        assert held or not process.holds
        if ended is not Ended.NO and run is not None:
            known = line.forget_run(run) or ended is Ended.YES_AND_MAY_COME_AGAIN
            run.ended, run.end_is_known = True, run.end_is_known or known
        line.forget(f"b:{process.owner}")
        released = self.store.release(
            key,
            process.owner,
            run=run.name if run and tells_run else "",
            ended=ended,
            inbox=inbox,
            keep_for=keep_for,
        )
        assert released.released == held
        process.holds = False
        self.observe(
            key,
            frees=process.owner if held else "",
            wake=released.wake,
            keeps=keep_for[0] if keep_for else "",
        )
        if held:
            self.settled(key)
        self.dispatch(released.wake, fate)

    def finish(
        self, process: Delivery, fate: Fate, keep_for: tuple[str, float] | None = None
    ) -> None:
        ((outcome, _),) = self.store.renew([Ownership(process.key, process.owner, LEASE)], 10.0)
        assert (outcome is RenewOutcome.RENEWED) == process.holds
        self.processes.remove(process)
        again = process.woken or (process.run is not None and process.run.late)
        ended = Ended.YES_AND_MAY_COME_AGAIN if again else Ended.YES
        if process.run is None:
            ended = Ended.NO
        self.release(process, fate=fate, ended=ended, keep_for=keep_for)
        if process.keep and process.wake is not None:
            self.unforgotten.append(process.wake)

    def drop(self, wake: Wake, fate: Fate) -> None:
        run, line = self.runs[wake.run], self.lines[wake.name]
        reserved = self.seen[wake.name].owner == f"parked:{run.name}"
        comes = reserved or run.name in line.woken
        if comes:
            line.forget_run(run)
            run.end_is_known = True
        released = self.store.drop(wake)
        assert released.released == comes
        frees = f"parked:{run.name}" if reserved else ""
        self.observe(wake.name, frees=frees, wake=released.wake)
        if reserved:
            self.settled(wake.name)
        self.dispatch(released.wake, fate)

    def dispatch(self, wake: Wake | None, fate: Fate) -> None:
        if wake is None:
            return
        run = self.runs[wake.run]
        assert (wake.name, wake.envelope) == (run.key, run.envelope)
        if fate is Fate.DIED:
            return
        self.broker.append(Message(run, woken=True))
        if fate is Fate.SENT:
            self.say_sent(wake)
        elif fate is Fate.SENT_AND_SAID_LATE:
            self.unsaid.append(wake)

    def say_sent(self, wake: Wake) -> None:
        self.store.sent(wake)
        self.observe(wake.name, said=wake.run)

    def come_back(self, wake: Wake) -> None:
        self.store.came_back(wake)
        self.observe(wake.name)
        if wake.run in self.lines[wake.name].woken:
            assert self.seen[wake.name].woken[wake.run] <= 0

    def sweep(self, fate: Fate) -> None:
        before = {key: self.seen[key] for key in self.keys}
        wakes = self.place.sweep()
        found = {(wake.name, wake.run): wake for wake in wakes}
        assert len(found) == len(wakes)
        expected = set()
        for key, look in before.items():
            running = "" if look.owner == f"parked:{look.run}" else look.run
            expected |= {(key, r) for r, due in look.woken.items() if due <= 0 and r != running}
            self.observe(key, wakes=found)
            after = self.seen[key]
            handed = after.owner != look.owner and after.owner.startswith("parked:")
            if handed and (key, after.run) in found:
                expected.add((key, after.run))
            if look.envelopes:  # where nobody is parked, blocked waiters look for themselves
                self.settled(key)
        assert set(found) == expected
        for wake in wakes:
            self.dispatch(wake, fate)

    def make_all_due(self) -> None:
        for key, line in self.lines.items():
            for run in sorted(line.woken):
                self.place.make_due(key, run)
            self.observe(key)

    def end_lease(self, key: str) -> None:
        owner = self.seen[key].owner
        self.place.end_lease(key)
        for process in self.processes:
            if process.owner == owner:
                process.holds = False
        self.observe(key, frees=owner)

    # Judging what the store did

    def observe(
        self,
        key: str,
        *,
        asks: Delivery | None = None,
        frees: str = "",
        wake: Wake | None = None,
        wakes: dict[tuple[str, str], Wake] | None = None,
        keeps: str = "",
        said: str = "",
    ) -> None:
        """
        Look at *key* after a request, and check what has become of it.

        Args:
            key: The key.
            asks: The one who asked for it.
            frees: The owner from whom it may have gone.
            wake: What the requester was given to send.
            wakes: What a sweeper was given, by key and run.
            keeps: The run for which the key was to be kept.
            said: The run that was said to be sent.
        """
        old, new, line = self.seen[key], self.place.look(key), self.lines[key]
        self.seen[key] = new
        asking = asks.owner if asks else ""
        granted = bool(new.owner) and new.token != old.token
        if old.owner and (granted or not new.owner):
            assert old.owner == frees, f"{key} was taken from {old.owner}"
        if granted:
            assert new.token > line.last_token
            line.last_token = new.token
            if new.owner == asking and asks is not None:
                self.check_turn(line, asks.member, asks.run.name if asks.run else "")
                assert new.lease <= LEASE + SLACK
            elif new.owner.startswith("parked:"):
                given = wakes.get((key, new.run)) if wakes is not None else wake
                self.check_turn(line, f"p:{new.run}")
                assert new.lease <= CLAIM * 64 + SLACK
                self.check_wake(key, new, given)
            else:
                self.check_waiter(line, new)
        elif new.owner and new.owner != old.owner:
            claimed = old.owner == f"parked:{new.run}" and new.owner == asking
            kept = old.owner == frees and new.owner == f"parked:{keeps}"
            assert claimed or kept
            assert new.lease <= LEASE + SLACK
            if kept and f"p:{keeps}" in line.queued:  # it came before its key was kept for it
                self.check_wake(key, new, wake)
        self.check_dues(new, said)

    def check_turn(self, line: Line, member: str, run: str = "") -> None:
        arrival = line.arrivals.get(member, math.inf)
        ahead = {
            other for other in line.queued - self.dead - {member} if line.arrivals[other] < arrival
        }
        assert not ahead or (run and run in line.woken), f"{member} overtook {ahead}"

    def check_wake(self, key: str, look: Look, wake: Wake | None) -> None:
        """A run that was in the queue is on its way to its key."""
        line, run = self.lines[key], self.runs[look.run]
        assert f"p:{run.name}" in line.queued
        line.queued.remove(f"p:{run.name}")
        line.woken.add(run.name)
        if run.desk in self.desks:
            assert wake is None
            self.pushes += self.place.pushed(run.desk)
            pushed = Wake(key, run.name, run.envelope)
            assert pushed in self.pushes
            self.pushes.remove(pushed)
            self.desks[run.desk].append(pushed)
        else:
            assert wake is not None
            assert wake.run == run.name

    def check_waiter(self, line: Line, look: Look) -> None:
        """The key was handed over to a blocked waiter."""
        (waiter,) = [w for w in self.waiters if w.owner == look.owner]
        assert waiter.inbox is not None
        assert waiter.member in line.queued
        self.check_turn(line, waiter.member)
        line.forget(waiter.member)
        assert look.lease <= GRANT + SLACK
        assert self.place.told(waiter.inbox, waiter.owner)

    def check_dues(self, look: Look, said: str) -> None:
        for run, due in look.woken.items():
            running = look.run == run and look.owner != f"parked:{run}"
            if due <= 0 or due > FAR / 2 or running:
                continue
            if run == said:
                assert UNSENT < due <= DAY + SLACK
            else:
                assert due <= UNSENT + SLACK or (due <= LEASE + SLACK and self.runs[run].late)

    def settled(self, key: str) -> None:
        """After a request that had to do with who holds *key*."""
        look, line = self.seen[key], self.lines[key]
        alive = line.queued - self.dead
        assert look.owner or not alive, f"{key} is free, and {alive} wait"
        if look.owner == f"parked:{look.run}":
            assert f"p:{look.run}" not in line.queued, f"{key} is kept for one who waits for it"

    def the_store_agrees_with_the_model(self) -> None:
        for key, line in self.lines.items():
            look = self.seen[key]
            listed = [member for member in look.queue if member not in self.dead]
            alive = line.queued - self.dead
            assert set(listed) == alive, f"in the queue: {set(listed)}, should be: {alive}"
            assert len(listed) == len(set(listed))
            arrivals = [line.arrivals[member] for member in listed]
            assert arrivals == sorted(arrivals)
            assert set(look.woken) == line.woken
            assert set(look.envelopes) == {m[2:] for m in line.queued if m[0] == "p"} | line.woken
            assert not look.stray

    # The end of the schedule

    def teardown(self) -> None:
        try:
            if sys.exc_info()[1] is self.error_outside and self.keys:
                self.come_to_rest()
        finally:
            self.place.clear(self.keys)

    def come_to_rest(self) -> None:
        """From now on nothing goes wrong, and everybody has to get what he waits for."""
        for waiter in [waiter for waiter in self.waiters if waiter.stopped]:
            self.kill_waiter(waiter)
        for sweeps in itertools.count():
            self.work_everything_off()
            for key in self.keys:
                look = self.seen[key]
                if not look.owner and not look.envelopes and self.dead.issuperset(look.queue):
                    # Nobody misses these, so nobody looks; they go when somebody has the key.
                    newcomer = Delivery(self.new_owner(), key)
                    assert self.ask(newcomer, Fate.SENT) is Status.GRANTED
                    self.release(newcomer, fate=Fate.SENT)
            if not self.waiters and all(self.at_rest(key) for key in self.keys):
                break
            assert sweeps < SWEEPS, f"{sweeps} sweeps and still not at rest"
            for key in self.keys:
                if self.seen[key].owner:
                    self.end_lease(key)
            self.make_all_due()
            self.sweep(Fate.SENT)
            self.all_is_well()
            self.work_everything_off()
            for waiter in list(self.waiters):
                self.look_again(waiter, Fate.SENT)  # as they do after a while
                self.all_is_well()
        self.statistics["sweeps"] = max(self.statistics.get("sweeps", 0), sweeps)
        self.statistics["runs"] = self.statistics.get("runs", 0) + len(self.runs)
        assert not [run.name for run in self.runs.values() if not run.over]
        assert not self.place.residue(self.keys)

    def at_rest(self, key: str) -> bool:
        look = self.seen[key]
        return not (look.owner or look.queue or look.envelopes or look.woken)

    def work_everything_off(self) -> None:
        while True:
            if self.broker:
                message = self.broker.pop(0)
                self.arrive(message.run, message, fate=Fate.SENT)
            elif any(self.desks.values()):
                wake = self.take_from_desk(0)
                self.arrive(self.runs[wake.run], wake=wake, fate=Fate.SENT)
            elif self.processes:
                process = self.processes[0]
                if process.holds:
                    if process.keep:  # nobody else is to have it while it runs
                        self.make_all_due()
                        self.sweep(Fate.SENT)
                    self.finish(process, Fate.SENT)
                else:
                    self.processes.remove(process)
                    self.lose_process(process)
            elif self.unsaid:
                self.say_sent(self.unsaid.pop())
            elif self.unforgotten:
                self.drop(self.unforgotten.pop(), Fate.SENT)
            elif any(self.has_the_key(waiter) for waiter in self.waiters):
                waiter = next(waiter for waiter in self.waiters if self.has_the_key(waiter))
                self.look_again(waiter, Fate.SENT)
            else:
                return
            self.all_is_well()

    def has_the_key(self, waiter: Delivery) -> bool:
        return self.seen[waiter.key].owner == waiter.owner


def nth(things: Any, pick: int) -> Any:
    found = list(things)
    return found[pick % len(found)]
