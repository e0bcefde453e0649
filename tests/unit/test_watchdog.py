from __future__ import annotations

import pytest

from celery_distlock import clock
from celery_distlock.engine.lease import Hold, Terms
from celery_distlock.engine.watchdog import ANSWER_SHARE, Watchdog, _Watched
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import RenewOutcome, Reply, Status


class Patience(MemoryStore):
    """Answers no renewal, and keeps for how long it was waited for."""

    def __init__(self):
        super().__init__("memory://", "test")
        self.timeouts = []

    def renew(self, holds, timeout):
        self.timeouts.append(timeout)
        return [(RenewOutcome.UNKNOWN, clock.monotonic()) for _ in holds]


def held(store: Patience, lease: float) -> Hold:
    hold = Hold(store, f"for {lease} s", Terms(lease), label="test")
    assert hold.take(Reply(Status.GRANTED, clock.monotonic(), token=1))
    return hold


@pytest.mark.parametrize("due", [60.0, 6.0])
def test_no_renewal_is_waited_for_longer_than_the_shortest_lease_can_bear(due):
    store, dog = Patience(), Watchdog()
    holds = {lease: held(store, lease) for lease in (60.0, 6.0)}
    now = clock.monotonic()
    for lease, hold in holds.items():
        dog._due[_Watched(hold)] = now - 1 if lease == due else now + 100

    dog._pass()

    assert store.timeouts == [6.0 / ANSWER_SHARE]
