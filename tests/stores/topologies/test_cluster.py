"""A cluster: keys on all of its nodes, slots that move, masters that die."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from celery_distlock import Lock
from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest, queue_store
from celery_distlock.stores.redis import cluster_nodes, mending, request_runner
from celery_distlock.stores.redis import store as redis_store
from celery_distlock.stores.redis.connections import ConnectionPool
from celery_distlock.stores.redis.scriptless import ScriptlessStore
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import (
    Completion,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Route,
    Status,
    Want,
    WokenTask,
)
from tests import servers
from tests.contract.parts.actions import swept
from tests.contract.parts.sending import send
from tests.stores.topologies import drill
from tests.topologies import Cluster
from tests.topologies.cluster import slot_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.topologies import Node

ASKING = "distlock-cluster"  # what a thread is called that asks a node for another
pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """A cluster of this module, which its tests break and mend."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    for server in shared.servers:
        shared.restore(server)
    shared.settle()


@pytest.fixture
def store(cluster: Cluster, prefix: str) -> Iterator[RedisStore]:
    with closing(RedisStore(cluster.url, prefix)) as made:
        yield made


def slot(key: str) -> int:
    return slot_of(f"{{{key}}}")


def node(cluster: Cluster, key: str) -> Node:
    return cluster.node_of_slot(slot(key))


def other(cluster: Cluster, key: str) -> Node:
    return other_than(cluster, node(cluster, key))


def other_than(cluster: Cluster, owner: Node) -> Node:
    return next(each for each in cluster.masters if each is not owner)


def keys_on(cluster: Cluster, server: Node, count: int) -> list[str]:
    mine = (key for key in map(str, range(10_000)) if node(cluster, key) is server)
    return [next(mine) for _ in range(count)]


def copied(server: Node) -> None:
    """Wait until the replica has what the master has."""
    with server.client() as client:
        key = next(key for key in map(str, range(10_000)) if _takes(client, key))
        assert key
        assert client.wait(1, 30_000) == 1


def _takes(client, key: str) -> bool:
    try:
        return bool(client.set(f"the last of it {key}", 1))
    except Exception:  # noqa: BLE001  # of another node's slot
        return False


@pytest.fixture
def trips(monkeypatch) -> list[int]:
    """One for each request of this thread or for it; and no answer is so slow as to be doubted."""
    found: list[int] = []
    send, here = ConnectionPool.send, threading.get_ident()

    def note(pool, calls, *until):
        ours = threading.get_ident() == here or threading.current_thread().name == ASKING
        found.extend([1] if ours else [])
        return send(pool, calls, *until)

    monkeypatch.setattr(ConnectionPool, "send", note)
    monkeypatch.setattr(cluster_nodes, "SLOW", 60.0)
    return found


def test_the_keys_of_a_cluster_that_is_unreachable_are_not_listed(prefix):
    url = "redis+cluster://127.0.0.1:1,127.0.0.1:2/0"
    with closing(RedisStore(url, prefix)) as away, pytest.raises(StoreUnavailableError):
        list(away.find_keys())


def test_keys_of_one_slot_are_taken_in_one_request_and_others_are_not(store, trips):
    neighbour = next(key for key in map(str, range(100_000)) if slot(key) == slot("k"))
    store.acquire(AcquireRequest("warm", "up", 1.0))
    trips.clear()

    assert len(store.acquire_all(["k", neighbour], ["a", "b"], 60.0)) == 2
    assert store.acquire_all(["far", "away"], ["a", "b"], 60.0) is None
    assert len(trips) <= 2  # the script has to be sent in full to a node that does not know it


def test_renewals_of_many_keys_go_to_each_node_once(cluster, store, trips):
    holds = [Ownership(f"k{n}", "a", 60.0) for n in range(60)]
    for hold in holds:
        store.acquire(AcquireRequest(hold.key, hold.owner, 60.0))
    store.renew(holds, 5.0)
    trips.clear()

    assert {outcome for outcome, _ in store.renew(holds, 5.0)} == {RenewOutcome.RENEWED}
    assert len(trips) == 3


