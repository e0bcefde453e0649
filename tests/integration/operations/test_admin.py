"""What an operator sees of locks and queues, and does to them, with workers at work."""

from __future__ import annotations

import pytest
import redis
from celery import chord
from celery.exceptions import ChordError, TaskRevokedError

from celery_distlock.errors import DistlockError, LockLostError
from celery_distlock.keys import Name
from celery_distlock.ops import admin as module
from celery_distlock.ops.admin import Admin
from celery_distlock.stores import AcquireRequest, SendRequest
from celery_distlock.stores.values import ParkRequest, Want
from tests.servers import grant
from tests.waiting import wait_until

WORKERS = [{"concurrency": 2}]
SHARED = True

# Celery's result backend says so of itself, with redis-py 8.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")


@pytest.fixture
def admin(site) -> Admin:
    return Admin(site.app)


def find(admin: Admin, key: str):
    """The one entry of the list with this key."""
    (found,) = [lock for lock in admin.locks() if lock.key == key]
    return found


def test_a_running_task_is_seen_as_the_holder(site, admin, key):
    result = site.tasks.work_requeue.delay(key, None, key)
    site.wait_held(key)

    seen = find(admin, key)

    assert seen.state == "held"
    assert (seen.holder.task, seen.holder.task_id) == ("work_requeue", result.id)
    assert seen.holder.pid in site.workers[0].children()
    assert 0 < seen.remaining <= site.tasks.LEASE
    assert seen.token == site.look(key).token
    site.journal.open(key)
    result.get(timeout=30)


def test_a_lock_of_other_code_is_seen_with_its_process(site, admin, key):
    with site.held(key):
        holder = admin.show(key).holder

    assert holder.task_id == ""
    assert str(holder).endswith(f"on {holder.host}, process {holder.pid}")


def test_a_free_key_is_shown_and_not_listed(site, admin, key):
    assert admin.show(key).state == "free"
    assert admin.show(key).holder is None
    assert key not in [lock.key for lock in admin.locks()]


@pytest.mark.parametrize("pattern", ["{}", "{}*", "*{}", "?{}"])
def test_a_pattern_narrows_the_list(site, admin, key, pattern):
    with site.held(key), site.held(f"x{key}"), site.held(f"{key}x"):
        found = {lock.key for lock in admin.locks(pattern.format(key))}

    assert (
        found
        == {
            "{}": {key},
            "{}*": {key, f"{key}x"},
            "*{}": {key, f"x{key}"},
            "?{}": {f"x{key}"},
        }[pattern]
    )


def test_a_key_too_long_to_be_kept_can_be_looked_up_by_what_the_list_shows(site, admin, key):
    lock = site.lock(key + "x" * 10_000)
    lock.acquire()

    (listed,) = admin.locks(f"{key}*")
    assert isinstance(listed.key, Name)
    assert admin.show(str(listed.key)).token == listed.token
    assert admin.release(str(listed.key)).done

    assert admin.show(listed.key).state == "free"
    with pytest.raises(LockLostError):
        lock.release()


def test_the_queue_names_its_waiters_in_order(site, admin, key):
    with site.held(key):
        results = []
        for number in range(3):
            results.append(site.tasks.work_requeue.delay(key))
            site.wait_queued(key, number + 1)

        queue = admin.queue(key)
        rest = admin.queue(key, first=1, limit=1)

    assert [(each.place, each.kind) for each in queue] == [(n, "parked") for n in range(3)]
    assert [each.who.task_id for each in queue] == [result.id for result in results]
    assert {each.who.task for each in queue} == {"work_requeue"}
    assert [each.since for each in queue] == sorted(each.since for each in queue)
    assert rest == queue[1:2]
    assert [result.get(timeout=30) for result in results] == [0, 0, 0]


def test_calls_behind_many_that_have_come_by_themselves_are_seen_and_dropped(
    site, admin, key, monkeypatch
):
    monkeypatch.setattr(module, "PAGE", 50)
    runs, park_request = (
        [f"task{number}:0:0:0" for number in range(105)],
        ParkRequest(b"", task="t"),
    )
    with site.held(key):
        for number, run in enumerate(runs):
            site.store.calls.send(SendRequest(key, run, park_request, delay=600.0 + number))
        for run in runs[:101]:
            site.store.acquire(AcquireRequest(key, run, 60.0, queue=park_request, run=run))

        delayed = admin.delayed(key, limit=1000)
        queue = admin.queue(key, limit=1000)
        dropped = admin.drop_all(key, force=True)
        left = admin.show(key)

    assert [waiter.who.task_id for waiter in delayed] == [f"task{n}" for n in range(101, 105)]
    assert [waiter.kind for waiter in queue] == 101 * ["parked"] + 4 * ["later"]
    assert len(dropped) == len(runs)
    assert (left.waiting, left.later) == (0, 0)


def test_all_dispatched_runs_are_seen_and_dropped(site, admin, key, monkeypatch):
    monkeypatch.setattr(module, "PAGE", 2)
    want, park_request = Want(1, 5), ParkRequest(b"", task="t")
    admin.limit(key, 0)
    for number in range(5):
        run = f"task{number}:0:0:0"
        site.store.acquire(AcquireRequest(key, run, 60.0, queue=park_request, run=run, want=want))
    site.store.units.set_limit(key, None)  # and send none of them

    kinds = [waiter.kind for waiter in admin.queue(key)]
    dropped = admin.drop_all(key, force=True)

    assert kinds == 5 * ["woken"]
    assert len(dropped) == 5
    assert admin.show(key).woken == 0


