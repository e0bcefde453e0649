"""What becomes of a task that finds its key taken, and what it leaves behind."""

from __future__ import annotations

import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery.result import AsyncResult

from celery_distlock.errors import LockConflictError
from celery_distlock.naming import holder_name
from tests.waiting import wait_until

SHARED = True


def wait_state(result: AsyncResult, state: str) -> None:
    wait_until(lambda: result.state == state, what=f"{state} of {result!r}")


# requeue


def test_requeue_is_the_default(site, key):
    with site.held(key):
        result = site.tasks.count.delay(key)
        wait_state(result, "PARKED")

    result.get(timeout=30)


def test_a_parked_task_reports_its_key_the_holder_and_its_place(site, key):
    with site.held(key):
        first = site.tasks.work_requeue.delay(key)
        site.wait_queued(key, 1)
        second = site.tasks.work_requeue.delay(key)
        site.wait_queued(key, 2)
        holder = site.look(key).owner

        assert first.state == second.state == "PARKED"
        assert first.info == {"key": key, "holder": holder, "place": 0}
        assert second.info == {"key": key, "holder": holder, "place": 1}

    first.get(timeout=30)
    second.get(timeout=30)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # by Celery's backend
@pytest.mark.parametrize("when", ["before it is parked", "while it is parked"])
def test_a_task_that_is_aborted_stays_so(site, key, when):
    task, task_id = site.tasks.abortable, uuid.uuid4().hex
    with site.held(key):
        if when == "before it is parked":
            task.AsyncResult(task_id).abort()
        result = task.apply_async((key,), task_id=task_id)
        site.wait_queued(key)
        if when == "while it is parked":
            result.abort()
        assert result.state == "ABORTED"

    assert result.get(timeout=30) == "aborted"


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # by Celery's backend
def test_a_task_that_is_aborted_and_parked_on_arrival_stays_so(site, key):
    holder = site.tasks.work_requeue.delay(key, None, key)
    site.journal.wait(key)
    task, ids = site.tasks.abortable, [uuid.uuid4().hex for _ in range(8)]  # for both workers
    for task_id in ids:
        task.AsyncResult(task_id).abort()
    results = [task.apply_async((key,), task_id=task_id) for task_id in ids]
    site.wait_queued(key, len(ids))
    site.journal.open(key)

    holder.get(timeout=30)
    assert [result.get(timeout=30) for result in results] == ["aborted"] * len(ids)


def test_the_key_of_a_task_that_is_validated_is_made_of_its_model(site, key):
    with site.held(key):
        result = site.tasks.work_validated.delay({"key": key})
        wait_state(result, "PARKED")
        assert site.journal.read(key) == []

    assert result.get(timeout=30) == {"key": key}


def test_a_parked_task_succeeds_with_its_retries_untouched(site, key):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        site.wait_queued(key)

    assert result.get(timeout=30) == 0
    assert result.state == "SUCCESS"


def test_parked_tasks_run_in_the_order_in_which_they_came(site, key):
    with site.held(key):
        results = []
        for number in range(5):
            results.append(site.tasks.work_requeue.delay(key, number))
            site.wait_queued(key, number + 1)

    for result in results:
        result.get(timeout=30)
    assert site.journal.read(key) == [0, 1, 2, 3, 4]


def test_a_parked_task_does_not_occupy_the_worker(site, key):
    with site.held(key):
        parked = [site.tasks.work_requeue.delay(key, number) for number in range(12)]
        site.wait_queued(key, 12)

        assert site.tasks.add.delay(2, 3).get(timeout=30) == 5

    for result in parked:
        result.get(timeout=30)


@pytest.mark.parametrize("ignored_by", ["task", "call"])
def test_a_parked_task_that_ignores_results_stores_nothing(site, key, ignored_by):
    with site.held(key):
        if ignored_by == "task":
            result = site.tasks.work_silently.delay(key)
        else:
            result = site.tasks.work_requeue.apply_async((key,), ignore_result=True)
        site.wait_queued(key)
        backend = site.app.backend
        assert backend.get(backend.get_key_for_task(result.id)) is None

    site.journal.wait(key)
    site.wait_free(key)
    assert backend.get(backend.get_key_for_task(result.id)) is None


# retry


@pytest.mark.parametrize("name", ["work_retry", "work_retry_and_retry_itself"])
def test_retries_by_conflict_do_not_count_as_retries(site, key, name):
    task = getattr(site.tasks, name)
    watched = f"watched-{key}"
    with site.held(watched):
        result = task.delay(watched)
        site.journal.wait(f"signals:{watched}", 6)  # conflicts
        assert result.state == "PARKED"
        assert result.info["key"] == watched
        assert site.look(watched).waiting == 0

    assert result.get(timeout=30) == task.max_retries


def test_a_task_that_was_sent_again_is_no_longer_shown_as_parked_when_it_runs(site, key):
    gate = f"{key}:gate"
    with site.held(key):
        result = site.tasks.work_wait_then["retry"].delay(key, gate=gate)
        wait_state(result, "PARKED")

    wait_state(result, "STARTED")
    site.journal.open(gate)
    assert result.get(timeout=30) == 0


# wait


