"""A call is not sent while one like it is there, and nothing is left behind that says it is."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, chain, chord, group, signals
from kombu import Queue

from celery_distlock import signals as lock_signals
from celery_distlock.errors import ConfigurationError, DuplicateTaskError, StoreUnavailableError
from celery_distlock.ops.admin import Admin
from celery_distlock.runtime.app import Runtime
from celery_distlock.unique import rule_of
from tests.threads import in_threads
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.worker.conftest import Site

SHARED = True

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's backend


def runs(site: Site, key: str) -> list[Any]:
    return site.journal.read(key)


# Until it has started


def test_a_call_while_one_waits_is_that_one(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        first, second = task.delay(key, 1), task.delay(key, 1)
        assert site.look(key).waiting == 1

    assert (first.joined, second.joined) == (False, True)
    assert first.id == second.id
    assert second.get(timeout=30) == 0
    assert runs(site, key) == [1]


def test_other_arguments_are_another_call(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        results = [task.delay(key, number) for number in (1, 2, 1, 2)]
        assert site.look(key).waiting == 2

    for result in results:
        result.get(timeout=30)
    assert runs(site, key) == [1, 2]


def test_arguments_by_name_are_the_same_call(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        first = task.delay(key, 1)
        second = task.apply_async(kwargs={"note": 1, "gate": "", "key": key})

    assert second.id == first.id
    first.get(timeout=30)


@pytest.mark.parametrize("by", ["name", "object"])
def test_a_call_to_a_queue_that_this_process_has_not_configured_is_compared(site, key, by):
    task, queue = site.tasks.work_once["started"], f"of-{by}-{key}"
    with site.held(key):
        first, second = [
            task.apply_async((key, 1), queue=queue if by == "name" else Queue(queue))
            for _ in range(2)
        ]
        assert site.look(key).waiting == 1
        site.app.control.add_consumer(queue, reply=True, timeout=10.0, limit=len(site.workers))

    assert (first.joined, second.joined) == (False, True)
    assert second.get(timeout=30) == 0
    assert runs(site, key) == [1]


def test_queue_and_priority_are_not_compared(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        first = task.delay(key, 1)
        second = task.apply_async((key, 1), queue=f"not-consumed-{key}", priority=9)

    assert (second.id, second.joined) == (first.id, True)
    assert second.get(timeout=30) == 0


def test_of_many_calls_while_one_runs_one_more_runs(site, key):
    task = site.tasks.work_once["started"]
    running = task.delay(key, "same", key)
    site.journal.wait(key)

    later = [task.delay(key, "same", key) for _ in range(20)]

    assert {result.id for result in later} != {running.id}
    assert len({result.id for result in later}) == 1
    site.journal.open(key)
    later[0].get(timeout=30)
    assert runs(site, key) == ["same", "same"]


def test_a_delayed_call_is_there(site, key):
    task = site.tasks.work_once["started"]
    first = task.apply_async((key, 1), countdown=600)

    assert task.delay(key, 1).id == first.id
    assert Admin(site.app).drop(first.id)


def test_of_calls_at_once_one_is_sent(site, key):
    task = site.tasks.work_once["started"]
    ids: set[str] = set()

    def call() -> None:
        ids.update(task.delay(key, 1).id for _ in range(10))

    with site.held(key):
        in_threads(call)
        assert len(ids) == 1
        assert site.look(key).waiting == 1

    site.app.AsyncResult(ids.pop()).get(timeout=30)


# Until it has finished


def test_a_task_that_calls_itself_says_that_it_is_joined_to_itself(site, key):
    result = site.tasks.send_itself.delay(key)

    assert result.get(timeout=30) == [True, True]
    assert f"[{result.id}] called itself and is unique until it has finished" in site.log()


def test_a_call_while_one_runs_is_that_one(site, key):
    task = site.tasks.work_once["finished"]
    running = task.delay(key, 1, key)
    site.journal.wait(key)

    joined = task.delay(key, 1, key)

    assert joined.id == running.id
    site.journal.open(key)
    assert joined.get(timeout=30) == 0
    site.wait_free(key)
    again = task.delay(key, 1, key)
    assert again.id != running.id
    again.get(timeout=30)
    assert runs(site, key) == [1, 1]


def test_a_retry_is_the_same(site, key):
    task = site.tasks.retry_once
    first = task.delay(key)
    site.journal.wait(key)
    ids = set()
    while not first.ready():
        ids.add(task.delay(key).id)

    assert first.get(timeout=30) == 2
    assert first.id in ids
    assert len(ids) <= 2  # the last one may have come when it had ended
    for task_id in ids:
        site.app.AsyncResult(task_id).get(timeout=30)


def test_a_call_within_so_many_seconds_is_the_one_before(site, key):
    task = site.tasks.work_once["seconds"]
    first = task.delay(key, 1)
    first.get(timeout=30)
    site.wait_free(key)

    assert task.delay(key, 1).id == first.id
    assert runs(site, key) == [1]


@pytest.mark.parametrize("rule", [0.5, "started", "finished"])
def test_a_deploy_that_shortens_those_seconds_counts_at_once(site, key, monkeypatch, rule):
    task = site.tasks.work_once["seconds"]
    task.delay(key, 1).get(timeout=30)
    site.wait_free(key)
    plan = Runtime.of(site.app).plan_of(task)
    shorter = replace(plan, unique=rule_of("lock_unique", rule))
    monkeypatch.setitem(Runtime.of(site.app).plans, task.name, shorter)

    again = task.delay(key, 1)

    assert not again.joined
    again.get(timeout=30)
    assert runs(site, key) == [1, 1]


# Updates


def test_an_updated_call_keeps_its_place_and_runs_with_what_came_last(site, key):
    task = site.tasks.work_once["update"]
    with site.held(key):
        first = task.delay(key, "old")
        other = site.tasks.work_requeue.apply_async((key, "other"), lock_via="store")
        for number in range(5):
            updated = task.delay(key, f"new {number}")
        assert site.look(key).waiting == 2

    assert updated.id == first.id
    assert updated.joined
    other.get(timeout=30)
    assert runs(site, key) == ["new 4", "other"]


def test_a_call_while_one_runs_is_not_lost(site, key):
    task = site.tasks.work_once["update"]
    task.delay(key, "first", key)
    site.journal.wait(key)

    later = [task.delay(key, f"later {number}") for number in range(3)]

    site.journal.open(key)
    for result in later:
        result.get(timeout=30)
    assert runs(site, key) == ["first", "later 2"]


def test_an_update_takes_the_place_of_a_retry_that_waits(site, key):
    task = site.tasks.retry_late
    first = task.delay(key, "fails")
    wait_until(lambda: first.state == "RETRY", what="it to wait for its next attempt")

    updated = task.delay(key, "newest")

    assert (updated.id, updated.joined) == (first.id, True)
    assert updated.get(timeout=30) == "newest"
    assert runs(site, key) == [["fails", 0], ["newest", 1]]
    assert site.look(key).later == 0


def test_an_update_that_the_store_refuses_is_sent_by_the_broker(site, key, monkeypatch):
    task = site.tasks.work_once["update"]
    with site.held(key):
        first = task.delay(key, "old")

        def refuse(_: Any) -> None:
            raise StoreUnavailableError("the store is full")

        with monkeypatch.context() as patch:
            patch.setattr(Runtime.of(site.app).store.calls, "send", refuse)
            second = task.delay(key, "new")

    assert (second.id != first.id, second.joined) == (True, False)
    for result in (first, second):
        result.get(timeout=30)
    assert sorted(runs(site, key)) == ["new", "old"]


def test_an_update_without_a_countdown_makes_it_due(site, key):
    task = site.tasks.work_once["update"]
    first = task.apply_async((key, "late"), countdown=600)

    assert task.delay(key, "now").id == first.id

    first.get(timeout=30)
    assert runs(site, key) == ["now"]


# Raising


def test_a_second_call_raises(site, key):
    task = site.tasks.work_once["raise"]
    with site.held(key):
        first = task.delay(key, 1)
        with pytest.raises(DuplicateTaskError, match=first.id) as raised:
            task.delay(key, 1)

    assert raised.value.task_id == first.id
    first.get(timeout=30)


def test_a_link_that_is_a_second_call_leaves_the_task_before_it_its_success(site, key):
    task = site.tasks.work_once["raise"]
    with site.held(key):
        first = task.delay(key, 1)

        before = site.tasks.add.apply_async((1, 2), link=task.si(key, 1))

        assert before.get(timeout=30) == 3
    first.get(timeout=30)
    assert runs(site, key) == [1]


# What is alike


def test_parameters_may_have_any_names(site, key):
    task = site.tasks.tell
    calls = [["a", "b", 1], ["a", "b", 2], ["a", "c", 1], ["d", "b", 1]]
    with site.held(key):
        results = [task.delay(key, *call) for call in calls]
        assert site.look(key).waiting == 4

    assert [result.get(timeout=30) for result in results] == calls


@pytest.mark.parametrize("note", ["same", "lone \udc80", "{braces} 100 %", "x" * 1000])
def test_what_is_alike_is_so_for_one_task(site, key, note):
    one, other = (site.tasks.by_note[name] for name in ("one", "other"))
    with site.held(key):
        results = [task.delay(key, note) for task in (one, other, one)]
        assert site.look(key).waiting == 2
        shown = [call.identity for call in Admin(site.app).calls(key)]

    assert [result.joined for result in results] == [False, False, True]
    if len(note) < 100:
        assert shown == [f"by_note_one:{note}", f"by_note_other:{note}"]
    for result in results:
        result.get(timeout=30)


# What it does not serve


def test_a_call_does_not_go_with_one_that_has_expired(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        first = task.apply_async((key, 1), expires=0.2)
        wait_until(lambda: not site.look(key).identities, what="the first one to expire")
        second = task.delay(key, 1)

    assert (second.joined, second.get(timeout=30)) == (False, 0)
    wait_until(lambda: first.state == "REVOKED", what="the first one to expire")


def test_a_call_that_lasts_longer_is_sent_in_addition_to_one_that_may_expire(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        first = task.apply_async((key, 1), expires=600)
        same = task.apply_async((key, 1), expires=600)
        longer = task.delay(key, 1)
        last = task.apply_async((key, 1), expires=600)
        assert site.look(key).waiting == 2

    assert (same.id, longer.joined, last.id) == (first.id, False, longer.id)
    for result in (first, longer):
        assert result.get(timeout=30) == 0


def test_calls_that_expire_are_one_also_when_it_is_in_flight(site, key):
    task = site.tasks.work_once["finished"]

    ids = {task.apply_async((key, 1, key), expires=600).id for _ in range(5)}

    assert len(ids) == 1
    site.journal.open(key)
    assert site.app.AsyncResult(ids.pop()).get(timeout=30) == 0


def test_a_call_that_wants_its_result_is_sent_in_addition_to_one_that_does_not(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        first = task.apply_async((key, 1), ignore_result=True)
        second = task.delay(key, 1)

    assert (first.id != second.id, second.joined) == (True, False)
    assert second.get(timeout=30) == 0


def test_no_caller_waits_for_a_result_that_is_not_stored(site, key):
    task = site.tasks.work_once["finished"]
    task.apply_async((key, 1, key), ignore_result=True)
    site.journal.wait(key)

    second = task.delay(key, 1, key)

    assert second.joined
    assert second.get(timeout=30) is None
    site.journal.open(key)


# What is put back


@pytest.mark.parametrize("name", ["fail_once_for_all", "postpone_once"])
def test_one_that_is_put_back_is_the_same(site, key, name):
    task = getattr(site.tasks, name)
    first = task.delay(key, f"gate:{key}")
    wait_until(lambda: len(runs(site, key)) == 2 or site.look(key).waiting, what="it to wait again")

    second = task.delay(key, f"gate:{key}")
    wait_until(lambda: len(runs(site, key)) == 2, what="it to run again")
    third = task.delay(key, f"gate:{key}")

    site.journal.open(f"gate:{key}")
    assert {first.id} == {second.id, third.id} == set(runs(site, key))
    assert third.get(timeout=30) == "done"


# What is never joined


def test_a_call_with_its_own_id_is_sent(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        task.delay(key, 1)
        mine = task.apply_async((key, 1), task_id=f"mine-{key}")
        assert site.look(key).waiting == 2

    assert mine.get(timeout=30) == 0


def test_a_call_with_a_link_is_sent(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        task.delay(key, 1)
        linked = task.apply_async((key, 1), link=site.tasks.work_requeue.si(f"{key}:linked", 2))

    linked.get(timeout=30)
    site.journal.wait(f"{key}:linked")


def test_a_call_may_be_sent_in_any_case(site, key):
    task = site.tasks.work_once["started"]
    with site.held(key):
        results = [task.delay(key, 1), task.apply_async((key, 1), lock_unique=None)]
        assert site.look(key).waiting == 2

    assert not any(result.joined for result in results)
    for result in results:
        result.get(timeout=30)
    with pytest.raises(ConfigurationError, match="can only be None"):
        task.apply_async((key, 1), lock_unique="started")


def test_a_call_of_several_keys_is_sent_if_it_is_sent_in_any_case(site, key):
    task, keys = site.tasks.work_once_split, f"{key}:a {key}:b"
    with pytest.raises(ConfigurationError, match=r"lock_key returned 2; .*lock_unique=None"):
        task.delay(keys, 1)
    with site.held(f"{key}:b"):
        result = task.apply_async((keys, 1), lock_unique=None)
        site.wait_queued(f"{key}:b")

    assert result.get(timeout=30) == 0
    assert site.journal.read(keys) == [1]


def test_a_chord_of_equal_members_completes(site, key):
    once = site.tasks.square_once

    result = chord([once.s(key, 3) for _ in range(4)])(site.tasks.total.s())

    assert result.get(timeout=60) == 36


def test_a_group_and_a_chain_of_equal_members_complete(site, key):
    once = site.tasks.square_once
    with site.held(key):
        once.delay(key, 3)
        together = group(once.s(key, 3) for _ in range(3)).delay()
        row = chain(once.si(key, 3), once.si(key, 3)).delay()

    assert together.get(timeout=60) == [9, 9, 9]
    assert row.get(timeout=60) == 9


@pytest.mark.parametrize("name", ["update", "debounce"])
def test_what_hangs_on_a_call_is_not_lost_by_an_update(site, key, name):
    task = site.tasks.work_once[name]
    after = site.tasks.work_requeue.si(f"{key}:after")
    with site.held(key):
        row = chain(task.si(key, "first"), after.clone()).delay()
        linked = task.apply_async((key, "second"), link=after.clone())
        last = task.delay(key, "last")
        assert task.delay(key, "newest").id == last.id

    for result in (row, linked, last):
        result.get(timeout=30)
    wait_until(lambda: len(runs(site, f"{key}:after")) == 2, what="what hangs on them to run")
    assert sorted(runs(site, key)) == ["first", "newest", "second"]


# What sees it


def test_no_receiver_of_before_task_publish_sees_an_id_that_does_not_run(site, key):
    task, seen = site.tasks.work_once["started"], []

    def note(headers: dict[str, Any], **_: Any) -> None:
        seen.append(headers["id"])

    signals.before_task_publish.connect(note)
    try:
        with site.held(key):
            first = task.delay(key, 1)
            for _ in range(3):
                task.delay(key, 1)
    finally:
        signals.before_task_publish.disconnect(note)

    assert seen == [first.id]
    first.get(timeout=30)


@pytest.mark.parametrize(
    ("name", "signal"),
    [("started", lock_signals.task_joined), ("update", lock_signals.task_updated)],
)
def test_receivers_are_notified_of_a_call_that_is_another_one(site, key, name, signal):
    task, notified = site.tasks.work_once[name], []

    def note(sender: Any, key: str, task_id: str, **_: Any) -> None:
        notified.append((sender.name, key, task_id))

    signal.connect(note)
    try:
        with site.held(key):
            first = task.delay(key, 1)
            task.delay(key, 1)
    finally:
        signal.disconnect(note)

    assert notified == [(task.name, key, first.id)]
    first.get(timeout=30)


def test_a_message_from_elsewhere_gets_the_rules_result(site, key):
    task = site.tasks.work_once["result"]
    running = task.delay(key, 1, key)
    site.journal.wait(key)

    second = site.app.send_task(task.name, (key, 1, key))

    assert second.get(timeout=30) == "there was one"
    site.journal.open(key)
    running.get(timeout=30)
    assert runs(site, key) == [1]


def test_a_message_from_elsewhere_is_revoked_if_the_rule_has_no_result(site, key):
    task = site.tasks.work_once["finished"]
    running = task.delay(key, 1, key)
    site.journal.wait(key)

    second = site.app.send_task(task.name, (key, 1, key))

    wait_until(lambda: second.state == "REVOKED", what="the second one to be revoked")
    assert running.id in str(second.result)
    site.journal.open(key)
    running.get(timeout=30)
    assert runs(site, key) == [1]


def test_what_canvas_waits_for_runs_though_it_came_from_elsewhere(site, key):
    once = site.tasks.work_once["finished"]
    running = once.delay(key, 1, key)
    site.journal.wait(key)
    elsewhere = Celery("elsewhere", set_as_current=False)
    elsewhere.conf.update(site.app.conf.changes)
    member = elsewhere.signature(once.name, (key, 1, key), immutable=True)
    linked = elsewhere.signature(site.tasks.work_requeue.name, (f"{key}:linked",), immutable=True)

    results = [
        member.clone().apply_async(link=linked.clone()),
        chain(member.clone(), linked.clone(), app=elsewhere).apply_async(),
        chord([member.clone()], linked.clone(), app=elsewhere).apply_async(),
    ]

    site.wait_queued(key, 3)
    site.journal.open(key)
    running.get(timeout=30)
    for result in results:
        result.get(timeout=60)
    wait_until(lambda: len(runs(site, f"{key}:linked")) == 3, what="what hangs on them to run")


def test_a_message_from_elsewhere_runs_if_there_is_none(site, key):
    task = site.tasks.work_once["finished"]

    assert site.app.send_task(task.name, (key, 1)).get(timeout=30) == 0


def test_a_call_that_the_store_could_not_judge_runs(site, key, monkeypatch):
    task = site.tasks.work_once["finished"]
    running = task.delay(key, 1, key)
    site.journal.wait(key)

    def unanswered(*_: str) -> None:
        raise StoreUnavailableError("the store is unreachable")

    with monkeypatch.context() as patch:
        patch.setattr(Runtime.of(site.app).store.calls, "peek", unanswered)
        second = task.delay(key, 1, key)
    wait_until(lambda: second.state != "PENDING", what="it to be judged by the worker")
    site.journal.open(key)

    assert second.id != running.id
    assert second.get(timeout=30) == 0
    assert runs(site, key) == [1, 1]


# Nothing is left behind


def test_a_killed_task_leaves_its_identity(site, key):
    task = site.tasks.sleep_once
    killed = task.delay(key)
    (pid,) = site.journal.wait(key)

    os.kill(pid, signal.SIGKILL)

    begin = time.monotonic()
    wait_until(lambda: not site.look(key).token, what="the key to be free")
    again = task.apply_async((key,))
    assert again.id != killed.id
    assert time.monotonic() - begin < 10
    again.revoke(terminate=True)
    site.wait_free(key)


def test_a_task_over_its_hard_time_limit_leaves_its_identity(site, key):
    task = site.tasks.sleep_once
    first = task.delay(key)
    site.journal.wait(key)
    assert task.delay(key).id == first.id
    site.wait_free(key)

    again = task.delay(key)

    assert again.id != first.id
    again.revoke(terminate=True)
    site.wait_free(key)


@pytest.mark.parametrize("how", ["dropped", "revoked", "expired"])
def test_one_that_does_not_run_leaves_its_identity(site, key, how):
    task = site.tasks.work_once["started"]
    with site.held(key):
        options = {"expires": 0.3} if how == "expired" else {}
        first = task.apply_async((key, 1), **options)
        if how == "dropped":
            assert Admin(site.app).drop(first.id)
        elif how == "revoked":
            first.revoke()
            for worker in site.workers:
                worker.wait_log(f"Tasks flagged as revoked: {first.id}")
        else:
            after = time.monotonic() + 0.5
            wait_until(lambda: time.monotonic() > after, what="the expiry")
    wait_until(lambda: first.state == "REVOKED", what="the first one to be revoked")
    site.wait_free(key)

    second = task.delay(key, 1)

    assert second.id != first.id
    assert second.get(timeout=30) == 0
    assert runs(site, key) == [1]
