"""A task that does not come to where its lock is taken is reported, and ends once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import wait_until

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from tests.worker.conftest import Site

APP = "tests.apps.own_calls"
WORKERS = [{"concurrency": 2}]


def between_two(site: Site, key: str, task: Any, how: str) -> AsyncResult:
    """Have *task* wait for a key, and another one for it; return when that one has run."""
    site.tasks.on_to_lock.delay(key, "gate")
    site.journal.wait(key)
    result = task.delay(key, how)
    site.wait_queued(key)
    last = site.tasks.on_to_lock.delay(key, "last")
    site.wait_queued(key, 2)
    site.journal.open(key)
    assert last.get(timeout=30) is True
    return result


def wait_left(site: Site, key: str) -> None:
    """Wait until the store keeps nothing that would run again."""
    seen = site.look
    wait_until(
        lambda: not (seen(key).token or seen(key).woken or seen(key).waiting),
        what=f"nothing to be left at {key}",
    )


@pytest.mark.parametrize("kind", ["early", "late", "sent"])
def test_what_runs_past_its_lock_runs_once_and_its_key_goes_on(site, key, kind):
    result = between_two(site, key, site.tasks.past_lock[kind], "past")

    assert result.get(timeout=30) is False
    wait_left(site, key)
    assert site.journal.read(key) == ["gate", "past", "last"]


def test_what_runs_past_its_lock_is_an_error_that_names_the_cure(site, key):
    result = site.tasks.past_lock["early"].delay(key)
    result.get(timeout=30)

    line = f"Task past_lock_early[{result.id}] ran WITHOUT its lock: the __call__ of PastLock does"
    site.workers[0].wait_log(line)
    assert "super().__call__(*args, **kwargs)" in site.log()


def test_what_wants_no_lock_or_takes_it_is_no_error(site, key):
    seen = len(site.log())
    assert site.tasks.past_nothing.delay(key).get(timeout=30) is False
    assert site.tasks.on_to_lock.delay(key).get(timeout=30) is True

    site.tasks.past_lock["early"].delay(key).get(timeout=30)
    message = "WITHOUT its lock"
    wait_until(lambda: message in site.log()[seen:], what="an error about the last one")
    assert site.log()[seen:].count(message) == 1


@pytest.mark.parametrize("kind", ["early", "late"])
def test_what_fails_before_its_lock_is_asked_for_fails_once_and_its_key_goes_on(site, key, kind):
    result = between_two(site, key, site.tasks.begin[kind], "fail")

    with pytest.raises(ValueError, match=key):
        result.get(timeout=30)
    wait_left(site, key)
    assert site.journal.read(f"{key}:begun") == ["fail"]


def test_what_is_rejected_before_its_lock_is_asked_for_runs_all_the_same(site, key):
    result = between_two(site, key, site.tasks.begin["late"], "reject")

    assert result.get(timeout=30) is True
    assert site.journal.read(f"{key}:begun") == ["reject"] * 2


def test_a_retry_that_fails_before_its_lock_is_asked_for_gives_up_what_was_kept_for_it(site, key):
    result = site.tasks.begin["kept"].delay(key, "retry")

    with pytest.raises(ValueError, match=key):
        result.get(timeout=30)
    assert site.tasks.on_to_lock.delay(key).get(timeout=30) is True
    wait_left(site, key)


@pytest.mark.parametrize("handler", ["on_success", "after_return"])
def test_a_handler_that_calls_its_task_at_a_taken_key_has_nothing_parked(site, key, handler):
    inner = f"{key}:inner"
    with site.held(inner):
        assert site.tasks.calls_itself.delay(key, handler).get(timeout=30) is True
        assert site.journal.wait(f"{key}:error") == ["LockConflictError"]
        assert site.look(inner).waiting == 0

    assert site.journal.read(key) == [handler]
    assert site.journal.read(inner) == []


@pytest.mark.parametrize("handler", ["before_start", "on_success", "after_return"])
def test_a_handler_calls_its_task_at_a_free_key_while_a_run_waits(site, key, handler):
    with site.held(key):
        result = site.tasks.calls_itself.delay(key, handler)
        site.wait_queued(key)

    assert result.get(timeout=30) is True
    site.journal.wait(f"{key}:inner")
    assert site.journal.read(key) == [handler]
    assert site.journal.read(f"{key}:error") == []


def test_a_handler_that_calls_its_task_just_as_it_was_called_does_not_count_for_it(site, key):
    with site.held(key):
        result = site.tasks.calls_itself.delay(key, "before_start itself")
        assert site.journal.wait(f"{key}:error") == ["LockConflictError"]
        site.wait_queued(key)

    assert result.get(timeout=30) is True
    wait_left(site, key)


def test_what_fails_after_a_handler_has_called_its_task_runs_once(site, key):
    with pytest.raises(ValueError, match=key):
        between_two(site, key, site.tasks.calls_itself, "before_start fails").get(timeout=30)

    wait_left(site, key)
    assert site.journal.read(key) == ["gate", "last"]


def test_what_decorates_before_start_and_the_call_alike_makes_the_one_not_the_other(site, key):
    with site.held(key):
        result = site.tasks.decorated_alike.delay(key)
        site.wait_queued(key)

    assert result.get(timeout=30) is True
