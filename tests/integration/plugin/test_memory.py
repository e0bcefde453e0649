from __future__ import annotations

import pytest


def test_locks_are_in_memory_and_none_is_held(run_tests):
    outcome = run_tests("""
        @pytest.mark.parametrize("time", [1, 2, 3])
        def test_left_behind(distlock_memory, time):
            distlock_memory.assert_free("k")
            assert Lock("k").acquire(blocking=False)
            distlock_memory.assert_locked("k")

        def test_task(distlock_memory):
            assert reserve.delay("RING-L").get() < reserve("RING-L")
            distlock_memory.assert_free("stock:RING-L")
    """)

    assert outcome.counts == {"passed": 4}, outcome.output


def test_everything_is_put_back_afterwards(run_tests):
    outcome = run_tests("""
        from celery_distlock.runtime.app import Runtime

        def facts():
            runtime = Runtime.of(app)
            plan = runtime.plans["shop.reserve"]
            return dict(app.conf.changes), runtime.settings, runtime.store, plan.settings

        @pytest.fixture(autouse=True)
        def unchanged():
            app.finalize()
            before = facts()
            yield
            assert facts() == before

        def test_first(unchanged, distlock_memory):
            reserve("a")
            assert "memory" in Runtime.of(app).store.identity
            assert Runtime.of(app).settings.url.startswith("memory:")

        def test_second(unchanged, distlock_memory):
            reserve("b")
    """)

    assert outcome.counts == {"passed": 2}, outcome.output


def test_a_setting_in_a_namespace_is_put_back(run_tests):
    outcome = run_tests(
        """
        from celery_distlock.runtime.app import Runtime

        def test_moved(distlock_memory):
            assert Runtime.of(shop).settings.url.startswith("memory:")

        @pytest.fixture(autouse=True)
        def unchanged():
            yield
            assert shop.conf.distlock_url == "redis://here.invalid"
            assert Runtime.of(shop).settings.url == "redis://here.invalid"
            assert "distlock_url" not in shop.conf.changes

        shop = Celery("spaced")
        shop.config_from_object(
            {"CELERY_BROKER_URL": "memory://", "CELERY_DISTLOCK_URL": "redis://here.invalid"},
            namespace="CELERY",
        )

        @shop.task(base=LockedTask, lock_key="{k}")
        def work(k): ...

        @pytest.fixture
        def distlock_app():
            return shop
    """
    )

    assert outcome.counts == {"passed": 1}, outcome.output


