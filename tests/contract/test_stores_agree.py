"""
Every store answers alike: whatever is asked of two, in any order, both answer the same.

Compared is what callers can observe. Two stores in this process have one clock, which a schedule
puts forward; beside a real server nothing expires, so that time makes no difference.
"""

from __future__ import annotations

import math
import uuid
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tests.oracle.memory as oracle_memory
from celery_distlock import clock
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest, SendRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.channels import EventInbox
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    KeyState,
    Limit,
    Ownership,
    ParkRequest,
    Reply,
    Status,
    Waiter,
    Want,
    WokenTask,
)
from tests import servers
from tests.contract.grace import lengthen
from tests.oracle.server import OracleServer
from tests.rewriting import RewrittenServer
from tests.schedules import schedules

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = schedules(200, steps=30)

LEASE = 600.0  # seconds
TICK = 0.001
KEYS = st.sampled_from(["a", "b"])
RUNS = st.sampled_from(["r1", "r2", "r3"])
FLAGS = st.booleans()
TWO, FIVE = Rate(2, per=LEASE, burst=2), Rate(5, per=2 * LEASE, burst=5)
WANTS = st.sampled_from(
    [
        *(ALONE, ALONE, Want(1, 0), Want(1, 2), Want(2, 3), Want(9, 3)),
        *(Want(1, 0, (TWO,)), Want(1, 3, (FIVE,)), Want(1, 1, (TWO, FIVE)), Want(2, 3, (FIVE,), 2)),
        *(Want(1, 0, (Rate(3, per=LEASE),)), Want(1, 2, (Rate(3, per=LEASE),))),
    ]
)
IDENTITIES = st.builds(
    Identity,
    st.just("same"),
    st.sampled_from(["started", "finished", LEASE]),
    st.one_of(st.sampled_from(["", "*"]), RUNS),
    st.sampled_from([None, LEASE]),
    st.sampled_from([math.inf, LEASE]),
    *(FLAGS, FLAGS, FLAGS),
)
LIMITS = st.one_of(st.none(), st.integers(0, 3))
OPERATORS_RATES = st.sampled_from([(), (), (TWO,), (FIVE, TWO)])


class Asked:
    """Both stores as one: the same request to both, and the one answer that both have to give."""

    def __init__(self, stores: list[Store], tick: Callable[[], object]) -> None:
        self._stores = stores
        self.tick = tick

    def __call__(self, ask: Callable[[Store, int], Any], said: Callable[[Any], Any]) -> Any:
        self.tick()
        answers = [ask(store, number) for number, store in enumerate(self._stores)]
        told = [said(answer) for answer in answers]
        assert all(each == told[0] for each in told), told
        return answers[0]


def said(reply: Reply) -> tuple[Any, ...]:
    """What a reply says but for times and tokens, which are each store's own."""
    if reply.status in (Status.GRANTED, Status.DONE):
        return (reply.status, reply.wake, reply.slot)
    return (reply.status, bool(reply.holder), reply.place, reply.wake, reply.due > 0.01)


def seen(state: KeyState) -> tuple[Any, ...]:
    """What a look says, likewise; of several holders in any order."""
    holders = sorted((each.owner, each.run, each.units, each.slot) for each in state.holders)
    limit = state.limit and (state.limit.capacity, state.limit.author)
    several = state.used, state.capacity, limit, state.rest > 0, state.starts
    who = ("", "") if holders else (state.owner, state.run)
    # The old scripts count one among those to come later that has come, and is retained.
    times = state.later * (not state.owner), (state.opens or 0.0) <= TICK, state.identities
    return (who, times, bool(state.token), state.waiting, holders, several)


def in_line(waiters: list[Waiter], *, wants_count: bool) -> tuple[Any, ...]:
    """Return the waiters that were woken, in any order, and those queued, in that of the queue."""
    # The old scripts forget what a second delivery wants that is put off.
    found = [each._replace(since=0.0, want=ALONE if each.woken else each.want) for each in waiters]
    if not wants_count:
        found = [each._replace(want=ALONE) if each.woken else each for each in found]
    woken = sorted((each for each in found if each.woken), key=lambda each: each.run)
    return woken, [each for each in found if not each.woken]


