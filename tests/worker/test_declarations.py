"""How tasks are declared and apps are set up; and that what is wrong is said then, not later."""

from __future__ import annotations

import math
import re
import threading
import uuid
from functools import partial
from typing import ClassVar
from unittest.mock import Mock

import pytest
from celery import Celery, Task, shared_task

from celery_distlock import LockedTask, install, policies
from celery_distlock.errors import ConfigurationError, LockKeyError
from celery_distlock.runtime.app import Runtime
from celery_distlock.testing import FakeClock
from celery_distlock.unique import Debounce, Unique
from celery_distlock.worker.start import LockStep


@pytest.fixture(autouse=True)
def _no_time_passes():
    """What is left of a lease is what it was."""
    with FakeClock().running():
        yield


@pytest.fixture
def make_app():
    """Makes apps with a lock store of their own, and tasks that other apps do not share."""
    made = []

    def make(**options) -> Celery:
        app = Celery("declarations", broker="memory://", **options)
        app.task = partial(app.task, shared=False)
        app.conf.distlock_url = f"memory://{uuid.uuid4().hex}"
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


@pytest.fixture
def app(make_app):
    return make_app()


def lease_of(task, *args) -> float:
    """The lease that *task*, which returns `self.lock.remaining`, runs with; whole seconds."""
    return math.ceil(task(*args))


def remaining(self):
    return self.lock.remaining


# What is right


def test_the_default_lease_is_30_seconds(app):
    assert lease_of(app.task(base=LockedTask, bind=True)(remaining)) == 30


def test_the_setting_gives_a_default(app):
    app.conf.distlock_lease = 5

    assert lease_of(app.task(base=LockedTask, bind=True)(remaining)) == 5


@pytest.mark.parametrize("used_first", ["a task", "a lock"])
def test_what_is_set_after_a_task_was_declared_counts_as_well(app, used_first):
    task = app.task(base=LockedTask, bind=True)(remaining)
    assert task.name  # it is declared by now

    app.conf.update(distlock_lease=5, distlock_prefix="another")
    if used_first == "a lock":
        assert Runtime.of(app).store.identity.endswith("#another")

    assert lease_of(task) == 5
    assert Runtime.of(app).store.identity.endswith("#another")


def test_a_wrong_setting_after_a_task_was_declared_is_said_when_it_is_called(app):
    task = app.task(base=LockedTask, bind=True)(remaining)
    assert task.name
    app.conf.distlock_leese = 5

    with pytest.raises(ConfigurationError, match="unknown setting distlock_leese"):
        task()


def test_a_setting_of_a_wrong_value_is_said_at_each_call_until_it_is_right(app):
    task = app.task(base=LockedTask, bind=True)(remaining)
    assert task.name
    app.conf.distlock_lease = -5

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="distlock_lease"):
            task()
    app.conf.distlock_lease = 5
    assert lease_of(task) == 5


def test_a_signal_s_handler_may_call_a_task_while_its_thread_reads_the_settings(app, monkeypatch):
    task = app.task(base=LockedTask, bind=True)(remaining)
    assert task.name
    app.conf.distlock_lease = 5
    runtime, found = Runtime.of(app), []
    read = runtime._read_layers

    def interrupted():
        monkeypatch.undo()
        found.append(lease_of(task))  # where Python calls the handler
        return read()

    monkeypatch.setattr(runtime, "_read_layers", interrupted)
    caller = threading.Thread(target=lambda: found.append(lease_of(task)), daemon=True)
    caller.start()
    caller.join(30)

    assert not caller.is_alive()
    assert found == [5, 5]


def test_a_call_during_the_finalization_of_the_app_finds_earlier_settings(app):
    task = app.task(base=LockedTask, bind=True)(remaining)
    assert task.name
    app.conf.distlock_lease = 5
    found = []
    app.on_after_finalize.connect(lambda **_: found.append(lease_of(task)), weak=False)

    caller = threading.Thread(target=task, daemon=True)
    caller.start()
    caller.join(30)

    assert not caller.is_alive()
    app.finalize()
    assert found == [5]


