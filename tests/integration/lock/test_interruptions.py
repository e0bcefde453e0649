"""Threads and processes that are interrupted, fork or end while they hold, wait or ask."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock import clock
from celery_distlock.lock import Lock
from celery_distlock.stores.redis.store import RedisStore
from tests import servers
from tests.integration.lock.processes import PRELUDE, ROOT, Script
from tests.integration.lock.proxy import Proxy
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(redis_url) as made:
        yield made


# Interrupted

INTERRUPTED = """
lock = Lock("k", store=store, lease=3600.0)
try:
    report(ready=True)
    lock.acquire()
except KeyboardInterrupt:
    report(interrupted=True, held=lock.lease is not None)
    ask()
"""
INTERRUPTED_WHEN_TOLD = INTERRUPTED.replace(
    "try:",
    """
lock.locked()
report(connected=True)
ask()
try:""",
)


@pytest.mark.parametrize("executed", [False, True], ids=["request", "answer"])
def test_an_acquisition_that_is_interrupted_leaves_no_lock(
    redis_store, redis_url, prefix, proxy, executed
):
    with (
        proxy.holding("acquire", executed=executed) as request,
        Script(INTERRUPTED, proxy.url, prefix) as script,
    ):
        script.received()
        request.wait()
        script.signal(signal.SIGINT)
        assert script.received() == {"interrupted": True, "held": False}
        wait_until(lambda: proxy.passed_on["release"], what="the first attempt to give it back")

        request.let_go()  # the request itself may be executed only now

        wait_until(lambda: not redis_store.inspect("k").token, what="the key to be free")


def test_a_request_that_a_stopped_server_executes_after_the_interruption_leaves_no_lock(
    private_server,
):
    server = private_server()
    with (
        closing(RedisStore(server.url, "test")) as store,
        Script(INTERRUPTED_WHEN_TOLD, server.url, "test") as script,
    ):
        script.received()
        server.pause()
        script.say()
        script.received()
        script.signal(signal.SIGINT)
        assert script.received() == {"interrupted": True, "held": False}
        server.resume()

        wait_until(lambda: store.inspect("k").token == 0, what="the key to be free")
        script.say()
        assert script.ended() == 0
        assert store.inspect("k").token == 0


# Forked

FORK = """
lock = Lock("k", store=store, lease=float(sys.argv[3]))
def work():
    with lock as lease:
        report(held=True)
        ask_main.wait()
        report(still=lease.held)

def renewed(name, sender, store, **facts):
    if name == "lock_renewed":
        report(renewed=True)

import celery_distlock.engine.acquisition
celery_distlock.engine.acquisition.defaults.on_event = renewed
ask_main = threading.Event()
thread = threading.Thread(target=work)
thread.start()
ask()
child = os.fork()
if not child:
    signal.alarm(60)
    facts = {"taken": lock.acquire(blocking=False), "waited": lock.acquire(timeout=0.05)}
    came = threading.Event()
    celery_distlock.engine.acquisition.defaults.on_event = lambda name, *_, **__: (
        name == "lock_renewed" and came.set()
    )
    with Lock("other", store=store, lease=4.0) as lease:
        facts["other"] = came.wait(30) and lease.held
    os.write(1, json.dumps(facts).encode() + b"\\n")
    os._exit(0)
