"""A server in this process that fails at any command, and a world of callers that live with it."""

from __future__ import annotations

import enum
import itertools
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock.errors import StoreError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.memory.keyspace import RefusedError
from celery_distlock.stores.memory.server import Server
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.queue_store import ready, reserve_or_queue
from celery_distlock.stores.redis.connections import BrokenOffError
from celery_distlock.stores.requests import Identity, SendRequest, StandRequest
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Route,
    Status,
    Want,
    WokenTask,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.redis.connections import Command

LEASE = 10.0
ROUNDS = 80  # of which each lets some seconds pass, until all have ended

# Commands that a server without free memory refuses, all that change its keys, and the others.
GROWS = frozenset({b"SET", b"HSET", b"HINCRBYFLOAT", b"ZADD"})
WRITES = GROWS | {b"DEL", b"PEXPIRE", b"EXPIRE", b"HDEL", b"ZREM", b"ZREMRANGEBYSCORE"}
READS = frozenset(
    b"EXISTS GET HEXISTS HGET HGETALL HLEN HMGET HSCAN PING PTTL PUBLISH SCAN SPUBLISH TIME"
    b" ZCARD ZCOUNT ZLEXCOUNT ZMSCORE ZRANGE ZRANGEBYSCORE ZRANK ZSCAN ZSCORE".split()
)


class Mishap(enum.Enum):
    """What befalls a request."""

    ENDED = "its script ends before that command, and it is repeated"
    ENDED_FOR_GOOD = "its script ends before that command, and its caller dies"
    LOST = "it is executed, its answer is lost, and it is repeated"
    LOST_FOR_GOOD = "it is executed, and its caller dies"
    REFUSED = "that write is refused, as by a full server"
    FULL = "the server is full for as long as it is asked"


class Fault(NamedTuple):
    """A mishap of one request, at one of its commands."""

    mishap: Mishap
    request: int
    command: int = 0


class DeadError(BaseException):
    """The caller's process has died."""


class EndedError(BaseException):
    """A script has ended between two commands."""


class BreakingServer(Server):
    """
    A server with one fault, which counts its requests.

    Attributes:
        requests: Of each request the names of its commands, and of its script first.
    """

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.fault = fault
        self.requests: list[list[str]] = []
        self._is_applied = False
        self._has_written = False

    def execute(self, call: Command) -> Any:
        fault = self.fault
        self.requests.append([call.script.name if call.script else ""])
        self._has_written = False
        now = fault is not None and len(self.requests) - 1 == fault.request
        try:
            answer = super().execute(call)
        except EndedError:
            if fault.mishap is Mishap.ENDED_FOR_GOOD:
                raise DeadError from None
            return BrokenOffError("script attempted to access a non local key")
        if now and fault.mishap is Mishap.LOST:
            return RedisTimeoutError("the answer is lost")
        if now and fault.mishap is Mishap.LOST_FOR_GOOD:
            raise DeadError
        return answer

    def do(self, name: bytes, *words: bytes) -> Any:
        fault = self.fault
        request = self.requests[-1]
        request.append(name.decode())
        if fault and len(self.requests) - 1 == fault.request:
            self._apply(fault, len(request) - 2, name, words)
        full = fault and fault.mishap is Mishap.FULL and self._is_applied
        if full and name in GROWS and not self._has_written:
            raise RefusedError("command not allowed when used memory > 'maxmemory'.", "OOM")
        # A server asks whether it is full before a script's first write only.
        self._has_written |= name in WRITES
        return super().do(name, *words)

    def _apply(self, fault: Fault, number: int, name: bytes, words: tuple[bytes, ...]) -> None:
        if fault.mishap is Mishap.FULL:
            self._is_applied = True
        elif number != fault.command:
            return
        elif fault.mishap in (Mishap.ENDED, Mishap.ENDED_FOR_GOOD):
            raise EndedError
        elif fault.mishap is Mishap.REFUSED and name in GROWS:
            raise RefusedError("command not allowed when used memory > 'maxmemory'.", "OOM")

    def empty(self) -> None:
        """Be full no longer."""
        self._is_applied = False


