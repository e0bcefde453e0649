"""
A world of tasks, a broker and workers around a store, in which anything happens in any order.

The store is asked as the package asks it. The world also knows where each task is, which
believes that it holds a key, and what has ended. Time advances only by `time_passes`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.values import (
    Completion,
    ParkRequest,
    RenewOutcome,
    Reply,
    Status,
    WokenTask,
)

from .store import KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .store import UnluckyStore, Worker

LEASE = 30.0
SWEEP = 2.0
HOUR = 3600.0  # for which a token, or an end, is remembered
COPIES = 31 * 86400.0  # the same, of a run of which the broker may have another message
DAY = 86400.0  # after which a message that did not come is sent again at the latest

KINDS = ["early", "late", "early, seen at receipt", "late, seen at receipt"]
KINDS += ["early, waits", "late, waits", "lock, waits"]

# What befalls the process that takes a step, and which answers of the store it loses.
MISHAPS = {
    "": "",
    "an answer is lost": "x",
    "the second answer is lost": "-x",
    "no answer comes": "xxx",
    "the second question is not answered": "-xxx",
    "it dies before it sends": "",
    "it dies after it has sent": "",
    "it says late that it has sent": "",
}
mishaps = st.sampled_from(["", *MISHAPS])


def happens(where: Callable[[World], Sequence[Any]], *, in_calm: bool = True) -> Callable[..., Any]:
    """A rule about one of the things that *where* finds, if there are any."""

    def decorate(what: Callable[[World, Any], None]) -> Any:
        @precondition(lambda self: (in_calm or not self.calm) and where(self))
        @rule(pick=st.integers(0, 5), mishap=mishaps)
        @functools.wraps(what)
        def step(self: World, pick: int, mishap: str) -> None:
            self.befall(mishap)
            things = where(self)
            what(self, things[pick % len(things)])

        return step

    return decorate


class _Interrupted(BaseException):
    """The process that sends a woken run does not go on."""


@dataclass(eq=False)
class Run:
    name: str
    key: str
    kind: str
    over: bool = False  # it need not run, or not again
    known: bool = False  # to the store, as one that has ended: it must not run again
    revoked: bool = False
    inherits: bool = False  # its key was kept for it, and so was the token

    def __post_init__(self) -> None:
        self.late = "late" in self.kind  # acknowledged when it has ended, not before it begins
        self.blocks = "waits" in self.kind  # in its process, and is parked if it gives up
        self.lock = "lock" in self.kind  # no task, but a caller of `Lock`
        self.wake = WokenTask(self.key, self.name, f"envelope of {self.name}".encode())


@dataclass(eq=False)
class Message:
    """One that the broker has, or that was delivered and is not acknowledged; or a push."""

    run: Run
    woken: bool = False  # it was parked before
    again: bool = False  # the broker says that it may have been delivered before
    overdue: bool = False  # the broker delivered it again, because a worker has had it too long
    pushed: bool = False


@dataclass(eq=False)
class Process:
    """Where a run asks for its key, and is executed."""

    run: Run
    worker: Worker
    hold: Hold
    message: Message
    inbox: Any = None  # while it waits
    runs: bool = False
    settles: bool = False  # its body has ended, and its result is being stored
    recalled: bool = False  # asked to leave

    @property
    def repeated(self) -> bool:
        return self.message.woken or self.message.again or self.message.overdue

    @property
    def kept(self) -> bool:
        return self.message.pushed and self.run.late

    @property
    def end(self) -> Completion:
        if self.run.lock:
            return Completion.NO
        return (
            Completion.YES_AND_MAY_COME_AGAIN if self.repeated or self.run.late else Completion.YES
        )


class World(RuleBasedStateMachine):
    def __init__(self, store: UnluckyStore, tally: dict[str, int]) -> None:
        super().__init__()
        self.store = store
        self.tally = tally
        self.runs: dict[str, Run] = {}
        self.broker: list[Message] = []
        self.processes: list[Process] = []
        self.sweepers: list[Iterator[WokenTask]] = []
        self.belated: list[Callable[[], object]] = []  # what is done in the end, by any process
        self.last_tokens = dict.fromkeys(KEYS, 0)
        self.calm = self.slow = self.pushes = False
        self.mishap = ""
        self.error_outside = sys.exc_info()[1]
        store.publishers.known = (self.publish,)

    @initialize(calm=st.booleans(), pushes=st.booleans())
    def begin(self, calm: bool, pushes: bool) -> None:
        """
        In calm weather no process dies, no answer is lost and everything goes quickly.

        With *pushes* the broker is the last resort.
        """
        self.calm, self.pushes = calm, pushes

    # What can be found

    def running(self) -> list[Process]:
        return [process for process in self.processes if process.runs]

    def tasks(self) -> list[Process]:
        return [process for process in self.running() if not process.run.lock]

    def settling(self) -> list[Process]:
        return [process for process in self.processes if process.settles]

    def waiting(self) -> list[Process]:
        return [process for process in self.processes if process.inbox is not None]

    def called(self) -> list[Process]:
        return [process for process in self.waiting() if process.inbox._called]

    def takers(self) -> list[Worker]:
        return [worker for worker in self.store.workers if worker.pushed]

    def unacknowledged(self) -> list[Message]:
        messages = [*self.broker, *(p.message for p in self.processes if not p.message.pushed)]
        return [message for message in messages if message.run.late]

    def revocable(self) -> list[Message]:
        # A key that is kept for a revoked run is taken until the lease ends.
        return [message for message in self.broker if not message.run.inherits]

    def sweepings(self) -> list[Iterator[WokenTask]]:
        return [*self.sweepers, self.store.parking.sweep(SWEEP)][:2] if self.runs else []

    def executing(self) -> list[Process]:
        return [*self.running(), *self.settling()]

    # What happens

    @rule(key=st.sampled_from(["a", "a", "b"]), kind=st.sampled_from(KINDS), mishap=mishaps)
    def a_task_comes(self, key: str, kind: str, mishap: str) -> None:
        self.befall(mishap)
        self.broker.append(Message(self.new_run(key, kind)))
        self.deliver(self.broker[-1])

    @happens(lambda self: self.broker)
    def a_message_comes(self, message: Message) -> None:
        self.deliver(message)

    @happens(takers)
    def a_pushed_run_comes(self, worker: Worker) -> None:
        self.take(worker)

    @happens(unacknowledged)
    def a_message_is_delivered_twice(self, message: Message) -> None:
        message.overdue = True
        self.broker.append(Message(message.run, message.woken, again=True))

    @happens(revocable)
    def a_task_is_revoked(self, message: Message) -> None:
        message.run.revoked = message.run.over = True

    @happens(running)
    def a_task_ends(self, process: Process) -> None:
        self.finish(process)

    @happens(running)
    def a_holder_is_asked_to_leave(self, process: Process) -> None:
        with contextlib.suppress(StoreUnavailableError):
            asked = self.store.recall(process.run.key, process.hold.owner)
            assert asked or not process.hold.held
            process.recalled |= asked

    @happens(tasks)
    def a_task_fails_and_is_requeued(self, process: Process) -> None:
        if self.requeue(process):
            self.finish(process, process.end)
        else:
            self.die(process)

    @happens(tasks)
    def a_task_retries_and_keeps_its_key(self, process: Process) -> None:
        retry = self.new_run(process.run.key, process.run.kind)
        retry.inherits = True
        self.broker.append(Message(retry))
        self.finish(process, process.end, keep_for=(retry.name, LEASE))

    @happens(tasks, in_calm=False)
    def a_task_is_put_back(self, process: Process) -> None:
        self.finish(process, Completion.NO)

    @happens(settling)
    def a_result_is_stored(self, process: Process) -> None:
        self.settle(process)

    @happens(waiting)
    def a_waiter_looks(self, process: Process) -> None:
        self.look(process)

    @happens(waiting)
    def a_waiter_gives_up(self, process: Process) -> None:
        inbox, process.inbox = process.inbox, None
        if not self.release(process.hold, inbox=inbox) or process.run.lock:
            self.die(process)
        else:
            self.park(process)

    @happens(executing, in_calm=False)
    def a_process_dies(self, process: Process) -> None:
        self.die(process)

    @happens(executing, in_calm=False)
    def a_process_dies_and_is_buried(self, process: Process) -> None:
        self.die(process)
        self.release(process.hold)

    @happens(lambda self: self.processes and self.store.workers, in_calm=False)
    def a_worker_dies(self, worker: Worker) -> None:
        self.store.kill(worker)
        for process in [process for process in self.processes if process.worker is worker]:
            self.die(process)

    @happens(sweepings)
    def somebody_sweeps(self, sweeper: Iterator[WokenTask]) -> None:
        self.sweep(sweeper)

    @happens(lambda self: self.belated)
    def something_is_done_late(self, errand: Callable[[], object]) -> None:
        self.do(errand)

    @precondition(lambda self: self.runs and not self.calm)
    @rule(seconds=st.sampled_from([1.5, 2.5, 6.0, 31.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.store.pass_time(seconds)

    @precondition(lambda self: self.running() and not self.calm)
    @rule()
    def time_passes_and_leases_are_renewed(self) -> None:
        self.befall("")
        self.store.pass_time(LEASE / 3)
        running = self.running()
        outcomes = self.store.renew([process.hold.ownership() for process in running], SWEEP)
        for process, (outcome, asked_at) in zip(running, outcomes, strict=True):
            hold = process.hold
            lapsed = asked_at > hold.valid_until + 1
            assert hold.held <= outcome.is_held <= (not lapsed)
            assert (outcome is RenewOutcome.RECALLED) == (process.recalled and outcome.is_held)
            hold.renewed(outcome, asked_at, LEASE)

    # What is true at any time

    @invariant()
    def all_is_well(self) -> None:
        self.tally["steps"] += 1
        self.store.hear()
        for key in KEYS:
            believers = [p.run.name for p in self.processes if p.run.key == key and p.hold.held]
            assert len(believers) <= 1, f"{believers} all believe that they hold {key}"
        assert not self.nowhere(), f"{self.nowhere()} are nowhere"

    def nowhere(self) -> set[str]:
        unfinished = {run.name for run in self.runs.values() if not run.over}
        nowhere = unfinished - {thing.run.name for thing in (*self.broker, *self.processes)}
        return nowhere and nowhere - self.store.kept()

    # What the package does

    def befall(self, mishap: str) -> None:
        self.mishap = "" if self.calm else mishap
        self.store.losses = MISHAPS[self.mishap]

    def new_run(self, key: str, kind: str) -> Run:
        run = Run(f"r{len(self.runs)}", key, kind)
        self.runs[run.name] = run
        return run

    def new_hold(self, run: Run) -> Hold:
        return Hold(self.store, run.key, Terms(LEASE), label="", run="" if run.lock else run.name)

    def deliver(self, message: Message) -> None:
        self.broker.remove(message)
        run, worker = message.run, self.store.workers[len(self.processes) % 2]
        if "receipt" in run.kind and not (message.woken or message.again or run.revoked):
            park_request = ParkRequest(run.wake.envelope, worker.channel)
            try:
                reply = self.store.parking.park_if_held(run.key, run.name, park_request, 0.25)
                if reply.status is Status.PARKED:
                    if not reply.holder:  # the one before it has ended since
                        self.sweep(self.store.parking.wake_next(run.key))
                    return
            except StoreUnavailableError:
                message.again = True
        self.start(message, worker)

    def take(self, worker: Worker) -> None:
        wake = worker.pushed.pop(0)
        assert wake._replace(arrival=0, givers=(), returned=False) == self.runs[wake.run].wake
        self.start(Message(self.runs[wake.run], woken=True, pushed=True), worker)

    def start(self, message: Message, worker: Worker) -> None:
        run = message.run
        if run.revoked:
            if message.woken:
                self.drop(run)
            return
        process = Process(run, worker, self.new_hold(run), message)
        self.processes.append(process)
        if self.ask(process) is Status.BUSY:
            if run.blocks:
                process.inbox = worker.inbox(process.hold.owner)
                self.ask(process, process.inbox)
            else:
                self.park(process)

    def look(self, process: Process) -> None:
        process.inbox._called = False
        self.ask(process, process.inbox)

    def park(self, process: Process) -> None:
        process.hold = self.new_hold(process.run)
        self.ask(process, ParkRequest(process.run.wake.envelope, process.worker.channel))

    def ask(self, process: Process, queue: Inbox | ParkRequest | None = None) -> Status | None:
        """Ask for the key and do what follows; the answer, or None if that ends the process."""
        try:
            reply = self.acquire(process.hold, queue, process.repeated, process.kept)
        except StoreUnavailableError:
            if process.inbox is None:
                self.postpone(process)
            return None
        if reply.status is Status.GRANTED:
            self.begin_to_run(process, reply)
        elif not self.send(reply.wake):
            self.die(process)
            return None
        elif reply.status is not Status.BUSY:
            self.processes.remove(process)
            if reply.status is Status.DONE and process.kept:
                self.belated.append(lambda: self.drop(process.run))
        return reply.status

    def acquire(
        self, hold: Hold, queue: Any, redelivered: bool = False, retain: bool = False
    ) -> Reply:
        how = {"queue": queue, "run": hold.run, "redelivered": redelivered, "retain": retain}
        reply = self.store.acquire(
            AcquireRequest(hold.key, hold.owner, LEASE, arrival=hold.arrival, **how)
        )
        hold.arrival = reply.arrival or hold.arrival
        return reply

    def postpone(self, process: Process) -> None:
        """Give back what an unreachable store may have granted; the task is sent again."""
        run, hold = process.run, process.hold
        self.belated.append(lambda: self.release(hold))
        self.processes.remove(process)
        if run.lock:
            run.over = True
        else:
            self.broker.append(Message(run, process.message.woken, again=True))

    def begin_to_run(self, process: Process, reply: Reply) -> None:
        run, last = process.run, self.last_tokens[process.run.key]
        assert not run.known, f"{run.name} runs again"
        settling = any(other.run is run for other in self.settling())
        assert not (settling and self.calm), f"{run.name} runs while its result is being stored"
        assert reply.token > last or (run.inherits and reply.token == last)
        assert process.hold.take(reply)
        self.last_tokens[run.key] = reply.token
        process.inbox, process.runs = None, True

    def requeue(self, process: Process) -> bool:
        """Park a failed run as another one; whether the process has survived it."""
        run = self.new_run(process.run.key, process.run.kind)
        hold = self.new_hold(run)
        try:
            reply = self.acquire(hold, ParkRequest(run.wake.envelope, process.worker.channel))
        except StoreUnavailableError:
            self.belated.append(lambda: self.release(hold))
        else:
            if reply.status is Status.PARKED:
                return self.send(reply.wake)
            if not self.release(hold):
                run.over = True  # it is unknown to all others
                return False
        self.broker.append(Message(run, woken=True))
        return True

    def finish(self, process: Process, ended: Completion | None = None, **how: Any) -> None:
        run = process.run
        if ended is None:
            ended = Completion.UNSETTLED if run.late else process.end
        process.hold.end()
        process.runs = False
        run.over |= run.lock or ended in (Completion.YES, Completion.YES_AND_MAY_COME_AGAIN)
        if not self.release(process.hold, ended, **how) or (
            ended is Completion.NO and not process.kept
        ):
            self.die(process)
        elif ended is Completion.UNSETTLED:
            process.settles = True
        else:
            self.processes.remove(process)
            last = self.put_back if ended is Completion.NO else self.drop
            if process.kept:
                self.belated.append(lambda: last(run))

    def settle(self, process: Process) -> None:
        run = process.run
        run.over = True
        if process.kept:
            self.belated.append(lambda: self.drop(run))
        elif not self.drop(run):
            self.die(process)
            return
        self.processes.remove(process)

    def release(self, hold: Hold, ended: Completion = Completion.NO, **how: Any) -> bool:
        """Give the key up, later if the store is unreachable; whether the process has survived."""
        try:
            released = self.store.release(
                ReleaseRequest(hold.key, hold.owner, run=hold.run, completion=ended, **how)
            )
        except StoreUnavailableError:
            how.pop("keep_for", None)
            self.belated.append(lambda: self.release(hold, ended, **how))
            return True
        if ended in (Completion.YES, Completion.YES_AND_MAY_COME_AGAIN):
            self.runs[hold.run].known = True
        return self.send(released.wake)

    def drop(self, run: Run) -> bool:
        """Whether the process has survived it."""
        try:
            dropped = self.store.drop(run.wake)
        except StoreUnavailableError:
            self.slow = True  # the key that it was woken for is taken until the claim ends
            return True
        run.known |= dropped.released
        return self.send(dropped.wake)

    def put_back(self, run: Run) -> None:
        with contextlib.suppress(StoreUnavailableError):  # its lease's end brings it back too
            self.store.parking.mark_returned(run.wake)

    def die(self, process: Process) -> None:
        self.processes.remove(process)
        run, message = process.run, process.message
        if run.late and not message.pushed:
            self.broker.append(Message(run, message.woken, again=True))
        elif not run.late and run.name in self.nowhere():
            run.over = True  # Celery lets a task that was acknowledged end with its process

    def send(self, wake: WokenTask | None) -> bool:
        """Whether the process that sends has survived it."""
        try:
            self.store.dispatch(wake)
        except _Interrupted:
            return self.mishap == "it says late that it has sent"
        return True

    def publish(self, wake: WokenTask) -> bool:
        run = self.runs[wake.run]
        assert wake._replace(returned=False) == run.wake
        if self.mishap == "it dies before it sends":
            raise _Interrupted
        if self.pushes and self.push(wake):
            if self.mishap.startswith("it "):
                raise _Interrupted
            return True
        self.broker.append(Message(run, woken=True))
        if self.mishap == "it says late that it has sent":
            self.slow = True  # it may be taken for sent when it has to be sent again
            self.belated.append(lambda: self.say_sent(wake))
        if self.mishap.startswith("it "):
            raise _Interrupted
        return False

    def push(self, wake: WokenTask) -> bool:
        try:
            pushed = self.store.channels.push(
                wake, [worker.channel for worker in self.store.workers]
            )
        except StoreUnavailableError:
            return False
        self.tally["pushes"] += pushed
        return pushed

    def say_sent(self, wake: WokenTask) -> None:
        with contextlib.suppress(StoreUnavailableError):
            self.store.parking.mark_published(wake)

    def do(self, errand: Callable[[], object]) -> None:
        self.belated.remove(errand)
        errand()

    def sweep(self, sweeper: Iterator[WokenTask]) -> None:
        self.sweepers = [other for other in self.sweepers if other is not sweeper]
        with contextlib.suppress(StopIteration, StoreUnavailableError):
            if self.send(next(sweeper)):
                self.sweepers.append(sweeper)

    # How it ends

    def teardown(self) -> None:
        try:
            if sys.exc_info()[1] is self.error_outside:
                self.come_to_rest()
                self.leave_nothing()
        finally:
            self.store.clear()

    def come_to_rest(self) -> None:
        """From now on nothing goes wrong, and every task has to get to its end."""
        self.befall("")
        self.work_off()
        for process in self.waiting():
            if process.run.over:  # a second delivery, that ends when it looks the next time
                self.look(process)
        self.work_off()
        sweeps = 0
        while self.processes or self.store.kept() or not all(r.over for r in self.runs.values()):
            assert not self.calm, "nothing went wrong, but a sweep is needed"
            assert sweeps < (3 if self.slow else 1), f"{sweeps} sweeps were not enough"
            self.store.pass_time([LEASE + 1, HOUR, DAY][sweeps])
            self.sweepers.append(self.store.parking.sweep(SWEEP))
            self.work_off()
            for process in 2 * self.waiting():  # one that is held back has to look again
                if process in self.waiting():
                    self.look(process)
                    self.work_off()
            sweeps += 1
        self.tally["sweeps"] = max(sweeps, self.tally["sweeps"])
        self.tally["schedules"] += 1

    def work_off(self) -> None:
        ways: list[tuple[Sequence[Any], Callable[[Any], object]]]
        for _ in range(1000):
            self.all_is_well()
            ways = [
                (self.broker, self.deliver),
                (self.takers(), self.take),
                (self.called(), self.look),
                (self.running(), self.finish),
                (self.settling(), self.settle),
                (self.belated, self.do),
                (self.sweepers, self.sweep),
            ]
            for things, way in ways:
                if things:
                    way(things[0])
                    break
            else:
                return
        raise AssertionError("there is no end to it")

    def leave_nothing(self) -> None:
        self.store.pass_time(DAY)
        for key in KEYS:  # a blocked waiter that died is removed by the next holder
            assert (
                self.store.acquire(AcquireRequest(key, "newcomer", LEASE)).status is Status.GRANTED
            )
            self.store.release(ReleaseRequest(key, "newcomer"))
        assert not list(self.store.parking.sweep(SWEEP))  # it marks stale names of the index
        self.store.pass_time(COPIES + 1)
        assert not list(self.store.parking.sweep(SWEEP))
        self.store.pass_time(SWEEP)
        assert not self.store.records(), self.store.records()
