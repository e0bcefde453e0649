"""Calls without a message: direct ones, `apply()`, and eager mode. Each over Redis and memory."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

from celery_distlock import Lock, LockedTask, policies
from celery_distlock.errors import ConfigurationError, LockConflictError, LockNotOwnedError
from celery_distlock.runtime.app import Runtime
from tests.apps import make_app

WAYS = {
    "direct": lambda task, *args: task(*args),
    "apply": lambda task, *args: task.apply(args).get(),
    "eager": lambda task, *args: task.delay(*args).get(),
}


@pytest.fixture(params=["redis", "memory"])
def app(request, celery_env, prefix):
    app = make_app("calls")
    app.task = partial(app.task, shared=False)  # or every other app would have its tasks, too
    app.conf.distlock_wait = 0.2
    if request.param == "memory":
        app.conf.distlock_url = f"memory://{prefix}"
    yield app
    Runtime.of(app).store.close()
    app.close()


@pytest.fixture(params=WAYS)
def call(request, app):
    if request.param == "eager":
        app.conf.task_always_eager = True
    return WAYS[request.param]


@contextmanager
def held_by_another(app, key: str, seconds: float | None = None):
    """Hold *key* in another thread, for some seconds or to the end of the block."""
    over, holding = threading.Event(), threading.Event()
    store = Runtime.of(app).store

    def hold():
        with Lock(key, store=store):
            holding.set()
            over.wait(seconds)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holding.wait(30)
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_lock_is_taken_and_released(app, call):
    @app.task(base=LockedTask, bind=True, lock_key="{key}")
    def look(self, key):
        return Lock(key).locked(), self.lock.key, self.lock.token > 0

    assert tuple(call(look, "k")) == (True, "k", True)

    assert not look.lock
    with pytest.raises(LockNotOwnedError):
        look.lock.ensure_held()
    assert not Lock("k").locked()


def test_the_lock_is_released_after_an_exception(app, call):
    @app.task(base=LockedTask, lock_key="{key}")
    def fail(key):
        raise ValueError(key)

    with pytest.raises(ValueError, match="k"):
        call(fail, "k")

    assert not Lock("k").locked()


def test_a_conflict_waits_and_then_raises(app, call):
    @app.task(base=LockedTask, lock_key="{key}")
    def work(key):
        raise AssertionError("it must not run")

    with held_by_another(app, "k"):
        began = time.monotonic()
        with pytest.raises(LockConflictError) as caught:
            call(work, "k")

    assert time.monotonic() - began >= 0.2
    assert caught.value.key == "k"
    assert caught.value.holder


def test_a_conflict_waits_until_the_key_is_free(app, call):
    @app.task(base=LockedTask, lock_key="{key}", lock_wait=30.0)
    def work(key):
        return "ran"

    with held_by_another(app, "k", seconds=0.1):
        assert call(work, "k") == "ran"


def test_skip_needs_no_message(app, call):
    @app.task(base=LockedTask, lock_key="{key}", lock_on_conflict=policies.Skip(result="busy"))
    def work(key):
        raise AssertionError("it must not run")

    with held_by_another(app, "k"):
        assert call(work, "k") == "busy"


def test_fail_does_not_wait(app, call):
    app.conf.distlock_wait = 3600.0

    @app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="fail")
    def work(key):
        raise AssertionError("it must not run")

    with held_by_another(app, "k"), pytest.raises(LockConflictError):
        call(work, "k")


@pytest.mark.parametrize("policy", ["requeue", "retry", "wait", policies.Wait(0.1, then="skip")])
def test_no_policy_publishes_anything(app, call, policy):
    @app.task(base=LockedTask, lock_key="{key}", lock_on_conflict=policy)
    def work(key):
        raise AssertionError("it must not run")

    with held_by_another(app, "k"):
        if isinstance(policy, policies.Wait):
            assert call(work, "k") is None
        else:
            with pytest.raises(LockConflictError):
                call(work, "k")

        assert Runtime.of(app).store.inspect("k").waiting == 0
    with app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare("celery").message_count == 0


def test_eager_errors_propagate_where_they_are_to(app):
    app.conf.update(task_always_eager=True, task_eager_propagates=True)

    @app.task(base=LockedTask, lock_key="{key}")
    def work(key):
        raise AssertionError("it must not run")

    with held_by_another(app, "k"), pytest.raises(LockConflictError):
        work.delay("k")


def test_an_eager_retry_runs_and_releases(app):
    app.conf.task_always_eager = True

    @app.task(base=LockedTask, bind=True, lock_key="{key}", max_retries=2)
    def work(self, key):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return self.request.retries

    assert work.delay("k").get() == 2
    assert not Lock("k").locked()


def test_a_task_called_inside_another_with_its_key_reenters(app, call):
    @app.task(base=LockedTask, bind=True, lock_key="{key}", lock_on_conflict="fail")
    def inner(self, key):
        return self.lock.token

    @app.task(base=LockedTask, bind=True, lock_key="{key}", lock_on_conflict="fail")
    def outer(self, key):
        tokens = {self.lock.token, inner(key), inner.apply((key,)).result}
        with Lock(key) as lease:
            tokens.add(lease.token)
        return len(tokens), self.lock.held

    assert tuple(call(outer, "k")) == (1, True)
    assert not Lock("k").locked()


def test_a_task_inside_a_lock_of_its_key_reenters(app, call):
    @app.task(base=LockedTask, bind=True, lock_key="{key}", lock_on_conflict="fail")
    def work(self, key):
        return self.lock.token

    with Lock("k") as lease:
        assert call(work, "k") == lease.token
        assert lease.held

    assert not Lock("k").locked()


def test_an_exception_of_an_inner_call_leaves_the_outer_lock(app, call):
    @app.task(base=LockedTask, lock_key="{key}")
    def inner(key):
        raise ValueError(key)

    @app.task(base=LockedTask, bind=True, lock_key="{key}")
    def outer(self, key):
        with pytest.raises(ValueError, match=key):
            inner(key)
        return self.lock.held and Lock(key).locked()

    assert call(outer, "k")
    assert not Lock("k").locked()


def test_another_thread_of_a_task_does_not_reenter(app, call):
    @app.task(base=LockedTask, lock_key="{key}")
    def work(key):
        seen = []
        lock = Lock(key, store=Runtime.of(app).store)
        thread = threading.Thread(target=lambda: seen.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return seen

    assert call(work, "k") == [False]


def test_arguments_may_be_given_in_every_way(app, call):
    @app.task(base=LockedTask, bind=True, lock_key="{a}-{b}-{c}")
    def work(self, a, b=2, *, c=3):
        return self.lock.key

    assert call(work, 1) == "1-2-3"
    assert work(a=1, c=4) == "1-2-4"
    assert work.apply(kwargs={"b": 5, "a": 1}).get() == "1-5-3"


def test_wrong_arguments_are_refused_as_python_does(app):
    @app.task(base=LockedTask, lock_key="{key}")
    def work(key):
        raise AssertionError("it must not run")

    with pytest.raises(TypeError, match="argument"):
        work()
    with pytest.raises(TypeError, match="nonsense"):
        work("k", nonsense=1)


def test_a_disabled_lock_is_not_taken(app, call):
    app.conf.distlock_enabled = False

    @app.task(base=LockedTask, bind=True, lock_key="{key}")
    def work(self, key):
        self.lock.ensure_held()
        return not self.lock and not Lock(key).locked()

    assert call(work, "k")


def test_a_store_without_a_url_is_said_to_be_missing(celery_env):
    app = make_app("nowhere")
    app.conf.update(broker_url="amqp://localhost", result_backend=None)

    @app.task(base=LockedTask, lock_key="{key}", shared=False)
    def work(key):
        raise AssertionError("it must not run")

    with pytest.raises(ConfigurationError, match="set distlock_url"):
        work("k")
