"""What ends a hold: a lease, a session, a process, a server."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest
from kazoo.exceptions import ConnectionLoss

from celery_distlock import Lock, clock
from celery_distlock.engine.hold import believed
from celery_distlock.errors import LockLostError, StoreError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Ownership
from celery_distlock.stores.zookeeper import ZooKeeperStore
from celery_distlock.stores.zookeeper.sessions import Exchange
from tests.stores.zookeeper.znodes import (
    BUSY,
    GRANTED,
    HELD,
    LOST,
    RENEWED,
    UNKNOWN,
    end_session,
    holder,
    nodes,
    renew,
    script,
    take,
    wait_for,
)
from tests.waiting import wait_until

HOLDER = """
reply = store.acquire(AcquireRequest("k", "dead", float(sys.argv[4])))
report(status=reply.status.value, pid=os.getpid())
ask()
"""


# Leases


def test_a_fixed_lease_ends_though_its_process_lives(store, open_store):
    other = open_store()
    reply = store.acquire(AcquireRequest("k", "a", 0.3))

    wait_until(
        lambda: other.acquire(AcquireRequest("k", "b", 30.0)).status is GRANTED,
        what="the key",
        poll=0.01,
    )

    assert clock.monotonic() >= reply.asked_at + believed(0.3)
    assert renew(store, ("k", "a", 30.0)) == [HELD]


def test_a_renewal_puts_the_end_off_and_never_forward(store):
    take(store, "k", "a", 2.5)
    assert renew(store, ("k", "a", 20.0), ("k", "a", 0.1)) == [RENEWED, RENEWED]

    time.sleep(2.7)

    assert holder(store, "k") == "a"
    assert renew(store, ("k", "a", 20.0)) == [RENEWED]


def test_an_owner_whose_lease_has_ended_may_ask_again(store):
    first = take(store, "k", "a", 0.05)
    wait_until(lambda: not holder(store, "k"), what="the end of the lease")

    assert take(store, "k", "a") > first


def test_a_lease_longer_than_the_session_is_refused_with_both_figures(store):
    with pytest.raises(StoreError, match=r"60 s is longer .* 30 s.*\?session=60"):
        store.acquire(AcquireRequest("k", "a", 60.0))

    assert nodes(store, "k") == []


def test_a_session_that_the_ensemble_has_cut_says_so(shared_server, prefix):
    with closing(ZooKeeperStore(f"{shared_server.url}?session=100", prefix)) as cut:
        with pytest.raises(StoreError, match=r"40 s \(not 100 as requested: .*maxSessionTimeout"):
            cut.acquire(AcquireRequest("k", "a", 60.0))
        assert any("40 s and not 100" in found.message for found in cut.check())


def test_a_renewal_for_longer_than_the_session_is_not_confirmed(store, caplog):
    take(store, "k", "a")

    assert renew(store, ("k", "a", 60.0)) == [UNKNOWN]

    wait_until(lambda: "shorten the lease" in caplog.text, what="a line in the log")
    assert renew(store, ("k", "a", 30.0)) == [RENEWED]


def test_what_confirms_a_hold_is_agreed_on_by_the_quorum(store):
    """A server that has lost its leader still answers what only reads."""
    take(store, "k", "a")
    client = store._contact.session.client

    first = client.last_zxid
    assert renew(store, ("k", "a", 30.0)) == [RENEWED]
    second = client.last_zxid
    take(store, "k", "a")

    assert first < second < client.last_zxid


# Sessions


def test_the_loss_of_the_session_is_the_loss_of_all_locks(store, open_store):
    take(store, "k1", "a")
    take(store, "k2", "b")
    first = store._contact.session

    end_session(store)

    assert renew(store, ("k1", "a", 30.0), ("k2", "b", 30.0)) == [LOST, LOST]
    take(open_store(), "k1", "c")
    assert renew(store, ("k1", "a", 30.0)) in ([LOST], [HELD])
    assert not store.release(ReleaseRequest("k1", "a")).released
    assert holder(store, "k1") == "c"
    take(store, "k2", "d")
    assert store._contact.session is not first


def test_a_lock_whose_session_is_lost_is_found_lost_before_another_has_it(store, open_store):
    lock = Lock("k", lease=0.9, store=store)
    lock.acquire()
    end_session(store)

    wait_until(lambda: not lock.lease.held, what="the loss to be noticed")
    with pytest.raises(LockLostError):
        lock.release()


def test_a_waiter_whose_session_is_lost_queues_again(store, open_store):
    other = open_store()
    take(other, "k", "a")
    inbox = wait_for(store, "k", "b")

    end_session(store)
    inbox.wait(60.0)

    assert store.acquire(AcquireRequest("k", "b", 30.0, queue=inbox)).status is BUSY
    other.release(ReleaseRequest("k", "a"))
    inbox.wait(60.0)
    take(store, "k", "b", queue=inbox)


def test_a_session_of_ours_that_is_over_leaves_nothing_that_counts(store, monkeypatch):
    """Its node may be seen for a moment, by a server that lags behind."""
    token = take(store, "k", "a")
    old = store._contact.session
    store._contact.session = None

    assert take(store, "k", "a") > token
    assert len(nodes(store, "k")) == 1
    old.close()
    assert holder(store, "k") == "a"


def test_closing_ends_what_is_held_and_the_store_can_be_used_again(store, open_store):
    take(store, "k", "a")

    store.close()

    take(open_store(), "k", "b")
    assert renew(store, ("k", "a", 30.0)) == [HELD]
    take(store, "k2", "c")


def test_a_store_that_was_closed_leaves_no_thread(url, prefix):
    before = threading.active_count()
    store = ZooKeeperStore(url, prefix)
    take(store, "k", "a", 5.0)
    store.close()

    wait_until(lambda: threading.active_count() <= before, what="its threads to end")


# Processes


def test_the_key_of_a_killed_process_is_free_when_its_session_ends(
    shared_server, store, prefix, open_store
):
    short = f"{shared_server.url}/chroot?session=3"
    with script(HOLDER, short, prefix, "3.0") as process:
        assert process.received()["status"] == "granted"
        inbox = wait_for(store, "k", "b")
        process.signal(signal.SIGKILL)
        started = time.monotonic()

        inbox.wait(30.0)

        take(store, "k", "b", queue=inbox)
        assert time.monotonic() - started < 20.0


def test_the_key_of_a_stopped_process_is_free_and_it_finds_it_lost(shared_server, store, prefix):
    source = """
