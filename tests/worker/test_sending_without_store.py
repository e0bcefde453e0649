"""Calls through the store, where it is unreachable, cannot do that, or is not asked."""

from __future__ import annotations

import json
import time
import uuid
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import redis
from celery import chain

from celery_distlock import Lock, LockedTask
from celery_distlock.errors import ConfigurationError, StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.trust import RefusedError
from celery_distlock.stores import Ability, WokenTask
from tests.apps import make_app
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

APP = "tests.apps.configured"


@pytest.fixture
def tasks(load_app, private_server, monkeypatch):
    """An app whose lock store is a server of its own."""
    server = private_server()
    conf = {"distlock_url": server.url, "distlock_sweep_interval": 0.5, "distlock_via": "store"}
    monkeypatch.setenv("DISTLOCK_TEST_CONF", json.dumps(conf))
    loaded: Any = load_app(APP)
    loaded.server, loaded.conf = server, conf
    yield loaded
    loaded.journal.close()


@pytest.fixture
def start(worker, tasks):
    return lambda: worker(
        APP, pool="threads", concurrency=2, env={"DISTLOCK_TEST_CONF": json.dumps(tasks.conf)}
    )


def messages(redis_url: str, prefix: str) -> list[dict[str, Any]]:
    with redis.Redis.from_url(redis_url) as client:
        return [json.loads(each) for each in client.lrange(f"{prefix}:broker:celery", 0, -1)]


def test_a_call_goes_by_the_broker_while_the_store_is_unreachable(
    tasks, start, redis_url, prefix, key
):
    tasks.server.stop()

    result = tasks.look.apply_async((key,), countdown=0.5)

    (message,) = messages(redis_url, prefix)
    assert message["headers"]["distlock"]["outages"] == 1
    assert message["headers"]["eta"]
    tasks.server.start()
    start()
    assert result.get(timeout=60) is not None


def test_a_call_is_refused_while_the_store_is_unreachable_if_the_task_is_to_fail_then(
    tasks, redis_url, prefix, key
):
    tasks.server.stop()

    with pytest.raises(StoreUnavailableError):
        tasks.fail_on_outage.delay(key)

    assert messages(redis_url, prefix) == []


def test_a_call_that_is_sent_in_any_case_is_sent_while_the_store_is_unreachable(
    tasks, redis_url, prefix, key
):
    tasks.server.stop()

    tasks.fail_on_outage.apply_async((key,), lock_unique=None)

    assert len(messages(redis_url, prefix)) == 1


def test_a_link_fails_by_itself_while_the_store_is_unreachable_if_it_is_to_fail_then(
    tasks, start, key
):
    tasks.server.stop()
    start()

    link = chain(tasks.add.s(1, 2), tasks.fail_on_outage.si(key))()

    with pytest.raises(StoreUnavailableError):
        link.get(timeout=60)
    assert link.parent.get(timeout=30) == 3


def test_a_retry_goes_by_the_broker_while_the_store_is_unreachable(tasks, redis_url, prefix, key):
    tasks.server.stop()

    tasks.fail_on_outage.apply_async((key,), task_id=key, retries=1)

    (message,) = messages(redis_url, prefix)
    assert message["headers"]["distlock"]["outages"] == 1


