"""Masters of a cluster that do not answer, among others that do: 6 of them, and 30."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
import redis

from celery_distlock import Lock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.findings import Severity
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.redis import request_runner
from celery_distlock.stores.redis.cluster_slots import SLOTS
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import SendRequest
from celery_distlock.stores.values import (
    Limit,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Status,
    Want,
    WokenTask,
)
from tests.servers import new_prefix
from tests.topologies import Cluster
from tests.topologies.cluster import slot_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.topologies import Node

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

PATIENCE = 4.0  # seconds; not that of other requests, whose connections would be there already


@pytest.fixture(scope="module", params=[6, 30])
def masters(request) -> Iterator[list[Node]]:
    """Masters that are not found missing, however long they are silent; in the slots' order."""
    options = {"cluster-require-full-coverage": "no", "cluster-node-timeout": "3000"}
    with Cluster(request.param, replicas=0, options=options) as cluster:
        for server in cluster.servers:
            server.ask("CONFIG", "SET", "cluster-node-timeout", "600000")
        yield cluster.servers


@pytest.fixture
def pause(masters: list[Node]) -> Iterator[object]:
    paused: list[Node] = []

    def stop(servers: Sequence[Node]) -> None:
        for server in servers:
            paused.append(server)
            server.pause()

    yield stop
    for server in paused:
        server.resume()


@pytest.fixture
def store(masters: list[Node]) -> Iterator[RedisStore]:
    with closing(new_store(masters)) as made:
        yield made


def new_store(masters: list[Node]) -> RedisStore:
    """A store whose own records are at none of those that a test makes silent."""
    prefixes = iter(new_prefix, "")
    prefix = next(each for each in prefixes if _are_last(f"{each}:parked", f"{each}:sweeper"))
    hosts = ",".join(server.address for server in masters)
    return RedisStore(f"redis+cluster://{hosts}/0", prefix)


