"""Which waiter is granted a key, in what order, and which is woken."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from celery_distlock.errors import StoreError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.zookeeper import ZooKeeperStore, acquisition, queues
from tests.stores.zookeeper.znodes import (
    BUSY,
    GRANTED,
    HELD,
    LOST,
    RENEWED,
    folder,
    holder,
    nodes,
    renew,
    script,
    take,
    wait_for,
)
from tests.waiting import wait_until

HOSTILE_KEYS = [
    "/",
    "a/b//c",
    ".",
    "..",
    "a\0b",
    "\ud800",
    "größe \U0001f512 \u2028",
    "%2F",
    "zookeeper",
    "x" * 10_000,
    "/" * 10_000,
    "\x7f\x80\x9f\ufff0\uf8ff",
]


def wakes(inboxes):
    """Counts how often each inbox is woken."""
    counts = dict.fromkeys(inboxes, 0)
    for name, inbox in inboxes.items():

        def counting(name=name, wake=inbox.wake):
            counts[name] += 1
            wake()

        inbox.wake = counting
    return counts


def test_a_release_wakes_the_next_waiter_and_no_other(store, open_store):
    take(store, "k", "w0")
    others = [open_store() for _ in range(5)]
    inboxes = {f"w{n}": wait_for(other, "k", f"w{n}") for n, other in enumerate(others, 1)}
    counts = wakes(inboxes)

    current = store
    for n, other in enumerate(others, 1):
        current.release(ReleaseRequest("k", f"w{n - 1}"))
        inboxes[f"w{n}"].wait(30.0)
        take(other, "k", f"w{n}", queue=inboxes[f"w{n}"])
        assert sum(counts.values()) == n
        current = other

    assert set(counts.values()) == {1}


def test_every_waiter_watches_the_node_before_his_own_alone(store):
    take(store, "k", "a")
    for n in range(4):
        wait_for(store, "k", f"w{n}")

    watched = store._contact.session.client._data_watchers

    assert sorted(watched) == sorted(nodes(store, "k")[:-1])
    assert all(len(watchers) == 1 for watchers in watched.values())


def test_a_waiter_that_looks_again_and_again_leaves_one_watch(store):
    take(store, "k", "a")
    for n in range(20):
        inbox = store.inbox("k", f"w{n}")
        assert store.acquire(AcquireRequest("k", f"w{n}", 30.0, queue=inbox)).status is BUSY
        store.release(ReleaseRequest("k", f"w{n}", inbox=inbox))

    (watchers,) = store._contact.session.client._data_watchers.values()
    assert len(watchers) == 1
    assert not store._contact.session._inboxes


def test_a_waiter_that_gives_up_does_not_let_the_next_one_overtake(store):
    take(store, "k", "a")
    middle = wait_for(store, "k", "b")
    last = wait_for(store, "k", "c")

    store.release(ReleaseRequest("k", "b", inbox=middle))
    last.wait(30.0)

    assert store.acquire(AcquireRequest("k", "c", 30.0, queue=last)).status is BUSY
    store.release(ReleaseRequest("k", "a"))
    last.wait(30.0)
    take(store, "k", "c", queue=last)


def test_a_try_leaves_no_node_behind_and_does_not_overtake(store):
    take(store, "k", "a")
    inbox = wait_for(store, "k", "b")

    assert store.acquire(AcquireRequest("k", "c", 30.0)).status is BUSY
    assert len(nodes(store, "k")) == 2

    store.release(ReleaseRequest("k", "a"))
    assert store.acquire(AcquireRequest("k", "c", 30.0)).status is BUSY
    assert len(nodes(store, "k")) == 1
    inbox.wait(30.0)
    take(store, "k", "b", queue=inbox)


def test_of_many_requests_at_once_one_has_it_and_no_other_node_stays(open_store):
    stores = [open_store() for _ in range(3)]
    for round_ in range(10):
        start = threading.Barrier(9)
        replies = []

        def ask(n, start=start, replies=replies, key=f"k{round_}"):
            start.wait()
            replies.append(stores[n % 3].acquire(AcquireRequest(key, f"t{n}", 30.0)).status)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert replies.count(GRANTED) <= 1
        assert len(nodes(stores[0], f"k{round_}")) == replies.count(GRANTED)


def test_an_owner_has_one_node_however_often_he_asks(store):
    take(store, "k", "a")
    inbox = wait_for(store, "k", "b")
    for _ in range(5):
        assert store.acquire(AcquireRequest("k", "a", 30.0)).status is GRANTED
        assert store.acquire(AcquireRequest("k", "b", 30.0, queue=inbox)).status is BUSY

    assert len(nodes(store, "k")) == 2


def test_a_waiter_that_was_woken_and_does_not_come_is_passed_over(store, monkeypatch):
    monkeypatch.setattr(acquisition, "GRANT", 0.1)
    take(store, "k", "a")
    wait_for(store, "k", "gone")
    alive = wait_for(store, "k", "alive")

    store.release(ReleaseRequest("k", "a"))

    alive.wait(30.0)
    wait_until(
        lambda: store.acquire(AcquireRequest("k", "alive", 30.0, queue=alive)).status is GRANTED,
        what="the key to pass the one that does not come",
    )


def test_tokens_rise_over_waiters_that_made_their_nodes_early(store, open_store):
    other = open_store()
    tokens = [take(store, "k", "a")]
    early = wait_for(store, "k", "b")
    for n in range(5):  # transactions, and a grant elsewhere, between the node and its grant
        take(other, f"other{n}", "x")
    late = wait_for(other, "k", "c")
    store.release(ReleaseRequest("k", "a"))
    tokens.append(take(store, "k", "b", queue=early))
    store.release(ReleaseRequest("k", "b"))
    tokens.append(take(other, "k", "c", queue=late))
    other.release(ReleaseRequest("k", "c"))
    tokens.append(take(store, "k", "d"))

    assert tokens == sorted(set(tokens))


def test_tokens_rise_though_the_keys_folder_was_deleted_and_numbers_restart(store):
    first = take(store, "k", "a")
    (path,) = nodes(store, "k")
    store.release(ReleaseRequest("k", "a"))
    client = store._contact.session.client
    wait_until(lambda: client.exists(folder(store, "k")) is None, what="the empty folder to go")

    assert take(store, "k", "b") > first
    assert nodes(store, "k")[0].rpartition("-")[2] == path.rpartition("-")[2] == "0000000000"


TAKER = """
for n in range(int(sys.argv[4])):
    owner = new_owner("taker")
    inbox = store.inbox("k", owner)
    request = AcquireRequest("k", owner, 10.0, queue=inbox)
    while (reply := store.acquire(request)).status is not Status.GRANTED:
        inbox.wait(1.0)
    with open(sys.argv[5], "a") as file:
        file.write(f"{reply.token}\\n")
    store.release(ReleaseRequest("k", owner))