lock = Lock("k", lease=3.0, store=store)
lock.acquire()
report(held=True)
ask()
report(held=lock.lease.held)
try:
    lock.release()
    report(error="")
except Exception as error:
    report(error=type(error).__name__)
"""
    with script(source, f"{shared_server.url}/chroot?session=3", prefix) as process:
        process.received()
        inbox = wait_for(store, "k", "b")
        process.pause()
        inbox.wait(30.0)
        take(store, "k", "b", queue=inbox)
        process.signal(signal.SIGCONT)
        process.say()

        assert process.received() == {"held": False}
        assert process.received() == {"error": "LockLostError"}
        assert holder(store, "k") == "b"


def test_a_process_that_waits_and_dies_is_passed_over(shared_server, store, prefix):
    source = """
inbox = store.inbox("k", "dead")
report(status=store.acquire(AcquireRequest("k", "dead", 0.5, queue=inbox)).status.value)
ask()
"""
    take(store, "k", "a")
    with script(source, f"{shared_server.url}/chroot?session=0.6", prefix) as process:
        assert process.received()["status"] == "busy"
        inbox = wait_for(store, "k", "b")
        process.signal(signal.SIGKILL)
        process.ended()
        store.release(ReleaseRequest("k", "a"))

        wait_until(
            lambda: store.acquire(AcquireRequest("k", "b", 30.0, queue=inbox)).status is GRANTED,
            what="the dead one to be passed over",
        )


def test_another_process_releases_but_does_not_renew(url, store, prefix):
    with script(HOLDER, url, prefix, "25.0") as process:
        process.received()
        assert renew(store, ("k", "dead", 0.5)) == [UNKNOWN]

        assert store.release(ReleaseRequest("k", "dead")).released

        assert not store.release(ReleaseRequest("k", "dead")).released
        assert renew(store, ("k", "dead", 0.5)) == [LOST]
        take(store, "k", "b")
        assert renew(store, ("k", "dead", 0.5)) == [HELD]


def test_a_hold_that_was_ended_elsewhere_is_found_lost_and_not_created_again(store, open_store):
    other = open_store()
    take(store, "k", "a")
    take(store, "k2", "a")
    assert other.release(ReleaseRequest("k", "a")).released
    assert other.release(ReleaseRequest("k2", "a")).released
    take(other, "k2", "b")

    assert renew(store, ("k", "a", 30.0), ("k2", "a", 30.0)) == [LOST, HELD]

    assert nodes(store, "k") == []
    assert not store.release(ReleaseRequest("k", "a")).released


def test_a_waiter_that_lost_its_hold_and_queued_again_does_not_hold_it(store, open_store):
    other = open_store()
    take(store, "k", "a")
    other.release(ReleaseRequest("k", "a"))
    take(other, "k", "b")
    wait_for(store, "k", "a")

    assert renew(store, ("k", "a", 30.0)) == [HELD]


def test_a_non_holder_did_not_release_it_though_answers_were_lost(store, monkeypatch):
    take(store, "k", "a")
    catch_up, failures = Exchange.catch_up, [ConnectionLoss()]

    def failing_once(talk, path):
        if failures:
            raise failures.pop()
        catch_up(talk, path)

    monkeypatch.setattr(Exchange, "catch_up", failing_once)

    assert not store.release(ReleaseRequest("k", "nobody")).released
    assert not failures


def test_another_process_leaves_the_queue_for_a_dead_waiter(url, store, open_store):
    other = open_store()
    take(other, "k", "a")
    wait_for(other, "k", "waiter")

    assert not store.release(ReleaseRequest("k", "waiter")).released

    assert store.inspect("k")[0] == "a"
    assert store.inspect("k").waiting == 0


def test_an_owner_with_the_name_of_another_processes_owner_does_not_take_its_key(store, open_store):
    take(store, "k", "a")

    reply = open_store().acquire(AcquireRequest("k", "a", 30.0))

    assert (reply.status, reply.holder) == (BUSY, "a")
    assert renew(store, ("k", "a", 30.0)) == [RENEWED]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_session_of_its_own_and_leaves_the_parents_alone(store):
    take(store, "k", "a", 20.0)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        outcome = "nothing"
        try:
            busy = store.acquire(AcquireRequest("k", "child", 20.0)).status is BUSY
            granted = store.acquire(AcquireRequest("k2", "child", 20.0)).status is GRANTED
            outcome = f"{busy} {granted}"
            store.close()
        except BaseException as error:  # noqa: BLE001
            outcome = repr(error)
        finally:
            os.write(write, outcome.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "True True"
    os.waitpid(child, 0)

    assert renew(store, ("k", "a", 20.0)) == [RENEWED]
    take(store, "k2", "b")
    assert store.release(ReleaseRequest("k", "a")).released


COUNTER = """
for _ in range(int(sys.argv[4])):
    with Lock("k", lease=5.0, store=store):
        with Lock("k", lease=5.0, store=store):
            with open(sys.argv[5]) as file:
                seen = int(file.read())
            with open(sys.argv[5], "w") as file:
                file.write(str(seen + 1))
