"""Requests whose answers are lost: each may have been executed or not."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing, suppress

import pytest
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import Create2, Delete, Transaction

from celery_distlock import Lock
from celery_distlock.engine import pending_releases
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Want
from celery_distlock.stores.zookeeper import ZooKeeperStore, sessions
from celery_distlock.stores.zookeeper import store as zookeeper
from celery_distlock.stores.zookeeper.sessions import Exchange
from tests.stores.zookeeper.znodes import BUSY, GRANTED, RENEWED, folder, nodes, renew, take
from tests.waiting import wait_until

KINDS = {"create": Create2, "delete": Delete, "transaction": Transaction}


class Losses:
    """Breaks the store's connection at its next requests of a kind."""

    def __init__(self, store, monkeypatch):
        self._store = store
        self._monkeypatch = monkeypatch
        self.left = 0

    def lose(self, kind, *, executed, times=1):
        client = self._store._contact.session.client
        call, self.left = client._call, times

        def losing(request, result):
            if type(request) is not KINDS[kind] or not self.left:
                return call(request, result)
            self.left -= 1
            if not executed:
                result.set_exception(ConnectionLoss())
                return False
            unseen = client.handler.async_result()
            call(request, unseen)
            unseen.wait(30)
            result.set_exception(ConnectionLoss())
            self._store._contact.session.hang_up()
            return None

        self._monkeypatch.setattr(client, "_call", losing)


@pytest.fixture
def losses(store, monkeypatch):
    take(store, "before", "x")  # connects
    store.release(ReleaseRequest("before", "x"))
    return Losses(store, monkeypatch)


@pytest.mark.parametrize("executed", [False, True])
def test_a_lost_answer_to_a_request_makes_no_second_node(store, losses, executed):
    store._contact.ask(lambda talk: talk.create_container(folder(store, "k")), "k")
    losses.lose("create", executed=executed)

    take(store, "k", "a")

    assert losses.left == 0
    assert len(nodes(store, "k")) == 1
    assert renew(store, ("k", "a", 30.0)) == [RENEWED]
    assert store.release(ReleaseRequest("k", "a")).released
    assert nodes(store, "k") == []


@pytest.mark.parametrize("executed", [False, True])
def test_a_waiter_whose_answer_is_lost_keeps_one_place(store, losses, executed):
    take(store, "k", "a")
    losses.lose("create", executed=executed)
    inbox = store.inbox("k", "b")

    assert store.acquire(AcquireRequest("k", "b", 30.0, queue=inbox)).status is BUSY

    assert losses.left == 0
    assert len(nodes(store, "k")) == 2
    store.release(ReleaseRequest("k", "a"))
    inbox.wait(30.0)
    take(store, "k", "b", queue=inbox)


@pytest.mark.parametrize("executed", [False, True])
def test_a_release_whose_answer_is_lost_is_a_release(store, losses, executed):
    take(store, "k", "a")
    losses.lose("delete", executed=executed)

    assert store.release(ReleaseRequest("k", "a")).released

    assert losses.left == 0
    assert nodes(store, "k") == []


@pytest.mark.parametrize("executed", [False, True])
def test_a_key_is_kept_and_claimed_once_though_answers_are_lost(store, losses, executed):
    token = take(store, "k", "a", run="run 1")
    losses.lose("transaction", executed=executed)
    assert store.release(ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 30.0))).released
    assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY
    losses.lose("transaction", executed=executed)

    assert take(store, "k", "c", run="run 2") == token

    assert len(nodes(store, "k")) == 1
    assert renew(store, ("k", "c", 30.0)) == [RENEWED]


@pytest.mark.parametrize("executed", [False, True])
def test_one_that_is_admitted_has_one_slot_though_the_answer_is_lost(
    store, losses, open_store, executed
):
    want, other = Want(1, 4), open_store()
    for owner in "ab":
        take(other, "k", owner, want=want)
    losses.lose("transaction", executed=executed)
    left = []

    def leave_once(talk, pending):
        if not losses.left and not left:
            left.append("a")
            other.release(ReleaseRequest("k", "a"))
            take(other, "k", "next", want=want)
        return result(talk, pending)

    with pytest.MonkeyPatch.context() as patch:
        result = Exchange.result
        patch.setattr(Exchange, "result", leave_once)
        reply = store.acquire(AcquireRequest("k", "c", 30.0, want=want))

    assert losses.left == 0
    assert reply.status is GRANTED
    state = store.inspect("k")
    slots = {each.owner: each.slot for each in state.holders}
    assert len(set(slots.values())) == len(slots) == 3
    assert slots["c"] == reply.slot == store.acquire(AcquireRequest("k", "c", 30.0, want=want)).slot
    assert state.token == reply.token


