"""What an ensemble reports of all its keys, and of their waiters."""

from __future__ import annotations

import time

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry, generate_latest

from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.ops.prometheus import StoreCollector
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.zookeeper import ZooKeeperStore
from celery_distlock.telemetry.counters import samples
from tests.stores.zookeeper.znodes import folder, nodes, take, wait_for
from tests.waiting import wait_until

ALL_ASKED = {
    "find_keys": lambda store: list(store.find_keys()),
    "look": lambda store: store.inspect_many(["k"]),
    "waiters": lambda store: store.waiters("k"),
    "facts": lambda store: list(store.describe()),
}
asking = pytest.mark.parametrize("ask", ALL_ASKED.values(), ids=list(ALL_ASKED))


def found(store, pattern="*"):
    return sorted(key for keys in store.find_keys(pattern) for key in keys)


def test_a_folder_without_nodes_is_no_key(store):
    take(store, "k", "a")
    client = store._contact.session.client
    client.create(folder(store, "left"))

    assert found(store) == ["k"]


def test_keys_of_another_prefix_are_not_listed(store, open_store):
    take(open_store("-other"), "k", "a")

    assert found(store) == []


def test_another_process_sees_keys_and_waiters(store, open_store):
    take(store, "k", "a")
    for name in ("b", "c", "d"):
        wait_for(store, "k", name)
    other = open_store()

    assert found(other) == ["k"]
    assert [waiter.owner for waiter in other.waiters("k")] == ["b", "c", "d"]
    assert [waiter.owner for waiter in other.waiters("k", first=1, limit=1)] == ["c"]


def test_a_waiter_that_gave_up_has_left_the_queue(store):
    take(store, "k", "a")
    inboxes = [wait_for(store, "k", name) for name in ("b", "c")]

    store.release(ReleaseRequest("k", "b", inbox=inboxes[0]))

    assert [waiter.owner for waiter in store.waiters("k")] == ["c"]


def test_a_waiter_s_time_is_when_it_came(store):
    take(store, "k", "a")
    before = time.time()
    wait_for(store, "k", "b")
    wait_for(store, "k", "c")
    after = time.time()

    first, second = store.waiters("k")

    # The server's clock and ours are one; it has milliseconds.
    assert before - 0.01 <= first.since <= second.since <= after + 0.01
    assert store.inspect("k").oldest == first.since
    assert store.inspect_many(["k"])[0].oldest == first.since


def test_a_key_without_a_queue_has_no_waiters(store):
    take(store, "k", "a")

    assert (store.inspect("k").waiting, store.inspect("k").oldest) == (0, 0.0)
    assert store.waiters("k") == []


def test_a_key_that_is_kept_for_a_run_is_listed(store):
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 30.0)))

    assert found(store) == ["k"]
    (state,) = store.inspect_many(["k"])
    assert (state.owner, state.run) == ("parked:run", "run")


def test_a_key_that_was_kept_for_too_long_is_free_in_a_look(store, monkeypatch):
    monkeypatch.setattr(store._registry, "_end", lambda _: None)  # as if its process were gone
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 0.1)))

    wait_until(lambda: not store.inspect_many(["k"])[0].token, what="the end of the time")

    assert len(nodes(store, "k")) == 1


def test_a_look_goes_on_where_nodes_vanish_meanwhile(store, monkeypatch):
    for number in range(5):
        take(store, f"k{number}", "a")
    talk = store._contact.talk(5.0)
    each, times = type(talk).each, []

    def vanish(self, ask, paths):
        times.append(list(paths))
        if len(times) == 2:
            store.release(ReleaseRequest("k3", "a"))
        return each(self, ask, paths)

    monkeypatch.setattr(type(talk), "each", vanish)

    states = store.inspect_many([f"k{number}" for number in range(5)])

    assert [state.owner for state in states] == ["a", "a", "a", "", "a"]
    assert times[2] == [folder(store, "k3")]


def test_the_ensemble_reports_itself(store, shared_server):
    facts = {fact.subject: fact.message for fact in store.describe()}

    assert facts["server"].startswith("ZooKeeper 3.")
    assert facts["server"].endswith(f", standalone, 127.0.0.1 port {shared_server.port}")
    assert facts["session"].startswith("30 s")
    assert "ms" in facts["clock"]


def test_a_server_that_does_not_report_itself_is_said_to_be_one(shared_server, prefix):
    with_another = f"zookeeper://127.0.0.1:{shared_server.port},127.0.0.1:1?session=30"
    store = ZooKeeperStore(with_another, prefix)
    try:
        messages = [fact.message for fact in store.describe() if fact.subject == "server"]
    finally:
        store.close()

    assert any("port 1 gives no status" in found for found in messages)
    assert any(found.startswith("ZooKeeper 3.") for found in messages)


@asking
def test_an_ensemble_that_is_unreachable_is_said_to_be(ask, prefix, monkeypatch):
    monkeypatch.setattr("celery_distlock.stores.zookeeper.store.TIMEOUT", 0.2)
    monkeypatch.setattr("celery_distlock.stores.zookeeper.sessions.TIMEOUT", 0.2)
    store = ZooKeeperStore("zookeeper://127.0.0.1:1", prefix)
    try:
        with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
            ask(store)
    finally:
        store.close()


def test_it_does_not_count_and_says_so(store):
    with pytest.raises(StoreError, match="cannot add up"):
        samples(store)


def test_metrics_show_what_is_held_and_leave_the_counters_out(url, prefix, store):
    take(store, "k", "a")
    wait_for(store, "k", "b")
    app = Celery("metrics", broker="memory://", set_as_current=False)
    app.conf.update(distlock_url=url, distlock_prefix=prefix)
    registry = CollectorRegistry()
    registry.register(StoreCollector(app, every=0.0))

    lines = generate_latest(registry).decode().splitlines()

    assert "distlock_up 1.0" in lines
    assert 'distlock_waiting{queue=""} 1.0' in lines
    assert 'distlock_held{task=""} 1.0' in lines
    assert not any("distlock_acquired" in line for line in lines)