report(done=True)
"""


def test_a_lock_excludes_between_processes(url, prefix, tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [script(COUNTER, url, prefix, "60", str(counter)) for _ in range(3)]
    for process in processes:
        with process:
            assert process.received() == {"done": True}

    assert counter.read_text() == "180"


# The server


@pytest.fixture
def breakable(server, prefix):
    with closing(ZooKeeperStore(f"{server.url}?session=40", prefix)) as made:
        yield made
        server.resume()
        server.start_again()


def test_a_paused_server_leaves_a_renewal_unknown_in_time(server, breakable):
    take(breakable, "k", "a", 40.0)
    server.pause()
    started = time.monotonic()

    ((outcome, _),) = breakable.renew([Ownership("k", "a", 40.0)], 0.2)

    assert outcome is UNKNOWN
    assert time.monotonic() - started < 20.0
    server.resume()
    wait_renewed(breakable)


def test_a_server_that_is_unreachable_is_given_up_in_time(server, breakable):
    take(breakable, "k", "a", 40.0)
    server.kill()
    started = time.monotonic()

    with pytest.raises(StoreUnavailableError, match="cannot serve"):
        breakable.acquire(AcquireRequest("k", "b", 40.0))

    assert 5.0 < time.monotonic() - started < 35.0
    assert renew_once(breakable, 0.1) is UNKNOWN
    server.start()
    wait_renewed(breakable)


def test_a_server_that_takes_a_connection_and_stays_silent_is_left(prefix):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30.0)
        url = f"zookeeper://127.0.0.1:{silent.getsockname()[1]}?session=300"
        with closing(ZooKeeperStore(url, prefix)) as store, ExitStack() as connections:
            assert renew_once(store, 0.1) is UNKNOWN

            for _ in range(2):
                connections.enter_context(silent.accept()[0])


def renew_once(store, timeout):
    ((outcome, _),) = store.renew([Ownership("k", "a", 40.0)], timeout)
    return outcome


def wait_renewed(store):
    """Renew until the server answers; it may be slow to come back, but must know the session."""
    outcome = wait_until(
        lambda: found if (found := renew_once(store, 5.0)) is not UNKNOWN else None,
        timeout=60.0,
        what="an answer to a renewal",
    )
    assert outcome is RENEWED


def test_a_server_that_hangs_is_given_up_in_time(server, breakable):
    take(breakable, "k", "a", 40.0)
    server.pause()
    started = time.monotonic()

    with pytest.raises(StoreUnavailableError, match="cannot serve"):
        breakable.acquire(AcquireRequest("k2", "b", 40.0))

    assert time.monotonic() - started < 35.0
    server.resume()
    assert breakable.acquire(AcquireRequest("k2", "b", 40.0)).status is GRANTED


def test_a_restarted_server_knows_the_locks_and_wakes_the_waiters(server, breakable):
    take(breakable, "k", "a", 40.0)
    inbox = wait_for(breakable, "k", "b")
    server.stop()
    server.start()

    inbox.wait(30.0)  # a broken connection has no watches
    wait_renewed(breakable)
    assert breakable.acquire(AcquireRequest("k", "b", 40.0, queue=inbox)).status is BUSY
    breakable.release(ReleaseRequest("k", "a"))
    inbox.wait(30.0)
    take(breakable, "k", "b", 40.0, queue=inbox)


def test_a_server_paused_for_longer_than_the_session_grants_nothing_twice(server, prefix):
    url = f"{server.url}?session=0.6"
    with closing(ZooKeeperStore(url, prefix)) as one, closing(ZooKeeperStore(url, prefix)) as two:
        lock = Lock("k", lease=0.5, store=one)
        lock.acquire()
        server.pause()
        wait_until(lambda: not lock.lease.held, what="the end of the belief")
        server.resume()
        wait_until(
            lambda: two.acquire(AcquireRequest("k", "b", 0.5)).status is GRANTED, what="the key"
        )
        with pytest.raises(LockLostError):
            lock.release()
