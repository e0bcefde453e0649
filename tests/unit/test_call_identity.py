"""What makes calls of one task alike."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
from celery import Celery, Task

from celery_distlock import LockedTask
from celery_distlock.keys import KeyRule
from celery_distlock.runtime.plans import CallIdentity
from celery_distlock.unique import Latest, Unique


def identity(task: str, by: str | None = None, *, all_are: bool = False) -> CallIdentity:
    signature = inspect.signature(lambda digest, task="", more=0: None)
    rule, template = (
        KeyRule(text, task=task, signature=signature) if text else None for text in ("k", by)
    )
    assert rule is not None
    return CallIdentity(rule, template, all_are=all_are)


def test_calls_with_equal_arguments_are_alike():
    of = identity("t").of

    assert of(("a", "b"), {}) == of((), {"task": "b", "digest": "a", "more": 0})
    assert len({of(("a",), {}), of(("b",), {}), of(("a", "b"), {}), of(("a", "", 1), {})}) == 4


def test_all_calls_may_be_alike():
    of = identity("t", all_are=True).of

    assert of(("a",), {}) == of(("b", "c"), {}) == "t"


@pytest.mark.parametrize(
    ("one", "other"), [(("sync", "full:1"), ("sync:full", "1")), (("a%3Ab", "c"), ("a:b", "c"))]
)
def test_calls_of_two_tasks_are_not_alike(one, other):
    of, as_other = (identity(task, "{digest}").of for task, _ in (one, other))

    assert of((one[1],), {}) != as_other((other[1],), {})


@pytest.mark.parametrize("again", [copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))])
@pytest.mark.parametrize("rule", [Unique(), Unique(result=None), Latest("stop")])
def test_a_copy_of_a_rule_is_as_the_rule_is(rule, again):
    assert again(rule) == rule
    assert again(rule).result is rule.result


def test_a_class_of_ones_own_may_send_nothing():
    class SometimesSent(Task):
        abstract = True

        def apply_async(self, *args, **options):
            return None

    class Base(LockedTask, SometimesSent):
        abstract = True

    app = Celery("sometimes", broker="memory://", set_as_current=False)
    app.conf.distlock_url = "memory://"

    @app.task(base=Base, lock_key="k", shared=False)
    def work():
        pass

    assert work.delay() is None
