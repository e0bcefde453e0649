"""A task that had to wait arrives as it was sent."""

from __future__ import annotations

import datetime
import uuid
from typing import TYPE_CHECKING

import pytest

from tests import fidelity
from tests.waiting import wait_until
from tests.worker.conftest import staffed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site

APP = "tests.apps.echoes"
ENV = {"C_FORCE_ROOT": "1"}  # Celery's leave to read pickles as root, as tests in a container are
POOLS = {"prefork": 2, "threads": 4, "gevent": 20, "solo": 1}


@pytest.fixture(scope="module", params=POOLS)
def pool(request) -> str:
    if request.param == "gevent":
        pytest.importorskip("gevent")
    return request.param


@pytest.fixture(scope="module")
def site(pool, bare_site: Site, tmp_path_factory) -> Iterator[Site]:
    """One worker of each pool."""
    worker = {"pool": pool, "concurrency": POOLS[pool]}
    with staffed(bare_site, tmp_path_factory.mktemp("workers"), [worker]) as site:
        yield site


@pytest.mark.parametrize("way", ["channel", "broker"])
@pytest.mark.parametrize("parked_by", fidelity.PARK)
def test_a_task_that_was_parked_arrives_as_one_that_did_not_wait(site, pool, parked_by, way):
    if (pool, parked_by) == ("solo", "main process"):
        pytest.skip("a solo worker receives nothing while it runs a task")
    straight = fidelity.send_straight(site, plain=parked_by == "main process")
    parked = fidelity.PARK[parked_by](site, way)

    assert fidelity.table(site, straight, parked) == {}
    assert fidelity.came_by(site, parked) == (parked_by, way)


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_a_task_that_waited_in_the_store_from_its_call_on_arrives_as_one_that_did_not(site, way):
    straight = fidelity.send_straight(site)
    sent = fidelity.send_via_store(site, way)

    assert fidelity.table(site, straight, sent) == {}
    assert fidelity.came_by(site, sent)[1] == way


def test_a_task_that_was_sent_through_the_store_to_a_free_key_arrives_as_any_other(site):
    straight = fidelity.send_straight(site)
    sent = fidelity.send_free_via_store(site)

    assert fidelity.table(site, straight, sent) == {}


def test_a_task_that_was_sent_again_arrives_as_one_that_did_not_wait(site):
    straight = fidelity.send_straight(site, "echo_retry")
    again = fidelity.wait_for_a_key_of_ours(site, "retry", "echo_retry")

    assert fidelity.table(site, straight, again) == {}


@pytest.mark.parametrize("way", ["channel", "broker", "retry"])
def test_the_links_of_a_task_that_waited_run_once(site, key, way):
    task = "echo_retry" if way == "retry" else "echo_requeue"
    name, last = f"{key}:link", f"{key}:last"
    with site.held(key):
        result = site.app.tasks[task].apply_async((key,), link=site.tasks.note.s(name))
        wait_until(lambda: result.state == "PARKED", what="a conflict")
        if way != "retry":
            site.wait_queued(key)
        if way == "broker":
            site.forget_channel(key)
    site.journal.wait(name)

    site.app.tasks[task].apply_async((key,), link=site.tasks.note.s(last)).get(timeout=30)
    site.journal.wait(last)

    assert len(site.journal.read(name)) == 1
    assert len(site.journal.read(f"{result.id}:ran")) == 1


def park_to_expire(site, key):
    """Park a task that expires soon, or later if it did before; return it and a time after that."""
    for seconds in (0.5, 5.0, 20.0):
        result = site.tasks.echo_requeue.apply_async((key,), expires=seconds)
        after = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds + 0.1)
        wait_until(
            lambda result=result: site.look(key).waiting or result.state == "REVOKED",
            what="it to be parked",
        )
        if site.look(key).waiting:
            return result, after
    raise AssertionError("it always expired before it was parked")


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_a_task_that_expires_while_it_is_parked_does_not_run_and_blocks_no_other(site, key, way):
    echo = site.tasks.echo_requeue
    with site.held(key):
        expiring, after = park_to_expire(site, key)
        other = echo.delay(key)
        site.wait_queued(key, 2)
        if way == "broker":
            site.forget_channel(key)
        wait_until(lambda: datetime.datetime.now(datetime.UTC) > after, what="the expiry")

    other.get(timeout=30)
    wait_until(lambda: expiring.state == "REVOKED", what="the expired task's state")
    assert site.journal.read(f"{expiring.id}:ran") == []


def test_a_parked_task_that_is_revoked_does_not_run_and_blocks_no_other(site, key):
    echo = site.tasks.echo_requeue
    with site.held(key):
        revoked = echo.delay(key)
        site.wait_queued(key, 1)
        other = echo.delay(key)
        site.wait_queued(key, 2)
        revoked.revoke()
        for worker in site.workers:
            worker.wait_log(f"Tasks flagged as revoked: {revoked.id}")

    other.get(timeout=30)
    wait_until(lambda: revoked.state == "REVOKED", what="the revoked task's state")
    assert site.journal.read(f"{revoked.id}:ran") == []


def test_a_parked_task_keeps_its_id(site, key):
    task_id = f"mine-{uuid.uuid4()}"
    with site.held(key):
        result = site.tasks.echo_requeue.apply_async((key,), task_id=task_id)
        site.wait_queued(key)
    result.get(timeout=30)

    assert len(site.journal.read(f"{task_id}:ran")) == 1
