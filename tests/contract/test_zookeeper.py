"""What every store promises, asked of the store over ZooKeeper."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from celery_distlock import clock
from celery_distlock.stores.zookeeper import ZooKeeperStore
from celery_distlock.testing.contract.given import LONGEST_WAIT
from tests import servers
from tests.contract.parts import Everything

if TYPE_CHECKING:
    from tests.zookeeper_server import ZooKeeperServer


class TestZooKeeperStore(Everything):
    shortest_lease = 0.6
    longest_lease = 40.0  # the server grants no longer session
    bound = True

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
