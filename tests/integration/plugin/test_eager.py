from __future__ import annotations

import pytest

WAYS = {
    "delay": "task.delay(*args)",
    "apply": "task.apply(args)",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_each_policy_does_while_another_holds_the_key(run_tests, way):
    outcome = run_tests(f"""
        from itertools import count
        from celery_distlock.errors import LockConflictError

        numbers = count()

        def call(task, *args):
            return {WAYS[way]}

        def declare(**options):
            @app.task(base=LockedTask, lock_key="k", name=f"t{{next(numbers)}}", **options)
            def task():
                raise AssertionError("it must not run")
            return task

        @pytest.fixture(autouse=True)
        def busy(distlock_memory, distlock_clock):
            with distlock_memory.hold("k"):
                began_at = distlock_clock.monotonic()
                yield lambda: distlock_clock.monotonic() - began_at

        @pytest.mark.parametrize("policy", ["requeue", "retry", "wait", policies.Retry(delay=1)])
        def test_waits_and_fails(busy, policy):
            result = call(declare(lock_on_conflict=policy, lock_wait=600))
            assert result.state == "FAILURE"
            with pytest.raises(LockConflictError):
                result.get()
            assert busy() == pytest.approx(600)

        def test_skip(busy):
            result = call(declare(lock_on_conflict=policies.Skip(result="busy")))
            assert (result.state, result.get(), busy()) == ("SUCCESS", "busy", 0)

        def test_fail(busy):
            result = call(declare(lock_on_conflict="fail"))
            assert (type(result.result), busy()) == (LockConflictError, 0)

        def test_wait_then_skip(busy):
            assert call(declare(lock_on_conflict=policies.Wait(60, then="skip"))).get() is None
            assert busy() == pytest.approx(60)

        def test_no_wait(busy):
            assert call(declare(lock_wait=0)).state == "FAILURE"
            assert busy() == 0

        def test_nothing_is_left_in_the_queue(busy, distlock_memory):
            call(declare())
            assert distlock_memory.store.waiters("k") == []
    """)

    assert outcome.counts == {"passed": 9}, outcome.output


def test_a_wait_policy_s_own_timeout_counts_in_eager_mode(run_tests):
    outcome = run_tests("""
        def test_wait(distlock_memory, distlock_clock):
            @app.task(base=LockedTask, lock_key="k", lock_on_conflict=policies.Wait(600))
            def task():
                return "ran"

            with distlock_memory.hold("k", lease=300, watchdog=False):
                assert task.delay().get() == "ran"
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_tasks_nest_and_see_their_lock(run_tests):
    outcome = run_tests("""
        def test_nested(distlock_memory):
            @app.task(base=LockedTask, lock_key="stock:{sku}", bind=True)
            def outer(self, sku):
                distlock_memory.assert_locked(f"stock:{sku}")
                assert reserve.delay(sku).get(disable_sync_subtasks=False) == self.lock.token
                assert reserve(sku) == self.lock.token
                return self.lock.keys

            assert outer.delay("a").get() == ("stock:a",)
            distlock_memory.assert_free("stock:a")
            assert not reserve.lock
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_a_canvas_runs_eagerly(run_tests):
    outcome = run_tests("""
        from celery import chain, chord, group

        def test_canvas(distlock_memory):
            @app.task(base=LockedTask, lock_key="stock:{sku}")
            def give(token=None, *, sku):
                return sku

            @app.task(base=LockedTask, lock_key="sum")
            def total(results):
                return sorted(results)

            assert chain(give.si(sku="a"), give.s(sku="b"))().get() == "b"
            assert group(give.si(sku=s) for s in "ab")().get() == ["a", "b"]
            assert chord([give.si(sku=s) for s in "aab"], total.s())().get() == ["a", "a", "b"]
            for key in ("stock:a", "stock:b", "sum"):
                distlock_memory.assert_free(key)
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_failed_and_retried_tasks_give_their_key_up(run_tests):
    outcome = run_tests("""
        @pytest.mark.parametrize(
            "name, value", [("wait", 0), ("on_failure", "requeue"), ("hold_on_retry", True)]
        )
        def test_ends(distlock_memory, name, value):
            options = {f"lock_{name}": value}

            @app.task(base=LockedTask, lock_key="k", bind=True, name=name, max_retries=1, **options)
            def task(self):
                raise self.retry(exc=ValueError(self.request.retries), countdown=0)

            with pytest.raises(ValueError, match="1"):
                task.delay().get()
            distlock_memory.assert_free("k")
    """)

    assert outcome.counts == {"passed": 3}, outcome.output