class Run:
    """A task: its keys, and where it is."""

    def __init__(self, name: str, keys: list[str], want: Want, leaves: float | None = None) -> None:
        self.name, self.keys, self.want, self.leaves = name, keys, want, leaves
        self.times = 0  # that it was executed
        self.holds: dict[str, str] = {}  # owners, by key
        self.is_waiting = False  # in the store, as that has said
        self.may_repeat = False  # a process has died with it
        self.owner = ""  # if it blocks
        self.identity: Identity | None = None
        self.is_recalled = False  # perhaps; a newer call was sent


class World:
    """Callers of a store that may fail once: what they believe, and what has to be true."""

    def __init__(self, fault: Fault | None, pass_time: Callable[[float], None]) -> None:
        self.store = MemoryStore("memory://", "p")
        self.store._servers.server = self.server = BreakingServer(fault)
        self.pass_time = pass_time
        self.runs: dict[str, Run] = {}
        self.messages: list[tuple[Run, bool]] = []  # with the broker; and whether it may be a copy
        self.left: list[Callable[[], None]] = []  # what is asked for again later
        self.tokens: dict[str, int] = {}
        self.units: dict[str, dict[str, Want]] = {}  # by key, of those that believe
        self._owners = itertools.count()

    # What callers do. Each may fail, and none goes on then.

    def ask(self, call: Callable[[], Any], run: Run | None = None) -> Any:
        """Return an answer; None if there is none, or the caller died."""
        self.died = False
        try:
            return call()
        except DeadError:
            self.died = True
            if run is not None:
                run.may_repeat = True
            return None
        except StoreError:
            return None
        finally:
            self.server.empty()

    def comes(self, *keys: str, want: Want = ALONE, leaves: float | None = None) -> Run:
        run = Run(f"r{len(self.runs)}:0:0:0", list(keys), want, leaves=leaves)
        self.runs[run.name] = run
        self.begins(run, may_be_copy=False)
        return run

    def blocks(self, key: str) -> Run:
        """Have a thread wait for a key."""
        run = Run(f"b{len(self.runs)}", [key], ALONE)
        self.runs[run.name], run.owner = run, f"o{next(self._owners)}"
        self.begins(run, may_be_copy=False)
        return run

    def _looks(self, run: Run) -> None:
        (key,) = run.keys
        with closing(self.store.inbox(key, run.owner)) as inbox:
            reply = self.ask(
                lambda: self.store.acquire(AcquireRequest(key, run.owner, LEASE, inbox)), run
            )
        if self.died:
            run.times = 1  # it never asks again
        elif reply is not None and reply.status is Status.GRANTED:
            self.woken(reply.wake)
            self.believes(run, {key: run.owner})
        else:
            self.messages.append((run, False))

    def sends(
        self,
        key: str,
        delay: float = 0.0,
        want: Want = ALONE,
        identity: Identity | None = None,
    ) -> Run:
        """Send a task through the store."""
        run = Run(f"r{len(self.runs)}:0:0:0", [key], want)
        run.identity = identity
        self.runs[run.name] = run
        self._sends(run, delay)
        return run

    def _sends(self, run: Run, delay: float) -> None:
        park_request = ParkRequest(run.name.encode())
        request = SendRequest(run.keys[0], run.name, park_request, run.want, delay)
        request = request._replace(identity=run.identity)
        reply = self.ask(lambda: self.store.calls.send(request), run)
        if self.died:
            run.times = 1  # it may be there, or not
            return
        if reply is None:
            self.left.append(lambda: self._sends(run, delay))
            return
        self.woken(reply.wake)
        if reply.sent is Sent.CHANGED:
            run.times = 1  # another call was sent first
            return
        if reply.sent is Sent.GO:
            self.messages.append((run, True))
        run.is_waiting = True

    def sends_newer(self, earlier: Run, identity: Identity) -> Run:
        """Send a task that supersedes an *earlier* one, which must learn of it if it runs."""
        earlier.is_recalled = True
        calls = self.server.keys._keys.get(b"p:{%b}:calls" % earlier.keys[0].encode())
        # A script that was cut short, and repeated, has left it without an identity.
        has_identity = calls and earlier.name.encode() in b" ".join(calls.value.values())
        run = self.sends(earlier.keys[0], identity=identity)
        for key, owner in earlier.holds.items() if run.is_waiting and has_identity else ():
            hold = Ownership(key, owner, LEASE)
            outcome = self.ask(lambda hold=hold: self.store.renew([hold], 1.0)[0][0])
            assert outcome in (None, RenewOutcome.RECALLED, RenewOutcome.UNKNOWN)
        return run

    def arrives(self, run: Run) -> None:
        """Have a task begin whose message is with the broker."""
        if (run, True) in self.messages:
            self.messages.remove((run, True))
            self.begins(run, may_be_copy=True)

    def cancels(self, run: Run) -> None:
        """Cancel a task that waits."""
        self._removes(run, lambda: self.store.parking.cancel(run.keys[0], run.name))

    def drops(self, run: Run) -> None:
        """Drop a task that is in flight: it need not run."""
        self.messages = [each for each in self.messages if each[0] is not run]
        wake = WokenTask(run.keys[0], run.name, run.name.encode())
        dropped = self._removes(run, lambda: self.store.drop(wake))
        run.may_repeat |= not dropped
        run.times = 1

    def _removes(self, run: Run, remove: Callable[[], Any]) -> bool:
        cancelled = self.ask(remove)
        if cancelled is None or cancelled.released:
            run.may_repeat, run.times = cancelled is None, 1
        if cancelled is not None:
            self.woken(cancelled.wake)
        return bool(cancelled and cancelled.released)

    def shares_for_a_while(self, run: Run) -> None:
        """Have a task downgrade its key, and take all of it again."""
        if not run.holds:
            return
        ((key, owner),) = run.holds.items()
        run.want = self.units[key][owner] = Want(1, 9)
        reply = self.ask(lambda: self.store.units.downgrade(key, owner, LEASE))
        self.woken(reply and reply.wake)
        reply = self.ask(lambda: self.store.units.upgrade(key, owner, LEASE))
        if reply is not None and reply.status is Status.GRANTED:
            run.want = self.units[key][owner] = ALONE

    def begins(self, run: Run, *, may_be_copy: bool) -> None:
        """Take a task's keys one after the other; have it wait if that cannot be."""
        if run.owner:
            self._looks(run)
            return
        taken: dict[str, str] = {}
        for key in run.keys:
            owner = f"o{next(self._owners)}"
            sealed = ParkRequest(run.name.encode(), leaves=run.leaves)
            park = sealed if len(run.keys) == 1 else None
            request = AcquireRequest(
                key, owner, LEASE, park, run.name, redelivered=may_be_copy, want=run.want
            )
            reply = self.ask(lambda request=request: self.store.acquire(request), run)
            if reply is None:
                self.messages.append((run, True))
                if not self.died:
                    self.gives_up(run, taken)
                return
            self.woken(reply.wake)
            if reply.status is Status.GRANTED:
                assert reply.token > self.tokens.get(key, 0) or run.want != ALONE
                self.tokens[key] = max(reply.token, self.tokens.get(key, 0))
                taken[key] = owner
            elif reply.status is Status.PARKED:
                run.is_waiting = True
                return
            elif reply.status is Status.RECALLED:
                assert run.is_recalled
                self.gives_up(run, taken)
                self.drops(run)
                return
            elif reply.status is Status.DONE:
                assert run.times or run.may_repeat or run.is_waiting
                self.gives_up(run, taken)
                return
            elif reply.holder_run == run.name:  # for a process that has died
                self.gives_up(run, taken)
                self.messages.append((run, True))
                return
            else:
                self.waits_at_all(run, taken)
                return
        self.believes(run, taken)

    def waits_at_all(self, run: Run, taken: dict[str, str]) -> None:
        route = Route(tuple(run.keys))
        park, owners = ParkRequest(run.name.encode()), [taken.get(key, "") for key in run.keys]
        request = StandRequest(run.name, route, 0, park, owners, comes=True)
        reply = self.ask(lambda: reserve_or_queue(self.store, request), run)
        if reply is None:
            self.messages.append((run, True))
            return
        run.is_waiting = True
        self.woken(reply.wake)
        if reply.status is Status.RESERVED:
            self.begins(run, may_be_copy=False)

    def gives_up(self, run: Run, taken: dict[str, str]) -> None:
        for key, owner in taken.items():
            released = self.ask(
                lambda key=key, owner=owner: self.store.release(
                    ReleaseRequest(key, owner, run.name)
                ),
                run,
            )
            self.woken(released and released.wake)

    def believes(self, run: Run, taken: dict[str, str]) -> None:
        assert not run.holds, f"{run.name} is executed twice at once"
        assert not run.times or run.may_repeat, f"{run.name} runs again"
        for key, owner in taken.items():
            others = self.units.setdefault(key, {})
            if run.want.alone:
                assert not others, f"{others} and {owner}"
            else:
                assert not any(want.alone for want in others.values())
                used = sum(want.units for want in others.values()) + run.want.units
                assert used <= run.want.capacity, f"{used} units of {run.want.capacity}"
            if run.want.most:
                in_lane = [want.units for want in others.values() if want.lane == run.want.lane]
                used = sum(in_lane) + run.want.units
                assert used <= run.want.most, f"{used} units of {run.want.most} of a lane"
            others[owner] = run.want
        run.holds, run.is_waiting = taken, False

    def ends(self, run: Run) -> None:
        """Have a task come to its end, if it runs; else it does so later."""
        if not run.holds:
            return
        taken, run.holds = run.holds, {}
        run.times += 1
        for key, owner in taken.items():
            del self.units[key][owner]
            self._releases(run, key, owner)

    def _releases(self, run: Run, key: str, owner: str) -> None:
        request = ReleaseRequest(key, owner, run.name, Completion.YES_AND_MAY_COME_AGAIN)
        if run.owner:
            request = ReleaseRequest(key, owner)
        released = self.ask(lambda: self.store.release(request), run)
        if released is not None:
            self.woken(released.wake)
        elif run.owner and self.died:
            pass
        elif run.may_repeat:
            self.messages.append((run, True))  # its message was never acknowledged
        else:
            self.left.append(lambda: self._releases(run, key, owner))

    def renews(self, run: Run) -> None:
        for key, owner in run.holds.items():
            hold = Ownership(key, owner, LEASE)
            outcome = self.ask(lambda hold=hold: self.store.renew([hold], 1.0)[0][0])
            if outcome is RenewOutcome.RECALLED:
                assert run.is_recalled
                continue
            assert outcome in (None, RenewOutcome.RENEWED, RenewOutcome.UNKNOWN)

    def dies(self, run: Run) -> None:
        """Have a task's process die: its lease ends, and its message comes again."""
        for key, owner in run.holds.items():
            del self.units[key][owner]
        run.holds, run.may_repeat = {}, True
        self.messages.append((run, True))

    def woken(self, wake: WokenTask | None) -> None:
        for each in [] if wake is None else [wake._replace(also=()), *wake.also]:
            for sent in self.ask(lambda each=each: list(ready(self.store, each))) or []:
                run = self.runs[sent.run]
                assert sent.envelope == run.name.encode()
                self.ask(lambda sent=sent: self.store.parking.mark_published(sent))
                self.messages.append((run, True))

    # What has to be true in the end.

    def come_to_rest(self, keys: str) -> None:
        """Let all come to its end, with time and sweeps; fail if it does not."""
        for _ in range(ROUNDS):
            if not (self.messages or self.left) and self._is_quiet(keys):
                break
            self.pass_time(7.0)
            messages, self.messages = self.messages, []
            for run, may_be_copy in messages:
                if not run.holds:
                    self.begins(run, may_be_copy=may_be_copy)
            left, self.left = self.left, []
            for call in left:
                call()
            for run in self.runs.values():
                self.ends(run)
            for key in keys:
                for wake in self.ask(lambda key=key: list(self.store.parking.wake_next(key))) or []:
                    self.woken(wake)
        lost = [run.name for run in self.runs.values() if not run.times]
        assert not lost, f"lost: {lost}"
        assert self._is_quiet(keys), [self.store.inspect(key) for key in keys]

    def _is_quiet(self, keys: str) -> bool:
        """Whether no key has a holder or a waiter. It is looked at without a fault."""
        fault, self.server.fault = self.server.fault, None
        states = [self.store.inspect(key) for key in keys]
        self.server.fault = fault
        return not any((state.owner, state.waiting, state.woken) > ("", 0, 0) for state in states)
