"""What a request costs, in commands and in words read, does not depend on how many wait or hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest

from celery_distlock import clock
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.memory.keyspace import Hash
from celery_distlock.stores.memory.server import Server
from celery_distlock.stores.queue_store import reserve_or_queue
from celery_distlock.stores.requests import Identity, SendRequest, StandRequest
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    Ownership,
    ParkRequest,
    Route,
    Status,
    Want,
)
from celery_distlock.testing.contract.actions import all_of, runs_of
from tests.rewriting import RewrittenServer

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
U = TypeVar("U")

FEW, MANY = 300, 10_000  # a few hundred of some things are looked through at once
BOUND = 64  # commands and words that one case may have more than the other
RUN = b"r0:0:0:0"
ANY = Want(1, 0)
PACED = Want(1, 0, (Rate(50_000, 3600.0, burst=50_000),))
PARKED = ParkRequest(b"message", "p:channel:x", "tasks.run")


class CountingServer(Server):
    """
    A server that counts.

    Attributes:
        commands: How many it has executed.
        words: Of how many these were, and their answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.commands = self.words = 0

    def do(self, name: bytes, *words: bytes) -> Any:
        answer = super().do(name, *words)
        self.commands += 1
        self.words += len(words) + (2 * int(words[-1]) if name == b"HSCAN" else size(answer))
        return answer

    def multiply(self, times: int) -> None:
        """Copy the records of one run, as if *times* of it had come."""
        for name in list(self.keys):
            key = self.keys._keys[name].value
            entries = key.items() if isinstance(key, Hash) else getattr(key, "scores", {}).items()
            for member, value in list(entries):
                if RUN not in member:
                    continue
                for number in range(1, times):
                    other = b"r%d:0:0:0" % number
                    if isinstance(key, Hash):
                        key[member.replace(RUN, other)] = value.replace(RUN, other)
                    else:
                        key.scores[member.replace(RUN, other)] = value + number / 1024
            if not isinstance(key, Hash) and hasattr(key, "scores"):
                key._order = None


def size(answer: Any) -> int:
    return sum(map(size, answer)) if isinstance(answer, list) else 1


class Cost(NamedTuple):
    commands: int
    words: int


def held(store: MemoryStore, want: Want = ALONE) -> None:
    store.acquire(AcquireRequest("k", "holder", 60.0, run="held:0:0:0", want=want))


def waiters(store: MemoryStore, times: int) -> None:
    held(store)
    store.parking.park_if_held("k", RUN.decode(), PARKED, 1.0)
    server_of(store).multiply(times)


def lanes(store: MemoryStore, times: int) -> None:
    """Have waiters that are each in a lane of its own."""
    held(store)
    want = Want(lane=RUN.decode())
    store.calls.send(SendRequest("k", RUN.decode(), PARKED, want))
    server = server_of(store)
    queue, index = (
        server.keys._keys[name_of(store, "k", record)].value for record in ("queue", "lanes")
    )
    place = queue.scores[b"p:" + RUN]
    server.multiply(times)
    queue.scores = dict.fromkeys(queue.scores, place)
    index.scores = {entry: {b"w": 0, b"x": 1}.get(entry[:1], 3) for entry in index.scores}
    queue._order = index._order = None


def deferred(store: MemoryStore, times: int) -> None:
    held(store)
    store.calls.send(SendRequest("k", RUN.decode(), PARKED, delay=600.0))
    server_of(store).multiply(times)


def ended(store: MemoryStore, times: int) -> None:
    held(store)
    store.acquire(AcquireRequest("gone", "x", 60.0, run=RUN.decode()))
    store.release(ReleaseRequest("gone", "x", RUN.decode(), Completion.YES_AND_MAY_COME_AGAIN))
    server = server_of(store)
    done = server.keys._keys[name_of(store, "gone", "done")]
    server.keys._keys[name_of(store, "k", "done")] = done
    server.multiply(times)


def holders(store: MemoryStore, times: int, want: Want = ANY) -> None:
    held(store, want)
    store.acquire(AcquireRequest("k", RUN.decode(), 60.0, run=RUN.decode(), want=want))
    server = server_of(store)
    server.multiply(times)
    record = server.keys._keys[name_of(store, "k", "lock")].value
    record[b"count"] = record[b"used"] = b"%d" % (times + 1)


def lapsing(store: MemoryStore, times: int) -> None:
    holders(store, times)
    server_of(store).keys._keys[name_of(store, "k", "lock")].value[b"next"] = b"1"


def identified(store: MemoryStore, times: int) -> None:
    holders(store, times)
    send(store, RUN.decode())
    server_of(store).multiply(times)