def _are_last(*records: str) -> bool:
    return all(slot_of(record) > SLOTS // 6 * 5 for record in records)


def one_each(masters: list[Node]) -> list[str]:
    """A key at each of the masters."""
    keys: dict[int, str] = {}
    for key in map(str, range(100_000)):
        number = slot_of(f"{{{key}}}") * len(masters) // SLOTS
        first = SLOTS * number // len(masters)
        if slot_of(f"{{{key}}}") - first > 1:  # of slots at the border, the sum may be one off
            keys.setdefault(number, key)
        if len(keys) == len(masters):
            return [keys[number] for number in range(len(masters))]
    raise AssertionError("there are no such keys")


def time_left(client: redis.Redis, record: str) -> float:
    return client.pttl(record) / 1000


def test_renewals_go_to_the_others_at_once_and_none_waits_twice(masters, store, pause):
    silent, *others = masters
    keys = one_each(masters)
    for key in keys:
        store.acquire(AcquireRequest(key, "a", 60.0))
    holds = [Ownership(key, "a", 600.0) for key in keys]
    outcomes: list[list[RenewOutcome]] = []

    def renew() -> None:
        outcomes.append([outcome for outcome, _ in store.renew(holds, PATIENCE)])

    with ExitStack() as closing_all:
        records = [f"{store._records.stem(slot_name(key))}lock" for key in keys[1:]]
        clients = [closing_all.enter_context(server.client()) for server in others]
        assert min(map(time_left, clients, records)) < 60
        pause([silent])
        began = time.monotonic()
        renewing = threading.Thread(target=renew)
        renewing.start()
        wait_until(lambda: min(map(time_left, clients, records)) > 60, what="renewals")
        assert time.monotonic() < began + PATIENCE / 2
    renewing.join()
    assert time.monotonic() < began + PATIENCE + 2

    began = time.monotonic()
    for _ in range(12):
        renew()
    asking = [each for each in threading.enumerate() if each.name == "distlock-cluster"]
    found = {key for some in store.find_keys() for key in some}
    assert time.monotonic() < began + PATIENCE

    assert outcomes == [[RenewOutcome.UNKNOWN] + [RenewOutcome.RENEWED] * len(others)] * 13
    assert len(asking) < 12
    assert found == set(keys[1:])


def test_a_list_without_a_part_says_so(masters, store, pause):
    keys = one_each(masters)
    for key in keys:
        store.acquire(AcquireRequest(key, "a", 600.0))
    assert {key for some in store.find_keys() for key in some} == set(keys)
    assert store.left_out == 0

    pause(masters[:1])
    assert {key for some in store.find_keys() for key in some} == set(keys[1:])
    assert store.left_out == 1


def test_a_master_that_does_not_answer_is_a_doubt(masters, store, pause):
    assert {each.severity for each in store.describe()} == {Severity.OK}

    pause(masters[:1])

    (doubt,) = [each for each in store.describe() if each.severity is not Severity.OK]
    assert (doubt.severity, doubt.subject) == (Severity.DOUBT, "server")
    assert f"does not answer: no answer of {masters[0].address}" in doubt.message
    assert doubt.remedy


def test_where_all_are_silent_no_keys_are_an_error(masters, store, pause, monkeypatch):
    store.acquire(AcquireRequest("k", "a", 600.0))
    pause(masters)
    monkeypatch.setattr(request_runner, "TIMEOUT", 0.2)

    with pytest.raises(StoreUnavailableError):
        list(store.find_keys())


def test_a_look_at_many_keys_without_a_part_says_so(masters, store, pause):
    keys = one_each(masters)
    for key in keys:
        store.acquire(AcquireRequest(key, "a", 600.0))
    pause(masters[:1])

    states = store.inspect_many(keys)

    assert [bool(state.token) for state in states] == [False] + [True] * (len(keys) - 1)
    assert store.left_out == 1


def test_a_node_that_is_back_is_renewed_at_once(masters, store, pause):
    keys = one_each(masters)
    for key in keys:
        store.acquire(AcquireRequest(key, "a", 600.0))
    holds = [Ownership(key, "a", 600.0) for key in keys]
    pause(masters[:1])
    assert store.renew(holds, 0.5)[0][0] is RenewOutcome.UNKNOWN

    masters[0].resume()

    def renewed() -> bool:
        return {outcome for outcome, _ in store.renew(holds, PATIENCE)} == {RenewOutcome.RENEWED}

    wait_until(renewed, timeout=PATIENCE, what="all to be renewed")


def test_locks_at_the_others_outlast_silent_masters(masters, store, pause):
    lease = 6.0
    silent = masters[: len(masters) // 6]
    locks = [Lock(key, lease=lease, store=store) for key in one_each(masters)]
    for lock in locks:
        assert lock.acquire(blocking=False)
    lost, kept = locks[: len(silent)], locks[len(silent) :]

    pause(silent)
    wait_until(lambda: not any(lock.lease.held for lock in lost), what="the others to be lost")
    believed = [lock.lease.remaining + time.monotonic() for lock in kept]

    def renewed() -> bool:
        for lock in kept:
            lock.lease.ensure_held()
        now = time.monotonic()
        return all(
            lock.lease.remaining + now > before + lease
            for lock, before in zip(kept, believed, strict=True)
        )

    wait_until(renewed, what="renewals over one more lease")
    for lock in kept:
        lock.release()


def test_a_slow_answer_is_confirmed_though_others_are_silent(masters, pause):
    *silent, _, owner = masters
    key = one_each(masters)[-1]
    with closing(new_store(masters)) as store:
        store.acquire(AcquireRequest(key, "a", 60.0))
        store.renew([Ownership(key, "a", 60.0)], PATIENCE)
        pause(silent[:4])
        owner.pause()
        began = time.monotonic()
        back = threading.Timer(0.2, owner.resume)
        back.start()

        ((outcome, _),) = store.renew([Ownership(key, "a", 60.0)], PATIENCE)

        back.join()
        assert outcome is RenewOutcome.RENEWED
        assert time.monotonic() < began + 2


def test_keys_of_the_others_wait_for_no_map(masters, pause):
    first, *_, last = one_each(masters)
    with closing(new_store(masters)) as store:
        store.acquire(AcquireRequest(first, "a", 60.0))
        pause(masters[:4])
        began = time.monotonic()
        assert store.renew([Ownership(first, "a", 60.0)], 0.5)[0][0] is RenewOutcome.UNKNOWN

        assert store.acquire(AcquireRequest(last, "a", 60.0)).token
        assert time.monotonic() < began + 2


def test_a_first_request_skips_nodes_that_do_not_answer(masters, pause):
    *_, last = one_each(masters)
    with closing(new_store(masters)) as store:
        pause(masters[:4])
        began = time.monotonic()

        assert store.acquire(AcquireRequest(last, "a", 60.0)).token
        assert time.monotonic() < began + 2


def test_a_sweep_does_not_wait_again_and_again(masters, store, pause):
    lost, *_, kept = one_each(masters)
    for key in (lost, kept):
        store.acquire(AcquireRequest(key, "holder", 0.1))
        store.acquire(
            AcquireRequest(key, "late", 60.0, queue=ParkRequest(b"envelope"), run=f"run {key}")
        )
    pause(masters[:1])
    store.renew([Ownership(lost, "a", 60.0)], 0.5)
    began = time.monotonic()

    found = wait_until(
        lambda: {wake.run for wake in store.parking.sweep(0.01)}, what="the parked run"
    )

    assert found == {f"run {kept}"}
    assert time.monotonic() < began + PATIENCE


def test_recording_when_keys_are_due_does_not_wait_again_and_again(masters, store, pause):
    ticker = slot_of(store._records.times) * len(masters) // SLOTS
    key = one_each(masters)[ticker - 1]
    want = Want(1, 1, rates=(Rate(1, 600.0),))
    assert store.acquire(AcquireRequest(key, "a", 60.0, want=want)).status is Status.GRANTED
    store.release(ReleaseRequest(key, "a"))
    pause([masters[ticker]])

    began = time.monotonic()
    for n in range(12):
        park_request = ParkRequest(b"envelope")
        reply = store.parking.park_if_held(key, "run", park_request, PATIENCE, want=want)
        assert (reply.status, reply.due > 0) == (Status.PARKED, True)
        call = SendRequest(key, f"later-{n}:0:0:0", ParkRequest(b"envelope"), delay=600.0)
        assert store.calls.send(call).sent is Sent.LATER
    assert time.monotonic() < began + PATIENCE + 2


def test_whose_worker_is_looked_for_does_not_wait_again_and_again(masters, store, pause):
    queue, key, *_ = one_each(masters)
    pause(masters[:1])

    began = time.monotonic()
    for _ in range(12):
        with pytest.raises(StoreUnavailableError):
            store.channels.find_channels([queue])
    assert time.monotonic() < began + PATIENCE + 2

    stem, is_silent = f"{store._prefix}:channel:", SLOTS // len(masters) - 1
    addresses = (f"{stem}{number:032x}" for number in range(100_000))
    address = next(each for each in addresses if slot_of(each) < is_silent)
    began = time.monotonic()
    for n in range(4):
        store.calls.send(SendRequest(key, f"run-{n}:0:0:0", ParkRequest(b"envelope")))
        assert not store.channels.push(
            WokenTask(slot_name(key), f"run-{n}:0:0:0", b"envelope"), [address]
        )
        store.parking.cancel(key, f"run-{n}:0:0:0")
    assert time.monotonic() < began + PATIENCE + 2


def test_a_key_is_limited_though_the_node_that_lists_it_is_silent(masters, store, pause, caplog):
    key = one_each(masters)[0]
    index = slot_of(f"{store._prefix}:parked") * len(masters) // SLOTS
    pause([masters[index]])

    store.units.set_limit(key, Limit(0))

    assert store.inspect(key).limit.pauses
    assert "lists do not show it until a caller waits there" in caplog.text
    store.units.set_limit(key, None)
    assert store.inspect(key).limit is None
