"""What a store is asked for, and what it cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_distlock import Key
from celery_distlock.engine.wants import ensure_able, want_of
from celery_distlock.errors import ConfigurationError
from celery_distlock.stores.values import ALONE, Ability, Want


@pytest.mark.parametrize(
    ("key", "want", "units"),
    [
        (Key("k"), ALONE, 1),
        (Key("k", capacity=3), Want(1, 3), 1),
        (Key("k", capacity=3, weight=2), Want(2, 3), 2),
        (Key("k", capacity=3, weight=7), Want(7, 3), 3),
        (Key("k", capacity=None), Want(1, 0), 1),
        (Key("k", shared=True), Want(1, 0), 1),
    ],
)
def test_a_key_says_how_much_is_asked_for_and_counted(key, want, units):
    assert want_of(key) == want
    assert want.counted() == units


ALL = frozenset({Ability.SEVERAL, Ability.WEIGH})


@pytest.mark.parametrize(
    ("key", "abilities"),
    [
        (Key("k", min_hold=1, cooldown=2), frozenset()),
        (Key("k", capacity=3), {Ability.SEVERAL}),
        (Key("k", shared=True), {Ability.SEVERAL}),
        (Key("k", capacity=3, weight=2), ALL),
    ],
)
def test_what_a_store_can_is_let_pass(key, abilities):
    ensure_able(SimpleNamespace(abilities=abilities, address="there"), [Key("a"), key], "task t")


@pytest.mark.parametrize(
    ("key", "abilities", "words"),
    [
        (Key("k", capacity=3), frozenset(), "let several hold a key"),
        (Key("k", shared=True), {Ability.WEIGH}, "let several hold a key"),
        (Key("k", capacity=3, weight=2), {Ability.SEVERAL}, "count units"),
        (Key("k", capacity=1, rate="5/s"), ALL, "count how often a key is taken"),
    ],
)
def test_what_a_store_cannot_is_refused_by_name(key, abilities, words):
    store = SimpleNamespace(abilities=abilities, address="there")

    with pytest.raises(ConfigurationError, match=rf"task t: .* a store that can {words}") as caught:
        ensure_able(store, [Key("a"), key], "task t")

    assert repr(key) in str(caught.value)
    assert "there cannot" in str(caught.value)
