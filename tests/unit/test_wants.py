"""From a key to what a store is asked for, and back."""

from __future__ import annotations

import pytest

from celery_distlock import Key
from celery_distlock.engine.hold import want_of
from celery_distlock.runtime.repairs import key_wanting


@pytest.mark.parametrize(
    "key",
    [
        Key("k"),
        Key("k", capacity=5),
        Key("k", capacity=5, weight=2),
        Key("k", shared=True),
        Key("k", capacity=1, rate="3/s"),
        Key("k", shared=True, rate=["3/s", "50/m"], cost=2),
    ],
    ids=repr,
)
def test_a_key_is_made_of_what_is_wanted_of_it(key):
    assert want_of(key_wanting("k", want_of(key))) == want_of(key)
