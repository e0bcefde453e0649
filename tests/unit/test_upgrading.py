"""What a hold is believed to have after upgrades and downgrades, some of them late or lost."""

from __future__ import annotations

import pytest

from celery_distlock import Key
from celery_distlock.engine import upgrading
from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.engine.lease import Lease
from celery_distlock.engine.upgrading import UpgradeWaiter, downgrade, upgrade
from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import ALONE, Status, Want


class Downgrades(MemoryStore):
    """Answers a downgrade with a slot, or executes it and loses the answer."""

    def __init__(self):
        super().__init__("memory://", "test")
        self._downgrade, self.units.downgrade = self.units.downgrade, self.downgrade
        self.slot = -1
        self.error = None
        self.downgrades = []

    def downgrade(self, key, owner, lease):
        reply = self._downgrade(key, owner, lease)
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


@pytest.fixture
def late(monkeypatch):
    """What must be done in the background, and is not done yet."""
    calls = []
    monkeypatch.setattr(upgrading._background, "submit", calls.append)
    return calls


def waits_for_others(hold):
    """An attempt to upgrade *hold* that has to wait, and is given up, later."""
    waiter = UpgradeWaiter(hold, float("inf"), waits=True)
    waiter.open()
    assert waiter.ask() is None
    waiter.give_up_later()
    waiter.close()


def test_an_attempt_that_gives_up_late_does_not_share_what_a_later_one_has(new_hold, late, store):
    hold, other = new_hold(Key("k", shared=True)), new_hold(Key("k", shared=True))
    waits_for_others(hold)
    release(other)
    assert upgrade(hold, 0).status is Status.GRANTED

    late.pop()()

    assert not store.downgrades
    assert hold.want == ALONE
    assert store.inspect("k").token == hold.token


def test_an_attempt_that_does_not_wait_gives_up_for_an_earlier_one(new_hold, late, store):
    hold, _other = new_hold(Key("k", shared=True)), new_hold(Key("k", shared=True))
    waits_for_others(hold)
    assert upgrade(hold, 0).status is Status.BUSY

    late.pop()()

    assert store.downgrades == [hold.owner]
    assert new_hold(Key("k", shared=True)).held  # the door is open


def test_the_latest_attempt_gives_up_late(new_hold, late, store):
    hold, _other = new_hold(Key("k", shared=True)), new_hold(Key("k", shared=True))
    waits_for_others(hold)

    late.pop()()

    assert store.downgrades == [hold.owner]
    assert new_hold(Key("k", shared=True)).held


@pytest.mark.parametrize("error", [StoreUnavailableError("no answer"), KeyboardInterrupt()])
def test_a_downgrade_without_an_answer_is_believed_to_be_done(new_hold, store, error):
    hold = new_hold(Key("k", capacity=5))
    upgrade(hold, 0)
    store.error = error

    with pytest.raises(type(error)):
        Lease((hold,)).downgrade()

    assert hold.want == Want(1, 5)
    assert store.inspect("k").token != hold.token  # it was done
    store.error = None
    Lease((hold,)).downgrade()
    assert store.inspect("k").token == hold.token
    Lease((hold,)).downgrade()
    assert len(store.downgrades) == 2


def test_a_downgrade_that_is_refused_leaves_the_key_held_alone(new_hold, store):
    hold = new_hold(Key("k", capacity=5))
    upgrade(hold, 0)
    store.error = StoreError("refused")

    with pytest.raises(StoreError, match="refused"):
        Lease((hold,)).downgrade()

    assert hold.want == ALONE


def test_a_downgrade_leaves_alone_what_was_declared_so(new_hold):
    account, index = new_hold("account"), new_hold(Key("index", shared=True))
    lease = Lease((account, index))

    lease.upgrade(timeout=1.0)
    lease.downgrade()

    assert account.want == ALONE
    assert index.want == Want(1, 0)


def test_a_downgrade_shares_all_where_all_were_declared_alone(new_hold):
    holds = new_hold("first"), new_hold("second")

    Lease(holds).downgrade()

    assert [hold.want for hold in holds] == [Want(1, 0), Want(1, 0)]
