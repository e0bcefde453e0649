"""What an agent for monitoring replaces in a task's class changes nothing of its declaration."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_distlock import LockedTask
from celery_distlock.runtime.app import Runtime
from tests.patching import WRAPPERS

pytestmark = pytest.mark.parametrize("wrap", WRAPPERS)


@pytest.fixture
def app():
    app = Celery("replaced", broker="memory://", set_as_current=False)
    app.conf.distlock_url = "memory://replaced"
    yield app
    app.close()


@pytest.fixture
def kind():
    class Base(LockedTask):
        name = "base"
        lock_key = "{order}"

        def run(self, order):
            return self.lock.keys

    return Base


def test_a_function_that_is_replaced_later_leaves_the_key_as_it_was(app, kind, wrap):
    """A worker reads all declarations again when it starts."""
    task = app.register_task(kind())
    kind.run = wrap(kind.run)

    Runtime.of(app).use_flags({})

    assert task("a") == ("a",)


def test_a_base_whose_call_is_replaced_still_takes_the_lock(app, kind, wrap):
    kind.__call__ = wrap(kind.__call__)

    task = app.register_task(type("Child", (kind,), {"name": "child"})())

    assert Runtime.of(app).detours["child"] == ""
    assert task("a") == ("a",)