def test_a_released_key_goes_to_the_next_and_its_holder_finds_out(site, admin, key):
    held = site.tasks.catch_loss.delay(key)
    before = site.wait_held(key)
    waiting = site.tasks.work_requeue.delay(key, None, key)
    site.wait_queued(key)

    done = admin.release(key)

    assert done.done
    assert done.before.holder.task_id == held.id
    assert done.before.token == before.token
    assert done.after.holder.task_id == waiting.id
    assert held.get(timeout=30)["token"] == before.token
    site.journal.open(key)
    assert waiting.get(timeout=30) == 0


def test_nothing_is_released_without_a_holder(site, admin, key):
    assert not admin.release(key).done


def test_a_dropped_task_is_revoked_and_the_others_go_on(site, admin, key):
    with site.held(key):
        dropped = site.tasks.work_requeue.delay(key, "dropped")
        site.wait_queued(key, 1)
        kept = site.tasks.work_requeue.delay(key, "kept")
        site.wait_queued(key, 2)

        (done,) = admin.drop(dropped.id)

        assert (done.key, done.task, done.task_id) == (key, "work_requeue", dropped.id)
        assert admin.show(key).waiting == 1
    with pytest.raises(TaskRevokedError, match=r"by \S+@\S+$"):
        dropped.get(timeout=30)
    assert kept.get(timeout=30) == 0
    assert site.journal.read(key) == ["kept"]


def test_a_task_is_dropped_at_a_key_that_is_named(site, admin, key):
    with site.held(key):
        dropped = site.tasks.work_requeue.delay(key)
        site.wait_queued(key, 1)

        assert admin.drop(dropped.id, "another") == []
        assert [each.key for each in admin.drop(dropped.id, key)] == [key]


def test_a_chord_whose_member_is_dropped_fails_and_does_not_hang(site, admin, key):
    with site.held(key):
        header = [site.tasks.square.s(key, 2), site.tasks.square.s(f"other-{key}", 2)]
        result = chord(header)(site.tasks.total.s())
        site.wait_queued(key, 1)

        assert admin.drop(result.parent.results[0].id)

    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=30)


def test_a_task_that_runs_is_not_dropped(site, admin, key):
    result = site.tasks.work_requeue.delay(key, None, key)
    site.wait_held(key)

    assert admin.drop(result.id) == []

    site.journal.open(key)
    assert result.get(timeout=30) == 0


def test_a_woken_task_whose_message_is_lost_is_sent_again_at_once(site, bare_site, admin, key):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        site.wait_queued(key, 1)
        site.forget_channel(key)
        publishers = site.store.publishers
        known, publishers.known = publishers.known, (lambda wake: None,)
    try:
        lost = admin.show(key)
        assert (lost.state, lost.holder.task_id, lost.woken) == ("waking", result.id, 1)
        assert [each.kind for each in admin.queue(key)] == ["woken"]
    finally:
        publishers.known = known

    assert admin.wake(key) == 1

    assert result.get(timeout=30) == 0
    wait_until(lambda: not admin.show(key).woken, what="nothing to be in flight")
    assert admin.wake(key) == 0


def test_a_task_is_not_dropped_for_another_whose_id_begins_alike(site, admin, key):
    with site.held(key):
        result = site.tasks.work_requeue.apply_async([key], task_id=f"{key}:42")
        site.wait_queued(key, 1)

        assert admin.drop(key) == []

    assert result.get(timeout=30) == 0


def test_a_task_that_comes_to_its_key_while_it_is_dropped_is_left_alone(
    site, admin, key, monkeypatch
):
    store = site.store
    parked = store.parking.parked

    def parked_and_claimed_then(at, run):
        found = parked(at, run)
        monkeypatch.setattr(store.parking, "parked", parked)
        lock.release()
        wait_until(lambda: site.look(at).run == run and site.journal.read(key), what="it to run")
        return found

    lock = site.lock(key)
    lock.acquire()
    result = site.tasks.work_requeue.delay(key, "begun", key)
    site.wait_queued(key, 1)
    monkeypatch.setattr(store.parking, "parked", parked_and_claimed_then)

    assert admin.drop(result.id, key) == []

    site.journal.open(key)
    assert result.get(timeout=30) == 0


def test_a_message_that_cannot_be_read_is_listed_and_can_be_dropped(site, admin, key):
    run = f"{key}:0:0:0"
    with site.held(key):
        site.store.acquire(
            AcquireRequest(key, "o", 1.0, queue=ParkRequest(b"\xff not ours"), run=run)
        )

        (waiter,) = admin.queue(key)
        assert (waiter.who.task, waiter.who.task_id) == ("", key)
        assert [each.task_id for each in admin.drop(key)] == [key]

    assert site.tasks.work_requeue.AsyncResult(key).state == "REVOKED"


def test_a_dropped_task_whose_result_cannot_be_stored_is_named(site, admin, key, monkeypatch):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        site.wait_queued(key, 1)
        monkeypatch.setattr(site.app.backend, "mark_as_revoked", lambda *_, **__: {}["away"])

        with pytest.raises(DistlockError, match=f"{result.id}.*was dropped.*not be stored"):
            admin.drop(result.id)


def test_another_s_record_under_the_prefix_does_not_hide_the_others(site, admin, key):
    with redis.Redis.from_url(site.app.conf.result_backend) as client, site.held(key):
        others = site.record(f"bad-{key}"), site.record(key).encode().replace(b"key", b"\xff")
        client.set(others[0], "no hash")
        client.hset(others[1], "x", grant("o"))
        try:
            assert [lock.key for lock in admin.locks(f"*{key}")] == [key]
        finally:
            client.delete(*others)