def test_the_tasks_option_outweighs_the_setting(app):
    app.conf.distlock_lease = 5

    assert lease_of(app.task(base=LockedTask, bind=True, lock_lease=3)(remaining)) == 3


def test_a_subclass_gives_options_to_its_tasks(app):
    class ShortTask(LockedTask):
        abstract = True
        lock_lease = 4.0

    assert lease_of(app.task(base=ShortTask, bind=True)(remaining)) == 4
    other = app.task(base=ShortTask, bind=True, name="other", lock_lease=3)(remaining)
    assert lease_of(other) == 3


def test_a_task_that_is_a_class_is_locked(app):
    class Work(LockedTask):
        name = "work"
        lock_key = "{key}"
        lock_lease = 4.0

        def run(self, key):
            return self.lock.key, self.lock.remaining

    key, seconds = app.register_task(Work())("k")

    assert key == "k"
    assert math.ceil(seconds) == 4


@pytest.mark.parametrize("named", ["by Celery", "by its instance"])
def test_a_class_that_has_no_name_is_locked_as_well(app, named):
    class Work(LockedTask):
        lock_key = "{task}:{key}"

        def run(self, key):
            return self.lock.key

    work = Work()
    if named == "by its instance":
        work.name = "its own"
    task = app.register_task(work)

    assert task("k") == f"{task.name}:k"


def test_tasks_of_one_class_have_a_lock_each(app):
    class Work(LockedTask):
        name = "work"
        lock_key = "{task}:{key}"

        def run(self, key):
            return self.lock.key

    first, second = Work(), Work()
    second.name = "another"

    assert [app.register_task(each)("k") for each in (first, second)] == ["work:k", "another:k"]


def test_a_wrong_option_of_a_class_without_a_name_is_said(app):
    class Work(LockedTask):
        lock_kee = "{key}"

        def run(self, key): ...

    with pytest.raises(ConfigurationError, match="Work: unknown option lock_kee"):
        app.register_task(Work())


@pytest.mark.parametrize("names", ["one task", "every task"])
def test_annotations_set_options(app, names):
    which = "annotated" if names == "one task" else "*"
    app.conf.task_annotations = {which: {"lock_lease": 6.0}}

    task = app.task(base=LockedTask, bind=True, name="annotated")(remaining)

    assert lease_of(task) == 6


def test_wrong_annotations_are_refused(app):
    app.conf.task_annotations = {"annotated": {"lock_leese": 6.0}}
    app.task(base=LockedTask, bind=True, name="annotated")(remaining)

    with pytest.raises(ConfigurationError, match=r"annotated.*lock_leese.*'lock_lease'"):
        app.finalize()


def test_settings_may_be_in_a_namespace(make_app):
    app = make_app()
    url = f"memory://{uuid.uuid4().hex}"
    source = {"CELERY_DISTLOCK_LEASE": 7, "CELERY_DISTLOCK_URL": url}
    app.config_from_object(source, namespace="CELERY")

    assert lease_of(app.task(base=LockedTask, bind=True)(remaining)) == 7


def test_a_setting_that_comes_after_the_declaration_counts(app):
    task = app.task(base=LockedTask, bind=True)(remaining)
    app.conf.distlock_lease = 5

    assert lease_of(task) == 5


def test_a_shared_task_is_locked_in_every_app(app, make_app):
    @shared_task(base=LockedTask, bind=True, name="shared", lock_key="shared", lock_lease=9.0)
    def shared(self):
        return self.lock.key, self.lock.remaining

    for each in (app, make_app()):
        each.finalize()
        key, seconds = each.tasks["shared"]()
        assert key == "shared"
        assert math.ceil(seconds) == 9


def test_with_the_apps_task_class_all_tasks_but_celerys_own_are_locked(make_app):
    app = make_app(task_cls=LockedTask)

    @app.task(bind=True)
    def seen(self):
        return bool(self.lock)

    @app.task(bind=True, base=LockedTask, name="outer")
    def outer(self):
        chord_unlock = app.tasks["celery.backend_cleanup"]
        return not chord_unlock.lock

    assert seen()
    assert outer()
    assert isinstance(app.tasks["celery.backend_cleanup"], LockedTask)
    assert app.tasks["celery.accumulate"](1, 2) == (1, 2)


