"""An intruder in the lock store has a way to the locks, and none to the workers or the broker."""

from __future__ import annotations

import base64
import json
import os
import pickle
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kombu import Exchange, Queue

from celery_distlock.errors import DistlockError
from celery_distlock.ops.admin import Admin
from celery_distlock.runtime.app import Runtime
from tests.waiting import wait_until
from tests.worker.conftest import Locks
from tests.worker.intruder import Intruder, envelope, parked_as

if TYPE_CHECKING:
    from collections.abc import Iterator

APP = "tests.apps.trusting"
WORKERS = [
    {"args": ("-Q", "celery,by-route")},
    {"args": ("-Q", "ad-hoc,misnamed")},
]


class Bomb:
    def __init__(self, note: str) -> None:
        self.note = note

    def __reduce__(self):
        return os.mkdir, (self.note,)


@pytest.fixture
def intruder(site) -> Iterator[Intruder]:
    intruder = Intruder(site)
    yield intruder
    intruder.close()


REMOTE_CONTROL = {"method": "shutdown", "arguments": {}, "destination": None}
HOSTILE = {
    "a task that is not locked": (lambda note: envelope("wipe", note), "no locked task"),
    "a task that there is not": (lambda note: envelope("tasks.nowhere", note), "no locked task"),
    "a task of Celery's own": (lambda note: envelope("celery.backend_cleanup"), "no locked task"),
    "a task whose name is a list": (lambda note: envelope(["work"], note), "it is not a message"),
    "another app's queue": (
        lambda note: envelope("work", note, routing_key="others"),
        "no such queue: 'others'",
    ),
    "another exchange": (
        lambda note: envelope("work", note, exchange="others", routing_key="celery"),
        "no such queue: exchange 'others', 'celery'",
    ),
    "a wrong routing key": (
        lambda note: envelope("work", note, exchange="celery", routing_key="others"),
        "no such queue: exchange 'celery', 'others'",
    ),
    "remote control": (
        lambda note: envelope(
            "work",
            exchange="celery.pidbox",
            routing_key="",
            body=base64.b64encode(json.dumps(REMOTE_CONTROL).encode()).decode(),
        ),
        "no such queue: exchange 'celery.pidbox', ''",
    ),
    "one worker's mailbox": (
        lambda note: envelope("work", routing_key="worker@here.celery.pidbox"),
        "no such queue: 'worker@here.celery.pidbox'",
    ),
    "events": (
        lambda note: envelope("work", exchange="celeryev", routing_key="worker.heartbeat"),
        "no such queue: exchange 'celeryev'",
    ),
    "a pickle": (
        lambda note: envelope(
            "work",
            content_type="application/x-python-serialize",
            content_encoding="binary",
            text=False,
            body=base64.b64encode(pickle.dumps(Bomb(note))).decode(),
        ),
        "accept_content does not have its content type",
    ),
    "an unknown compression": (
        lambda note: json.dumps(
            {
                **(made := json.loads(envelope("work", note))),
                "headers": {**made["headers"], "compression": "nothing-like-it"},
            }
        ).encode(),
        "it is not a message",
    ),
    "no message": (lambda note: b"{[", "it is not a message"),
    "no headers": (lambda note: b'{"headers": 1}', "it is not a message"),
    "no object": (lambda note: b"[]", "it is not a message"),
}


@pytest.mark.parametrize("made", HOSTILE)
def test_what_the_app_would_not_have_parked_is_neither_sent_nor_lost(
    site, intruder, key, tmp_path, made
):
    make, words = HOSTILE[made]
    note = str(tmp_path / "note")
    left = make(note)

    run = intruder.park(key, left)
    if words == "it is not a message":  # it is not sent, so it is looked at ever less often
        wait_until(lambda: run in site.log(), what="it to be logged")
    else:
        intruder.wait_left(key, run)

    assert words in site.log()
    assert intruder.parked(key) == {run: left}
    assert site.journal.read(note) == []
    assert not Path(note).exists()
    assert not intruder.keys(f"{site.env['DISTLOCK_TEST_PREFIX']}:broker:others*")
    assert all(worker.running for worker in site.workers)
    assert "Traceback" not in site.log()


def test_one_that_is_not_sent_is_reported_once_and_keeps_its_key_for_a_while_only(
    site, intruder, key
):
    task = f"tasks.{uuid.uuid4().hex}"
    left = intruder.park(key, envelope(task))
    for worker in site.workers:
        worker.wait_log(task)

    assert site.tasks.work.delay(key, "next").get(timeout=30) == "next"

    assert [worker.log().count(task) for worker in site.workers] == [1, 1]
    assert left in intruder.parked(key)