def test_wait_gets_the_key_when_it_is_free(site, key):
    with site.held(key):
        result = site.tasks.work_wait.delay(key)
        site.wait_queued(key)
        assert result.state == "PENDING"
        assert site.journal.read(key) == []

    assert result.get(timeout=30) == 0


def test_wait_then_fail(site, key):
    with site.held(key):
        result = site.tasks.work_wait_then["fail"].delay(key)
        with pytest.raises(LockConflictError):
            result.get(timeout=30)

    assert site.journal.read(key) == []


def test_wait_then_skip(site, key):
    with site.held(key):
        result = site.tasks.work_wait_then["skip"].delay(key)
        assert result.get(timeout=30) is None

    assert site.journal.read(key) == []


@pytest.mark.parametrize("then", ["requeue", "retry"])
def test_wait_then_later(site, key, then):
    with site.held(key):
        result = site.tasks.work_wait_then[then].delay(key)
        wait_state(result, "PARKED")

    assert result.get(timeout=30) == 0


def test_a_waiter_that_gives_up_leaves_the_queue(site, key):
    with site.held(key):
        site.tasks.work_wait_then["skip"].delay(key).get(timeout=30)
        assert site.look(key).waiting == 0

    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


def test_a_soft_time_limit_ends_the_waiting(site, key):
    with site.held(key):
        result = site.tasks.work_wait_limited.delay(key)
        wait_state(result, "FAILURE")
        site.wait_queued(key, 0)

    assert type(result.result).__name__ == "SoftTimeLimitExceeded"
    site.wait_free(key)
    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


# skip


@pytest.mark.parametrize(
    ("name", "expected"), [("work_skip", None), ("work_skip_with_result", {"busy": True})]
)
def test_skip_succeeds_without_running_the_task(site, key, name, expected):
    with site.held(key):
        result = getattr(site.tasks, name).delay(key)

        assert result.get(timeout=30) == expected
        assert result.state == "SUCCESS"

    assert site.journal.read(key) == []
    assert getattr(site.tasks, name).delay(key).get(timeout=30) == 0


def test_skip_is_logged(site, key):
    with site.held(key):
        result = site.tasks.work_skip.delay(key)
        result.get(timeout=30)

    assert f"work_skip[{result.id}] skipped: '{key}' is held by " in site.log()


# fail


def test_fail_fails_with_the_holder(site, key):
    with site.held(key):
        holder = site.look(key).owner
        result = site.tasks.work_fail.delay(key)

        with pytest.raises(LockConflictError) as caught:
            result.get(timeout=30)

    assert result.state == "FAILURE"
    assert caught.value.key == key
    assert caught.value.holder == holder
    assert 0 < caught.value.remaining <= 30.0
    assert str(caught.value).startswith(f"lock '{key}' is held by {holder_name(holder)}, for ")
    assert site.journal.read(key) == []


def test_fail_is_one_line_in_the_log(site, key):
    with site.held(key):
        holder = site.look(key).owner
        result = site.tasks.work_fail.delay(key)
        with pytest.raises(LockConflictError):
            result.get(timeout=30)

    words = f"lock '{key}' is held by {holder_name(holder)}, for "
    wait_until(lambda: f'[{result.id}] raised expected: LockConflictError("{words}' in site.log())
    assert f"[{result.id}] raised unexpected" not in site.log()


def test_a_conflict_that_autoretry_for_names_is_retried(site, key):
    with site.held(key):
        result = site.tasks.work_retry_conflicts.delay(key)
        wait_until(lambda: result.state == "RETRY", what="it to be retried")

    assert result.get(timeout=30) > 0
    assert site.journal.read(key) == [None]


def test_a_conflict_is_retried_as_often_as_other_errors(site, key):
    with site.held(key):
        result = site.tasks.work_retry_conflicts_once.delay(key)
        with pytest.raises(LockConflictError):
            result.get(timeout=30)

    retried = f"work_retry_conflicts_once[{result.id}] retry: Retry in"
    assert site.log().count(retried) == 1


def test_a_conflict_that_dont_autoretry_for_names_is_not_retried(site, key):
    with site.held(key):
        result = site.tasks.work_retry_other_errors.delay(key)
        with pytest.raises(LockConflictError):
            result.get(timeout=30)

    assert f"[{result.id}] retry" not in site.log()


def test_a_conflict_of_a_direct_call_is_raised(site, key):
    with site.held(key), ThreadPoolExecutor(1) as elsewhere:  # this thread has the key
        called = elsewhere.submit(site.tasks.work_retry_conflicts, key)
        with pytest.raises(LockConflictError):
            called.result(30)


def test_a_conflict_from_the_result_backend_can_be_pickled(site, key):
    with site.held(key), pytest.raises(LockConflictError) as caught:
        site.tasks.work_fail.delay(key).get(timeout=30)

    again = pickle.loads(pickle.dumps(caught.value))

    assert (again.key, str(again)) == (key, str(caught.value))


# One of one's own


def test_a_policy_of_ones_own_decides(site, key):
    watched = f"watched-{key}"
    with site.held(watched), pytest.raises(LockConflictError):
        site.tasks.work_own_policy.delay(watched).get(timeout=30)

    conflicts = [n for n in site.journal.read(f"signals:{watched}") if n["name"] == "lock_conflict"]
    # The last one is of the task; web code that takes the key has none.
    assert len([c for c in conflicts if c["sender"] == "work_own_policy"]) == 3