def test_install_may_be_called_often(app):
    for _ in range(3):
        install(app)

    flags = [flag for option in app.user_options["worker"] for flag in option.opts]

    assert sorted(flag for flag in flags if flag.startswith("--distlock-")) == [
        "--distlock-disable",
        "--distlock-lease",
        "--distlock-on-conflict",
        "--distlock-prefix",
        "--distlock-url",
    ]
    assert [step for step in app.steps["worker"] if step is LockStep] == [LockStep]


# What is wrong


@pytest.mark.parametrize("lease", [0, -1, math.nan, math.inf, "10", True, None])
def test_a_lease_that_is_none_is_refused_as_option(app, lease):
    app.task(base=LockedTask, bind=True, name="work", lock_lease=lease)(remaining)

    with pytest.raises(ConfigurationError, match=r"task work: lock_lease must be a number of sec"):
        app.finalize()


@pytest.mark.parametrize("lease", [0, -1, math.nan, math.inf, "10", True, None])
def test_a_lease_that_is_none_is_refused_as_setting(app, lease):
    app.conf.distlock_lease = lease
    app.task(base=LockedTask, bind=True)(remaining)

    with pytest.raises(ConfigurationError, match=r"setting distlock_lease must be a number of sec"):
        app.finalize()


@pytest.mark.parametrize(
    ("option", "closest"),
    [
        ("lock_leese", "lock_lease"),
        ("lock_on_conflicts", "lock_on_conflict"),
        ("lock_keys", "lock_key"),
        ("lock_holdonretry", "lock_hold_on_retry"),
    ],
)
def test_an_unknown_option_is_refused_with_the_closest(app, option, closest):
    app.task(base=LockedTask, bind=True, name="work", **{option: 1})(remaining)

    with pytest.raises(ConfigurationError, match=rf"task work: .*{option}; .*'{closest}'"):
        app.finalize()


@pytest.mark.parametrize("option", ["lock_url", "lock_prefix", "lock_enabled"])
def test_what_is_for_the_app_alone_is_refused_as_option(app, option):
    app.task(base=LockedTask, bind=True, name="work", **{option: 1})(remaining)

    with pytest.raises(ConfigurationError, match=rf"task work: .*{option}"):
        app.finalize()


@pytest.mark.parametrize(
    ("setting", "closest"),
    [("distlock_leese", "distlock_lease"), ("DISTLOCK_ON_CONFLICTS", "distlock_on_conflict")],
)
def test_an_unknown_setting_is_refused_with_the_closest(app, setting, closest):
    app.conf[setting] = 1
    app.task(base=LockedTask, bind=True)(remaining)

    with pytest.raises(ConfigurationError, match=rf"{setting}.*'{closest}'"):
        app.finalize()


def test_a_setting_in_capitals_without_a_namespace_is_not_passed_over(app):
    app.conf["DISTLOCK_LEASE"] = 7
    app.task(base=LockedTask, bind=True)(remaining)

    with pytest.raises(ConfigurationError, match=r"DISTLOCK_LEASE.*distlock_lease"):
        app.finalize()


@pytest.mark.parametrize("name", ["{}", "{0}", "a{b", "100%", "*"])
def test_a_task_may_have_any_name(app, name):
    app.task(base=LockedTask, bind=True, name=name, lock_key="k")(remaining)
    app.task(base=LockedTask, bind=True, name=f"{name}-wrong", lock_key="k", lock_lease=-1)(
        remaining
    )

    with pytest.raises(ConfigurationError, match=re.escape(f"task {name}-wrong: lock_lease")):
        app.finalize()


@pytest.mark.parametrize("wrong", [None, "shop", Celery])
def test_only_an_app_can_be_installed(wrong):
    words = re.escape(f"takes the Celery app of the tasks, not {wrong!r}")
    with pytest.raises(ConfigurationError, match=words):
        install(wrong)


