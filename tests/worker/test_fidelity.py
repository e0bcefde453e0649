"""A task that had to wait arrives as it was sent."""

from __future__ import annotations

import datetime
import uuid

import pytest
import redis

from tests.waiting import wait_until

APP = "tests.apps.echoes"
ENV = {"C_FORCE_ROOT": "1"}  # Celery's leave to read pickles as root, as tests in a container are

ROUTES = {
    "direct": {"queue": "celery"},
    "topic": {"queue": "stock", "routing_key": "stock.books.red"},
}
OPTIONS = {
    "headers": {"x-tenant": "shop-7", "x-trace": {"ids": [1, 2]}},
    "priority": 5,
    "expires": datetime.datetime(2199, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "time_limit": 300,
    "soft_time_limit": 200,
    "shadow": "shop.echo",
    "compression": "zlib",
}


def arguments(serializer: str) -> tuple[list, dict]:
    args = [1, 2.5, None, "ü\n", {"a": [True, {"b": None}]}]
    if serializer == "pickle":
        args += [(1, 2), b"\x00\xff", datetime.date(2024, 2, 29), {3, 4}]
    return args, {"word": "né", "empty": ""}


def send(site, task: str, key: str, serializer: str, route: str):
    args, kwargs = arguments(serializer)
    return site.app.tasks[task].apply_async(
        (key, *args), kwargs, serializer=serializer, **ROUTES[route], **OPTIONS
    )


def forget_desk(site, key: str) -> None:
    """Make the parked tasks come by the broker, as if the worker that parked them were gone."""
    record = site.record(key).removesuffix("lock") + "tasks"
    with redis.Redis.from_url(site.app.conf.broker_url) as client:
        for field in client.hkeys(record):
            if field.startswith(b"h:"):
                client.hdel(record, field)


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml", "msgpack"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("way", ["desk", "broker", "retry"])
def test_a_task_that_waited_arrives_as_one_that_did_not(site, key, serializer, route, way):
    if serializer in ("yaml", "msgpack"):
        pytest.importorskip(serializer)
    task = "echo_retry" if way == "retry" else "echo_requeue"
    expected = send(site, task, key, serializer, route).get(timeout=30)
    site.wait_free(key)

    with site.held(key):
        result = send(site, task, key, serializer, route)
        wait_until(lambda: result.state == "PARKED", what="a conflict")
        if way != "retry":
            site.wait_queued(key)
        if way == "broker":
            forget_desk(site, key)

    assert result.get(timeout=30) == expected
    assert expected["properties"]["priority"] == 5
    assert expected["exchange"] == ("shop" if route == "topic" else "")
    assert expected["headers"] == OPTIONS["headers"]


@pytest.mark.parametrize("way", ["desk", "broker", "retry"])
def test_the_links_of_a_task_that_waited_run_once(site, key, way):
    task = "echo_retry" if way == "retry" else "echo_requeue"
    name, last = f"{key}:link", f"{key}:last"
    with site.held(key):
        result = site.app.tasks[task].apply_async((key,), link=site.tasks.note.s(name))
        wait_until(lambda: result.state == "PARKED", what="a conflict")
        if way != "retry":
            site.wait_queued(key)
        if way == "broker":
            forget_desk(site, key)
    site.journal.wait(name)

    site.app.tasks[task].apply_async((key,), link=site.tasks.note.s(last)).get(timeout=30)
    site.journal.wait(last)

    assert len(site.journal.read(name)) == 1
    assert len(site.journal.read(result.id)) == 1


@pytest.mark.parametrize("way", ["desk", "broker"])
def test_a_task_that_expires_while_it_is_parked_does_not_run_and_blocks_nobody(site, key, way):
    echo = site.tasks.echo_requeue
    with site.held(key):
        expiring = echo.apply_async((key,), expires=0.5)
        site.wait_queued(key, 1)
        other = echo.delay(key)
        site.wait_queued(key, 2)
        if way == "broker":
            forget_desk(site, key)
        sent = datetime.datetime.now(datetime.UTC)
        after = sent + datetime.timedelta(seconds=0.6)
        wait_until(lambda: datetime.datetime.now(datetime.UTC) > after, what="the expiry")

    other.get(timeout=30)
    wait_until(lambda: expiring.state == "REVOKED", what="the expired task's state")
    assert site.journal.read(expiring.id) == []


def test_a_parked_task_that_is_revoked_does_not_run_and_blocks_nobody(site, key):
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
    assert site.journal.read(revoked.id) == []


def test_a_parked_task_keeps_its_id(site, key):
    task_id = f"mine-{uuid.uuid4()}"
    with site.held(key):
        result = site.tasks.echo_requeue.apply_async((key,), task_id=task_id)
        site.wait_queued(key)
    result.get(timeout=30)

    assert site.journal.read(task_id) == [None]
