"""What can be said of how often a key is taken, and what is wrong is said at once."""

from __future__ import annotations

import math
import pickle

import pytest

from celery_distlock import AsyncLock, Key, Lock, Rate
from celery_distlock.engine.hold import want_of
from celery_distlock.errors import ConfigurationError
from celery_distlock.stores.values import ALONE, Ability, Route, Want


@pytest.mark.parametrize(
    ("text", "limit", "per", "shown"),
    [
        ("100/m", 100, 60.0, "100/m"),
        ("5/10s", 5, 10.0, "5/10s"),
        ("1/h", 1, 3600.0, "1/h"),
        ("3/2d", 3, 172800.0, "3/2d"),
        ("7/60s", 7, 60.0, "7/m"),
        ("20/0.5s", 20, 0.5, "20/0.5s"),
        (" 20/s ", 20, 1.0, "20/s"),
    ],
)
def test_a_text_is_a_rate(text, limit, per, shown):
    rate = Rate.read(text)

    assert (rate.limit, rate.per, rate.burst) == (limit, per, 1)
    assert str(rate) == shown
    assert Rate.read(str(rate)) == rate
    assert eval(repr(rate)) == rate
    assert pickle.loads(pickle.dumps(rate)) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m",
        "100",
        "100/",
        "100/x",
        "/m",
        "-1/m",
        "1.5/m",
        "10/-5s",
        "10/1e3s",
        "10 / m",
        "1/m/m",
    ],
)
def test_another_text_is_refused_with_the_right_syntax(text):
    with pytest.raises(ConfigurationError) as raised:
        Key("api", shared=True, rate=text)

    assert f"Key('api'): rate {text!r}" in str(raised.value)
    assert "'100/m', '5/10s', or Rate(5, per=10)" in str(raised.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"limit": 0}, "limit is a whole number from 1 to 1000000"),
        ({"limit": -3}, "limit is a whole number"),
        ({"limit": True}, "limit is a whole number"),
        ({"limit": 1.5}, "limit is a whole number"),
        ({"limit": 10**7}, "limit is a whole number"),
        ({"limit": 5, "per": 0}, "per is from 0.001 to 2592000 seconds"),
        ({"limit": 5, "per": -1.0}, "per is from"),
        ({"limit": 5, "per": math.nan}, "per is from"),
        ({"limit": 5, "per": math.inf}, "per is from"),
        ({"limit": 5, "per": 1e9}, "per is from"),
        ({"limit": 5, "per": 10**400}, "per is from"),
        ({"limit": 5, "per": "m"}, "per is from"),
        ({"limit": 5, "burst": 0}, "burst is a whole number from 1 to the limit, 5"),
        ({"limit": 5, "burst": 6}, "burst is a whole number"),
        ({"limit": 5, "burst": 1.0}, "burst is a whole number"),
    ],
)
def test_a_rate_out_of_range_is_refused(how, said):
    with pytest.raises(ConfigurationError) as raised:
        Rate(**how)

    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "rate='5/s' does not set how many may run at once; add shared=True"),
        ({"weight": 1}, "add shared=True for any number, or capacity=N"),
        ({"shared": True, "rate": []}, "rate gives 0 rates; it is 1 to 4"),
        ({"shared": True, "rate": ["5/s"] * 5}, "rate gives 5 rates"),
        ({"shared": True, "rate": ["5/s", "7/s"]}, "two limits for one time, 5/s, 7/s"),
        ({"shared": True, "rate": 5}, "rate is '100/m'"),
        ({"shared": True, "rate": {"5/s"}}, "rate is '100/m'"),
        ({"shared": True, "rate": b"5/s"}, "rate is '100/m'"),
        ({"shared": True, "cost": 6}, "cost=6 is more than rate 5/s allows"),
        ({"shared": True, "rate": ["90/m", "5/s"], "cost": 6}, "more than rate 5/s allows"),
        ({"shared": True, "cost": 0}, "cost is a whole number from 1"),
        ({"shared": True, "cost": 1.0}, "cost is a whole number from 1"),
        ({"shared": True, "rate": None, "cost": 2}, "cost=2 needs a rate"),
        ({"shared": True, "rate": "0/m"}, "Key('api'): Rate(0)"),
    ],
)
def test_a_key_that_contradicts_itself_is_refused(how, said):
    with pytest.raises(ConfigurationError) as raised:
        Key("api", **{"rate": "5/s", **how})

    assert "Key('api')" in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.parametrize("kind", [Lock, AsyncLock])
def test_a_lock_takes_a_rate_as_a_key_does(kind):
    lock = kind("api", capacity=1, rate="5/s", store="memory://")

    assert lock.wanted == Key("api", capacity=1, rate=Rate(5, per=1.0))
    with pytest.raises(ConfigurationError, match="add shared=True"):
        kind("api", rate="5/s", store="memory://")
    with pytest.raises(ConfigurationError, match="shared and rate go with a text"):
        kind(Key("api"), rate="5/s", store="memory://")


def test_a_key_says_its_rates():
    key = Key("api", capacity=1, rate=["100/m", Rate(5, per=1, burst=5)], cost=2)

    assert key.rates == (Rate(5, per=1.0, burst=5), Rate(100))
    assert eval(repr(key)) == key
    assert key.of("other").rates == key.rates
    assert key.alone
    assert Key("api").rates == ()


def test_what_is_wanted_is_written_and_read():
    want = want_of(Key("api", capacity=7, weight=2, rate=["100/m", "5/s"], cost=3))

    assert want == Want(2, 7, (Rate(5, per=1.0), Rate(100)), 3)
    assert Want.read(want.written()) == want
    assert Want.read("1/1") == ALONE
    route = Route(("a", "b"), "shop.t", (want, ALONE))
    assert Route.read(route.written()) == route


@pytest.mark.parametrize(
    "text", ["", "1", "1/", "1/2/", "1/2/x", "1/2/1:", "1/2/1:5,6", "1/2/1:5,6,7;", "1/1/1:0,0,0"]
)
def test_a_foreign_record_is_no_want(text):
    assert Want.read(text) is None


def test_a_rate_needs_its_ability():
    assert want_of(Key("api", capacity=1, rate="5/s")).needs is Ability.QUEUE
    assert want_of(Key("api", shared=True, rate="5/s")).needs is Ability.QUEUE
    assert want_of(Key("api", shared=True)).needs is Ability.SEVERAL
    assert want_of(Key("api")).needs is None