def test_an_unknown_setting_of_a_namespace_is_refused_with_the_closest(make_app):
    app = make_app()
    app.config_from_object({"CELERY_DISTLOCK_LEESE": 7}, namespace="CELERY")
    app.task(base=LockedTask, bind=True)(remaining)

    with pytest.raises(ConfigurationError, match=r"(?i)distlock_leese.*distlock_lease"):
        app.finalize()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("reque", "'requeue'"),
        ("nonsense", "there are fail, requeue, retry, skip, wait"),
        (7, "must be one of"),
        (policies.Skip, r"Skip\(\)"),
    ],
)
@pytest.mark.parametrize("where", ["option", "setting"])
def test_an_unknown_policy_is_refused(app, policy, message, where):
    options = {}
    if where == "option":
        options = {"lock_on_conflict": policy}
    else:
        app.conf.distlock_on_conflict = policy
    app.task(base=LockedTask, bind=True, **options)(remaining)

    with pytest.raises(ConfigurationError, match=f"on_conflict.*{message}"):
        app.finalize()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("stock:{skuu}", r"\{skuu\}.*did you mean \{sku\}\?"),
        ("stock:{}", "a field without a name"),
        ("stock:{sku", "does not parse"),
        ("", "empty"),
        ([], "lock_key must be"),
        (["{sku}", "{skuu}"], r"\{skuu\}"),
        (7, "lock_key must be"),
        (lambda other_name, *, needed: "k", "cannot be called with the task's own parameters"),
    ],
)
def test_a_key_that_cannot_be_made_is_refused(app, key, message):
    @app.task(base=LockedTask, name="reserve", lock_key=key)
    def reserve(sku, quantity=1):
        raise AssertionError("it must not run")

    with pytest.raises(ConfigurationError, match=rf"task reserve: .*{message}"):
        app.finalize()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock_wait": 5, "lock_on_conflict": "skip"}, r".*no effect.*Wait\(then=Skip"),
        (
            {"lock_wait": 5, "lock_on_conflict": policies.Fail()},
            r".*no effect.*Wait\(then=Fail",
        ),
        ({"lock_wait": 5, "lock_on_conflict": policies.Wait(2)}, "lock_wait is 5 s, and Wait"),
        ({"lock_max_hold": 5}, "lock_max_hold is 5 s and lock_lease 30 s"),
        ({"lock_max_hold": 50, "lock_watchdog": False}, "lock_max_hold is 50 s, and with lock_wat"),
        ({"lock_max_hold": 5, "lock_lease": 6}, "lock_max_hold is 5 s and lock_lease 6 s"),
    ],
)
def test_what_would_have_no_effect_is_refused(app, options, message):
    app.task(base=LockedTask, bind=True, name="work", **options)(remaining)

    with pytest.raises(ConfigurationError, match=f"task work: {message}"):
        app.finalize()


@pytest.mark.parametrize("rule", [Debounce, Unique])
def test_seconds_that_are_none_are_refused_with_those_that_are_some(rule):
    with pytest.raises(ConfigurationError, match="seconds above 0"):
        rule(0)


def test_what_a_base_sets_for_all_its_tasks_is_no_mistake_of_one(app):
    class Patient(LockedTask):
        abstract = True
        lock_wait = 5

    app.task(base=Patient, bind=True, name="skipping", lock_on_conflict="skip")(remaining)
    app.task(base=LockedTask, bind=True, name="short", lock_max_hold=5, lock_lease=5)(remaining)

    app.finalize()


def test_what_an_app_sets_for_all_its_tasks_is_no_mistake_of_one(app):
    app.conf.distlock_lease = 60
    app.task(base=LockedTask, bind=True, name="short", lock_max_hold=5)(remaining)

    app.finalize()


def test_what_annotations_set_for_all_tasks_is_no_mistake_of_one(app):
    app.conf.task_annotations = {"*": {"lock_on_conflict": "skip"}}
    app.task(base=LockedTask, bind=True, name="patient", lock_wait=5)(remaining)

    app.finalize()


