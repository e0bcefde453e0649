from __future__ import annotations

import math

import pytest

from celery_distlock.errors import ConfigurationError
from celery_distlock.settings import (
    APP_ONLY,
    MAX_LEASE,
    MIN_LEASE,
    TASK_OPTIONS,
    Layer,
    Settings,
    checked,
    closest,
    meant,
)
from celery_distlock.stores import open_store

DURATIONS = ["wait", "lease", "max_hold", "sweep_interval"]
FLAGS = ["watchdog", "hold_on_retry", "enabled"]
CHOICES = {"on_lost": "warn", "on_failure": "requeue", "on_outage": "fail"}


def app(**values):
    return Layer("distlock_*", values)


def task(**values):
    return Layer("lock_* of task shop.reserve", values)


def refusal(name, value):
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_layers(app(**{name: value}))
    return str(caught.value)


def test_without_layers_there_are_the_documented_defaults():
    settings = Settings.from_layers()

    assert settings == Settings()
    assert (settings.on_conflict, settings.wait, settings.lease) == ("requeue", 10.0, 30.0)
    assert (settings.watchdog, settings.max_hold, settings.on_lost) == (True, None, "abort")
    assert (settings.on_failure, settings.on_outage) == ("release", "retry")
    assert (settings.hold_on_retry, settings.prefix, settings.sweep_interval) == (
        False,
        "distlock",
        2.0,
    )
    assert (settings.key, settings.url, settings.enabled) == ("{task}:{digest}", None, True)


def test_the_first_layer_that_names_an_option_wins():
    settings = Settings.from_layers(
        task(lease=1), Layer("--distlock-*", {"lease": 2, "wait": 3}), app(wait=4, prefix="p")
    )

    assert (settings.lease, settings.wait, settings.prefix) == (1.0, 3.0, "p")
    assert settings.on_lost == "abort"


def test_none_in_a_stronger_layer_is_a_value():
    assert Settings.from_layers(task(max_hold=None), app(max_hold=5.0)).max_hold is None


def test_what_a_stronger_layer_hides_is_not_checked():
    assert Settings.from_layers(task(lease=1.0), app(lease="nonsense")).lease == 1.0


def test_every_option_belongs_to_tasks_or_to_the_app_alone():
    assert set(TASK_OPTIONS) | APP_ONLY == set(Settings.__dataclass_fields__)
    assert not set(TASK_OPTIONS) & APP_ONLY


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize(
    "value",
    [
        *(-1, -0.001, math.nan, math.inf, -math.inf, "5", "", True, False, b"5", [5]),
        pytest.param(10**400, id="huge"),
    ],
)
def test_a_duration_is_a_number_of_seconds_in_range(name, value):
    assert f"distlock_{name} must be a number of seconds from" in refusal(name, value)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("lock_ttl", "lock_lease"),
        ("lock_timeout", "lock_lease"),
        ("lock_expiry", "lock_lease"),
        ("lock_blocking_timeout", "lock_wait"),
        ("lock_leese", "lock_lease"),
        ("lock_waits", "lock_wait"),
    ],
)
def test_foreign_names_get_ours_as_a_suggestion(name, right):
    known = [f"lock_{option}" for option in TASK_OPTIONS]

    assert meant(name, known) == f"did you mean {right!r}?"
    assert (
        meant(name.upper(), [each.upper() for each in known]) == f"did you mean {right.upper()!r}?"
    )


@pytest.mark.parametrize("name", ["wait", "lease", "sweep_interval"])
def test_only_max_hold_may_be_none(name):
    assert "must be a number of seconds" in refusal(name, None)


@pytest.mark.parametrize("name", ["lease", "max_hold", "sweep_interval"])
def test_a_duration_that_has_to_pass_is_not_0(name):
    refusal(name, 0)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("lease", MIN_LEASE, MAX_LEASE),
        ("max_hold", MIN_LEASE, MAX_LEASE),
        ("wait", 0, MAX_LEASE),
        ("sweep_interval", 0.05, 3600),
    ],
)
def test_the_ends_of_a_range_belong_to_it(name, low, high):
    for value in (low, high):
        made = getattr(Settings.from_layers(app(**{name: value})), name)
        assert made == value
        assert type(made) is float
    refusal(name, math.nextafter(low, -math.inf))
    refusal(name, math.nextafter(high, math.inf))


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", "", None, 1.0])
def test_a_flag_is_true_or_false(name, value):
    assert f"distlock_{name} must be True or False, not {value!r}" in refusal(name, value)


@pytest.mark.parametrize(("name", "most"), [("max_requeues", 1_000_000), ("replicas", 100)])
def test_a_count_is_a_whole_number_with_a_bound(name, most):
    for value in (-1, 1.0, "3", True, None, math.inf, math.nan, most + 1, 10**20):
        words = f"distlock_{name} must be a whole number from 0 to {most}, not {value!r}"
        assert words in refusal(name, value)
    assert getattr(Settings.from_layers(app(**{name: most})), name) == most