def test_what_the_store_has_all_the_same_runs_once(tasks, start, redis_url, prefix, key):
    store = Runtime.of(tasks.app).store
    send = store.calls.send

    def unanswered(request: Any) -> Any:
        send(request)
        raise StoreUnavailableError("the answer was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.calls, "send", unanswered)
        results = [tasks.look.delay(key) for _ in range(3)]
    assert len(messages(redis_url, prefix)) == 3
    start()

    for result in results:
        result.get(timeout=60)
    last = tasks.look.delay(key)
    last.get(timeout=60)
    wait_until(lambda: messages(redis_url, prefix) == [], what="the broker's queue to be empty")
    wait_until(lambda: not store.inspect(key).owner, what="the key to be free")
    assert len(tasks.journal.read(key)) == 4


# Apps of this process


@pytest.fixture
def app(celery_env, prefix):
    app = make_app("sending")
    app.task = partial(app.task, shared=False)
    app.conf.update(distlock_url=f"memory://{uuid.uuid4().hex}", distlock_via="store")
    yield app
    app.close()


def test_eager_calls_are_as_ever(app):
    app.conf.task_always_eager = True
    task = app.task(base=LockedTask, bind=True, lock_key="{key}")(keys_of)

    result = task.apply_async(("k",), countdown=600, lock_via="store")

    assert result.get() == ["k"]


def keys_of(self, key):
    return list(self.lock.keys)


def test_where_locks_are_disabled_calls_go_by_the_broker(app, redis_url, prefix):
    app.conf.distlock_enabled = False
    task = app.task(base=LockedTask, bind=True, lock_key="{key}")(keys_of)

    task.apply_async(("k",), lock_via="store")

    (message,) = messages(redis_url, prefix)
    assert "distlock" not in message["headers"]


def test_an_app_wide_way_is_for_those_tasks_that_can(app, redis_url, prefix):
    task = app.task(base=LockedTask, bind=True, lock_key="{key}", lock_on_conflict="skip")(keys_of)

    task.delay("k")

    (message,) = messages(redis_url, prefix)
    assert "distlock" not in message["headers"]


def test_an_app_wide_way_is_for_calls_of_one_key(app, redis_url, prefix):
    task = app.task(base=LockedTask, bind=True, lock_key=lambda key: key.split())(keys_of)

    task.delay("k1 k2")

    (message,) = messages(redis_url, prefix)
    assert "distlock" not in message["headers"]
    with pytest.raises(ConfigurationError, match="lock_key returned 2"):
        task.apply_async(("k1 k2",), lock_via="store")


@pytest.fixture
def producer(app):
    """The only one that the app has."""
    app.conf.broker_pool_limit = 1
    return app.producer_pool.acquire(block=True)


def check_sent_while_waiting(task: Any, producer: Any, waits: Callable[[], object]) -> None:
    """A call waits for *producer*; one that has it is sent, and may not hang."""
    waiting = Thread(target=task.delay, args=("k",))
    waiting.start()
    wait_until(waits, what="the call to be with the store")
    time.sleep(0.2)  # for it to come to where it waits

    own = Thread(target=task.apply_async, args=(("other",),), kwargs={"producer": producer})
    own.start()
    own.join(10)

    hangs = own.is_alive()
    producer.release()
    waiting.join(10)
    assert not hangs


def test_a_wait_for_a_producer_keeps_no_other_producer_from_being_used(app, producer):
    task = app.task(base=LockedTask, bind=True, lock_key="{key}")(keys_of)

    check_sent_while_waiting(task, producer, lambda: Runtime.of(app).store.inspect("k").runs)


def test_a_wait_for_a_producer_for_an_event_keeps_no_other_event_from_being_sent(app, producer):
    app.conf.task_send_sent_event = True
    task = app.task(base=LockedTask, bind=True, lock_key="{key}")(keys_of)
    store: Any = Runtime.of(app).store
    with Lock("k", store=store):
        check_sent_while_waiting(task, producer, lambda: store.inspect("k").waiting)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"lock_via": "store"}, "lock_via='store'"), ({"lock_unique": "started"}, "lock_unique")],
)
def test_a_store_that_cannot_is_named_by_the_sender(app, monkeypatch, options, named):
    task = app.task(base=LockedTask, bind=True, lock_key="{key}", **options)(keys_of)
    runtime = Runtime.of(app)
    app.finalize()
    lacking = runtime.store.abilities - {Ability.QUEUE}
    monkeypatch.setattr(runtime.store, "abilities", lacking, raising=False)

    needed = f"{named} needs a store that can keep tasks until the key is free, .*; memory://"
    with pytest.raises(ConfigurationError, match=needed):
        task.delay("k")


def test_a_worker_names_what_a_store_cannot(app, monkeypatch):
    task = app.task(base=LockedTask, bind=True, lock_key="{key}", lock_via="store")(keys_of)
    runtime = Runtime.of(app)
    app.finalize()
    assert runtime.plans[task.name].needs(runtime.store) == []
    lacking = runtime.store.abilities - {Ability.QUEUE}
    monkeypatch.setattr(runtime.store, "abilities", lacking, raising=False)

    needs = runtime.plans[task.name].needs(runtime.store)
    assert needs == [("Requeue()", Ability.QUEUE), ("lock_via='store'", Ability.QUEUE)]


# With a secret


def test_what_is_sent_is_signed(app):
    app.conf.update(distlock_secret="a secret of the tests", accept_content=["json"])
    task = app.task(base=LockedTask, bind=True, name="signed", lock_key="{key}")(keys_of)
    runtime = Runtime.of(app)
    store: Any = runtime.store
    with Lock("k", store=store):
        result = task.delay("k")
        (key, run), *others = store.parking.find_parked(result.id)
        assert (key, others) == ("k", [])
        parked = store.parking.parked(key, run)

    woken = WokenTask(slot_name("k"), run, parked.envelope)
    assert runtime.trust.check(woken)["headers"]["id"] == result.id
    spoilt = woken._replace(envelope=parked.envelope.replace(b'"signed"', b'"other."'))
    with pytest.raises(RefusedError, match="not signed"):
        runtime.trust.check(spoilt)
