"""Tasks of which a limited number may wait for their key."""

from __future__ import annotations

import pytest
from celery import chain, chord, group

from celery_distlock.errors import ConfigurationError, LockConflictError, QueueFullError
from celery_distlock.signals import task_refused
from tests.threads import in_threads
from tests.waiting import wait_until

SHARED = True

via_each = pytest.mark.parametrize("via", ["store", "broker"])


def fill(site, key, name="work_of_two", via="store"):
    """Let two tasks wait; return their results."""
    task, results = getattr(site.tasks, name), []
    for number in (1, 2):
        results.append(task.apply_async((key, number), lock_via=via))
        site.wait_queued(key, number)
    return results


def test_a_call_to_a_full_queue_raises_and_sends_nothing(site, key):
    with site.held(key):
        waiting = fill(site, key)
        with pytest.raises(QueueFullError) as raised:
            site.tasks.work_of_two.apply_async((key, 3), lock_via="store")

        assert (raised.value.key, raised.value.max_waiting) == (key, 2)
        assert raised.value.holder == site.look(key).owner
        assert isinstance(raised.value, LockConflictError)
        assert site.unread() == 0
        assert site.look(key).waiting == 2
    for result in waiting:
        result.get(timeout=30)
    site.wait_free(key)
    assert site.tasks.work_of_two.apply_async((key, 4), lock_via="store").get(timeout=30) == 0
    assert site.journal.read(key) == [1, 2, 4]


def test_a_message_for_a_full_queue_fails_where_it_runs(site, key):
    with site.held(key):
        waiting = fill(site, key, via="broker")
        failed = site.tasks.work_of_two.delay(key, 3)

        with pytest.raises(QueueFullError, match="is full, 2 wait"):
            failed.get(timeout=30)
        assert site.look(key).waiting == 2
    for result in waiting:
        result.get(timeout=30)
    assert site.journal.read(key) == [1, 2]


def test_receivers_are_notified_of_a_call_that_is_refused(site, key):
    notified = []

    def note(sender, key, task_id, **_):
        notified.append((sender.name, key, task_id))

    task_refused.connect(note)
    try:
        with site.held(key):
            waiting = fill(site, key)
            with pytest.raises(QueueFullError):
                site.tasks.work_of_two.apply_async((key, 3), lock_via="store", task_id="refused")
    finally:
        task_refused.disconnect(note)

    assert notified == [("work_of_two", key, "refused")]
    for result in waiting:
        result.get(timeout=30)


@via_each
def test_a_task_for_a_full_queue_is_skipped_if_its_policy_says_so(site, key, via):
    with site.held(key):
        waiting = fill(site, key, "work_of_two_or_full", via)

        skipped = site.tasks.work_of_two_or_full.apply_async((key, 3), lock_via=via)

        assert skipped.get(timeout=30) == "full"
        assert site.look(key).waiting == 2
    for result in waiting:
        result.get(timeout=30)
    assert site.journal.read(key) == [1, 2]


@via_each
def test_a_task_for_a_full_queue_is_sent_again_until_there_is_room(site, key, via):
    with site.held(key):
        waiting = fill(site, key, "work_of_two_or_later", via)
        later = site.tasks.work_of_two_or_later.apply_async((key, 3), lock_via=via)
        wait_until(lambda: later.state == "PARKED", what="a conflict")

        assert site.look(key).waiting == 2
    for result in [*waiting, later]:
        assert result.get(timeout=30) == 0
    assert sorted(site.journal.read(key)) == [1, 2, 3]


@via_each
def test_what_canvas_waits_for_is_let_in(site, key, via):
    task = site.tasks.work_of_two.signature
    with site.held(key):
        fill(site, key)

        members = [task((key, number)).set(lock_via=via) for number in (3, 4)]
        whole = chord(members)(site.tasks.total.si([1]))
        several = group(task((key, number)).set(lock_via=via) for number in (5, 6)).delay()
        link = task((key, 7), immutable=True).set(lock_via=via)
        chained = chain(site.tasks.add.si(1, 2), link, site.tasks.add.si(3, 4)).delay()

        site.wait_queued(key, 7)
    assert whole.get(timeout=30) == 1
    assert several.get(timeout=30) == [0, 0]
    assert chained.get(timeout=30) == 7
    wait_until(lambda: len(site.journal.read(key)) == 7, what="all to run")


def test_no_more_than_that_many_wait_however_many_are_called_at_once(site, key):
    calls, refused = iter(range(24)), []

    def call() -> None:
        for number in calls:
            try:
                site.tasks.work_of_two.apply_async((key, number), lock_via="store")
            except QueueFullError:
                refused.append(number)

    with site.held(key):
        in_threads(call)

        assert site.look(key).waiting == 2
        assert len(refused) == 22
    wait_until(lambda: len(site.journal.read(key)) == 2, what="two runs")


def test_a_call_of_several_keys_is_refused(site, key):
    assert site.tasks.work_of_any_keys.delay(key, 1).get(timeout=30) == 0

    with pytest.raises(ConfigurationError, match="bounds the queue of one key"):
        site.tasks.work_of_any_keys.delay(key, 2).get(timeout=30)
