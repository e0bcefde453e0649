"""What waits in the store goes on where its key is given up, if that worker takes such calls."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import redis

from celery_distlock.stores.redis.scripts import load
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site

ENV = {"DISTLOCK_TEST_VIA": "store"}
WORKERS = [{"concurrency": 2}]

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's backend


def registered(site: Site) -> str:
    """Wait until the worker is pushed calls; return of which queue."""
    (queue,) = site.app.amqp.queues
    wait_until(
        lambda: site.store.channels.find_channels([queue]), what="the worker to be registered"
    )
    return queue


@contextmanager
def scripts_of(site: Site) -> Iterator[Counter[str]]:
    """Count what scripts the site's processes run in the block; others may use its server, too."""
    names = {load(name).sha: name for name in ("acquire", "release", "channels", "push")}
    counts: Counter[str] = Counter()
    url, prefix = site.env["DISTLOCK_TEST_BROKER"], site.env["DISTLOCK_TEST_PREFIX"]
    with redis.Redis.from_url(url) as client, client.monitor() as monitor:
        yield counts
        with redis.Redis.from_url(url) as other:
            other.echo(f"end of {prefix}")
        for each in monitor.listen():
            verb, *words = each["command"].split()
            if verb == "ECHO" and words[-1] == prefix:
                break
            if verb.startswith("EVAL") and any(prefix in word for word in words):
                counts[names.get(words[0], words[0])] += 1


def test_a_waiter_gets_the_key_by_the_release_alone(site, key):
    registered(site)
    gate = f"gate-{key}"
    results = [site.tasks.work_requeue.delay(key, 0, gate)]
    site.journal.wait(key)
    results += [site.tasks.work_requeue.delay(key, number) for number in range(1, 40)]
    with scripts_of(site) as scripts:
        site.journal.open(gate)
        for result in results:
            result.get(timeout=30)

    assert site.journal.read(key) == list(range(40))
    # Each task acquires and releases; a release with no worker near looks for one and pushes to it.
    assert scripts["channels"] + scripts["push"] < len(results) / 4, scripts


def test_what_waits_does_not_stay_at_a_worker_that_takes_no_more_of_its_queue(site, key):
    queue, gate = registered(site), f"gate-{key}"
    results = [site.tasks.work_requeue.delay(key, number, gate) for number in range(4)]
    site.journal.wait(key)
    control, store = site.app.control, site.store

    control.cancel_consumer(queue)
    wait_until(lambda: not store.channels.find_channels([queue]), what="the worker to be withdrawn")
    for _ in results:
        site.journal.open(gate)

    # One is pushed to it before it is known that it takes no more.
    wait_until(site.unread, what="a call in the broker's queue")
    assert len(site.journal.read(key)) <= 2
    control.add_consumer(queue)
    for result in results:
        result.get(timeout=30)
    assert site.journal.read(key) == list(range(4))
