"""What a task that runs only its newest call may declare, and what is made of it."""

from __future__ import annotations

import pytest

from celery_distlock import Key, LockedTask
from celery_distlock.errors import ConfigurationError
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.call_rules import terms_of
from celery_distlock.stores import Ability
from celery_distlock.unique import NOTHING, Latest, Unique

ASKING = [Latest("tell"), Latest("stop"), Latest("stop", result=None)]
NAMES = ["tell", "stop", "with a result"]


@pytest.fixture
def declared(app):
    """Declare a task; return it and its plan."""

    def declared(rule, key="{key}", **options):
        how = {"lock_key": key, "lock_unique": rule, **options}

        @app.task(base=LockedTask, name="render", shared=False, **how)
        def render(key): ...

        return render, Runtime.of(app).plans["render"]

    return declared


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"running": "kill"}, r"Latest\(running\) must be one of 'finish', 'tell', 'stop', not"),
        ({"on_outage": "retry"}, r"Latest\(on_outage\) must be one of 'send', 'raise'"),
        ({"by": ""}, r"Latest\(by\) must be a template or None"),
        ({"result": 0}, r"Latest\(result=0\) has no effect with running='finish'"),
    ],
)
def test_a_wrong_rule_is_refused(given, why):
    with pytest.raises(ConfigurationError, match=why):
        Latest(**given)


def test_without_more_it_updates_the_call_that_waits_and_asks_no_other(declared):
    task, plan = declared("latest")

    rule = plan.unique
    assert rule == Latest() == Latest("finish")
    update = Unique(duplicate="update")
    for name in ("until", "duplicate", "by", "on_outage", "all_alike"):
        assert getattr(rule, name) == getattr(update, name)
    assert terms_of(task, rule, "name", {}) == terms_of(task, update, "name", {})
    assert plan.terms.renew_every is None
    assert Ability.RECALL not in dict(map(reversed, plan.needs_of_calls))


@pytest.mark.parametrize(
    ("rule", "recalls", "stops"),
    list(zip(ASKING, ["free", "free", "all"], [False, True, True], strict=True)),
    ids=NAMES,
)
def test_one_that_asks_is_renewed_each_second(declared, rule, recalls, stops):
    task, plan = declared(rule)

    assert terms_of(task, rule, "name", {}).recalls == recalls
    assert (plan.terms.renew_every, plan.terms.stops) == (1.0, stops)
    assert plan.recall_result is rule.result


def test_a_task_without_the_rule_can_be_asked_by_operators(declared):
    _, plan = declared("started")

    assert (plan.terms.renew_every, plan.terms.stops) == (None, True)
    assert plan.recall_result is NOTHING


@pytest.mark.parametrize("rule", ASKING, ids=NAMES)
def test_a_key_of_several_holders_is_refused(declared, rule):
    with pytest.raises(ConfigurationError, match=r"render: lock_unique=Latest.*may have several"):
        declared(rule, Key("{key}", capacity=2))


@pytest.mark.parametrize("rule", ASKING, ids=NAMES)
def test_so_is_one_that_a_function_returns_where_it_is_called(declared, rule):
    task, _ = declared(rule, lambda key: Key(key, shared=True))

    with pytest.raises(ConfigurationError, match=r"Key\('k', shared=True\) may have several"):
        task.delay("k")


def test_one_that_asks_no_other_may_have_any_key(declared):
    declared("latest", Key("{key}", capacity=2))


@pytest.mark.parametrize("rule", ASKING, ids=NAMES)
def test_leases_that_are_not_renewed_are_refused(declared, rule):
    with pytest.raises(ConfigurationError, match="lock_watchdog=False no lease is renewed"):
        declared(rule, lock_watchdog=False)


@pytest.mark.parametrize("rule", ASKING, ids=NAMES)
def test_a_store_that_cannot_ask_is_refused_by_name(app, declared, monkeypatch, rule):
    task, plan = declared(rule)
    store = Runtime.of(app).store
    lacking = store.abilities - {Ability.RECALL}
    monkeypatch.setattr(store, "abilities", lacking, raising=False)

    assert [ability for _, ability in plan.needs(store)] == [Ability.RECALL]
    words = rf"lock_unique=Latest\(running={rule.running!r}.* needs a store that can ask a holder"
    with pytest.raises(ConfigurationError, match=words):
        task.delay("k")


def test_it_is_no_word_of_other_kind(declared):
    with pytest.raises(ConfigurationError, match="did you mean 'latest'"):
        declared("lastest")
