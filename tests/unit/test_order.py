"""`Order`: what it accepts, and what it asks of the task that has it."""

from __future__ import annotations

import itertools
import pickle

import pytest
from celery import Celery

from celery_distlock import AsyncLock, Key, Lock, LockedTask, Order, install
from celery_distlock.engine.hold import want_of
from celery_distlock.errors import ConfigurationError
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.repairs import key_wanting
from celery_distlock.stores.values import Want

_number = itertools.count()


@pytest.fixture
def app():
    with Celery("orders", broker="memory://", set_as_current=False) as made:
        made.conf.distlock_url = "memory://"
        install(made)
        yield made


def take(tenant, sku=1): ...


def declared(app, **options):
    options.setdefault("name", f"t{next(_number)}")
    return app.task(base=LockedTask, shared=False, lazy=False, **options)(take)


@pytest.mark.parametrize(
    ("lane", "more", "words"),
    [
        (None, {"share": 2}, r"Order\(share=2\): share is that of a lane; name one, as in Order"),
        (None, {"most": 2, "strict": True}, "most is that of a lane"),
        *[
            ("a", {"ahead": each}, "ahead is from 0 to 2592000 seconds, not")
            for each in (-1, True, "2", float("nan"), 30 * 86400 + 1)
        ],
        *[("a", {"strict": each}, "strict is True or False, not") for each in (1, None, "yes")],
        (7, {}, r"Order\(7\): lane is a text, such as '\{tenant\}', or str\(tenant\)"),
        (b"a", {}, "lane is a text"),
        *[("a", {"share": each}, "share is from 0.001 to 1000") for each in (0, -1, 1001, "2")],
        *[("a", {"share": each}, "share is from") for each in (float("nan"), float("inf"), True)],
        *[
            ("a", {"most": each}, rf"Order\('a', most=.*\): most is a whole .*, not {each!r}")
            for each in (0, -1, True, 1.5, "2", 10**6 + 1)
        ],
    ],
)
def test_what_is_no_order_is_refused(lane, more, words):
    with pytest.raises(ConfigurationError, match=words):
        Order(lane, **more)


def test_it_says_what_it_is():
    assert repr(Order("{a}")) == "Order('{a}')"
    assert repr(Key("k", order=Order("b", share=2))) == "Key('k', order=Order('b', share=2))"
    assert repr(Order("a", most=2)) == "Order('a', most=2)" == repr(Order("b", most=2).of("a"))
    assert repr(Order(ahead=2.5, strict=True)) == "Order(ahead=2.5, strict=True)"
    assert Order("a", ahead=2, strict=True).of("b") == Order("b", ahead=2, strict=True)
    assert Order("a") == Order("a", share=1.0) != Order("b")
    assert pickle.loads(pickle.dumps(Order("a", share=0.5))) == Order("a", share=0.5)


def test_an_order_of_a_key_is_an_order():
    with pytest.raises(ConfigurationError, match="order is an Order, as in"):
        Key("k", order="{tenant}")


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({}, r"Key\('k'\): Order\('a', most=2\) has a most, and only one .* give it a capacity"),
        ({"capacity": 8, "weight": 3}, r"Key\('k'\): weight=3 is more than Order\('a', most=2\)"),
        ({"capacity": 8, "order": Order(strict=True)}, r"Order\(strict=True\) is strict, which is"),
        ({"shared": True, "order": Order(strict=True)}, "keys that one task has at a time"),
    ],
)
def test_an_order_that_does_not_suit_its_key_is_refused(terms, words):
    with pytest.raises(ConfigurationError, match=words):
        Key("k", **{"order": Order("a", most=2), **terms})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"lock_on_conflict": "skip"},
            r"order=Order\('\{tenant\}'\)\) needs .*'requeue'.*not Skip",
        ),
        ({"lock_via": "broker"}, r"lock_via='broker' contradicts Key\(.*leave lock_via out"),
        (
            {"lock_unique": "started", "lock_on_conflict": "fail"},
            "needs lock_on_conflict='requeue'",
        ),
    ],
    ids=str,
)
def test_a_task_whose_calls_do_not_wait_in_the_store_is_refused(app, options, words):
    with pytest.raises(ConfigurationError, match=words):
        declared(app, lock_key=Key("k", order=Order("{tenant}")), **options)


def test_a_task_with_several_keys_is_refused(app):
    keys = [Key("k", order=Order("{tenant}")), "sku:{sku}"]

    with pytest.raises(ConfigurationError, match="needs one key to wait at, and lock_key names 2"):
        declared(app, lock_key=keys)


def test_a_lane_that_names_no_parameter_is_refused(app):
    with pytest.raises(ConfigurationError, match=r"lock_key: Order '\{tennant\}' names .*did you"):
        declared(app, lock_key=Key("k", order=Order("{tennant}")))


def test_a_lane_that_looks_like_a_parameter_is_warned_of(app):
    with pytest.warns(UserWarning, match=r"Order 'tenant' has the text .*write \{tenant\}"):
        declared(app, lock_key=Key("k", order=Order("tenant")))


def test_a_lane_is_filled_in_as_a_key_is(app):
    task = declared(app, lock_key=Key("k", order=Order("{tenant[id]}:{sku}", share=2)))

    (key,) = Runtime.of(app).plan_of(task).rule.keys(({"id": 7},), {})

    assert key == Key("k", order=Order("7:1", share=2))


@pytest.mark.parametrize("kind", [Lock, AsyncLock])
def test_a_lock_has_no_order(kind):
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}.*order is for tasks"):
        kind(Key("k", order=Order("a")), store="memory://")


@pytest.mark.parametrize(
    "lane", ["", "a", "a b", "@1/b", "a/b", "%", "{a}", "\N{SNOWMAN}", "\0", "\udc80", "\xa0"]
)
@pytest.mark.parametrize(
    "terms", [{}, {"capacity": 4, "weight": 2}, {"shared": True, "rate": "5/s"}]
)
@pytest.mark.parametrize("most", [None, 2])
def test_a_lane_survives_the_store(lane, terms, most):
    key = Key("k", order=Order(lane, share=1.5, most=most if terms else None), **terms)

    want = want_of(key)

    read = Want.read(want.written())
    assert read == want
    assert (read.lane, read.share, read.most) == (lane, 1500, (most or 0) if terms else 0)
    assert want_of(key_wanting("k", read)) == want


@pytest.mark.parametrize("lane", [None, "", "a!", "+5", "@1000:5/x!"])
@pytest.mark.parametrize("rate", [None, "5/s"])
def test_what_is_ahead_or_strict_survives_the_store(lane, rate):
    terms = {} if rate is None else {"capacity": 1, "rate": rate}
    key = Key("k", order=Order(lane, ahead=12.345, strict=True), **terms)

    want = want_of(key)

    read = Want.read(want.written())
    assert read == want
    assert (read.ahead, read.strict) == (12_345, True)
    assert want_of(key_wanting("k", read)) == want


def test_a_long_lane_is_shortened_and_still_itself():
    long, other = (want_of(Key("k", order=Order("x" * 10_000 + end))) for end in "ab")

    assert len(long.written()) < 250
    assert long.written() != other.written()
    assert Want.read(long.written()).written() == long.written()