@pytest.mark.parametrize(
    "options",
    [
        {"lock_wait": -1},
        {"lock_wait": "1"},
        {"lock_max_hold": 0},
        {"lock_max_requeues": -1},
        {"lock_max_requeues": 1.5},
        {"lock_watchdog": "yes"},
        {"lock_hold_on_retry": None},
        {"lock_on_lost": "ignore"},
        {"lock_on_failure": "retry"},
        {"lock_on_outage": "wait"},
        {"lock_via": "stor"},
        {"lock_unique": 0},
        {"lock_unique": True},
    ],
)
def test_a_wrong_value_is_refused(app, options):
    ((option, value),) = options.items()
    app.task(base=LockedTask, bind=True, name="work", **options)(remaining)

    with pytest.raises(ConfigurationError, match=rf"task work: {option} .*{value!r}"):
        app.finalize()


class RunsItself(Task):
    abstract = True

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


class GoesOn:
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def test_a_base_whose_call_would_run_the_task_past_its_lock_is_refused(app):
    class Base(RunsItself, LockedTask):
        abstract = True

    @app.task(base=Base, name="work", lock_key="k")
    def work(): ...

    with pytest.raises(ConfigurationError, match=r"task work: .*RunsItself.*put LockedTask first"):
        app.finalize()


@pytest.mark.parametrize(
    "bases", [(LockedTask, RunsItself), (GoesOn, LockedTask), (LockedTask, GoesOn)]
)
def test_a_base_whose_call_leaves_the_lock_to_its_task_is_not_refused(app, bases):
    @app.task(base=type("Base", bases, {"abstract": True}), bind=True, lock_key="k")
    def seen(self):
        return bool(self.lock)

    assert seen()


def nothing(): ...


class Notes:
    """A mixin that is no task."""

    noted: ClassVar[list] = []

    def apply_async(self, *args, **options):
        self.noted.append("sent")
        return super().apply_async(*args, **options)

    def __call__(self, *args, **kwargs):
        self.noted.append(bool(self.lock))
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_mixin_that_is_no_task_comes_before_celery_on_both_sides(app, order):
    bases = (Notes, LockedTask) if order == "before" else (LockedTask, Notes)
    app.conf.task_always_eager = True
    Notes.noted.clear()

    app.task(base=type("Base", bases, {"abstract": True}), lock_key="k")(nothing).delay()

    assert Notes.noted == ["sent", order == "behind"]


def test_bases_of_bases_come_before_celery_as_well(app):
    class First(LockedTask, RunsItself):
        abstract = True

    class Second(First, Notes):
        abstract = True

    class Third(First):
        abstract = True

    class Both(Third, Second):
        abstract = True

    names = [base.__name__ for base in Both.__mro__]
    assert names[-6:] == ["LockedTask", "RunsItself", "Notes", "Sending", "Task", "object"]


def test_a_wrong_declaration_is_refused_whenever_the_task_is_used(app):
    task = app.task(base=LockedTask, bind=True, lock_lease=0)(remaining)

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="lock_lease"):
            task.delay()
    with pytest.raises(ConfigurationError, match="lock_lease"):
        task()


def test_a_task_whose_declaration_was_interrupted_is_locked_when_it_is_used_again(app, monkeypatch):
    task = app.task(base=LockedTask, bind=True, lock_lease=25)(remaining)
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "declare", Mock(side_effect=TimeoutError))  # of its waiters
        with pytest.raises(TimeoutError):
            task()

    assert lease_of(task) == 25


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lock_on_conflict": "skip"}, "lock_on_conflict='requeue'.* not Skip"),
        ({"lock_on_conflict": policies.Wait()}, "lock_on_conflict='requeue'.* not Wait"),
        ({"lock_key": ["{a}", "{b}"]}, "one key to wait at, and lock_key names 2"),
        ({"lock_key": lambda a, b: [a, b]}, "one key to wait at, and lock_key returns 2"),
        ({"lock_key": lambda a, b: (a, b, f"{a}{b}")}, "one key .* lock_key returns 3"),
    ],
)
@pytest.mark.parametrize("by", [{"lock_via": "store"}, {"lock_unique": "started"}], ids=str)
def test_what_cannot_be_sent_through_the_store_is_refused(app, options, why, by):
    @app.task(base=LockedTask, name="work", **by, **options)
    def work(a, b): ...

    words = f"task work: lock_(via='store'|unique) needs {why}"
    with pytest.raises(ConfigurationError, match=words) as caught:
        app.finalize()
    assert next(iter(by)) in str(caught.value)


