"""A store in memory where its thread is interrupted, forked, or lacks what it needs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from contextlib import closing

import pytest

from celery_distlock.errors import ConfigurationError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.memory.scripting import interpreter
from celery_distlock.stores.memory.server import Server
from celery_distlock.stores.values import Status, Want
from celery_distlock.testing import FakeClock
from tests.handlers import hangs_of


class InterruptedServer(Server):
    """A server that calls `interrupt` before its command of that number."""

    def __init__(self, number, interrupt):
        super().__init__()
        self.left = number
        self.interrupt = interrupt

    def do(self, name, *words):
        self.left -= 1
        if not self.left:
            self.interrupt()
        return super().do(name, *words)


@pytest.fixture
def store():
    with closing(MemoryStore("memory://", "test")) as store:
        yield store


def take(store, owner, **how):
    return store.acquire(AcquireRequest("k", owner, 30.0, **how))


def test_without_lupa_it_is_refused_by_a_message_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lupa", None)
    interpreter.reset()

    with pytest.raises(ConfigurationError, match=r"pip install 'celery-distlock\[memory\]'"):
        MemoryStore("memory://", "test")


def test_a_signal_s_handler_gets_nothing_in_the_middle_of_a_script(store):
    refused = []

    def handler():
        with pytest.raises(StoreUnavailableError, match="BUSY") as caught:
            take(store, "handler")
        refused.append(caught.value)

    store._servers.server = InterruptedServer(2, handler)
    granted = take(store, "thread")

    assert refused
    assert granted.status is Status.GRANTED
    assert store.inspect("k").owner == "thread"
    assert take(store, "handler").status is Status.BUSY


def test_a_signal_s_handler_may_ask_at_any_line(store):
    def handler():
        with contextlib.suppress(StoreUnavailableError):
            store.inspect("k", timeout=1.0)

    def work():
        assert take(store, "a").status is Status.GRANTED
        assert store.release(ReleaseRequest("k", "a")).released

    assert not hangs_of(
        work, handler, {"exchange", "execute", "do", "run", "_from_lua", "_deliver"}
    )


@pytest.mark.parametrize("number", range(1, 7))
def test_an_exception_in_the_middle_of_a_script_ends_it_and_the_next_is_executed(store, number):
    class TimeLimitError(BaseException):
        pass

    def interrupt():
        raise TimeLimitError

    store._servers.server = server = InterruptedServer(number, interrupt)
    with contextlib.suppress(TimeLimitError):
        take(store, "a")
        store.release(ReleaseRequest("k", "a"))
    assert server.left <= 0

    assert take(store, "a").status is Status.GRANTED
    assert take(store, "b").status is Status.BUSY
    assert store.release(ReleaseRequest("k", "a")).released
    assert take(store, "b").status is Status.GRANTED


def test_what_a_listener_raises_is_logged_and_keeps_nothing_from_the_others(store, caplog):
    received = []
    store._servers.server.keys.subscribe(b"c", lambda message: 1 / 0)
    store._servers.server.keys.subscribe(b"c", received.append)
    with caplog.at_level(logging.ERROR):
        store._servers.server.do(b"PUBLISH", b"c", b"hello")
        store.inspect("k")

    assert received == [b"hello"]
    assert "failed to take a published message" in caplog.text


def test_a_forked_child_begins_with_an_empty_store_whatever_other_threads_do(store):
    take(store, "a")
    inside, go_on = threading.Event(), threading.Event()

    def stay():
        inside.set()
        go_on.wait(30)

    store._servers.server.do(b"PING")
    other = MemoryStore("memory://", "other")
    other._servers.server = InterruptedServer(1, stay)
    thread = threading.Thread(target=lambda: take(other, "b"), daemon=True)
    thread.start()
    assert inside.wait(30)

    child = os.fork()
    if not child:
        granted = [take(each, "child").status is Status.GRANTED for each in (store, other)]
        os._exit(0 if all(granted) else 1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go_on.set()
        thread.join(30)
    assert store.inspect("k").owner == "a"


def test_threads_take_turns(store, quick_turns):
    tokens, held = [], []

    def work(number):
        for turn in range(50):
            owner = f"{number}-{turn}"
            while (reply := take(store, owner)).status is not Status.GRANTED:
                pass
            held.append(owner)
            tokens.append(reply.token)
            assert held == [owner]
            held.clear()
            store.release(ReleaseRequest("k", owner))

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(tokens) == 200
    assert tokens == sorted(set(tokens))


@pytest.fixture
def frozen():
    with FakeClock().running() as clock:
        yield clock


@pytest.mark.parametrize("want", [Want(), Want(1, 3), Want(1, 0)], ids=str)
@pytest.mark.parametrize("passed", [0.0, 0.0001, 1 / 3])
def test_a_lease_ends_when_exactly_its_length_has_passed(frozen, store, want, passed):
    frozen.advance(passed)
    take(store, "a", want=want)
    frozen.advance(29.9)
    assert store.inspect("k").owner

    frozen.advance(0.1)

    assert not store.inspect("k").owner