@servers.needs("sharded channels")
def test_a_push_goes_to_the_node_that_has_the_key_alone(cluster, store):
    drill.hand_over(store, "k")

    subscribed = {server: server.ask("PUBSUB", "SHARDCHANNELS") for server in cluster.masters}
    assert [server for server, channels in subscribed.items() if channels] == [node(cluster, "k")]
    assert all(not server.ask("PUBSUB", "CHANNELS") for server in cluster.masters)


def test_slots_move_under_load(cluster, store):
    done = threading.Event()
    failures: list[BaseException] = []
    tokens: dict[str, list[int]] = {key: [] for key in "abcdefgh"}

    def work(key: str) -> None:
        try:
            while not done.is_set():
                # On a busy machine a slot can be moving for longer than one waits for it.
                with suppress(StoreUnavailableError), Lock(key, store=store, lease=10.0) as lease:
                    tokens[key].append(lease.token)
        except BaseException as error:
            failures.append(error)
            raise

    workers = [threading.Thread(target=work, args=(key,)) for key in tokens for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for key in tokens:
            cluster.move_slot(slot(key), other(cluster, key))
        at_once = "CLUSTER MIGRATESLOTS" not in servers.LACKS
        span = cluster.slots_from(slot("a") // 1000 * 1000, 300 if at_once else 30)
        move = cluster.reshard_at_once if at_once else cluster.reshard
        move(span, other_than(cluster, cluster.node_of_slot(span[0])))
    finally:
        done.set()
        for worker in workers:
            worker.join(60)

    assert not failures
    for found in tokens.values():
        assert found == sorted(set(found))
        assert len(found) > 2


def test_a_slot_half_way_can_be_renewed_and_given_up(cluster, store):
    held, free = "k", next(key for key in map(str, range(100_000)) if slot(key) == slot("k"))
    store.acquire(AcquireRequest(held, "a", 60.0))
    record = f"{store._prefix}:{{{held}}}:lock"
    with cluster.moving(slot(held), other(cluster, held)) as move:
        assert store.renew([Ownership(held, "a", 60.0)], 5.0)[0][0] is RenewOutcome.RENEWED
        move.migrate(record)  # the node that had it now sends us on
        assert store.renew([Ownership(held, "a", 60.0)], 5.0)[0][0] is RenewOutcome.RENEWED
        with pytest.raises(StoreUnavailableError, match="cannot serve"):
            store.acquire(AcquireRequest(held, "b", 60.0))
        with pytest.raises(StoreUnavailableError):
            store.acquire(AcquireRequest(free, "b", 60.0))
    assert store.acquire(AcquireRequest(held, "b", 60.0)).status is Status.BUSY
    assert store.release(ReleaseRequest(held, "a")).released
    assert store.acquire(AcquireRequest(free, "b", 60.0)).status is Status.GRANTED


def test_a_slot_with_an_interrupted_move_is_reported_with_the_remedy(cluster, store):
    with cluster.moving(slot("k"), other(cluster, "k")):
        with pytest.raises(StoreUnavailableError, match=r"moving the key's slot") as caught:
            store.inspect("k", 5.0)
        assert "redis-cli --cluster fix" in str(caught.value)
        (finding,) = [found for found in store.check() if "being moved" in found.message]
        assert str(slot("k")) in finding.message
    assert not [found for found in store.check() if "being moved" in found.message]


RATED = (Rate(1000, 1.0),)


def stand_everywhere(store: RedisStore, capacity: int = 1) -> ReleaseRequest:
    """Have a key be in each of its records, and return what gives it up: one alone has it."""
    alone, again = Want(1, 1, rates=RATED), Completion.YES_AND_MAY_COME_AGAIN
    want = Want(1, capacity, rates=RATED)
    store.acquire(AcquireRequest("k", "first", 60.0, run="first", want=alone))
    for run, of_it in {"next": want, "last": alone}.items():
        queue = ParkRequest(b"envelope")
        store.acquire(AcquireRequest("k", "", 60.0, queue=queue, run=run, want=of_it))
    store.release(ReleaseRequest("k", "first", "first", again))

    def comes() -> bool:
        request = AcquireRequest("k", "next", 60.0, run="next", retain=True, want=want)
        return (
            list(store.parking.wake_next("k")) != []
            or store.acquire(request).status is Status.GRANTED
        )

    def has_come() -> bool:
        state = store.inspect("k")
        return "next" in {state.owner, *(each.owner for each in state.holders)}

    wait_until(lambda: comes() and has_come(), what="the next start")
    return ReleaseRequest("k", "next", "next", again)


def test_a_script_that_is_broken_off_while_its_slot_moves_is_an_outage(cluster, store):
    give_up = stand_everywhere(store)
    with (
        cluster.moving(slot("k"), other(cluster, "k")),
        pytest.raises(StoreUnavailableError, match=r"non local key|rehashing"),
    ):
        store.release(give_up)
    released = store.release(give_up)  # as its caller does
    assert released.released
    found = [released.wake] if released.wake else []
    # A node that has not reported for a while that it is a master is passed over.
    wait_until(lambda: found or found.extend(store.parking.wake_next("k")), what="its turn")
    assert [wake.run for wake in found] == ["last"]


def test_a_release_that_is_broken_off_while_its_slot_moves_is_none_of_a_lost_key(
    cluster, store, monkeypatch
):
    give_up = stand_everywhere(store)
    with cluster.moving(slot("k"), other(cluster, "k")) as move:
        monkeypatch.setattr(request_runner.time, "sleep", lambda _: move.finish())
        assert store.release(give_up).released


@pytest.mark.parametrize("capacity", [0, 1], ids=["upgrade", "downgrade"])
def test_a_change_that_is_broken_off_while_its_slot_moves_leaves_the_holder_the_key(
    cluster, store, capacity
):
    stand_everywhere(store, capacity)
    change = store.units.downgrade if capacity == 1 else store.units.upgrade
    with cluster.moving(slot("k"), other(cluster, "k")), suppress(StoreUnavailableError):
        change("k", "next", 60.0)

    assert list(store.parking.wake_next("k")) == []
    assert store.renew([Ownership("k", "next", 60.0)], 5.0)[0][0] is RenewOutcome.RENEWED
    assert change("k", "next", 60.0).status is Status.GRANTED


def test_a_release_that_is_broken_off_while_its_slot_moves_leaves_the_key_its_rest(cluster, store):
    give_up = stand_everywhere(store)
    assert store.units.rest("k", "next", 60.0)
    with cluster.moving(slot("k"), other(cluster, "k")), suppress(StoreUnavailableError):
        store.release(give_up)

    store.release(give_up)
    assert list(store.parking.wake_next("k")) == []
    state = store.inspect("k")
    assert (state.owner, state.waiting) == ("", 1)
    assert 0 < state.rest <= 60.0


def test_a_waiter_is_notified_though_its_slot_has_moved(cluster, store):
    lock, got = Lock("k", store=store, lease=60.0), threading.Event()
    lock.acquire()
    waiter = threading.Thread(target=drill.take_once, args=[store, "k", got])
    waiter.start()
    wait_until(lambda: store.inspect("k").waiting, what="the waiter to queue")

    cluster.move_slot(slot("k"), other(cluster, "k"))
    lock.release()

    assert got.wait(60)
    waiter.join(60)


def test_locks_waiters_and_parked_runs_outlast_their_master(cluster, store):
    old = node(cluster, "k")
    lock, got = Lock("k", store=store, lease=60.0), threading.Event()
    lock.acquire()
    waiter = threading.Thread(target=drill.take_once, args=[store, "k", got])
    waiter.start()
    wait_until(lambda: store.inspect("k").waiting, what="the waiter to queue")
    parked = keys_on(cluster, old, 3)
    for key in parked:
        store.acquire(AcquireRequest(key, "holder", 60.0))
        store.acquire(
            AcquireRequest(key, "late", 60.0, queue=ParkRequest(b"envelope"), run=f"run {key}")
        )
    copied(old)

    cluster.fail_over(old)

    wait_until(lambda: _extended(lock), what="the new master")
    lock.release()
    assert got.wait(60)
    waiter.join(60)
    for key in parked:
        assert store.release(ReleaseRequest(key, "holder")).wake.run == f"run {key}"


def _extended(lock: Lock) -> bool:
    try:
        lock.lease.extend(60.0)
    except Exception:  # noqa: BLE001  # not yet
        return False
    return True


def test_a_silent_master_costs_the_others_keys_nothing(cluster, store):
    silent = node(cluster, "k")
    elsewhere = [keys_on(cluster, each, 5) for each in cluster.masters if each is not silent]
    holds = [Ownership(key, "a", 60.0) for key in ("k", *elsewhere[0], *elsewhere[1])]
    for hold in holds:
        store.acquire(AcquireRequest(hold.key, hold.owner, 60.0))
    silent.pause()

    outcomes = [outcome for outcome, _ in store.renew(holds, 2.0)]

    assert outcomes == [RenewOutcome.UNKNOWN] + [RenewOutcome.RENEWED] * 10


def test_an_answer_that_comes_late_from_a_master_that_is_none_any_more_is_none(
    cluster, prefix, monkeypatch
):
    monkeypatch.setattr(redis_store, "TIMEOUT", 60.0)  # longer than any failover
    old = node(cluster, "k")
    with (
        closing(RedisStore(cluster.url, prefix)) as one,
        closing(RedisStore(cluster.url, prefix)) as two,
    ):
        one.acquire(AcquireRequest("k", "warm", 60.0))
        one.release(ReleaseRequest("k", "warm"))
        copied(old)
        answers: list[object] = []
        old.pause()
        asking = threading.Thread(target=lambda: answers.append(_acquired(one, "one")))
        asking.start()
        cluster.fail_over(old, "pause")
        granted = wait_until(lambda: _acquired(two, "two"), what="the key at the new master")
        old.resume()
        asking.join(60)

        assert granted is Status.GRANTED
        assert answers == [Status.BUSY]


def _acquired(store: RedisStore, owner: str) -> Status | None:
    try:
        return store.acquire(AcquireRequest("k", owner, 60.0)).status
    except StoreUnavailableError:
        return None


def test_a_far_cluster_is_not_asked_for_its_map_again_and_again(cluster, store, monkeypatch):
    keys = [keys_on(cluster, server, 1)[0] for server in cluster.masters]
    receive, send, maps = ConnectionPool.receive, ConnectionPool.send, []

    def come_from_far(*request):
        time.sleep(0.04)
        return receive(*request)

    def note(pool, calls, *until):
        maps.extend(call for call in calls if b"SLOTS" in call.head)
        return send(pool, calls, *until)

    monkeypatch.setattr(ConnectionPool, "receive", come_from_far)
    monkeypatch.setattr(ConnectionPool, "send", note)
    monkeypatch.setattr(cluster_nodes, "SLOW", 0.03)
    for key in keys * 10:
        store.acquire(AcquireRequest(key, "a", 60.0))

    assert len(maps) < 15  # a busy machine has slow answers besides


def test_a_slot_that_has_moved_is_asked_for_at_its_new_node_from_then_on(
    cluster, store, monkeypatch
):
    store.inspect("k")
    cluster.move_slot(slot("k"), other(cluster, "k"))
    store.inspect("k")  # is answered so
    send, asked = ConnectionPool.send, []

    def note(pool, calls, *until):
        asked.extend(pool._connect().port for call in calls if call.script)
        return send(pool, calls, *until)

    monkeypatch.setattr(ConnectionPool, "send", note)
    store.inspect("k")

    assert asked == [node(cluster, "k").port]
    assert store.channels._place(slot_name("k"), "channel").node[1] == node(cluster, "k").port


def test_a_node_that_is_gone_is_forgotten(cluster, prefix):
    old, where_to_begin = node(cluster, "k"), other(cluster, "k").address
    with (
        closing(RedisStore(f"redis+cluster://{where_to_begin}/0", prefix)) as store,
        closing(store.channels.open_channel(lambda wake: None)) as channel,
    ):
        drill.hand_over(store, "k")
        store.acquire(AcquireRequest("k", "holder", 60.0))
        park_request = ParkRequest(b"envelope", channel.address)
        store.acquire(AcquireRequest("k", "late", 60.0, queue=park_request, run="run"))
        copied(old)
        where = ("127.0.0.1", old.port)
        assert [where in known for known in _known(store, channel)] == [True] * 3

        new = cluster.fail_over(old)
        wait_until(lambda: _acquired(store, "two"), what="an answer of the new master")
        drill.hand_over(store, next(key for key in keys_on(cluster, new, 2) if key != "k"))
        store.acquire(AcquireRequest("k", "later", 60.0, queue=park_request, run="another"))

        assert [where in known for known in _known(store, channel)] == [False] * 3


def _known(store, channel):
    return store._servers._nodes._nodes, store._inboxes.subscriptions, channel._listeners


def test_a_slot_that_moved_unheard_does_not_deafen_for_the_others(cluster, store):
    server = node(cluster, "k")
    moved, *_ = (key for key in keys_on(cluster, server, 5) if slot(key) != slot("k"))
    drill.hand_over(store, "k")
    drill.hand_over(store, moved)
    server.ask("CLIENT", "KILL", "TYPE", "pubsub")
    cluster.move_slot(slot(moved), other(cluster, "k"))

    def subscribed() -> bool:
        for key in ("k", moved):
            drill.hand_over(store, key)
        return all(
            each.is_subscribed(
                store.channels._place(slot_name("k"), store._inboxes.channel).channel
            )
            for where, each in store._inboxes.subscriptions.items()
            if where[1] == server.port
        )

    # At once, if the server answers in time. What is handed over is free after its lease.
    wait_until(subscribed, timeout=80.0, what="pushes to be heard")


def test_sweeps_go_on_while_a_master_is_gone(private_topology, prefix):
    cluster = private_topology(Cluster(replicas=0, options={"cluster-require-full-coverage": "no"}))
    index = cluster.node_of(f"{prefix}:parked")
    turn = cluster.node_of(f"{prefix}:sweeper")
    dead = next((each for each in cluster.masters if each not in (index, turn)), None)
    if dead is None:
        pytest.skip("both of the sweeper's records would have to be elsewhere")
    with closing(RedisStore(cluster.url, prefix)) as store:
        lost, *kept = keys_on(cluster, dead, 1) + keys_on(cluster, index, 3)
        store.acquire(AcquireRequest(lost, "holder", 0.1))
        store.acquire(
            AcquireRequest(lost, "late", 60.0, queue=ParkRequest(b"envelope"), run=f"run {lost}")
        )
        dead.kill()

        assert drill.park_and_sweep(store, kept) == {f"run {key}" for key in kept}


def test_each_node_that_may_evict_is_named(cluster, store):
    count = len(cluster.servers) - len(cluster.masters)
    wait_until(lambda: len(store._servers.replicas()) == count, what="replicas to be known")
    assert not [found for found in store.check() if "replica" in found.message]
    for each in cluster.servers:  # also those that may be masters soon
        each.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        doubts = [found.message for found in store.check() if found.subject == "memory"]
        each.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")

        assert [each.address in doubt for doubt in doubts] == [True]


def test_a_waiter_is_found_though_the_node_with_the_index_comes_back_empty(cluster, store, prefix):
    index = cluster.node_of(f"{prefix}:parked")
    key, *_ = keys_on(cluster, other_than(cluster, index), 1)
    assert swept(store) == []
    send(store, key, "run", delay=0.5)
    index.ask("FLUSHALL")

    assert wait_until(lambda: swept(store), what="a sweep")[0].run == "run"


def test_a_waiter_that_is_missing_in_the_index_is_found_by_and_by(
    cluster, store, prefix, monkeypatch
):
    monkeypatch.setattr(mending, "MENDED", 0.5)
    assert swept(store) == []
    send(store, "k", "run", delay=0.5)
    cluster.node_of(f"{prefix}:parked").ask("ZREM", f"{prefix}:parked", "k")

    assert wait_until(lambda: swept(store), what="a sweep")[0].run == "run"


def test_an_index_that_is_lost_during_its_repair_is_repaired_again(
    cluster, store, prefix, monkeypatch
):
    monkeypatch.setattr(mending, "MENDING", 0.0)  # a sweep mends one part only
    index = cluster.node_of(f"{prefix}:parked")
    keys = [key for each in cluster.masters for key in keys_on(cluster, each, 2)]
    for key in keys:
        send(store, key, "run", delay=0.5)
    assert swept(store) == []
    for name in (f"{prefix}:parked", f"{prefix}:{{{prefix}:parked}}:whole"):
        index.ask("DEL", name)

    found: set[str] = set()
    wait_until(
        lambda: found.update(woken.name for woken in swept(store)) or len(found) == len(keys),
        what="all of them",
    )


def test_any_node_will_do_to_begin_with(cluster, prefix):
    first, *_ = cluster.url.removeprefix("redis+cluster://").split("/")[0].split(",")
    with closing(RedisStore(f"redis+cluster://localhost:1,{first}/0", prefix)) as store:
        drill.exclude(store, "k", threads=2, times=3)


def test_a_server_that_is_no_cluster_is_named(redis_server):
    url = redis_server.url.replace("redis://", "redis+cluster://")
    with (
        closing(RedisStore(url, "p")) as store,
        pytest.raises(StoreUnavailableError, match="is not in a cluster"),
    ):
        store.acquire(AcquireRequest("k", "a", 30.0))


def test_a_node_that_is_taken_for_a_lone_server_says_so(cluster, prefix):
    server = node(cluster, "k")
    with closing(RedisStore(f"redis://{server.address}/0", prefix)) as store:
        store.acquire(AcquireRequest("k", "a", 1.0))
        with pytest.raises(StoreError, match=r"one node of a cluster.* redis\+cluster://"):
            store.acquire(AcquireRequest(keys_on(cluster, other(cluster, "k"), 1)[0], "a", 1.0))


@servers.needs("SET with IFEQ")
def test_a_lone_node_without_scripts_does_not_list_others_keys_as_free(cluster, prefix):
    server = node(cluster, "k")
    keys = ["k", *keys_on(cluster, other(cluster, "k"), 1)]
    with (
        closing(ScriptlessStore(f"redis://{server.address}/0?scripts=off", prefix)) as store,
        pytest.raises(StoreError, match=r"one node of a cluster.* redis\+cluster://"),
    ):
        store.inspect_many(keys)


def test_a_run_of_keys_in_several_slots_goes_from_one_to_the_other(store):
    keys = ["far", "k", "away"]
    assert len({slot(key) for key in keys}) == 3
    route, sent = Route(tuple(keys)), []
    store.publishers.known = (sent.append,)
    for key in keys:
        store.acquire(AcquireRequest(key, "before", 60.0))
    reply = queue_store.reserve_or_queue(
        store, StandRequest("run", route, park_request=ParkRequest(b"run"))
    )
    assert reply.status is Status.PARKED

    for key in reversed(keys):
        store.dispatch(store.release(ReleaseRequest(key, "before")).wake)

    wait_until(lambda: sent, what="its way")
    assert sent == [WokenTask("far", "run", b"run")]
    for key in keys:
        assert (
            store.acquire(AcquireRequest(key, key, 60.0, run="run", redelivered=True)).status
            is Status.GRANTED
        )
        assert store.inspect(key).waiting == 0
