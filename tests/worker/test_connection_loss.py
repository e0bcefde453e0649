"""What becomes of running tasks when their worker has lost its connection to the broker."""

from __future__ import annotations

import pytest
import redis

from celery_distlock.testing import EmbeddedServer
from tests import servers
from tests.worker.conftest import opened, staffed

CANCELS = ["--", "worker.cancel_long_running_tasks_on_connection_loss=1"]


@pytest.fixture(scope="module")
def broker():
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="module")
def site(broker, redis_url, tmp_path_factory):
    env = {
        "DISTLOCK_TEST_BROKER": broker.url,
        "DISTLOCK_TEST_BACKEND": redis_url,
        "DISTLOCK_TEST_PREFIX": servers.new_prefix(),
    }
    workers = [{"concurrency": 1, "args": CANCELS}]
    with (
        opened("tests.apps.locked", env) as site,
        staffed(site, tmp_path_factory.mktemp("workers"), workers) as site,
    ):
        yield site
        servers.delete_keys(redis_url, env["DISTLOCK_TEST_PREFIX"])


def test_a_woken_task_that_it_cancels_runs_again_long_before_its_lease_ends(broker, site, key):
    with site.held(key):
        result = site.tasks.work_late_for_long.delay(key, key)
        site.wait_queued(key)
    site.journal.wait(key)

    with redis.Redis.from_url(broker.url) as client:
        client.client_kill_filter(_type="normal", skipme=True)

    site.journal.wait(key, 2)
    site.journal.open(key)
    assert result.get(timeout=30) == "done"
    assert site.journal.read(key) == [result.id] * 2