def test_max_requeues_may_be_0():
    assert Settings.from_layers(app(max_requeues=0)).max_requeues == 0


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", [None, True, 0, ["abort"], "", "ABORT "])
def test_a_choice_is_one_of_its_names(name, value):
    assert f"distlock_{name} cannot be {value!r}" in refusal(name, value)
    assert getattr(Settings.from_layers(app(**{name: CHOICES[name]})), name) == CHOICES[name]


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("on_lost", "abrt", "did you mean 'abort'?"),
        ("on_failure", "re-queue", "did you mean 'requeue'?"),
        ("on_outage", "retri", "did you mean 'retry'?"),
        ("on_outage", "zzz", "there are fail, retry, run"),
        ("on_lost", 7, "one of abort, requeue, warn"),
    ],
)
def test_a_wrong_choice_gets_a_suggestion(name, value, hint):
    assert hint in refusal(name, value)


@pytest.mark.parametrize("value", ["", None, 7, b"p"])
def test_a_prefix_is_a_text(value):
    assert "distlock_prefix must be a text without braces, blanks" in refusal("prefix", value)


@pytest.mark.parametrize("character", ["{", "}", *map(chr, range(33)), *"\x7f\x85\xa0\u2028\ud800"])
def test_what_a_prefix_may_not_have_is_named(character):
    said = refusal("prefix", f"a{character}b")

    assert f"has {character!r}" in said
    with pytest.raises(ConfigurationError, match="a prefix must be a text without"):
        open_store("memory://", f"a{character}b")


@pytest.mark.parametrize("prefix", ["distlock", "shop:locks", "läden", "a*b?[c]%", "\U0001f512"])
def test_a_prefix_may_have_all_that_can_be_read(prefix):
    assert Settings.from_layers(app(prefix=prefix)).prefix == prefix


@pytest.mark.parametrize(
    "value", ["", "localhost", "localhost:6379", 6379, b"redis://h", ["a://b"]]
)
def test_a_url_has_a_scheme(value):
    assert "distlock_url must be a URL such as redis://localhost:6379/0" in refusal("url", value)


@pytest.mark.parametrize(
    "value",
    [
        ":hunter2@localhost:6379",
        b"redis://:hunter2@localhost",
        ["redis://:hunter2@localhost"],
        {"url": "redis://:hunter2@localhost"},
    ],
)
def test_a_password_in_a_wrong_url_is_not_shown(value):
    assert "hunter2" not in refusal("url", value)


def test_the_message_says_where_the_value_comes_from():
    with pytest.raises(ConfigurationError, match=r"^lock_lease of task shop\.reserve must be"):
        Settings.from_layers(task(lease=-1), app(lease=1.0))
    with pytest.raises(ConfigurationError, match=r"^distlock_lease must be"):
        Settings.from_layers(task(), app(lease=-1))


def test_the_message_names_the_range():
    assert "from 0.1 to 2592000, not -1" in refusal("lease", -1)


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        Settings().lease = 5.0  # type: ignore[misc]


def test_the_closest_name_or_all_of_them():
    assert closest("leese", ["lease", "wait"]) == "did you mean 'lease'?"
    assert closest("zzz", ["wait", "lease"]) == "there are lease, wait"


def test_a_lease_alone_is_checked_alike():
    assert checked("lease", 1) == 1.0
    with pytest.raises(ConfigurationError, match=r"^lease must be"):
        checked("lease", "1")
    with pytest.raises(ConfigurationError, match=r"^extend must be"):
        checked("lease", 0, "extend")


SECRETS = {
    "one": "sixteen letters!",
    "several": ["sixteen letters!", "other sixteen letters"],
    "while it is introduced": ("sixteen letters!", None),
}


@pytest.mark.parametrize("value", SECRETS.values(), ids=SECRETS)
def test_a_secret_is_a_text_or_several(value):
    secrets = Settings.from_layers(app(secret=value)).secret

    assert secrets == ((value,) if isinstance(value, str) else tuple(value))


@pytest.mark.parametrize(
    "value",
    [
        *("", "fifteen letters", None, [], [None], [None, "sixteen letters!"], 5, True),
        *(b"sixteen letters!", ["sixteen letters!", ""], ["sixteen letters!", None, None]),
        ["sixteen letters!", b"sixteen letters!"],
    ],
)
def test_what_is_no_secret_is_refused_and_not_shown(value):
    said = refusal("secret", value)

    assert said.startswith("distlock_secret must be a text")
    assert "letters" not in said


def test_settings_are_shown_without_their_secret():
    assert "letters" not in repr(Settings.from_layers(app(secret="sixteen letters!")))