def test_a_callable_that_may_return_one_key_may_have_its_calls_sent_through_the_store(app):
    def one(a, b):
        return [f"{[a, b]}"]

    @app.task(base=LockedTask, name="work", lock_unique="started", lock_key=one)
    def work(a, b): ...

    app.finalize()


def test_a_way_that_the_rule_for_calls_does_not_take_is_refused(app):
    @app.task(base=LockedTask, name="work", lock_unique="started", lock_via="broker")
    def work(a, b): ...

    with pytest.raises(ConfigurationError, match="lock_via='broker' has no effect"):
        app.finalize()


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"until": "ended"}, r"Unique\(until\) must be one of 'started', 'finished', or seconds"),
        ({"until": -1.0}, r"Unique\(until\) must be"),
        ({"duplicate": "skip"}, r"Unique\(duplicate\) must be one of 'join', 'update', 'raise'"),
        ({"on_outage": "retry"}, r"Unique\(on_outage\) must be one of 'send', 'raise'"),
        ({"by": ""}, r"Unique\(by\) must be a template"),
    ],
)
def test_a_wrong_call_rule_is_refused(rule, why):
    with pytest.raises(ConfigurationError, match=why):
        Unique(**rule)


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ((0,), r"Debounce\(delay\) must be seconds"),
        (("5",), r"Debounce\(delay\) must be seconds"),
        ((5.0, 1.0), r"Debounce\(max_delay\) must be seconds from its delay on"),
        ((5.0, None, 1), r"Debounce\(leading\) must be a bool"),
    ],
)
def test_a_wrong_debounce_is_refused(terms, why):
    with pytest.raises(ConfigurationError, match=why):
        Debounce(*terms)


def test_what_is_alike_names_parameters_of_the_task(app):
    @app.task(base=LockedTask, name="work", lock_key="k", lock_unique=Unique(by="{colour}"))
    def work(a): ...

    with pytest.raises(ConfigurationError, match=r"work: lock_unique: by .*colour"):
        app.finalize()


# What only a call can show


def test_a_key_that_a_call_cannot_make_is_an_error_of_that_call(app):
    @app.task(base=LockedTask, bind=True, lock_key="{order.id}")
    def work(self, order):
        return self.lock.key

    class Order:
        id = 7

    with pytest.raises(LockKeyError, match=r"order.id.*has no attribute 'id'"):
        work("text")
    assert work(Order()) == "7"


@pytest.mark.parametrize(
    ("namespace", "written", "right"),
    [
        (None, "lock_lease", "distlock_lease"),
        ("CELERY", "CELERY_LOCK_ON_CONFLICT", "CELERY_DISTLOCK_ON_CONFLICT"),
    ],
)
def test_a_tasks_option_is_no_setting(make_app, namespace, written, right):
    app = make_app()
    app.config_from_object({written: 7}, namespace=namespace)
    app.task(base=LockedTask, bind=True)(remaining)

    with pytest.raises(ConfigurationError, match=f"{written} is not read.* write {right}"):
        app.finalize()


@pytest.mark.parametrize("written", ["lock_unique", "distlock_unique"])
def test_a_rule_for_calls_is_no_setting(app, written):
    app.conf[written] = "started"
    app.task(base=LockedTask, bind=True)(remaining)

    with pytest.raises(ConfigurationError, match=f"{written} is not read.*without a default"):
        app.finalize()


def test_the_hint_to_a_wrong_setting_is_written_as_it_is_to_be(make_app):
    app = make_app()
    app.config_from_object({"CELERY_DISTLOCK_LEESE": 7}, namespace="CELERY")
    app.task(base=LockedTask, bind=True)(remaining)

    with pytest.raises(ConfigurationError, match="'CELERY_DISTLOCK_LEASE'"):
        app.finalize()