class Agreement(RuleBasedStateMachine):
    """See the module."""

    def __init__(
        self,
        stores: list[Store],
        pass_time: Callable[[float], None] | None,
        *,
        leases_end: bool,
        is_old: bool,
    ) -> None:
        super().__init__()
        self._leases_end = leases_end
        self._is_old = is_old
        self._pass_time = pass_time
        self._asked = Asked(stores, lambda: pass_time and pass_time(TICK))
        self._stores = stores
        self._world = uuid.uuid4().hex  # keys are of one schedule alone
        self._owners: list[tuple[str, str, str]] = []  # key, owner, run
        self._inboxes: dict[str, list[Any]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._wakes: list[WokenTask] = []
        self._wants: dict[str, Want] = {}
        self._count = 0

    def _name(self, key: str) -> str:
        return f"{key}-{self._world}"

    def _owner(self) -> str:
        self._count += 1
        return f"owner-{self._count}"

    def _granted(self, key: str, owner: str, run: str, replies: list[Reply]) -> None:
        """Note a grant; tokens rise in each store, but for the one who has it already."""
        if replies[0].status is not Status.GRANTED:
            return
        tokens = [reply.token for reply in replies]
        before = self._tokens.get(key, [0] * len(tokens))
        assert all(new >= old for new, old in zip(tokens, before, strict=True))
        self._tokens[key] = tokens
        self._owners.append((key, owner, run))

    def _acquire(self, key: str, owner: str, run: str, **how: Any) -> None:
        replies = []

        def ask(store: Store, number: int) -> Reply:
            queue = how.get("queue")
            mine = {**how, "queue": queue[number]} if isinstance(queue, list) else how
            replies.append(
                store.acquire(AcquireRequest(self._name(key), owner, LEASE, run=run, **mine))
            )
            return replies[-1]

        reply = self._asked(ask, said)
        self._wants[owner] = how.get("want", ALONE)
        self._granted(key, owner, run, replies)
        self._take(reply.wake)

    def _take(self, wake: WokenTask | None) -> None:
        if wake is not None:
            self._wakes += [wake._replace(also=()), *wake.also]

    @rule(key=KEYS, run=st.one_of(st.just(""), RUNS), redelivered=FLAGS, retain=FLAGS, want=WANTS)
    def somebody_tries(
        self, key: str, run: str, redelivered: bool, retain: bool, want: Want
    ) -> None:
        how = {"redelivered": redelivered, "retain": retain} if run else {}
        self._acquire(key, self._owner(), run, want=want, **how)

    @rule(
        run=st.one_of(st.just(""), RUNS),
        redelivered=FLAGS,
        retain=FLAGS,
        wants=st.one_of(st.just(()), st.tuples(WANTS, WANTS)),
    )
    def somebody_wants_both(
        self, run: str, redelivered: bool, retain: bool, wants: tuple[Want, ...]
    ) -> None:
        keys, owners = ["a", "b"], [self._owner(), self._owner()]
        names = [self._name(key) for key in keys]
        how: dict[str, Any] = {"redelivered": redelivered, "retain": retain} if run else {}
        how["wants"] = wants
        answers = []

        def ask(store: Store, _: int) -> list[Reply] | None:
            answers.append(store.acquire_all(names, owners, LEASE, run=run, **how))
            return answers[-1]

        if self._asked(ask, lambda replies: replies is None) is not None:
            self._wants.update(zip(owners, wants, strict=False))
            for key, owner, replies in zip(keys, owners, zip(*answers, strict=True), strict=True):
                self._granted(key, owner, run, list(replies))

    @rule(key=KEYS, run=RUNS, redelivered=FLAGS, want=WANTS)
    def a_run_parks(self, key: str, run: str, redelivered: bool, want: Want) -> None:
        how = {"redelivered": redelivered, "want": want}
        park_request = ParkRequest(f"envelope of {run}".encode())
        self._acquire(key, self._owner(), run, queue=park_request, **how)

    @rule(key=KEYS, run=RUNS, want=WANTS)
    def a_run_is_parked_on_arrival(self, key: str, run: str, want: Want) -> None:
        park_request = ParkRequest(f"envelope of {run}".encode())

        def ask(store: Store, _: int) -> Reply:
            return store.parking.park_if_held(self._name(key), run, park_request, 5.0, want=want)

        self._take(self._asked(ask, said).wake)

    @rule(
        key=KEYS,
        run=RUNS,
        want=WANTS,
        delay=st.sampled_from([0.0, 0.0, LEASE]),
        identity=st.one_of(st.none(), IDENTITIES),
    )
    def a_run_is_sent(
        self, key: str, run: str, want: Want, delay: float, identity: Identity | None
    ) -> None:
        park_request = ParkRequest(f"envelope of {run}".encode())

        def ask(store: Any, _: int) -> Any:
            terms = want, delay, (), identity
            return store.calls.send(SendRequest(self._name(key), run, park_request, *terms))

        reply = self._asked(ask, lambda told: told)
        self._take(reply.wake)
        if reply.sent is Sent.GO:
            self._wakes.append(WokenTask(self._name(key), run, park_request.envelope))

    @rule(key=KEYS, run=st.one_of(st.just(""), RUNS), redelivered=FLAGS, want=WANTS)
    def somebody_waits(self, key: str, run: str, redelivered: bool, want: Want) -> None:
        owner = self._owner()
        self._inboxes[owner] = [store.inbox("", owner) for store in self._stores]
        self._owners.append((key, owner, run))
        how: dict[str, Any] = {"redelivered": redelivered} if run else {}
        self._wants[owner] = want
        self._acquire(key, owner, run, queue=self._inboxes[owner], want=want, **how)

    @precondition(lambda self: self._owners)
    @rule(data=st.data())
    def one_asks_again(self, data: st.DataObject) -> None:
        key, owner, run = data.draw(st.sampled_from(self._owners))
        queue = {"queue": self._inboxes[owner]} if owner in self._inboxes else {}
        self._acquire(key, owner, run, want=self._wants.get(owner, ALONE), **queue)

    @precondition(lambda self: self._owners)
    @rule(
        data=st.data(),
        ended=st.sampled_from(Completion),
        keep=st.one_of(st.none(), RUNS),
        begun=FLAGS,
    )
    def one_releases(
        self, data: st.DataObject, ended: Completion, keep: str | None, begun: bool
    ) -> None:
        key, owner, run = data.draw(st.sampled_from(self._owners))
        started = begun if self._wants.get(owner, ALONE).rates else None
        inboxes = self._inboxes.pop(owner, None)

        def ask(store: Store, number: int) -> Any:
            return store.release(
                ReleaseRequest(
                    self._name(key),
                    owner,
                    run=run,
                    completion=ended,
                    inbox=inboxes[number] if inboxes else None,
                    keep_for=(keep, LEASE) if keep else None,
                    started=started,
                )
            )

        self._take(self._asked(ask, lambda released: released).wake)
        for inbox in inboxes or []:
            inbox.close()

    @precondition(lambda self: self._owners)
    @rule(data=st.data())
    def one_renews(self, data: st.DataObject) -> None:
        key, owner, _ = data.draw(st.sampled_from(self._owners))
        hold = Ownership(self._name(key), owner, LEASE)
        self._asked(lambda store, _: store.renew([hold], 5.0)[0][0], lambda outcome: outcome)

    @precondition(lambda self: self._owners)
    @rule(data=st.data(), what=st.sampled_from(["upgrade", "downgrade"]), waits=FLAGS)
    def one_changes(self, data: st.DataObject, what: str, waits: bool) -> None:
        key, owner, _ = data.draw(st.sampled_from(self._owners))
        waits = waits and what == "upgrade"
        if waits and owner not in self._inboxes:
            self._inboxes[owner] = [store.inbox("", owner) for store in self._stores]
        answers = []

        def ask(store: Any, number: int) -> Reply:
            more = [self._inboxes[owner][number]] if waits else []
            answers.append(getattr(store.units, what)(self._name(key), owner, LEASE, *more))
            return answers[-1]

        reply = self._asked(ask, lambda told: (told.status, told.wake, told.slot))
        if reply.status is Status.GRANTED:
            self._granted(key, owner, "", answers)
            self._owners.pop()
        self._take(reply.wake)

    @precondition(lambda self: self._owners)
    @rule(data=st.data())
    def one_lets_the_key_rest(self, data: st.DataObject) -> None:
        key, owner, _ = data.draw(st.sampled_from(self._owners))
        self._asked(
            lambda store, _: store.units.rest(self._name(key), owner, LEASE), lambda told: told
        )

    @rule(key=KEYS, capacity=LIMITS, rates=OPERATORS_RATES, clear=FLAGS)
    def an_operator_limits(
        self, key: str, capacity: int | None, rates: tuple[Rate, ...], clear: bool
    ) -> None:
        limit = None if clear else Limit(capacity, 0.0, "somebody", rates=rates)

        def ask(store: Any, _: int) -> Any:
            return store.units.set_limit(self._name(key), limit)

        self._take(self._asked(ask, lambda told: told).wake)

    @precondition(lambda self: self._wakes)
    @rule(
        data=st.data(),
        what=st.sampled_from(["mark_published", "mark_returned", "drop"]),
        mark=FLAGS,
    )
    def a_woken_run_is_told_of(self, data: st.DataObject, what: str, mark: bool) -> None:
        wake = data.draw(st.sampled_from(self._wakes))
        if what == "drop":
            dropped = self._asked(lambda store, _: store.drop(wake, mark=mark), lambda told: told)
            self._take(dropped.wake)
        else:
            self._asked(lambda store, _: getattr(store.parking, what)(wake), lambda told: told)

    @precondition(lambda self: self._leases_end)
    @rule(seconds=st.sampled_from([0.5, 1.5, 3.0, 6.0, LEASE / 2, LEASE + 1.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self._pass_time(seconds)

    @precondition(lambda self: self._leases_end)
    @rule(key=KEYS)
    def a_key_is_swept(self, key: str) -> None:
        wakes = self._asked(lambda store, _: list(store.parking.wake_next(self._name(key))), list)
        self._wakes += wakes

    @precondition(lambda self: not self._is_old)
    @invariant()
    def the_same_waiters_are_called(self) -> None:
        for inboxes in self._inboxes.values():
            if all(isinstance(inbox, EventInbox) for inbox in inboxes):  # else it takes a moment
                called = [inbox.event.is_set() for inbox in inboxes]
                assert len(set(called)) == 1, called
                for inbox in inboxes:
                    inbox.event.clear()

    @invariant()
    def the_keys_look_alike(self) -> None:
        for key in ("a", "b"):
            self._asked(
                lambda store, _, key=key: store.waiters(self._name(key)),
                partial(in_line, wants_count=not self._is_old),
            )
            self._asked(
                lambda store, _, key=key: store.inspect(self._name(key)),
                seen,
            )
            self._asked(
                lambda store, _, key=key: store.calls.peek(self._name(key), "same"),
                lambda told: (
                    told and (*told[:2], told.expires < math.inf, *told[3:5], told.lasts > 0)
                ),
            )

    def teardown(self) -> None:
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                inbox.close()


class Pair:
    """Two stores to be compared, by their names; in this process, if none is a server's."""

    def __init__(self, names: tuple[str, str], monkeypatch: Any, redis_url: str) -> None:
        self.stores: list[Any] = []
        self._now = clock.monotonic()
        # The old store knew fewer of the cases in which a run is sent again.
        self.leases_end = not {"server", "old store"} & set(names)
        # After a downgrade, it does not call the waiter that must look when a rest ends; and a run
        # that gives back what it was granted in another want than before is shown with the later.
        self.is_old = "old store" in names
        if "server" in names:
            lengthen(monkeypatch, GRANT=LEASE, CLAIM=LEASE)
            self.pass_time = None
        else:
            monkeypatch.setattr(clock, "monotonic", lambda: self._now)
        prefix = servers.new_prefix()
        self.stores = [self._open(name, prefix, redis_url) for name in names]

    def _open(self, name: str, prefix: str, redis_url: str) -> Any:
        if name == "server":
            return RedisStore(redis_url, prefix)
        if name == "old store":
            return oracle_memory.MemoryStore("memory://", prefix)
        store = MemoryStore("memory://", prefix)
        if name == "old scripts":
            store._servers.server = OracleServer()
        return store

    def pass_time(self, seconds: float) -> None:
        self._now += seconds

    def compare(self, schedules: Any) -> None:
        machine = partial(
            Agreement,
            self.stores,
            self.pass_time,
            leases_end=self.leases_end,
            is_old=self.is_old,
        )
        run_state_machine_as_test(machine, settings=schedules)

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def pair(request, monkeypatch, redis_url):
    with closing(Pair(request.param, monkeypatch, redis_url)) as pair:
        yield pair


# Longer than Hypothesis shrinks what it has found, which else is reported as flaky.
@pytest.mark.timeout(600)
# Threads that other tests have left may use it meanwhile.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize(
    "pair",
    [
        *(("memory", "server"), ("memory", "old store"), ("memory", "old scripts")),
        ("old scripts", "old store"),
    ],
    indirect=True,
    ids=lambda names: "+".join(names).replace(" ", "_"),
)
def test_the_stores_agree(pair):
    pair.compare(SETTINGS)


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("pair", [("memory", "old scripts")], indirect=True, ids=["memory"])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # The queue's order.
        ("'NX', F.integer(stands), member)", "'NX', F.integer(-stands), member)"),
        ("+ F_grants.needed(want) > of", "+ F_grants.needed(want) - 1 > of"),  # one unit too many
        ("local token = F.integer(now)", "local token = F.integer(3e15 - now)"),  # tokens that rise
        ("    F_queue.free(grant)\nend\n", "    F_grants.vacate(grant)\nend\n"),  # nobody is woken
    ],
    ids=["order", "units", "tokens", "wakes"],
)
def test_a_script_that_is_wrong_is_found(pair, right, wrong):
    server = RewrittenServer((right, wrong))
    pair.stores[0]._servers.server = server

    with pytest.raises((AssertionError, ExceptionGroup)):
        pair.compare(
            # More schedules than find it, as they end with the first that does.
            settings(
                SETTINGS, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False
            )
        )

    server.check()