report(done=True)
"""


def test_tokens_of_several_processes_rise_in_the_order_of_their_grants(url, prefix, tmp_path):
    file = tmp_path / "tokens"
    takers = [script(TAKER, url, prefix, "40", str(file)) for _ in range(3)]
    for taker in takers:
        with taker:
            taker.received()

    tokens = [int(line) for line in file.read_text().split()]
    assert len(tokens) == 120
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
def test_a_key_may_hold_any_text(store, key):
    token = take(store, key, "a")
    inbox = wait_for(store, key, "b")
    assert store.acquire(AcquireRequest(key, "c", 30.0)).status is BUSY
    assert renew(store, (key, "a", 30.0), (key, "c", 30.0)) == [RENEWED, HELD]
    assert store.inspect(key)[:2] == ("a", token)
    assert store.inspect(key).waiting == 1

    assert store.release(ReleaseRequest(key, "a")).released
    inbox.wait(30.0)
    take(store, key, "b", queue=inbox)
    assert store.release(ReleaseRequest(key, "b")).released
    assert renew(store, (key, "a", 30.0)) == [LOST]


def test_no_two_keys_are_one_lock(store):
    for n, key in enumerate(HOSTILE_KEYS):
        take(store, key, f"o{n}")

    assert [holder(store, key) for key in HOSTILE_KEYS] == [
        f"o{n}" for n in range(len(HOSTILE_KEYS))
    ]


def test_prefixes_that_look_alike_are_other_places(url, prefix):
    names = [f"{prefix}{end}" for end in ("/a", "%2Fa", ".", "")]
    for name in names:
        with closing(ZooKeeperStore(url, name)) as one:
            take(one, "k", "a")
            one.release(ReleaseRequest("k", "a"))
    assert len({ZooKeeperStore(url, name)._locks for name in names}) == len(names)


def test_a_folder_whose_numbers_are_used_up_is_refused(store, monkeypatch):
    monkeypatch.setattr(queues, "LAST_NUMBER", 0)

    with pytest.raises(StoreError, match="no more numbers"):
        store.acquire(AcquireRequest("k", "a", 30.0))

    assert nodes(store, "k") == []
