"""What every store promises, asked of the store over ZooKeeper."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from celery_distlock import clock
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import RenewOutcome
from celery_distlock.stores.zookeeper import ZooKeeperStore
from celery_distlock.testing import (
    ListContract,
    OrderContract,
    RecogniseContract,
    SeveralContract,
    StoreContract,
)
from celery_distlock.testing.contract.actions import BUSY, renew, take
from tests import servers
from tests.contract.parts.units import SeveralFound

if TYPE_CHECKING:
    from tests.zookeeper_server import ZooKeeperServer

LONGEST_WAIT = 2.0  # seconds that pass on the server's clock, too


class TestZooKeeperStore(
    StoreContract,
    OrderContract,
    RecogniseContract,
    ListContract,
    SeveralContract,
    SeveralFound,
):
    shortest_lease = 0.6
    longest_lease = 40.0  # the server grants no longer session

    # An owner ends with the session of its process.
    test_an_owner_is_an_acquisition_and_not_a_process = None

    def test_another_process_can_release_a_hold_and_no_more(self, store, another):
        take(store, "k", "a")

        assert another.acquire(AcquireRequest("k", "a", 30.0)).status is BUSY
        assert renew(another, ("k", "a", 30.0)) != [RenewOutcome.RENEWED]
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
        assert another.release(ReleaseRequest("k", "a")).released
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

    @pytest.fixture
    def open_store(self, shared_server: ZooKeeperServer):
        prefix = servers.new_prefix()
        url = f"{shared_server.url}/contract?session={self.longest_lease}"
        return lambda name: ZooKeeperStore(url, f"{prefix}-{name}")

    @pytest.fixture
    def pass_time(self, monkeypatch):
        monotonic, skipped = clock.monotonic, 0.0
        monkeypatch.setattr(clock, "monotonic", lambda: monotonic() + skipped)

        def pass_by(seconds):
            nonlocal skipped
            if seconds <= LONGEST_WAIT:
                time.sleep(seconds)
            else:
                skipped += seconds

        return pass_by
