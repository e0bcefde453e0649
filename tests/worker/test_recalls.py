"""A task that is asked to leave: what it learns, and what it ends with."""

from __future__ import annotations

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from tests.worker.recalling import recall

APP = "tests.apps.recalls"


@pytest.fixture
def recalled(site, key):
    """Call a task of this name, recall it once it has begun, and return its result."""

    def begin(name, *args):
        result = getattr(site.tasks, name).delay(key, *args)
        site.journal.wait(key)
        recall(site, key)
        return result

    return begin


def assert_revoked(site, key, result):
    with pytest.raises(TaskRevokedError, match="recalled: superseded by a newer call"):
        result.get(timeout=30)
    assert result.state == "REVOKED"
    site.wait_free(key)
    assert site.look(key).waiting == 0
    assert site.journal.read(key) == ["begun"]


def test_it_is_revoked_if_it_leaves(site, key, recalled):
    assert_revoked(site, key, recalled("leave"))


def test_it_has_its_key_while_it_cleans_up_and_the_next_runs_after_it(site, key, recalled):
    first = recalled("stay", "turn")
    next_one = site.tasks.follow.delay(key)

    began = next_one.get(timeout=30)

    ((is_recalled, held, left),) = site.journal.wait(f"{key}:left")
    assert is_recalled
    assert held
    assert left < began
    assert_revoked(site, key, first)


def test_it_may_catch_it_and_then_has_its_result(key, recalled):
    answer = recalled("catch").get(timeout=30)

    assert answer == [key, True, "superseded by a newer call", 500]


@pytest.mark.parametrize("name", ["fail_and_be_retried", "retry", "postpone"])
def test_what_it_would_do_to_run_again_is_not_done(site, key, recalled, name):
    assert_revoked(site, key, recalled(name))


def test_its_own_error_is_a_failure_and_it_does_not_go_back(site, key, recalled):
    result = recalled("fail")

    with pytest.raises(ValueError, match="while it cleaned up"):
        result.get(timeout=30)
    site.wait_free(key)
    assert site.journal.read(key) == ["begun"]


def test_with_warn_it_is_only_notified(recalled):
    assert recalled("look").get(timeout=30) is True


def test_the_outermost_of_calls_of_itself_ends(site, key, recalled):
    assert_revoked(site, key, recalled("call_itself"))
    assert site.journal.read(f"{key}:left") == [[0, True], [1, True]]


def test_a_lock_that_it_has_taken_is_free_then(site, key, recalled):
    result = recalled("take_another", f"{key}:other")

    assert_revoked(site, key, result)
    site.wait_free(f"{key}:other", timeout=1.0)


def test_a_soft_time_limit_while_it_cleans_up_is_its_end(site, key, recalled):
    result = recalled("clean_up_for_long")

    site.journal.wait(f"{key}:left")
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=30)


@pytest.mark.parametrize("how", ["called", "applied"])
def test_without_a_message_it_is_only_notified(site, key, how):
    looked = []

    def look(task, key):
        recall(site, key)
        task.lock.extend(site.tasks.LEASE)
        looked.append(task.lock.recalled)
        task.lock.ensure_held()

    task = site.tasks.locked(name=f"look-{key}")(look)
    if how == "called":
        task(key)
    else:
        task.apply(args=[key], throw=True)

    assert looked == [True]
    site.wait_free(key)


def test_it_is_logged_and_signalled(site, key, recalled):
    result = recalled("leave")

    assert_revoked(site, key, result)
    assert f"leave[{result.id}] is asked to leave '{key}'" in site.log()
    assert f"leave[{result.id}] recalled: superseded by a newer call" in site.log()