@pytest.mark.parametrize("executed", [False, True])
def test_a_unit_is_kept_and_claimed_once_though_answers_are_lost(store, losses, executed):
    want = Want(1, 2)
    token = take(store, "k", "x", want=want)
    take(store, "k", "a", run="run 1", want=want)
    losses.lose("transaction", executed=executed)
    assert store.release(ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 30.0))).released
    assert store.acquire(AcquireRequest("k", "b", 30.0, want=want)).status is BUSY
    losses.lose("transaction", executed=executed)

    assert take(store, "k", "c", run="run 2", want=want) == token

    assert len(nodes(store, "k")) == 2
    assert renew(store, ("k", "c", 30.0)) == [RENEWED]


def test_what_a_request_without_any_answer_took_is_ended_soon(store, losses, monkeypatch):
    monkeypatch.setattr(zookeeper, "GRANT", 0.1)
    losses.lose("create", executed=True)
    result = Exchange.result

    def fail(talk, pending):
        answer = result(talk, pending)
        if not losses.left:
            raise ConnectionLoss
        return answer

    store._contact.ask(lambda talk: talk.create_container(folder(store, "k")), "k")
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "result", fail)
        with pytest.raises(StoreUnavailableError):
            store.acquire(AcquireRequest("k", "a", 30.0))

    wait_until(lambda: nodes(store, "k") == [], what="the node to be ended")


def test_a_lock_that_got_no_answer_is_given_back(store, losses, monkeypatch):
    monkeypatch.setattr(pending_releases, "PAUSES", (0.01,) * 7)
    store._contact.ask(lambda talk: talk.create_container(folder(store, "k")), "k")
    losses.lose("create", executed=True)

    with monkeypatch.context() as once:
        once.setattr(sessions, "PAUSES", (0.0,))
        with pytest.raises(StoreUnavailableError):
            Lock("k", store=store).acquire(timeout=0.1)

    wait_until(lambda: nodes(store, "k") == [], what="the node to be given back")


class Proxy:
    """Passes on to a server, and breaks all connections on request."""

    def __init__(self, port):
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = set()
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._sockets |= {client, server}
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        self._end(source, target)

    def _end(self, *sockets):
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._sockets.discard(each)

    def break_all(self):
        self._end(*list(self._sockets))

    def close(self):
        self._listener.close()
        self.break_all()


@pytest.mark.faults
@pytest.mark.parametrize("capacity", [1, 2])
def test_connections_that_break_all_the_time_lose_no_exclusion_and_leave_no_node(
    shared_server, store, prefix, capacity
):
    with closing(Proxy(shared_server.port)) as proxy:
        url = f"zookeeper://127.0.0.1:{proxy.port}/chroot?session=30"
        stores = [ZooKeeperStore(url, prefix) for _ in range(3)]
        inside, overlaps, done = [], [], []
        ended = threading.Event()

        def live(one):
            while not ended.is_set():
                lock = Lock("k", capacity=capacity, lease=20.0, store=one)
                with suppress(StoreUnavailableError), lock as lease:
                    inside.append((lease.token, lease.slot))
                    overlaps.extend([list(inside)] if len(set(inside)) > capacity else [])
                    overlaps.extend([list(inside)] if len(set(inside)) < len(inside) else [])
                    time.sleep(0.005)
                    inside.remove((lease.token, lease.slot))
                    done.append(lease.token)

        threads = [threading.Thread(target=live, args=(one,)) for one in stores]
        for thread in threads:
            thread.start()
        for _ in range(15):
            enough = len(done) + 5
            proxy.break_all()
            wait_until(lambda enough=enough: len(done) >= enough, what="locks to be taken again")
        ended.set()
        for thread in threads:
            thread.join()

        assert overlaps == []
        if capacity == 1:
            assert done == sorted(set(done))
        wait_until(lambda: nodes(store, "k") == [], what="the last node to go")
        for one in stores:
            one.close()


def test_a_hanging_connection_is_broken_so_that_another_server_is_asked(store, monkeypatch):
    take(store, "k", "a")
    client, calls = store._contact.session.client, []
    call = client._call

    def swallow_one(request, result):
        calls.append(request)
        return None if len(calls) == 1 else call(request, result)

    monkeypatch.setattr(client, "_call", swallow_one)
    broken = client._connection._socket

    with monkeypatch.context() as briefly, suppress(StoreUnavailableError):
        briefly.setattr(sessions, "TIMEOUT", 0.2)
        store.acquire(AcquireRequest("k", "b", 30.0))

    wait_until(
        lambda: client._connection._socket is not broken and client.connected,
        what="another connection",
    )
    wait_until(lambda: store.inspect("k").owner == "a", what="an answer")
