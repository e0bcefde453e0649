"""Runs that need several keys get on in every pool, and when the worker that knew them is gone."""

from __future__ import annotations

import random

import pytest

from tests.waiting import wait_until
from tests.worker.conftest import staffed
from tests.worker.test_several_keys import judge, leave_nothing, names

APP = "tests.apps.several"


def test_those_that_a_worker_has_parked_go_on_when_it_vanishes(bare_site, key, tmp_path):
    """Killed with all its processes, while one runs and others wait at several keys."""
    rng, keys = random.Random(6), names(key, 3)
    tasks = bare_site.tasks
    with staffed(bare_site, tmp_path, [{"concurrency": 4}]) as site:
        tasks.use_till.delay(keys, key)  # acknowledged, and so it ends with the worker
        site.journal.wait(f"begun:{key}")
        results = [tasks.use_late.delay(rng.sample(keys, 2)) for _ in range(20)]
        wait_until(lambda: site.log().count(" ignored") >= 20, timeout=60, what="all to be parked")
        site.workers[0].kill(whole=True)
    with staffed(bare_site, tmp_path, [{"concurrency": 4}]):
        judge(bare_site, results, key, 100)


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_they_get_on_in_every_pool(bare_site, key, pool, tmp_path):
    rng, keys = random.Random(7), names(key, 6)
    with staffed(bare_site, tmp_path, [{"concurrency": 8, "pool": pool}]) as site:
        results = [site.tasks.use.delay(rng.sample(keys, 2)) for _ in range(150)]

        judge(site, results, key, 100)

        leave_nothing(site, keys)


def test_those_that_wait_for_a_slot_keep_their_order(bare_site, key, tmp_path):
    """The first is in the pool and has not asked; the others have their keys before it has."""
    tasks = bare_site.tasks
    with staffed(bare_site, tmp_path, [{"concurrency": 1}]) as site:
        busy = tasks.use_till.delay([f"{key}:other"], key)
        site.journal.wait(f"begun:{key}")
        results = [tasks.use_pair.delay(f"{key}:x", f"{key}:y") for _ in range(4)]
        wait_until(lambda: site.log().count(" parked: ") >= 3, timeout=60, what="all to be parked")

        site.journal.open(key)

        notes = judge(site, [busy, *results], key, 60)
    assert [note[0][4] for note in notes] == [busy.id, *(result.id for result in results)]