def starts(store: MemoryStore, times: int) -> None:
    held(store, PACED)
    record = server_of(store).keys._keys[name_of(store, "k", "rate")].value
    (series,) = (field for field in record if field.startswith(b"p:"))
    *head, at, _ = record[series].split()
    parts = [b"%d %d" % (int(at) - each, times // 64) for each in range(63, -1, -1)]
    record[series] = b" ".join([*head, *parts])


def reserved(store: MemoryStore, times: int) -> None:
    holders(store, 1, PACED)
    server = server_of(store)
    terms = b"1:" + PACED.written().encode().rpartition(b":")[2]
    rate = name_of(store, "k", "rate")
    server.do(b"HSET", rate, b"r:" + RUN, terms, b"reserved", b"%d" % times)
    server.multiply(times)
    record = server.keys._keys[name_of(store, "k", "lock")].value
    record[b"count"] = record[b"used"] = b"%d" % (times + 1)


def elsewhere(store: MemoryStore, times: int) -> None:
    held(store)
    store.acquire(AcquireRequest("hot", "x", 60.0))
    route = Route(("k", "hot"), "tasks.run", (ALONE, ALONE))
    store.release(ReleaseRequest("k", "holder", "held:0:0:0"))
    reserve_or_queue(store, StandRequest(RUN.decode(), route, 0, PARKED))
    server_of(store).multiply(times)
    held(store)


CROWDS = {
    "waiters": waiters,
    "waiters in lanes": lanes,
    "holders": holders,
    "holders of which some may have lapsed": lapsing,
    "holders and calls": identified,
    "starts": starts,
    "reserved starts": reserved,
    "runs that wait at another key": elsewhere,
    "ends": ended,
    "deferred runs": deferred,
}


def server_of(store: MemoryStore) -> CountingServer:
    return store._servers.server


def name_of(store: MemoryStore, key: str, record: str) -> bytes:
    return f"{store._records.stem(key)}{record}".encode()


def send(store: MemoryStore, run: str) -> object:
    identity = Identity(f"of {run}", "finished")
    return store.calls.send(SendRequest("k", run, PARKED, ANY, identity=identity))


def tries(store: MemoryStore, want: Want) -> object:
    return store.acquire(AcquireRequest("k", "new", 1.0, want=want))


def hands_over(store: MemoryStore, want: Want) -> object:
    request = ReleaseRequest("k", "holder", "held:0:0:0", Completion.YES_AND_MAY_COME_AGAIN)
    return store.release(request)


def claims(store: MemoryStore, want: Want) -> Any:
    hands_over(store, want)
    server_of(store).commands = server_of(store).words = 0
    first = AcquireRequest("k", "new", 60.0, run=RUN.decode(), redelivered=True, want=want)
    return store.acquire(first)


ACTS = {
    "tries": tries,
    "waits": lambda store, want: store.acquire(
        AcquireRequest("k", "new", 1.0, store.inbox("k", "new"), want=want)
    ),
    "parks": lambda store, want: store.parking.park_if_held(
        "k", "new:0:0:0", PARKED, 1.0, want=want
    ),
    "hands over": hands_over,
    "claims": claims,
    "renews": lambda store, _: store.renew([Ownership("k", "holder", 60.0)], 1.0),
    "sends": lambda store, want: store.calls.send(SendRequest("k", "new:0:0:0", PARKED, want)),
    "calls again": lambda store, _: [send(store, "x:0:0:0"), send(store, "x:0:0:0")],
    "cancels": lambda store, _: store.parking.cancel("k", "r7:0:0:0"),
    "looks": lambda store, _: store.inspect("k"),
    "looks where messages go": lambda store, _: store.parking.destinations(["k"]),
    "sweeps": lambda store, _: list(store.parking.wake_next("k")),
    "takes several": lambda store, want: store.acquire_all(
        ["k", "other"], ["o1", "o2"], 1.0, wants=[want, ALONE]
    ),
}


def cost(crowd: str, act: str, times: int) -> Cost:
    store = MemoryStore("memory://", "p")
    store._servers.server = server = CountingServer()
    CROWDS[crowd](store, times)
    server.commands = server.words = 0
    ACTS[act](store, PACED if "starts" in crowd else ANY if "holders" in crowd else ALONE)
    return Cost(server.commands, server.words)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_a_request_costs_the_same_with_many_others(crowd, act):
    among_few, among_many = cost(crowd, act, FEW), cost(crowd, act, MANY)

    assert among_many.commands <= among_few.commands + BOUND
    assert among_many.words <= among_few.words + BOUND


@pytest.mark.parametrize(
    ("want", "most"), [(ALONE, 8), (ANY, 14), (Want(1, 8), 14)], ids=["exclusive", "any", "eight"]
)
def test_a_free_key_costs_few_commands(want, most):
    store = MemoryStore("memory://", "p")
    store._servers.server = server = CountingServer()
    for _ in range(2):
        server.commands = 0
        assert store.acquire(AcquireRequest("k", "a", 60.0, want=want)).status is Status.GRANTED
        assert store.release(ReleaseRequest("k", "a")).released

    assert server.commands == most


def test_no_request_adds_a_long_queue_to_the_index_of_lanes_at_once():
    store = MemoryStore("memory://", "p")
    store._servers.server = server = CountingServer()
    waiters(store, MANY)
    queue = server.keys._keys[name_of(store, "k", "queue")].value
    for number, member in enumerate(sorted(queue.scores, key=queue.scores.__getitem__)):
        queue.scores[member] = 1e15 + number // 3  # some have the same place
    queue._order = None
    line = sorted(queue.scores, key=lambda member: (queue.scores[member], member))
    owner, run, order, costs = "holder", "held:0:0:0", [], []

    def count(act: Callable[[U], T], request: U) -> T:
        server.commands = server.words = 0
        answer = act(request)
        costs.append(Cost(server.commands, server.words))
        return answer

    for number in range(40):
        laned = SendRequest("k", f"lane{number}:0:0:0", PARKED, Want(lane="a"))
        count(store.calls.send, laned)
    for _ in range(80):
        done = ReleaseRequest("k", owner, run, Completion.YES)
        (run,) = runs_of(all_of(count(store.release, done).wake))
        owner = f"o-{run}"
        want = Want(lane="a") if run.startswith("lane") else ALONE
        claim = AcquireRequest("k", owner, 60.0, run=run, redelivered=True, want=want)
        assert count(store.acquire, claim).status is Status.GRANTED
        order.append(run)

    assert order[::2] == [member[2:].decode() for member in line[:40]]
    assert order[1::2] == [f"lane{number}:0:0:0" for number in range(40)]
    index = server.keys._keys[name_of(store, "k", "lanes")].value
    entries = sum(entry.startswith(b"w") for entry in index.scores)
    assert 0 <= entries - len(queue.scores) <= 1  # the last one that was served may be obsolete
    assert len(queue.scores) == MANY - 40
    assert max(cost.commands for cost in costs) < 50
    assert max(cost.words for cost in costs) < 2000


@pytest.mark.parametrize(
    ("act", "more"),
    {"parks": 2, "hands over": 5, "claims": 1, "sends": 2, "cancels": 2, "sweeps": 3}.items(),
)
def test_many_lanes_of_one_waiter_cost_little_more_than_a_queue_of_them(act, more, monkeypatch):
    now = clock.wall()  # each second ms, a script removes obsolete entries
    monkeypatch.setattr(clock, "wall", lambda: now)
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    lanes_of_one, plain = cost("waiters in lanes", act, MANY), cost("waiters", act, MANY)

    assert lanes_of_one.commands <= plain.commands + more


def test_a_waiter_that_stays_the_next_one_is_not_written_again():
    store, want = MemoryStore("memory://", "p"), Want(1, 2)
    store._servers.server = server = CountingServer()
    for number in range(2):
        store.acquire(AcquireRequest("k", f"o{number}", 60.0, run=f"o{number}:0:0:0", want=want))
    for number in range(3):
        store.calls.send(SendRequest("k", f"r{number}:0:0:0", PARKED, want))
    store.release(ReleaseRequest("k", "o0", "o0:0:0:0", Completion.YES))
    server.commands = 0

    claim = AcquireRequest("k", "o2", 60.0, run="r0:0:0:0", redelivered=True, want=want)
    assert store.acquire(claim).status is Status.GRANTED

    assert server.commands <= 13


@pytest.mark.parametrize("lane", ["a", ""])
def test_a_page_of_a_lane_costs_few_commands(lane):
    store = MemoryStore("memory://", "p")
    store._servers.server = server = CountingServer()
    held(store)
    for number in range(300):
        want = Want(1, 1, (), 1, "ab"[number % 2] if lane else None)
        store.calls.send(SendRequest("k", f"r{number}:0:0:0", PARKED, want))
    server.commands = 0

    assert len(store.parking.lane_waiters("k", lane, limit=100)) == 100
    assert server.commands < 50


class MakingServer(RewrittenServer):
    """
    A server that notes which functions a script makes only when it calls them.

    Attributes:
        late: Their names.
    """

    MADE = "F[F_name] = F_made"

    def __init__(self) -> None:
        super().__init__((self.MADE, f"redis.call('ECHO', F_name)\n{self.MADE}"))
        self.late: list[bytes] = []

    def do(self, name: bytes, *words: bytes) -> Any:
        if name == b"ECHO":
            self.late.append(words[0])
            return 0
        return super().do(name, *words)


def test_what_a_task_needs_that_waited_is_made_at_once():
    store = MemoryStore("memory://", "p")
    store._servers.server = server = MakingServer()
    channel = store.channels.open_channel(lambda _: None)
    held(store)
    parked = PARKED._replace(channel=channel.address)
    for run in (RUN.decode(), "r1:0:0:0", "r2:0:0:0"):
        store.parking.park_if_held("k", run, parked, 1.0)

    assert claims(store, ALONE).status is Status.GRANTED
    for key in ("k", "free"):
        store.calls.send(SendRequest(key, "r3:0:0:0", parked))
    assert server.late == []
    store.inspect("k")
    assert server.late


def test_a_sweep_only_looks_at_keys_that_are_held():
    store = MemoryStore("memory://", "p")
    store._servers.server = server = CountingServer()
    for number in range(FEW):
        key = f"k{number}"
        assert store.acquire(AcquireRequest(key, "holder", 60.0)).status is Status.GRANTED
        store.parking.park_if_held(key, f"r{number}:0:0:0", PARKED, 1.0)
    server.commands = 0

    assert list(store.parking.sweep(1.0)) == []

    assert server.commands <= 3.1 * FEW