def test_another_holder_blocks_this_thread_too(run_tests):
    outcome = run_tests("""
        from celery_distlock.errors import LockConflictError

        def test_held(distlock_memory):
            with distlock_memory.hold("stock:a") as theirs:
                assert not Lock("stock:a").acquire(blocking=False)
                distlock_memory.assert_locked("stock:a")
            assert reserve("a") > theirs.token
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_another_holder_has_units_of_a_key(run_tests):
    outcome = run_tests("""
        from celery_distlock import Key

        def test_held(distlock_memory):
            with distlock_memory.hold("api", capacity=3, units=2):
                distlock_memory.assert_units("api", 2)
                with Lock("api", capacity=3) as ours:
                    assert ours.held
                    distlock_memory.assert_units("api", 3)
            distlock_memory.assert_free("api")
            with distlock_memory.hold(Key("api", capacity=3, weight=2)):
                distlock_memory.assert_units("api", 2)

        def test_shared(distlock_memory):
            with distlock_memory.hold("api", shared=True), Lock("api", shared=True) as ours:
                assert ours.shared
            with distlock_memory.hold("api", shared=True):
                assert not Lock("api").acquire(blocking=False)

        def test_full(distlock_memory):
            with distlock_memory.hold("api", capacity=3, units=2):
                with distlock_memory.hold("api", capacity=3, units=2):
                    pass
    """)

    assert outcome.counts == {"passed": 2, "failed": 1}, outcome.output
    assert outcome.says(r"'api' is not free: ")


def test_holding_what_is_held_fails(run_tests):
    outcome = run_tests("""
        def test_held(distlock_memory):
            with Lock("k"), distlock_memory.hold("k"):
                pass
    """)

    assert outcome.counts == {"failed": 1}
    assert outcome.says(r"'k' is not free: MainThread \(pid \d+ on .*\) holds it")


@pytest.mark.parametrize("way", ["current", "fixture", "celery_app"])
def test_which_app_is_moved(run_tests, way):
    conftest = {
        "current": "",
        "fixture": """
            import pytest

            @pytest.fixture
            def distlock_app():
                import shop
                return shop.other
        """,
        "celery_app": """
            import pytest

            @pytest.fixture
            def celery_app():
                import shop
                return shop.other
        """,
    }[way]
    asks = "distlock_memory" if way != "celery_app" else "celery_app, distlock_memory"
    outcome = run_tests(
        f"""
        import shop
        shop.other = Celery("other", set_as_current=False)

        @shop.other.task(base=LockedTask, lock_key="{{k}}")
        def work(k): ...

        def test_app({asks}):
            assert distlock_memory.app.main == {"shop" if way == "current" else "other"!r}
        """,
        conftest=conftest,
    )

    assert outcome.counts == {"passed": 1}, outcome.output


def test_several_apps_are_said_to_be_several(run_tests):
    outcome = run_tests("""
        one, two = Celery("one"), Celery("two")

        @one.task(base=LockedTask, shared=False)
        def work(): ...

        current = Celery("current")

        def test_app(distlock_memory): ...
    """)

    assert outcome.counts == {"error": 1}
    assert outcome.says(r"several apps have locked tasks \(one, shop\).* a fixture distlock_app")


def test_no_app_is_said_to_be_missing(run_tests):
    outcome = run_tests(
        """
        def test_app(distlock_memory): ...
        """,
        shop="""
        from celery import Celery

        app = Celery("unlocked")

        @app.task
        def work(): ...
        """,
    )

    assert outcome.counts == {"error": 1}
    assert outcome.says("no Celery app with locked tasks is known: import the module")


def test_an_app_that_has_shared_tasks_alone_is_moved(run_tests):
    outcome = run_tests(
        """
        def test_app(distlock_memory):
            assert distlock_memory.app is app
            work("a")
        """,
        shop="""
        from celery import Celery, shared_task
        from celery_distlock import LockedTask

        app = Celery("django-like", broker="memory://")

        @shared_task(base=LockedTask, lock_key="{k}")
        def work(k): ...
        """,
    )

    assert outcome.counts == {"passed": 1}, outcome.output


def test_a_worker_in_this_process_parks_in_memory(run_tests):
    outcome = run_tests("""
        import threading
        from celery.contrib.testing.worker import start_worker

        def test_parked(distlock_memory):
            app.conf.task_always_eager = False
            with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
                with distlock_memory.hold("stock:a"):
                    result = reserve.delay("a")
                    distlock_memory.assert_parked(result, within=30)
                    distlock_memory.assert_parked(result.id, "stock:a")
                    distlock_memory.assert_parked(reserve, "stock:a")
                assert result.get(timeout=30)
                distlock_memory.assert_free("stock:a", within=30)
    """)

    assert outcome.counts == {"passed": 1}, outcome.output


def test_it_goes_with_the_fixtures_that_celery_brings(run_tests):
    outcome = run_tests(
        """
        @pytest.fixture
        def work(celery_app):
            @celery_app.task(base=LockedTask, lock_key="{key}", bind=True, shared=False)
            def work(self, key):
                return self.lock.keys
            return work

        def test_parked(distlock_memory, work, celery_worker):
            celery_worker.reload()
            with distlock_memory.hold("k"):
                result = work.delay("k")
                distlock_memory.assert_parked(result, within=30)
            assert tuple(result.get(timeout=30)) == ("k",)
            distlock_memory.assert_free("k", within=30)
        """,
        *("-p", "celery.contrib.pytest"),
        conftest="""
        import pytest

        @pytest.fixture
        def celery_config():
            return {"broker_url": "memory://", "result_backend": "cache+memory://"}

        @pytest.fixture
        def celery_worker_parameters():
            return {"perform_ping_check": False}
        """,
    )

    assert outcome.counts == {"passed": 1}, outcome.output
