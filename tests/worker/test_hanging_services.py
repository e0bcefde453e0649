"""The worker's main process waits for nothing but its own, whichever of its neighbours hangs."""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests import servers
from tests.integration.lock.proxy import Proxy
from tests.waiting import wait_until
from tests.worker.conftest import opened, staffed

CONFLICTS = 6
BROKERS_PATIENCE = 5.0  # seconds; kombu's at the least, with its retries several times that
ANSWER = 3.0  # seconds; a loop that waited a quarter of one for each message would need four


@pytest.fixture
def start(private_server, tmp_path):
    """
    Start a worker of four processes, or threads, and return its site.

    Of ``broker``, ``backend``, ``store`` and ``journal``, those that are not given are one server.
    """
    with ExitStack() as stack:

        def start(pool: str = "prefork", **neighbours: str):
            rest = private_server().url
            env = {
                f"DISTLOCK_TEST_{name.upper()}": neighbours.get(name, rest)
                for name in ("broker", "backend", "store", "journal")
            }
            env["DISTLOCK_TEST_PREFIX"] = servers.new_prefix()
            site = stack.enter_context(opened("tests.apps.neighbours", env))
            # A sender would subscribe to the result, and hang in this process.
            site.app.backend.on_task_call = lambda *_: None
            return stack.enter_context(staffed(site, tmp_path, [{"pool": pool, "concurrency": 4}]))

        yield start


@pytest.fixture
def broker(private_server):
    return private_server()


@pytest.fixture
def backend(private_server):
    return private_server()


@pytest.fixture
def store(private_server):
    return private_server()


def hold(site, key, **options):
    """Have a task hold *key* until its gate is open."""
    holder = site.tasks.work.apply_async((key, "holder", key), **options)
    site.journal.wait(key)
    return holder


def send(site, key, count=CONFLICTS):
    return [site.tasks.work.delay(key, number) for number in range(count)]


def assert_answers(site, times=1):
    """Check that it does, and that no answer has to wait until a message is parked."""
    begun = time.monotonic()
    for _ in range(times):
        assert site.app.control.ping([site.workers[0].name], timeout=60.0, limit=1)
    assert time.monotonic() - begun < ANSWER


def assert_awake(site, note):
    """Check that the worker answers, and that it receives and runs what needs no neighbour."""
    assert_answers(site)
    site.tasks.quick.delay(note)
    site.journal.wait(note, timeout=10.0)


def assert_all_ran(site, key, results, *, in_order=True):
    """Check that all of *results* came, once each; in order, if they were parked."""
    assert [result.get(timeout=60) for result in results] == list(range(len(results)))
    holder, *others = site.journal.read(key)
    assert holder == "holder"
    assert (others if in_order else sorted(others)) == list(range(len(results)))


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_result_backend_that_hangs_holds_up_only_what_it_is_needed_for(start, backend, key, pool):
    if pool == "gevent":
        pytest.importorskip("gevent")
    site = start(pool, backend=backend.url)
    hold(site, key, ignore_result=True)
    backend.pause()
    results = send(site, key)
    for number in range(3):
        assert_awake(site, f"{key}-{number}")
    assert site.look(key).waiting == 0  # what is parked has its state

    site.journal.open(key)
    site.wait_free(key)
    assert_awake(site, f"{key}-after")
    backend.resume()

    # They find the key free, and go to the pool, where one may overtake another.
    assert_all_ran(site, key, results, in_order=False)
    assert {result.state for result in results} == {"SUCCESS"}


def test_messages_that_wait_for_the_result_backend_do_not_keep_others_from_coming(
    start, backend, key
):
    site = start(backend=backend.url)
    hold(site, key, ignore_result=True)
    backend.pause()
    results = send(site, key, 40)  # more than the worker fetches at a time
    assert_awake(site, f"{key}-unlocked")
    backend.resume()
    site.wait_queued(key, 40)
    site.journal.open(key)

    assert_all_ran(site, key, results)


def test_a_result_backend_that_refuses_prevents_no_parking(start, backend, key):
    site = start(backend=backend.url)
    hold(site, key, ignore_result=True)
    backend.stop()
    for number in range(3):
        site.tasks.work.apply_async((key, number))
    site.wait_queued(key, 3, timeout=60.0)

    assert_awake(site, f"{key}-unlocked")
    backend.start()
    site.journal.open(key)
    assert site.journal.wait(key, 4, timeout=60.0) == ["holder", 0, 1, 2]


