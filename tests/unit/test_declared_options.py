"""Options that are none: where they are said, the right ones are named."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from celery import Celery

from celery_distlock import AsyncLock, Key, Lock, LockedTask
from celery_distlock.errors import ConfigurationError
from celery_distlock.policies import Requeue, Wait
from celery_distlock.runtime.plans import OPTIONS
from celery_distlock.typing import locked_task
from celery_distlock.unique import Unique

_number = itertools.count()


@pytest.fixture
def app():
    with Celery("options", broker="memory://", set_as_current=False) as made:
        made.conf.distlock_url = "memory://"
        yield made


def take(sku, quantity=1): ...


def nightly(): ...


def declared(app: Celery, **options: Any) -> Any:
    options = {"base": LockedTask, "shared": False, "lazy": False, **options}
    options.setdefault("name", f"t{next(_number)}")
    return app.task(**options)(take)


# Where a task is declared


@pytest.mark.parametrize("name", sorted({*OPTIONS} - {"on_failure"}))
def test_an_option_without_its_prefix_is_refused_with_it(app, name):
    with pytest.raises(ConfigurationError, match=rf"task t: {name} is no .*; write lock_{name}\."):
        declared(app, name="t", **{name: "x"})


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("capacity", 2, r"write lock_key=Key\('a:\{sku\}', capacity=5\)"),
        ("weight", 2, r"write lock_key=Key\(.*capacity=5, weight=2\)"),
        ("rate", "5/m", r"write lock_key=Key\(.*shared=True, rate='100/m'\)"),
        ("cost", 2, r"cost=2\)"),
        ("cooldown", 2, r"cooldown=2.0\)"),
        ("min_hold", 2, r"min_hold=2.0\)"),
        ("distlock_lease", 5, "write lock_lease"),
        ("distlock_prefix", "a", "distlock_prefix is a setting of the app"),
        ("on_failure", "requeue", "write lock_on_failure"),
    ],
)
def test_so_is_what_a_key_or_the_app_says(app, name, value, right):
    with pytest.raises(ConfigurationError, match=right):
        declared(app, **{name: value})


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("capacity", r"write lock_key=Key\('a:\{sku\}', capacity=5\)"),
        ("weight", r"Key\(.*weight=2\)"),
        ("shared", r"Key\('a:\{sku\}', shared=True\)"),
        ("cooldown", r"Key\(.*cooldown=2.0\)"),
        ("rate", r"Key\(.*rate='100/m'\)"),
        ("retry", "write lock_on_conflict='retry'"),
        ("debounce", r"write lock_unique=Debounce\(2.0\)"),
        ("throttle", r"write lock_unique=Throttle\(60.0\)"),
        ("latest", r"write lock_unique=Latest\(\)"),
        ("prefix", "distlock_prefix is a setting of the app"),
        ("url", "distlock_url is a setting of the app"),
        ("leese", "did you mean 'lock_lease'"),
    ],
)
def test_a_name_with_the_prefix_that_is_no_option_gets_a_suggestion(app, name, right):
    with pytest.raises(ConfigurationError, match=rf"unknown option lock_{name}; .*{right}"):
        declared(app, **{f"lock_{name}": 1})


def test_a_setting_that_belongs_to_a_key_is_reported_as_that(app):
    app.conf.distlock_capacity = 5

    with pytest.raises(ConfigurationError, match=r"distlock_capacity; write lock_key=Key\("):
        declared(app)


def test_locked_task_refuses_it_as_well(app):
    with pytest.raises(ConfigurationError, match="write lock_on_conflict"):
        locked_task(app, on_conflict="skip", shared=False, lazy=False)(take)


def test_celerys_own_options_are_let_pass(app):
    handler = lambda self, *args: None  # noqa: E731
    declared(
        app,
        rate_limit="5/m",
        expires=60,
        max_retries=3,
        time_limit=60,
        ignore_result=True,
        throws=(KeyError,),
        autoretry_for=(KeyError,),
        on_failure=handler,
        after_return=handler,
    )


@pytest.mark.parametrize("shared", [True, False])
def test_celerys_shared_may_be_an_attribute(app, shared):
    # What @app.task() does in a pool process that is spawned.
    task = app._task_from_fun(take, name="t", base=LockedTask, shared=shared)

    assert app.tasks["t"] is task


def test_an_attribute_that_a_base_declares_may_be_set_by_the_decorator(app):
    class Base(LockedTask):
        abstract = True
        key = capacity = None

    assert declared(app, base=Base, key="a", capacity=7).capacity == 7


def test_a_class_may_have_any_attributes(app):
    class Work(LockedTask):
        name = "work"
        rate = key = lease = 7

        def run(self): ...

    assert app.register_task(Work()).lease == 7


# Where it is called


@pytest.mark.parametrize("option", ["lock_on_conflict", "lock_key", "lock_whatever", "lock_lease"])
@pytest.mark.parametrize(
    "call",
    [
        lambda task, options: task.apply_async(("tee",), **options),
        lambda task, options: task.s("tee").apply_async(**options),
        lambda task, options: task.s("tee").set(**options).delay(),
        lambda task, options: task.apply(("tee",), **options),
    ],
)
def test_a_call_refuses_what_it_does_not_take(app, call, option):
    task = declared(app, name="t")
    words = rf"task t: a call does not take {option}; it takes lock_via=.* lock_unique=None"

    with pytest.raises(ConfigurationError, match=words):
        call(task, {option: "fail"})


@pytest.mark.parametrize("via", ["broker", "store"])
def test_a_rule_for_one_call_is_refused_whichever_way_it_goes(app, via):
    task = declared(app, lock_via=via)

    with pytest.raises(ConfigurationError, match="in a call lock_unique can only be None"):
        task.apply_async(("tee",), lock_unique="started")


def test_what_a_call_takes_is_let_pass(app):
    task = declared(app)

    task.apply_async(("tee",), lock_via="broker", lock_unique=None)
    assert task.apply(("tee",), lock_via="store", lock_unique=None).successful()


def test_a_link_with_such_an_option_is_sent_and_the_log_says_so(app, caplog):
    task = declared(app, name="t")

    with caplog.at_level(logging.ERROR, logger="celery_distlock"):
        assert task.apply_async(("tee",), parent_id="parent", lock_key="other").id

    assert "task t: a call does not take lock_key; it takes" in caplog.text


def test_an_argument_may_have_any_name(app):
    @app.task(base=LockedTask, shared=False, lock_key="{lock_key}")
    def work(lock_key): ...

    assert work.delay(lock_key="a").id


# Keys that look as if they had a parameter


@pytest.mark.parametrize(
    "template",
    [
        *("stock:%s", "stock:%(sku)s", "stock:%d", "stock:$sku", "stock:<sku>", "stock:{{sku}}"),
        *("stock:{{sku.id}}", "{quantity}:$sku", "{digest}:<sku>", "{{{quantity}}}:{{sku}}"),
    ],
)
@pytest.mark.parametrize("made", [str, lambda text: Key(text, capacity=2), lambda text: [text]])
def test_a_template_that_looks_as_if_it_had_a_parameter_warns(app, template, made):
    with pytest.warns(UserWarning, match=r"lock_key .* in every key: .* write \{sku\}"):
        declared(app, lock_key=made(template))


@pytest.mark.parametrize("by", ["$sku", "sku"])
def test_so_does_the_template_of_what_is_alike(app, by):
    with pytest.warns(UserWarning, match=f"lock_unique: by {by!r}".replace("$", r"\$")):
        declared(app, lock_key="{sku}", lock_unique=Unique(by=by))


@pytest.mark.parametrize(
    "template",
    ["stock", "{sku}", "{{{sku}}}", "a%20b", "100%", "{sku}:<b>", "{sku}:%s", "costs $5", "{sku}$"],
)
def test_others_do_not(app, template):
    declared(app, lock_key=template)


def test_nor_does_one_of_a_task_without_parameters(app):
    app.task(base=LockedTask, shared=False, lazy=False, lock_key="<nightly>")(nightly)


@pytest.mark.parametrize("kind", [Lock, AsyncLock])
@pytest.mark.parametrize(
    "key",
    ["stock:{sku}", "{order.id}", "a:%s", "a:%(sku)s", Key("{sku}"), "<A object at 0x7f00>"],
)
def test_a_lock_of_a_template_warns_where_it_is_made(kind, key):
    words = rf'{kind.__name__}\(\) takes the key as it is, .*\(f"stock:\{{sku\}}"\)'
    with pytest.warns(UserWarning, match=words) as caught:
        kind(key)

    assert caught[0].filename == __file__


@pytest.mark.parametrize("key", ["stock:tee", "{7}", "{}", "a%20b", "a$filter=x", "<b>", "100%"])
def test_a_lock_of_any_other_text_does_not(key):
    Lock(key)
    AsyncLock(key)


# Bases


class Silent:
    """Keeps from its bases that a class was made."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class Deferring:
    def apply_async(self, *args: Any, **options: Any) -> None: ...


def test_a_base_that_hides_the_class_from_the_lock_is_refused_by_name(app):
    class Base(Silent, LockedTask, Deferring):
        abstract = True

    with pytest.raises(ConfigurationError, match=r"the __init_subclass__ of Silent does not call"):
        declared(app, base=Base, lock_key="{sku}")


# A bound of the queue


@pytest.mark.parametrize(
    "policy", [Requeue(max_waiting=5), Wait(then=Requeue(max_waiting=5, then="skip"))], ids=repr
)
def test_a_bounded_queue_is_that_of_one_key(app, policy):
    with pytest.raises(ConfigurationError) as refusal:
        declared(app, lock_key=["a:{sku}", "b:{sku}"], lock_on_conflict=policy)

    assert "Requeue(max_waiting=5" in str(refusal.value)
    assert "bounds the queue of one key, and lock_key names 2" in str(refusal.value)
    declared(app, lock_key=["a:{sku}", "b:{sku}"])
    declared(app, lock_key="a:{sku}", lock_on_conflict=policy)
