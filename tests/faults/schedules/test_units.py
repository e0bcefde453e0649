"""
Several at a time, in any order: never more units than there are, none with an exclusive holder,
and none before an earlier one; and all waiters are served in the end.
"""

from __future__ import annotations

import random
import uuid
from contextlib import closing
from itertools import count
from typing import NamedTuple

import pytest

from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    Limit,
    ParkRequest,
    Reply,
    Status,
    Want,
    WokenTask,
)

LEASE = 600.0
WANTS = [ALONE, Want(1, 0), Want(1, 2), Want(1, 3), Want(2, 3), Want(3, 5), Want(9, 5)]


class Asker(NamedTuple):
    """A caller: as a run, parked, or blocked at an inbox."""

    owner: str
    run: str
    want: Want
    inbox: object


class Play:
    """One random schedule over a store, held to what the module says."""

    def __init__(self, store, seed):
        self.rng = random.Random(seed)
        self.store = store
        self.key = f"k-{uuid.uuid4().hex}"
        self.count = count()
        self.waiting: list[Asker] = []
        self.holding: dict[Asker, Reply] = {}
        self.upgraded: set[Asker] = set()
        self.woken: list[WokenTask] = []
        self.refused: list[Asker] = []
        self.arrivals: dict[Asker, int] = {}
        self.limit: int | None = None
        self.granted = 0

    def asker(self):
        number, want = next(self.count), self.rng.choice(WANTS)
        owner = f"h|1|t|{number}"
        run = f"run-{number}:0:0:0" if self.rng.random() < 0.6 else ""
        return Asker(owner, run, want, None if run else self.store.inbox(self.key, owner))

    def ask(self, asker, *, queue=True, again=False):
        """Ask as it is due, and note what came of it."""
        park_request = ParkRequest(f"envelope {asker.run}".encode()) if asker.run else asker.inbox
        reply = self.store.acquire(
            AcquireRequest(
                self.key,
                asker.owner,
                LEASE,
                queue=park_request if queue else None,
                run=asker.run,
                redelivered=again,
                arrival=self.arrivals.get(asker, 0),
                want=asker.want,
            )
        )
        self.arrivals[asker] = reply.arrival or self.arrivals.get(asker, 0)
        self.take(reply.wake)
        if reply.status is Status.GRANTED:
            earlier = self.waiting[: self.waiting.index(asker)] if asker in self.waiting else []
            if asker not in self.waiting:
                earlier = list(self.waiting)
            queued = {each.run or each.owner for each in self.store.waiters(self.key)}
            passed = [each for each in earlier if (each.run or each.owner) in queued]
            assert all(map(self.is_handed, passed)), (asker, passed)
            self.holding[asker] = reply
            self.granted += 1
            if asker in self.waiting:
                self.waiting.remove(asker)
        elif queue and asker not in self.waiting:
            self.waiting.append(asker)
        self.check()
        return reply

    def is_handed(self, asker):
        """Whether it was handed the key, and has not come for it yet."""
        owners = {each.owner for each in self.state().holders} | {self.state().owner}
        return bool({asker.owner, f"parked:{asker.run}"} & owners)

    def take(self, wake):
        if wake is not None:
            self.woken += [wake._replace(also=()), *wake.also]

    def state(self):
        return self.store.inspect(self.key)

    def check(self):
        state = self.state()
        alone = [asker for asker in self.holding if self.is_alone(asker)]
        assert len(self.holding) == 1 or not alone, self.holding
        if alone:
            assert state.owner == alone[0].owner
            assert not state.holders
        else:
            assert {asker.owner for asker in self.holding} <= {each.owner for each in state.holders}
        assert state.used == sum(each.units for each in state.holders)
        slots = [each.slot for each in state.holders if each.slot >= 0]
        assert len(set(slots)) == len(slots)
        tokens = {reply.token for reply in self.holding.values()}
        assert tokens <= {state.token}

    def is_alone(self, asker):
        return asker in self.upgraded or asker.want.alone

    def comes(self):
        asker = self.asker()
        before = self.state()
        reply = self.ask(asker, queue=self.rng.random() < 0.8)
        if reply.status is Status.GRANTED and not asker.want.alone:
            capacity = asker.want.capacity if self.limit is None else self.limit
            now = self.state()
            # One that finds no holder may have more than an operator allows.
            assert not capacity or now.used <= capacity or len(now.holders) == 1
            assert self.limit != 0
        if before.used and asker.want.alone:
            assert reply.status is not Status.GRANTED

    def leaves(self):
        if self.holding:
            asker = self.rng.choice(list(self.holding))
            del self.holding[asker]
            self.upgraded.discard(asker)
            completion = self.rng.choice([Completion.NO, Completion.YES]) if asker.run else None
            request = ReleaseRequest(self.key, asker.owner, run=asker.run)
            released = self.store.release(request._replace(completion=completion or Completion.NO))
            assert released.released
            self.take(released.wake)
            self.check()

    def gives_up(self):
        blocked = [asker for asker in self.waiting if not asker.run]
        if blocked:
            asker = self.rng.choice(blocked)
            self.waiting.remove(asker)
            request = ReleaseRequest(self.key, asker.owner, inbox=asker.inbox)
            self.take(self.store.release(request).wake)
            self.check()

    def looks_again(self):
        for asker in [each for each in self.waiting if not each.run]:
            if asker in self.waiting and self.is_handed(asker):
                self.ask(asker)

    def woken_runs_come(self):
        self.rng.shuffle(self.woken)
        woken, self.woken = self.woken, []
        for wake in woken:
            for asker in [each for each in self.waiting if each.run == wake.run]:
                if self.ask(asker, queue=False, again=True).status is Status.BUSY:
                    self.refused.append(asker)

    def refused_runs_park(self):
        refused, self.refused = self.refused, []
        for asker in [each for each in refused if each in self.waiting]:
            self.ask(asker, again=True)

    def operator(self):
        self.limit = self.rng.choice([None, 0, 1, 2, 4])
        limit = None if self.limit is None else Limit(self.limit, 0.0, "me")
        self.take(self.store.units.set_limit(self.key, limit).wake)
        self.check()

    def upgrades(self):
        shares = [
            asker for asker in self.holding if asker in self.upgraded or not self.is_alone(asker)
        ]
        if not shares:
            return
        asker = self.rng.choice(shares)
        if asker in self.upgraded:
            reply = self.store.units.downgrade(self.key, asker.owner, LEASE)
            self.upgraded.discard(asker)
        else:
            others = len(self.state().holders) > 1
            reply = self.store.units.upgrade(self.key, asker.owner, LEASE)
            assert (reply.status is Status.BUSY) is others
            if others:
                return
            self.upgraded.add(asker)
        assert reply.status is Status.GRANTED
        self.holding[asker] = reply
        self.take(reply.wake)
        self.check()

    def second_delivery(self):
        runs = [asker for asker in self.holding if asker.run]
        if runs:
            asker = self.rng.choice(runs)
            again = asker._replace(owner=f"{asker.owner}-again")
            reply = self.store.acquire(
                AcquireRequest(
                    self.key, again.owner, LEASE, run=again.run, redelivered=True, want=again.want
                )
            )
            assert reply.status is Status.BUSY
            assert reply.holder_run == asker.run
            self.take(reply.wake)

    def run(self, steps):
        acts = [self.comes, self.comes, self.leaves, self.leaves, self.gives_up, self.looks_again]
        acts += [self.woken_runs_come, self.woken_runs_come, self.operator, self.upgrades]
        acts += [self.refused_runs_park, self.second_delivery]
        for _ in range(steps):
            self.rng.choice(acts)()
        self.take(self.store.units.set_limit(self.key, None).wake)
        self.limit = None
        for _ in range(20 * steps):
            if not (self.waiting or self.holding):
                break
            self.leaves()
            self.looks_again()
            self.woken_runs_come()
            self.refused_runs_park()
        assert not self.waiting
        state = self.state()
        assert (state.token, state.waiting, state.holders) == (0, 0, ())
        return self.granted


@pytest.fixture(params=["redis", "memory"])
def store(request, redis_url, prefix):
    url = redis_url if request.param == "redis" else f"memory://{prefix}"
    with closing(open_store(url, prefix)) as opened:
        yield opened


@pytest.mark.parametrize("seed", range(12))
def test_never_too_many_and_never_out_of_order(store, seed):
    assert sum(Play(store, f"{seed}-{n}").run(60) for n in range(6)) > 30
