"""One start in a while, at once or when it is over, with what came last."""

from __future__ import annotations

import itertools
import time
import uuid

import pytest

from celery_distlock import Key, LockedTask
from celery_distlock.errors import ConfigurationError
from celery_distlock.runtime.app import Runtime
from celery_distlock.unique import Throttle
from tests.apps import make_app
from tests.waiting import wait_until

SHARED = True

PERIOD = 2.0  # seconds, as in `tests.apps.locked`
# Starts count at the store; a busy machine may take the rest from there to a task's first line.
APART = 0.75 * PERIOD


def test_calls_in_a_row_run_at_once_and_when_the_time_is_over(site, key):
    task = site.tasks.throttled["trailing"]
    first = task.delay(key, "first")
    _, begun = first.get(timeout=30)
    assert time.time() - begun < PERIOD

    later = [task.delay(key, number) for number in range(5)]

    assert {result.id for result in later} == {later[0].id} != {first.id}
    assert [result.joined for result in later] == [False] + [True] * 4
    note, again = later[0].get(timeout=30)
    assert note == 4
    assert again - begun >= APART


def test_one_after_a_quiet_time_starts_at_once(site, key):
    task = site.tasks.throttled["trailing"]
    _, begun = task.delay(key).get(timeout=30)
    wait_until(lambda: time.time() > begun + PERIOD + 0.1, what="the period to be over")

    result = task.delay(key)

    assert not result.joined
    assert site.look(key).later == 0
    result.get(timeout=30)


def test_a_stream_of_calls_starts_once_in_each_period(site, key):
    task = site.tasks.throttled["trailing"]
    results, until = {}, time.monotonic() + 2.5 * PERIOD
    while time.monotonic() < until:
        result = task.delay(key)
        results[result.id] = result

    starts = sorted(result.get(timeout=30)[1] for result in results.values())

    assert 3 <= len(starts) <= 4
    assert min(b - a for a, b in itertools.pairwise(starts)) >= APART


def test_a_wait_for_the_next_period_keeps_no_other_from_the_key(site, key):
    task = site.tasks.throttled["trailing"]
    task.delay(key).get(timeout=30)
    waits = task.delay(key)

    assert site.tasks.work_requeue.delay(key, "other").get(timeout=30) == 0

    assert site.look(key).later == 1
    waits.get(timeout=30)


def test_a_call_within_the_period_may_be_the_one_before(site, key):
    task = site.tasks.throttled["joined"]
    first = task.delay(key, 1)
    first.get(timeout=30)

    second, other = task.delay(key, 1), task.delay(f"{key}:other", 1)

    assert (second.id, second.joined) == (first.id, True)
    assert not other.joined
    other.get(timeout=30)


def test_what_is_waited_for_by_its_id_runs_and_in_its_period(site, key):
    task = site.tasks.throttled["trailing"]
    _, begun = task.delay(key, "first").get(timeout=30)
    task.delay(key, "deferred")

    mine = task.apply_async((key, "mine"), task_id=f"mine-{key}")

    note, again = mine.get(timeout=30)
    assert note == "mine"
    assert again - begun >= APART


# Where it is declared


@pytest.fixture
def app(celery_env):
    app = make_app("throttled")
    app.conf.distlock_url = f"memory://{uuid.uuid4().hex}"
    yield app
    app.close()


def item_of(item):
    return item


def keys_of(app, lock_key):
    options = {"base": LockedTask, "lock_unique": Throttle(60.0), "shared": False}
    task = app.task(name=f"t-{uuid.uuid4().hex}", lock_key=lock_key, **options)(item_of)
    return Runtime.of(app).plans[task.name].rule.keys((7,), {})


def test_its_key_has_the_rate(app):
    (key,) = keys_of(app, "item:{item}")
    assert (key.template, key.alone, list(map(str, key.rates))) == ("item:7", True, ["1/m"])


def test_a_key_keeps_its_other_rates(app):
    (key,) = keys_of(app, Key("item:{item}", shared=True, rate=["100/h", "50/m"]))
    assert (key.shared, list(map(str, key.rates))) == (True, ["1/m", "100/h"])


def test_a_key_that_is_returned_has_it_too(app):
    (key,) = keys_of(app, lambda item: f"made:{item}")
    assert list(map(str, key.rates)) == ["1/m"]


def test_a_cost_above_one_is_refused(app):
    with pytest.raises(ConfigurationError, match="cost=2 is more than rate 1/m allows"):
        keys_of(app, Key("item", shared=True, rate="10/s", cost=2))


@pytest.mark.parametrize(
    "given", [{"period": 0}, {"period": "1s"}, {"period": 1e9}, {"period": 1, "trailing": 1}]
)
def test_what_is_no_throttle_is_refused(given):
    with pytest.raises(ConfigurationError, match=r"Throttle\((period|trailing)\) must be"):
        Throttle(**given)
