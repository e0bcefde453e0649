"""A task that is declared with types is the one that ``@app.task(base=LockedTask)`` makes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery, Task

from celery_distlock import Lock, LockedTask
from celery_distlock.errors import ConfigurationError, LockConflictError
from celery_distlock.typing import TypedTask, locked_task

MODULE = "tests.apps.typed"
PAIRS = [("typed", "untyped"), ("typed_bound", "untyped_bound")]


@pytest.fixture
def tasks(load_app):
    return load_app(MODULE)


def declaration(task):
    """What a task's class says of it, but for its name and what Celery makes for each."""
    return {
        name: getattr(value, "__func__", value)
        for name, value in vars(type(task)).items()
        if name not in ("name", "request_stack", "__header__")
    }


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_it_is_declared_as_without_types(tasks, pair):
    typed, untyped = (tasks.app.tasks[name] for name in pair)

    assert declaration(typed) == declaration(untyped)
    assert type(typed).__mro__[1:] == type(untyped).__mro__[1:]
    assert (typed.lock_lease, typed.acks_late, typed.__doc__) == (5.0, True, untyped.__doc__)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_worker_runs_both_alike(tasks, worker, pair):
    worker(MODULE)

    results = [tasks.app.tasks[name].delay("a").get(timeout=60) for name in pair]

    assert results[0] == results[1]


def test_a_worker_gives_a_bound_one_its_lock(tasks, worker):
    worker(MODULE)

    assert tasks.typed_bound.delay("a").get(timeout=60) == ["stock:a"]
    assert tasks.shared.delay("b").get(timeout=60) == ["stock:b"]


@pytest.mark.parametrize("name", ["typed", "untyped"])
def test_a_call_does_not_wait_where_the_key_is_taken(tasks, name):
    with Lock("stock:a"), pytest.raises(LockConflictError):
        call_from_another_thread(tasks.app.tasks[name], "a")


def call_from_another_thread(task, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task, *args).result(timeout=60)


def test_its_name_is_the_functions(tasks):
    assert tasks.named_by_its_function.name == f"{MODULE}.named_by_its_function"
    assert tasks.named_by_its_function.__doc__ == "It needs no name."


def test_it_is_bound_to_a_base_of_ones_own(tasks):
    assert tasks.typed_bound.auditor == "none"
    assert isinstance(tasks.typed_bound, tasks.Audited)


def test_without_an_app_it_is_every_apps(tasks):
    with Celery("another", set_as_current=False) as another:
        assert isinstance(another.tasks[f"{MODULE}.shared"], LockedTask)


def test_eagerly_it_runs_under_its_lock():
    with Celery("eager", set_as_current=False) as app:
        app.conf.update(task_always_eager=True, distlock_url="memory://")

        @locked_task(app, lock_key="stock:{sku}", bind=True, shared=False)
        def look(self: LockedTask, sku: str) -> str:
            assert self.lock is not None
            return self.lock.key

        assert look("a") == look.delay("a").get() == look.apply(("a",)).get() == "stock:a"


@pytest.mark.parametrize("base", [Task, object, None, "LockedTask", TypedTask])
def test_a_base_that_is_no_locked_task_is_refused(base):
    with (
        Celery("eager", set_as_current=False) as app,
        pytest.raises(ConfigurationError, match="inherit from LockedTask instead"),
    ):
        locked_task(app, base=base)


def test_forgotten_parentheses_are_named():
    with pytest.raises(ConfigurationError, match=r"write @locked_task\(app, \.\.\.\)"):
        locked_task(test_forgotten_parentheses_are_named)


def test_a_wrong_option_is_refused_when_the_task_is_declared():
    with Celery("eager", set_as_current=False) as app:
        app.conf.distlock_url = "memory://"

        with pytest.raises(ConfigurationError, match="did you mean 'lock_wait'"):
            locked_task(app, lock_weit=3, lazy=False, shared=False)(declaration)


def test_its_type_is_that_of_a_locked_task_as_a_base():
    class Base(TypedTask[[str], int]):
        abstract = True

    assert Base.__mro__[1] is LockedTask
