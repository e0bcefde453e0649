"""Which functions a locked task may have, and the signature that their keys are made by."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import sys
from collections.abc import Awaitable

import pytest
from celery import Celery

from celery_distlock import LockedTask
from celery_distlock.errors import ConfigurationError
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.execution import is_pending
from celery_distlock.unique import Debounce, Unique


@pytest.fixture
def app():
    with Celery("functions", broker="memory://", set_as_current=False) as made:
        made.conf.distlock_url = "memory://"
        yield made


def declare(app, function, base=LockedTask, **options):
    task = app.task(function, base=base, name="work", shared=False, **options)
    app.finalize()
    return task


def key(app, *args, **kwargs):
    (made,) = Runtime.of(app).plans["work"].rule.keys(args, kwargs)
    return made.template


def identity(app, *args, **kwargs):
    return Runtime.of(app).plans["work"].identity.of(args, kwargs)


# The signature is that of what Celery calls


def hands_out(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def injects(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function("session", *args, **kwargs)

    return wrapper


def injects_and_says_so(function):
    wrapper = injects(function)
    signature = inspect.signature(function)
    wrapper.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return wrapper


def takes_away(function):
    @functools.wraps(function)
    def wrapper(tenant, *args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def touch(session, user=None): ...


def count_by_name(*, a): ...


@pytest.mark.parametrize("lock_key", ["u:{user}", ["all", "u:{user}"]])
def test_a_parameter_that_a_wrapper_hides_is_refused_in_a_template(app, lock_key):
    words = (
        r"task work: .*names \{user\}, which is no parameter of the task.*\(\*args, \*\*kwargs\)"
        r".*decorator.*touch.*wrapper\.__signature__"
    )
    with pytest.raises(ConfigurationError, match=words):
        declare(app, injects(touch), lock_key=lock_key)


def test_what_is_alike_names_no_parameter_that_a_wrapper_hides(app):
    with pytest.raises(ConfigurationError, match=r"lock_unique: by .*\{user\}.*__signature__"):
        declare(app, injects(touch), lock_key="k", lock_unique=Unique(by="{user}"))


def test_a_wrapper_that_says_its_signature_gives_the_key_that_is_meant(app):
    declare(app, injects_and_says_so(touch), lock_key="u:{user}")

    assert key(app, "ann") == key(app, user="ann") == "u:ann"
    assert key(app) == "u:None"


def test_a_callable_names_what_a_wrapper_is_called_with(app):
    declare(app, injects(touch), lock_key=lambda user=None: f"u:{user}")

    assert key(app, "ann") == key(app, user="ann") == "u:ann"


def test_what_a_wrapper_takes_away_can_be_named(app):
    declare(app, takes_away(touch), lock_key="{tenant}")

    assert key(app, "acme", "session", user="ann") == "acme"


def test_a_callable_is_held_to_the_parameters_of_the_wrapper(app):
    with pytest.raises(ConfigurationError, match="cannot be called with the task's own parameters"):
        declare(app, takes_away(touch), lock_key=lambda *, user: user)


def says_its_parameters(function):
    wrapper = hands_out(function)
    wrapper.__signature__ = inspect.signature(function)
    return wrapper


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, r"\{digest\} in lock_key"),
        ({"lock_key": ["all", "u:{digest}"]}, r"\{digest\} in lock_key"),
        ({"lock_key": "k", "lock_unique": "finished"}, "lock_unique"),
    ],
)
def test_a_wrapper_that_takes_anything_is_refused_where_calls_are_compared(
    app, options, what, bind
):
    with pytest.raises(ConfigurationError, match=rf"task work: {what} compares.*__signature__"):
        declare(app, hands_out(touch), bind=bind, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"lock_key": "k", "lock_unique": Unique(by="{task}")},
        {"lock_key": "k", "lock_unique": Debounce(5.0)},
        {"lock_key": lambda *args, **kwargs: "k"},
    ],
)
def test_a_wrapper_that_takes_anything_will_do_where_no_arguments_are_compared(app, options):
    declare(app, hands_out(touch), **options)


@pytest.mark.parametrize("function", [lambda: None, lambda *args, **kwargs: None, count_by_name])
def test_a_wrapper_around_what_can_be_called_in_one_way_will_do(app, function):
    function.__name__ = "function"

    declare(app, hands_out(function))


def test_a_wrapper_that_says_its_parameters_has_one_key_for_a_call(app):
    declare(app, says_its_parameters(touch), lock_unique="finished")

    assert key(app, "s") == key(app, session="s", user=None)
    assert identity(app, "s") == identity(app, session="s", user=None)


def test_the_standard_library_s_wrappers_hand_on_what_they_get(app):
    @contextlib.contextmanager
    def transaction():
        yield

    declare(app, transaction()(touch), lock_key="u:{user}", lock_unique="finished")

    assert key(app, "s", "ann") == key(app, "s", user="ann") == "u:ann"
    assert identity(app, "s") == identity(app, session="s", user=None)


def test_a_dispatch_by_type_hands_on_what_it_gets(app):
    declare(app, functools.singledispatch(touch), lock_key="u:{user}")

    assert key(app, "s", "ann") == "u:ann"


def register(app, function):
    run = staticmethod(function)
    work = type("Work", (LockedTask,), {"name": "work", "run": run, "lock_key": "u:{user}"})
    return app.register_task(work())


def test_what_does_not_say_its_parameters_is_refused(app):
    with pytest.raises(ConfigurationError, match="work: its function has no known signature"):
        register(app, functools.cache(touch))


def test_a_wrapper_around_a_bound_function_counts_without_its_task(app):
    def wrapper(self, account, *args): ...

    declare(app, functools.wraps(touch)(wrapper), bind=True, lock_key="a:{account}")

    assert key(app, 7) == key(app, account=7) == "a:7"


def test_a_partial_has_the_parameters_that_are_left(app):
    register(app, functools.update_wrapper(functools.partial(touch, "session"), touch))

    assert key(app, "ann") == key(app, user="ann") == "u:ann"


class Counts:
    """A callable object, which is called without the task, also where that is bound."""

    __name__ = "counts"
    __annotations__ = {}

    def __call__(self, account, more=0): ...


@pytest.mark.parametrize("bind", [True, False])
def test_a_callable_object_has_the_parameters_of_its_call(app, bind):
    declare(app, Counts(), bind=bind, lock_key="a:{account}:{more}")

    assert key(app, 7) == key(app, account=7) == "a:7:0"


def test_a_task_that_is_a_class_has_the_parameters_of_its_decorated_run(app):
    class Work(LockedTask):
        name = "work"
        lock_key = "{tenant}"

        @takes_away
        def run(self, user): ...

    with pytest.raises(ConfigurationError, match=r"names \{tenant\}"):
        app.register_task(Work())


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when defined")
def test_annotations_may_name_what_only_type_checkers_import(app):
    source = "def work(a: Checked): ...\ndef key_of(a: Checked): return str(a)"
    found = {"__name__": __name__}
    exec(compile(source, __file__, "exec", dont_inherit=True), found)

    declare(app, found["work"], lock_key=found["key_of"])

    assert key(app, 7) == "7"


# What a base adds to a call and takes away before the function


def count(a): ...


@pytest.mark.parametrize("rule", ["{a}", str, "{digest}"], ids=str)
def test_keywords_that_a_base_takes_away_are_no_part_of_the_key(app, rule):
    declare(app, count, typing=False, lock_key=rule, lock_unique="finished")

    assert key(app, 7, trace="x") == key(app, 7, trace="y") == key(app, 7)
    assert identity(app, 7, trace="x") == identity(app, a=7)


def test_keywords_that_nothing_takes_away_are_an_error_of_the_call(app):
    declare(app, count, lock_key="{a}")

    with pytest.raises(TypeError, match=r"work\(\) got an unexpected keyword argument 'trace'"):
        key(app, 7, trace="x")


# Functions whose body runs when the key is released


async def coroutine(a): ...


def generator(a):
    yield a


async def async_generator(a):
    yield a


class Coroutine:
    __name__ = "called"
    __annotations__ = {}

    async def __call__(self, a): ...


@contextlib.contextmanager
def around():
    yield


LATER = {
    "a coroutine": coroutine,
    "a generator": generator,
    "an async generator": async_generator,
    "a bound coroutine": coroutine,
    "an object": Coroutine(),
    "a wrapper of the standard library": around()(coroutine),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_function_whose_body_runs_after_its_call_is_refused(app, kind):
    with pytest.raises(
        ConfigurationError, match=r"^task work: (coroutine|generator|async_gen|cal)"
    ) as it:
        declare(app, LATER[kind], bind="bound" in kind)

    message = str(it.value)
    assert "key would be released before" in message
    assert ("asyncio.run" in message and "AsyncLock" in message) or "list" in message


def test_it_is_refused_with_pydantic_as_well(app):
    with pytest.raises(ConfigurationError, match=r"task work: coroutine.* is a coroutine function"):
        declare(app, coroutine, pydantic=True)


def test_a_class_whose_run_is_a_coroutine_is_refused(app):
    class Work(LockedTask):
        name = "work"

        async def run(self, a): ...

    with pytest.raises(ConfigurationError, match=r"task work: .*run is a coroutine function"):
        app.register_task(Work())


def test_a_partial_of_a_coroutine_is_refused(app):
    with pytest.raises(ConfigurationError, match="task work: coroutine is a coroutine function"):
        register(app, functools.partial(functools.partial(coroutine), 7))


def test_a_wrapper_that_runs_a_coroutine_is_no_coroutine(app):
    @functools.wraps(coroutine)
    def runs(a):
        return asyncio.run(coroutine(a))

    assert declare(app, runs, lock_key="{a}")(7) is None


def runs(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return asyncio.run(function(*args, **kwargs))

    return wrapper


@pytest.mark.parametrize(
    ("function", "seems"),
    [
        (hands_out(coroutine), True),
        (hands_out(runs(coroutine)), False),
        (runs(hands_out(coroutine)), False),
        (hands_out(touch), False),
    ],
)
def test_a_wrapper_that_seems_to_return_a_coroutine_is_known(app, function, seems):
    declare(app, function, lock_key="k")

    assert Runtime.of(app).plans["work"].seems_pending is seems


def future(*, done):
    made = concurrent.futures.Future()
    if done:
        made.set_result(None)
    return made


class WithoutDone(Awaitable):
    def __await__(self):
        return iter(())


PENDING = {
    "a generator": lambda: generator(1),
    "an async generator": lambda: async_generator(1),
    "a future": lambda: future(done=False),
    "an awaitable": WithoutDone,
}
ENDED = {"a list": list, "nothing": lambda: None, "a result": lambda: future(done=True)}


@pytest.mark.parametrize("kind", [*PENDING, *ENDED])
def test_what_has_not_ended_is_known(kind):
    assert is_pending({**PENDING, **ENDED}[kind]()) is (kind in PENDING)


def test_a_body_that_returns_what_has_not_ended_is_an_error_in_the_log_once(app, caplog):
    task = declare(app, hands_out(generator), lock_key="k")
    options = {"base": LockedTask, "lock_key": "k", "shared": False}
    other = app.task(hands_out(async_generator), name="other", **options)

    for each in (task, task, other, task):
        each(7)

    lines = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert [line.split(",")[0] for line in lines] == [
        "Task work has returned a generator",
        "Task other has returned a async_generator",
    ]
    assert "its key is released now" in lines[0]


def test_celery_s_own_tasks_are_not_judged(app):
    app.task(generator, base=LockedTask, name="celery.own", shared=False)

    app.finalize()


@pytest.mark.parametrize("by", ["an option", "a base", "a base behind"])
def test_a_strategy_that_takes_messages_past_the_lock_is_refused(app, by):
    class Own(app.Task):
        abstract = True

        def Strategy(self, task, app, consumer): ...  # noqa: N802

    options = {"Strategy": "proj:strategy"} if by == "an option" else {}
    bases = {"a base": (Own, LockedTask), "a base behind": (LockedTask, Own)}.get(by, (LockedTask,))
    base = type("Base", bases, {"abstract": True})
    with pytest.raises(ConfigurationError, match=r"task work: .*Strategy.*with Lock\("):
        declare(app, touch, base, **options)


@pytest.mark.parametrize("order", ["before", "behind"])
def test_celery_batches_is_refused_in_either_order(app, order):
    batches = pytest.importorskip("celery_batches").Batches
    bases = (batches, LockedTask) if order == "before" else (LockedTask, batches)
    base = type("Base", bases, {"abstract": True})

    with pytest.raises(ConfigurationError, match=r"task work: the Strategy of Batches .*with Lock"):
        declare(app, touch, base, flush_every=2, lock_key="k")
