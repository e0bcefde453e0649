"""What a hold is believed to have after upgrades and downgrades, some of them late or lost."""

from __future__ import annotations

import threading

import pytest

from celery_distlock import Key
from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.lease import Hold, Terms
from celery_distlock.engine.upgrading import (
    UpgradeWaiter,
    downgrade,
    downgrade_all,
    upgrade,
)
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import ALONE, Status, Want
from tests.waiting import wait_until


class Downgrades(MemoryStore):
    """Answers a downgrade with a slot, or executes it and loses the answer."""

    def __init__(self):
        super().__init__("memory://", "test")
        self.slot = -1
        self.error = None
        self.downgrades = []

    def downgrade(self, key, owner, lease):
        reply = super().downgrade(key, owner, lease)
        self.downgrades.append(owner)
        if self.error is not None:
            raise self.error
        return reply._replace(slot=self.slot)


@pytest.fixture
def store():
    return Downgrades()


@pytest.fixture
def new_hold(store):
    made = []

    def make(key):
        made.append(Hold(store, key, Terms(), label="test"))
        assert acquire(made[-1]).status is Status.GRANTED
        return made[-1]

    yield make
    for hold in made:
        release(hold)


@pytest.mark.parametrize(
    ("key", "want", "slot"),
    [
        (Key("k", capacity=5), Want(1, 5), 3),
        (Key("k", capacity=5, weight=2), Want(2, 5), -1),
        (Key("k", shared=True), Want(1, 0), -1),
        (Key("k"), Want(1, 0), -1),
    ],
)
def test_a_downgrade_leaves_what_was_had_before(new_hold, store, key, want, slot):
    hold = new_hold(key)
    store.slot = slot
    assert upgrade(hold, 0).status is Status.GRANTED
    assert (hold.want, hold.slot) == (ALONE, None)

    downgrade(hold)

    assert hold.want == want
    assert hold.slot == (slot if slot >= 0 else None)
