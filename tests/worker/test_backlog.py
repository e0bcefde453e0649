"""Calls that were published, as their keys were free, and wait at the broker behind other work."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import redis

from celery_distlock.ops.admin import Admin
from tests import servers
from tests.waiting import wait_until
from tests.worker.conftest import staffed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.worker.conftest import Site

APP = "tests.apps.backlog"
KINDS = [
    "store",
    *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("finished", "late")),
]
MANY = 20


@pytest.fixture
def site(bare_site: Site, tmp_path: Path) -> Iterator[Site]:
    """With a worker of its own, which has not seen the broker's queue before."""
    with staffed(bare_site, tmp_path, [{"concurrency": 1}]) as site:
        yield site


def client_of(site: Site) -> redis.Redis:
    return redis.Redis.from_url(site.env["DISTLOCK_TEST_BACKEND"])


def ready(site: Site) -> int:
    """How many messages the broker's queue has."""
    if "DISTLOCK_TEST_AMQP" not in site.env:
        return site.unread()
    with site.app.connection_for_read() as connection, connection.channel() as channel:
        return channel.queue_declare(queue="celery", passive=True).message_count


def coming(site: Site, key: str) -> dict[bytes, float]:
    """The times (s, from now) at which what is in flight for keys of *key* is looked for."""
    with client_of(site) as client:
        found: dict[bytes, float] = {}
        for record in client.scan_iter(f"{site.env['DISTLOCK_TEST_PREFIX']}:lock:{{{key}:*:woken"):
            found.update(client.zrange(record, 0, -1, withscores=True))
    return {run: at / 1000 - time.time() for run, at in found.items()}


def let_pass(site: Site, key: str, seconds: float) -> None:
    """Advance the store's time by *seconds*, and sweep what is due by then."""
    left = seconds
    while left > 0:
        step = min(left, 600.0)
        servers.bring_nearer(
            site.env["DISTLOCK_TEST_BACKEND"], f"{site.env['DISTLOCK_TEST_PREFIX']}:lock", step
        )
        left -= step
        wait_until(
            lambda: all(due > 0.0 for due in coming(site, key).values()),
            what="all that is due to be looked at",
        )


@contextmanager
def blocked(site: Site, key: str) -> Iterator[None]:
    """Have the only slot taken, and work of others before what is sent in the block."""
    gate = f"gate-{key}"
    site.tasks.plain.delay(f"{key}:gate", 0, gate)
    site.journal.wait(f"{key}:gate")
    for number in range(5):
        site.tasks.plain.delay(key, f"before {number}")
    try:
        yield
    finally:
        site.journal.open(gate)


def publish(site: Site, key: str, kind: str, many: int) -> None:
    """Call the task, and wait until the store knows that the broker has its messages."""
    for number in range(many):
        site.tasks.sent[kind].delay(key, number)
    wait_until(
        lambda: len(dues := coming(site, key)) == many and min(dues.values()) > 30.0,
        what="all of it to be published",
    )


def wait_empty(site: Site, key: str) -> None:
    """Wait until nothing is with the broker, or in flight."""
    site.tasks.plain.delay(f"{key}:last", 0)
    site.journal.wait(f"{key}:last")
    wait_until(lambda: not ready(site) and not coming(site, key), what="the end of all")


BEFORE = [f"before {number}" for number in range(5)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_hours_behind_other_work_they_pass_nothing_and_run_once(site, key, kind):
    with blocked(site, key):
        publish(site, key, kind, MANY)
        before = ready(site)

        let_pass(site, key, 7200.0)

        assert ready(site) == before
        assert site.journal.read(key) == []
    site.journal.wait(key, len(BEFORE) + MANY)
    wait_empty(site, key)
    assert site.journal.read(key) == BEFORE + list(range(MANY))
    assert "swept up" not in site.log()
    assert "second delivery" not in site.log()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_broker_has_lost_is_sent_again(site, key, kind):
    with blocked(site, key):
        publish(site, key, kind, 3)
        site.app.control.purge()

        let_pass(site, key, 65.0)

        wait_until(lambda: ready(site) == 3, what="the three to be with the broker again")
    wait_empty(site, key)
    ran = [note for note in site.journal.read(key) if note not in BEFORE]
    assert sorted(ran) == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_comes_hours_after_its_copy_has_run_does_not_run(site, key, kind):
    with blocked(site, key), taken_away(site, key, kind):
        let_pass(site, key, 65.0)
        wait_until(lambda: ready(site) == 1, what="a copy to be with the broker")
        site.journal.open(f"gate-{key}")
        site.journal.wait(key, 2)
        wait_until(lambda: not coming(site, key), what="the end of the copy")
        let_pass(site, key, 7200.0)
    wait_empty(site, key)

    assert site.journal.read(key).count(0) == 1


@contextmanager
def taken_away(site: Site, key: str, kind: str) -> Iterator[None]:
    """Make a call, and have its message unacknowledged in the block, as by a worker that died."""
    publish(site, key, kind, 1)
    with site.app.connection_for_read() as connection, connection.channel() as channel:
        taken = []
        while (message := channel.basic_get("celery", no_ack=False)) is not None:
            taken.append(message)
        yield
        for message in taken:
            channel.basic_reject(message.delivery_tag, requeue=True)


def test_a_call_that_is_dropped_does_not_run_however_late_its_message_comes(site, key):
    with blocked(site, key):
        result = site.tasks.sent["store"].delay(key, 0)
        wait_until(lambda: min(coming(site, key).values()) > 30.0, what="it to be published")

        assert Admin(site.app).drop(result.id)
        let_pass(site, key, 7200.0)
    wait_empty(site, key)
    assert site.journal.read(key) == BEFORE


def test_calls_of_one_key_stay_in_order_though_the_first_waits_at_the_broker(site, key):
    sent = site.tasks.sent["one key"]
    with blocked(site, key):
        for number in range(3):
            sent.delay(key, number)
        wait_until(lambda: len(coming(site, key)) == 1, what="the first to be published")

        # As its time to come for the key ends, the next one has its turn, and so on.
        for many in (2, 3):
            let_pass(site, key, 25.0)
            wait_until(lambda many=many: len(coming(site, key)) == many, what="the next one's turn")
    wait_empty(site, key)

    assert site.journal.read(key) == [*BEFORE, 0, 1, 2]


@pytest.mark.parametrize("kind", ["store", pytest.param("debounce", marks=pytest.mark.exhaustive)])
def test_many_calls_that_are_due_at_once_are_pushed_to_no_worker_that_is_full(site, key, kind):
    with blocked(site, key):
        channels = site.store.channels.find_channels
        wait_until(
            lambda: (found := channels(["celery"])) and not found[0].free,
            what="the worker to report that it is full",
        )
        received = site.log().count("received")

        for number in range(MANY):
            delay = {"countdown": 0.5} if kind == "store" else {}
            site.tasks.sent[kind].apply_async((key, number), **delay)

        # Those before them in the broker's queue but one, which the worker has fetched.
        wait_until(lambda: ready(site) == len(BEFORE) - 1 + MANY, what="all to be with the broker")
        assert site.log().count("received") - received <= 1
    wait_empty(site, key)

    assert sorted(site.journal.read(key)[len(BEFORE) :]) == list(range(MANY))