def test_a_lock_store_that_hangs_holds_up_only_locked_tasks(start, store, key):
    site = start(store=store.url)
    hold(site, key)
    store.pause()
    results = send(site, key, 2)  # which leave one process of the pool free
    for number in range(2):
        assert_awake(site, f"{key}-{number}")
    results += [site.tasks.work.delay(key, number) for number in range(2, 22)]
    assert_answers(site, times=16)
    store.resume()
    site.journal.open(key)

    assert sorted(result.get(timeout=60) for result in results) == list(range(22))
    assert sorted(site.journal.read(key), key=str) == sorted([*range(22), "holder"], key=str)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_lock_store_that_hangs_while_the_pool_is_full_does_not_stop_the_worker(
    start, store, key, pool
):
    site = start(pool, store=store.url)
    holders = [site.tasks.work.delay(f"{key}-{number}", number, key) for number in range(4)]
    for number in range(4):
        site.journal.wait(f"{key}-{number}")
    store.pause()
    late = [site.tasks.skip.delay(f"{key}-{number % 4}") for number in range(8)]
    others = [site.tasks.skip.delay(f"{key}-free-{number}") for number in range(4)]
    assert_answers(site, times=16)
    store.resume()
    site.journal.open(key)

    assert [each.get(timeout=60) for each in holders] == [0, 1, 2, 3]
    assert {each.get(timeout=60) for each in late} <= {None, "ran"}
    assert [each.get(timeout=60) for each in others] == ["ran"] * 4


def test_a_lock_store_that_is_slow_does_not_make_the_worker_slow(start, store, key):
    with Proxy(store.url) as proxy:
        site = start(store=proxy.url)
        hold(site, key)
        proxy.delay = 0.2
        results = send(site, key, 16)
        assert_answers(site, times=16)
        assert_awake(site, f"{key}-unlocked")
        site.wait_queued(key, 16)
        proxy.delay = 0.0
        site.journal.open(key)

        assert_all_ran(site, key, results)


def test_a_lock_is_released_by_remote_control_though_the_store_takes_its_time(start, store, key):
    with Proxy(store.url) as proxy:
        site = start(store=proxy.url)
        hold(site, key)
        with proxy.holding("release", executed=False) as held:
            control = site.app.control
            how = {"arguments": {"key": key}, "reply": True, "limit": 1, "timeout": 60.0}
            (reply,) = control.broadcast("release_lock", **how)
            assert "keeps trying" in reply[site.workers[0].name]["error"]
            held.wait()
            assert_awake(site, f"{key}-unlocked")
        site.wait_free(key)
        site.journal.open(key)


def park_without_channel(site, key):
    """Have a task wait that comes by the broker, as if the worker that parked it were gone."""
    result = site.tasks.work.delay(key, 0)
    site.wait_queued(key)
    site.forget_channel(key)
    return result


def test_a_broker_that_hangs_keeps_no_result_from_being_stored(start, broker, key):
    site = start(broker=broker.url)
    holder = hold(site, key)
    result = park_without_channel(site, key)
    broker.pause()
    begun = time.monotonic()
    site.journal.open(key)

    assert holder.get(timeout=60) == "holder"
    assert time.monotonic() - begun < BROKERS_PATIENCE
    broker.resume()
    assert_all_ran(site, key, [result])


def test_a_broker_that_hangs_keeps_no_release_from_returning(start, broker, key):
    site = start(broker=broker.url)
    with site.held(key):
        result = park_without_channel(site, key)
        broker.pause()
        begun = time.monotonic()
    assert time.monotonic() - begun < BROKERS_PATIENCE
    broker.resume()

    assert result.get(timeout=60) == 0
    assert site.journal.read(key) == [0]


def test_a_big_message_is_read_where_it_runs(start, key):
    site = start()
    hold(site, key)
    freight = "x" * 10_000_000
    big = site.tasks.work.delay(key, "big", freight=freight)
    site.tasks.quick.delay(f"{key}-unlocked")
    site.journal.wait(f"{key}-unlocked")
    site.wait_queued(key, 1)
    small = site.tasks.work.delay(key, "small")
    site.wait_queued(key, 2)

    def parked_by(result):
        found = [line for line in site.log().splitlines() if f"[{result.id}] parked" in line]
        return found and found[0].partition("/")[2].partition("]")[0].partition("-")[0]

    assert wait_until(lambda: parked_by(big), what="its parking") == "ForkPoolWorker"
    assert wait_until(lambda: parked_by(small), what="its parking") == "MainProcess"
    site.journal.open(key)
    assert [big.get(timeout=60), small.get(timeout=60)] == ["big", "small"]
    assert site.journal.read(key) == ["holder", "big", "small"]


@contextmanager
def files_of_at_most(size):
    """Limit the files that processes which are started in this block can write, in bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_worker_without_room_for_its_ledger_says_so_and_works(start, key):
    with files_of_at_most(1 << 20):
        site = start()

    assert "no room for the shared memory" in site.log()
    assert site.tasks.work.delay(key, 1).get(timeout=30) == 1