report(status=os.waitpid(child, 0)[1])
ask()
ask_main.set()
thread.join()
"""


def facts_but_renewals(script: Script) -> dict[str, Any]:
    while "renewed" in (facts := script.received()):
        pass
    return facts


@pytest.mark.parametrize("executed", [False, True], ids=["request", "answer"])
def test_a_fork_while_a_renewal_is_in_flight_harms_neither_process(
    redis_store, prefix, proxy, executed
):
    with (
        proxy.holding("renew", executed=executed) as renewal,
        Script(FORK, proxy.url, prefix, "6.0") as script,
    ):
        assert script.received() == {"held": True}
        renewal.wait()
        token = redis_store.inspect("k").token
        script.say()

        child = facts_but_renewals(script)

        assert child == {"taken": False, "waited": False, "other": True}
        renewal.let_go()
        assert facts_but_renewals(script) == {"status": 0}
        while "renewed" not in script.received():
            pass
        assert redis_store.inspect("k").token == token
        script.say()
        assert facts_but_renewals(script) == {"still": True}
        assert script.ended() == 0
        assert not redis_store.inspect("k").token


def test_a_fork_while_an_acquisition_is_in_flight_is_one_hold_of_the_parents(
    redis_store, prefix, proxy
):
    with (
        proxy.holding("acquire", executed=True) as acquisition,
        Script(FORK, proxy.url, prefix, "60.0") as script,
    ):
        acquisition.wait()
        token = redis_store.inspect("k").token
        script.say()

        child = facts_but_renewals(script)

        assert child == {"taken": False, "waited": False, "other": True}
        assert script.received() == {"status": 0}
        acquisition.let_go()
        assert script.received() == {"held": True}
        assert redis_store.inspect("k").token == token
        script.say()
        assert facts_but_renewals(script) == {"still": True}
        assert script.ended() == 0
        assert not redis_store.inspect("k").token


# Ended


def test_the_key_of_a_thread_that_ended_is_free_after_its_lease(redis_store):
    lock = Lock("k", store=redis_store, lease=0.6)

    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    ended_at = clock.monotonic()
    token = redis_store.inspect("k").token

    with lock as later:
        assert clock.monotonic() - ended_at < 0.6 + 20.0
        assert later.token > token


LEASE = 30.0
HOLDS = f'Lock("k", store=store, lease={LEASE}).acquire()'
EXITS = {
    "the main thread holds": HOLDS,
    "a thread holds": f"""
came = threading.Event()
def hold():
    {HOLDS}
    came.set()
    ask()
threading.Thread(target=hold, daemon=True).start()
came.wait()
""",
    "a thread waits": f"""
{HOLDS}
threading.Thread(target=lambda: Lock("k", store=store).acquire(), daemon=True).start()
while not store.inspect("k").waiting:
    time.sleep(0.01)
""",
    "a thread that is joined holds": f"""
def hold():
    {HOLDS}
    time.sleep(0.3)
threading.Thread(target=hold).start()
""",
    "an exception leaves the block": """
try:
    with Lock("k", store=store, lease=1.0):
        sys.exit(0)
finally:
    assert not store.inspect("k").token
""",
}


@pytest.mark.parametrize("source", EXITS.values(), ids=list(EXITS))
def test_a_process_ends_quietly_and_its_key_is_free_after_the_lease(
    redis_store, redis_url, prefix, source
):
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + source, redis_url, prefix],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert (process.wait(60), said) == (0, "")
    ended_at = clock.monotonic()
    servers.bring_nearer(redis_url, prefix, LEASE)

    with Lock("k", store=redis_store):
        assert clock.monotonic() - ended_at < 20.0


def test_an_interrupted_acquisition_is_given_back_before_the_process_ends(
    redis_store, redis_url, prefix
):
    source = """
import celery_distlock.engine.pending_releases
celery_distlock.engine.pending_releases.LAST_MOMENT = 30.0  # for a busy machine
lock = Lock("k", store=store)
report(ready=True)
lock.acquire()
"""
    with (
        Proxy(redis_url) as proxy,
        proxy.holding("acquire", executed=True) as held,
        Script(source, proxy.url, prefix) as script,
    ):
        script.received()
        held.wait()
        script.signal(signal.SIGINT)
        script.ended()

        assert not redis_store.inspect("k").token


def test_a_fork_while_another_thread_opens_a_store_leaves_the_child_able_to(redis_url, prefix):
    source = """
import celery_distlock.stores as stores
came, go = threading.Event(), threading.Event()
right = stores._new_store
def slow(*words):
    came.set()
    go.wait()
    return right(*words)
stores._new_store = slow
threading.Thread(target=lambda: open_store(sys.argv[1], "other")).start()
came.wait()
child = os.fork()
if not child:
    import signal
    signal.alarm(60)
    open_store(sys.argv[1], sys.argv[2])
    os._exit(0)
_, status = os.waitpid(child, 0)
go.set()
report(status=status)
"""
    with Script(source, redis_url, prefix) as script:
        assert script.received() == {"status": 0}
