"""
Calls in any order, of a few identities: what was taken in runs, once, with what it was updated to
last; an identity is taken for exactly as long as its run is there; and nothing is left in the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ParkRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.queue_parts import Bearer, Sent, Where
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import Identity, SendRequest
from celery_distlock.stores.values import Completion, Status, WokenTask
from tests import servers

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.queue_store import QueueStore

LEASE = 30.0
KEY = "k"
UNTIL = {"one": "started", "two": "finished", "three": "started"}  # three is updated


@dataclass
class Call:
    """A run that the store has taken in, as far as it should be."""

    run: str
    name: str  # of its identity
    envelope: bytes
    ended: bool = False
    begun: bool = False  # once at least
    owner: str = ""  # while it has the key

    @property
    def has_identity(self) -> bool:
        return not self.ended and not (self.begun and UNTIL[self.name] == "started")

    @property
    def may_have_identity(self) -> bool:
        """Whether it has died, and is to run again."""
        return self.begun and not self.ended and not self.owner


class Play:
    """One random schedule over a store, held to what the module says."""

    def __init__(self, store: QueueStore, pass_time: Callable[[float], None], seed: str) -> None:
        self.rng = random.Random(seed)
        self.store = store
        self.pass_time = pass_time
        self.calls: dict[str, Call] = {}
        self.messages: list[tuple[str, bytes]] = []  # with the broker
        self.bearers: dict[str, str] = {}  # the run that took each identity last
        self.counted = 0
        self.served = 0

    # The model

    def bearer(self, name: str) -> Call | None:
        call = self.calls.get(self.bearers.get(name, ""))
        return call if call is not None and call.has_identity else None

    def check(self) -> None:
        for name in UNTIL:
            found, call = self.store.calls.peek(KEY, name), self.bearer(name)
            if found and call is None and self.calls[found.run].may_have_identity:
                continue
            assert (found and found.run) == (call and call.run), (name, found, call)

    # What happens

    def calls_one(self) -> None:
        while not self.is_taken_in():
            pass

    def is_taken_in(self) -> bool:
        """Make a call; false: another run had the identity by then."""
        name = self.rng.choice(list(UNTIL))
        bearer = self.store.calls.peek(KEY, name)
        updates = name == "three" and bearer is not None and bearer.where is Where.WAITING
        if bearer is not None and not updates and not self.is_replaced(name, bearer):
            return True  # it is joined
        self.counted += 1
        run = bearer.run if updates else f"task-{self.counted}:0:0:0"
        replaces = bearer.run if bearer is not None else ""
        envelope = f"{run} {self.counted}".encode()
        delay = self.rng.choice([0.0, 0.0, 5.0, 20.0])
        reply = self.store.calls.send(
            SendRequest(
                KEY,
                run,
                ParkRequest(envelope),
                delay=delay,
                identity=Identity(name, UNTIL[name], replaces),
            )
        )
        if reply.sent is Sent.CHANGED:
            return False
        self.calls[run] = Call(run, name, envelope)
        self.bearers[name] = run
        if reply.sent is Sent.GO and self.rng.random() < 0.8:  # else its sender has died
            self.publish(WokenTask(slot_name(KEY), run, envelope))
        self.take(reply.wake)
        self.check()
        return True

    def is_replaced(self, name: str, bearer: Bearer) -> bool:
        return name == "three" and bearer.where is Where.COMING

    def publish(self, wake: WokenTask) -> None:
        self.store.parking.mark_published(wake._replace(envelope=b""))
        self.messages.append((wake.run, wake.envelope))

    def take(self, wake: WokenTask | None) -> None:
        for each in [] if wake is None else [wake._replace(also=()), *wake.also]:
            if self.rng.random() < 0.9:  # else the process that was to send it has died
                self.publish(each)

    def comes(self) -> None:
        if not self.messages:
            return
        self.rng.shuffle(self.messages)
        run, envelope = self.messages.pop()
        fate = self.rng.random()
        if fate < 0.1:
            return  # the broker has lost it
        if fate < 0.2:
            self.messages.append((run, envelope))  # and delivers it again
        self.counted += 1
        owner, call = f"h|1|t|{self.counted}", self.calls[run]
        request = AcquireRequest(
            KEY, owner, LEASE, ParkRequest(call.envelope), run, redelivered=True, retain=True
        )
        reply = self.store.acquire(request)
        self.take(reply.wake)
        if reply.status is Status.GRANTED:
            assert not call.ended, call
            assert not call.owner, call
            assert envelope == call.envelope
            call.begun, call.owner = True, owner
        self.check()

    def ends(self) -> None:
        for call in [each for each in self.calls.values() if each.owner]:
            call.ended, owner, call.owner = True, call.owner, ""
            self.served += 1
            request = ReleaseRequest(KEY, owner, call.run, Completion.YES)
            self.take(self.store.release(request).wake)
            self.take(self.store.drop(WokenTask(slot_name(KEY), call.run, b"")).wake)
            self.check()

    def dies(self) -> None:
        """The holder dies: its lease ends, and the broker delivers its message again."""
        for call in [each for each in self.calls.values() if each.owner]:
            call.owner = ""
            self.pass_time(LEASE + 1.0)
            self.messages.append((call.run, call.envelope))

    def is_dropped(self) -> None:
        waiting = [each for each in self.calls.values() if not (each.owner or each.ended)]
        if waiting and self.rng.random() < 0.3:
            call = self.rng.choice(waiting)
            self.take(self.store.parking.cancel(KEY, call.run).wake)
            call.ended = True
            self.check()

    def sweeps(self) -> None:
        for wake in list(self.store.parking.wake_next(KEY)):
            self.take(wake)

    def run(self, steps: int) -> int:
        acts = [self.calls_one] * 4 + [self.comes] * 4 + [self.ends] * 3
        acts += [self.sweeps, self.time_passes, self.dies, self.is_dropped]
        for _ in range(steps):
            self.rng.choice(acts)()
        for _ in range(50):
            if all(call.ended for call in self.calls.values()):
                break
            self.time_passes()
            while self.messages:
                self.comes()
                self.ends()
            self.ends()
        assert not [call for call in self.calls.values() if not call.ended]
        assert all(self.store.calls.peek(KEY, name) is None for name in UNTIL)
        state = self.store.inspect(KEY)
        assert (state.owner, state.waiting, state.woken) == ("", 0, 0)
        return self.served

    def time_passes(self) -> None:
        if not any(call.owner for call in self.calls.values()):
            self.pass_time(self.rng.choice([1.0, 6.0, 70.0]))
        self.sweeps()


@pytest.fixture(params=["redis", "memory"])
def play(request, redis_url, prefix, monkeypatch):
    opened = []

    def make(seed: str) -> Play:
        name = f"{prefix}-{seed}"
        if request.param == "redis":
            store: QueueStore = RedisStore(redis_url, name)
            opened.append(store)
            return Play(store, lambda seconds: servers.bring_nearer(redis_url, name, seconds), seed)
        offset, now = [0.0], clock_now
        monkeypatch.setattr(clock, "monotonic", lambda: now() + offset[0])

        def pass_time(seconds: float) -> None:
            offset[0] += seconds

        opened.append(MemoryStore("memory://", name))
        return Play(opened[-1], pass_time, seed)

    yield make
    for store in opened:
        store.close()


clock_now = clock.monotonic


@pytest.mark.parametrize("seed", range(12))
def test_what_is_taken_in_runs_once(play, seed):
    assert sum(play(f"{seed}-{number}").run(60) for number in range(4)) > 10
