"""What a worker without work costs its lock server."""

from __future__ import annotations

import time

import pytest

from celery_distlock.stores import open_store
from tests.waiting import wait_until

SECONDS = 12.0  # longer than any period of what an idle worker repeats


@pytest.mark.parametrize("pool", ["prefork", pytest.param("threads", marks=pytest.mark.exhaustive)])
def test_an_idle_worker_calls_a_script_a_second(worker, private_server, prefix, pool):
    server = private_server()
    worker("tests.apps.configured", pool=pool, env={"DISTLOCK_TEST_STORE": server.url})
    store = open_store(server.url, f"{prefix}:lock")
    wait_until(lambda: store.timetable.dues().ticker, what="a ticker")
    store.close()

    with server.client() as client:
        client.config_resetstat()
        began = time.monotonic()
        time.sleep(SECONDS)
        scripts = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        passed = time.monotonic() - began

    # The registration, and the ticker. The sweeper needs none while it finds no task.
    assert scripts <= passed / 2 + passed / 2 + 3
