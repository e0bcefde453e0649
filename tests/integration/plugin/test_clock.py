from __future__ import annotations

import threading

import pytest

from celery_distlock.testing import FakeClock
from tests.waiting import wait_until


def test_a_lease_ends_without_waiting(run_tests):
    outcome = run_tests("""
        def test_dead(distlock_memory, distlock_clock):
            with distlock_memory.hold("stock:a", lease=3600, watchdog=False):
                distlock_clock.advance(3599)
                distlock_memory.assert_locked("stock:a")
                distlock_clock.advance(1)
                distlock_memory.assert_free("stock:a")
                assert reserve("a")
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_a_watchdog_renews_while_time_passes(run_tests):
    outcome = run_tests("""
        def test_alive(distlock_memory, distlock_clock):
            with distlock_memory.hold("k", lease=30) as lease:
                distlock_clock.advance(3600)
                assert lease.held
                distlock_memory.assert_locked("k")
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_a_watchdog_renews_while_its_threads_do_something_else(run_tests):
    outcome = run_tests("""
        import threading
        from celery_distlock.engine.watchdog import watchdog

        def test_alive(distlock_memory, distlock_clock):
            end = threading.Event()
            with distlock_memory.hold("k", lease=30) as lease:
                watchdog(distlock_memory.store)._asking.submit(end.wait)
                distlock_clock.advance(3600)
                assert lease.held
            end.set()
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_an_eager_task_has_waited_in_no_time(run_tests):
    outcome = run_tests("""
        from celery_distlock.errors import LockConflictError

        def test_conflict(distlock_memory, distlock_clock):
            began_at = distlock_clock.monotonic()
            with distlock_memory.hold("stock:a"), pytest.raises(LockConflictError):
                reserve.delay("a").get()
            assert distlock_clock.monotonic() - began_at == pytest.approx(10, abs=0.01)

        def test_its_turn_comes(distlock_memory, distlock_clock):
            began_at = distlock_clock.monotonic()
            with distlock_memory.hold("stock:a", lease=5, watchdog=False):
                assert reserve.apply(("a",)).get()
            assert distlock_clock.monotonic() - began_at == pytest.approx(5, abs=0.1)
    """)

    assert outcome.counts == {"passed": 2}, outcome.output


def test_a_task_whose_lease_ends_is_aborted(run_tests):
    outcome = run_tests("""
        from celery_distlock.errors import LockLostError

        def test_lost(distlock_memory, distlock_clock):
            @app.task(base=LockedTask, lock_key="k", lock_lease=30, lock_watchdog=False)
            def work():
                distlock_clock.advance(29)
                distlock_clock.advance(2)
                raise AssertionError("it must not come here")

            with pytest.raises(LockLostError):
                work.delay().get()
            distlock_memory.assert_free("k")
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_a_thread_that_waits_gets_the_key_when_its_time_has_come(run_tests):
    outcome = run_tests("""
        import threading

        def test_thread(distlock_memory, distlock_clock):
            got = threading.Event()

            def wait():
                with Lock("k", store=distlock_memory.store):
                    got.set()

            thread = threading.Thread(target=wait)
            with distlock_memory.hold("k", lease=3600, watchdog=False):
                thread.start()
                while not distlock_memory.store.inspect("k").waiting:
                    pass
                distlock_clock.advance(3601)
                assert got.wait(30)
            thread.join()
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_time_is_real_again_afterwards(run_tests):
    outcome = run_tests("""
        import time
        from celery_distlock import clock

        @pytest.fixture(autouse=True)
        def real():
            yield
            assert clock.wall() == pytest.approx(time.time(), abs=60)

        def test_time(real, distlock_memory):
            distlock_memory.clock.advance(3600)
            assert clock.wall() > time.time() + 3000
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_a_server_s_time_is_its_own(run_tests):
    outcome = run_tests("""
        def test_both(distlock_redis, distlock_clock): ...

        def test_both_the_other_way_round(distlock_clock, distlock_redis): ...

        def test_by_the_locks(distlock_redis):
            distlock_redis.clock
    """)

    assert outcome.counts == {"error": 2, "failed": 1}, outcome.output
    assert outcome.says("distlock_clock cannot be used with distlock_redis: a server's leases end")


def test_a_waiter_in_another_thread_looks_again_when_time_passes():
    clock, event = FakeClock(), threading.Event()
    thread = threading.Thread(target=clock.wait, args=(event, 3600), daemon=True)
    thread.start()
    wait_until(lambda: clock._waited_for)

    clock.advance(1)

    thread.join(30)
    assert not thread.is_alive()


def test_time_does_not_go_back():
    with pytest.raises(ValueError, match="back"):
        FakeClock().advance(-1)
