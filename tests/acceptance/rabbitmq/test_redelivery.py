"""RabbitMQ delivers what was not acknowledged again as soon as a worker's connection is lost."""

from __future__ import annotations

import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.faults


def wait_delivered_again(site, result) -> None:
    # Perhaps more than once: connections are closed one after the other.
    received = f"[{result.id}] received"
    wait_until(lambda: site.log().count(received) > 1, what="a second delivery")


def check(site, key, result) -> None:
    """The task ran once, and the next one gets the key."""
    assert result.get(timeout=30) == "done"
    site.wait_queued(key, 0)
    assert site.tasks.work_fail.delay(key, "next").get(timeout=30) == 0
    assert site.journal.read(key) == [result.id, "next"]
    assert result.result == "done"


def test_a_task_whose_connection_is_lost_while_it_runs_runs_once(site, rabbit_server, key):
    result = site.tasks.work_late.delay(key, key)
    site.journal.wait(key)

    rabbit_server.close_connections()
    site.wait_queued(key)
    site.journal.open(key)

    check(site, key, result)


def test_a_task_that_ends_while_its_connection_is_lost_runs_once(site, rabbit_server, key):
    result = site.tasks.work_late.delay(key, key)
    site.journal.wait(key)

    rabbit_server.close_connections()
    site.journal.open(key)
    wait_delivered_again(site, result)

    check(site, key, result)