@pytest.mark.parametrize("made", HOSTILE)
def test_a_channel_takes_only_locked_tasks_of_its_app(site, intruder, key, tmp_path, made):
    note = str(tmp_path / "note")

    for channel in intruder.channels():  # each serves in order, and has one process
        intruder.push(channel, key, HOSTILE[made][0](note))
        after = f"{uuid.uuid4()}:0:0:0"
        intruder.push(channel, key, parked_as(after, key, envelope("work", key, "after it")), after)
    site.journal.wait(key, 2)

    assert site.journal.read(note) == []
    assert not Path(note).exists()
    assert "Traceback" not in site.log()


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's result backend
def test_an_operator_drops_what_no_process_sends(site, intruder, key):
    task_id = str(uuid.uuid4())
    intruder.park(key, b"{[", f"{task_id}:0:0:0")

    (dropped,) = Admin(site.app).drop(task_id)

    assert (dropped.key, dropped.task_id) == (key, task_id)
    assert intruder.parked(key) == {}


# What the app has parked itself is sent


def park_by_broker(site, key, task, **options):
    """Have *task* parked at *key*, so that it comes by the broker; return its result."""
    result = task.apply_async((key, "ran"), **options)
    site.wait_queued(key)
    site.forget_channel(key)
    return result


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("work", {}),
        ("routed", {}),
        ("work", {"queue": "ad-hoc"}),
        ("work", {"exchange": "ad-hoc", "routing_key": "ad-hoc"}),
    ],
    ids=["default queue", "queue of task_routes", "queue of the call", "exchange of the call"],
)
def test_a_task_of_any_queue_that_a_worker_consumes_comes_back(site, key, task, options):
    with site.held(key):
        result = park_by_broker(site, key, site.tasks.app.tasks[task], **options)

    assert result.get(timeout=30) == "ran"
    assert site.journal.read(key) == ["ran"]


def test_a_task_of_a_queue_that_the_waker_does_not_know_is_sent_by_its_consumer(site, key, caplog):
    with site.held(key):
        result = park_by_broker(site, key, site.tasks.work, queue="ad-hoc")
        dict.pop(site.app.amqp.queues, "ad-hoc")  # a sender of a task to it knows it from then on

    assert "another process may" in caplog.text
    assert "no such queue: 'ad-hoc'" in caplog.text
    assert result.get(timeout=30) == "ran"
    assert site.journal.read(key) == ["ran"]


def test_a_task_that_came_by_an_exchange_which_its_worker_does_not_know_waits_where_it_is(
    site, key
):
    queue = Queue("misnamed", Exchange("elsewhere", type="topic"), "stock.#")
    with site.held(key):
        result = site.tasks.work.apply_async((key, "ran"), queue=queue, routing_key="stock.books")
        site.workers[1].wait_log("it came by exchange 'elsewhere' with routing key 'stock.books'")
        site.wait_queued(key)
        assert site.store.waiters(key)[0].run == ""

    assert result.get(timeout=30) == "ran"


def test_an_operator_gets_the_reason_when_this_process_does_not_send_a_woken_task(
    site, intruder, key
):
    intruder.park(key, envelope("wipe", key))

    with pytest.raises(DistlockError, match="its task is no locked task of this app: 'wipe'"):
        Admin(site.app).wake(key)


def test_what_a_message_says_of_its_own_way_here_is_not_believed(site, intruder, key):
    header = {"pushed": True, "shown": True, "body": "another", "delivery_address": "elsewhere"}
    with site.held(key):
        result = site.tasks.work.apply_async((key, "ran"), distlock=header)
        site.wait_queued(key)
        site.forget_channel(key)

    assert result.get(timeout=30) == "ran"
    unacknowledged = f"{site.env['DISTLOCK_TEST_PREFIX']}:broker:unacked"
    wait_until(lambda: not intruder.keys(unacknowledged), what="the broker to know")


def test_a_task_that_an_old_worker_does_not_know_waits_for_a_new_one(
    worker, load_app, celery_env, monkeypatch
):
    new = load_app(APP)
    new.app.finalize()  # or the task would be declared again when it is looked for
    site, key = Locks(new.app), uuid.uuid4().hex
    parker = worker(APP)
    with site.held(key):
        new.fresh.apply_async((key, "ran"), ignore_result=True)
        site.wait_queued(key)
        with closing(Intruder(site)) as store:
            unacknowledged = f"{celery_env['DISTLOCK_TEST_PREFIX']}:broker:unacked"
            wait_until(lambda: not store.keys(unacknowledged), what="the broker to know")
        parker.stop()
        # Of another queue: what comes to it from the broker, Celery would discard.
        old = worker(APP, env={"DISTLOCK_TEST_RELEASE": "old"}, args=("-Q", "another"))
        monkeypatch.delitem(Runtime.of(new.app).plans, "fresh")  # nor does the releaser of the key
    old.wait_log("its task is no locked task of this app: 'fresh'")

    worker(APP)

    assert new.journal.wait(key) == ["ran"]
    assert "Received unregistered task" not in old.log()
    new.journal.close()
