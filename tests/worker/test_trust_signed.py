"""With `distlock_secret`, workers send and run what was signed with it, and nothing else."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

import pytest

from celery_distlock.runtime.trust import is_signed_with, sign
from tests.worker.intruder import Intruder, envelope, parked_as

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "only the workers know this"
APP = "tests.apps.trusting"
ENV = {"DISTLOCK_TEST_TRUST": json.dumps({"distlock_secret": SECRET})}
WORKERS = [{"concurrency": 2}]


@pytest.fixture
def intruder(site) -> Iterator[Intruder]:
    intruder = Intruder(site)
    yield intruder
    intruder.close()


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_a_task_that_the_pool_parked_comes_back(site, key, way):
    with site.held(key):
        result = site.tasks.work.delay(key, "ran")
        site.wait_queued(key)
        if way == "broker":
            site.forget_channel(key)

    assert result.get(timeout=30) == "ran"
    assert site.journal.read(key) == ["ran"]


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_a_task_that_the_main_process_parked_comes_back(site, key, way):
    site.tasks.block.delay(key)
    site.journal.wait(key)
    result = site.tasks.work.delay(key, "ran")
    site.wait_queued(key)
    if way == "broker":
        site.forget_channel(key)
    site.journal.open(key)

    assert result.get(timeout=30) == "ran"


def test_a_task_that_failed_and_is_requeued_comes_back(site, key):
    site.tasks.fail_once.delay(key).get(timeout=30)

    assert len(site.journal.read(key)) == 2


def test_what_is_not_signed_is_not_sent(site, intruder, key):
    left = envelope("work", key)
    run = intruder.park(key, left)
    intruder.wait_left(key, run)

    assert intruder.parked(key) == {run: left}
    assert site.journal.read(key) == []
    assert f"it is not signed with distlock_secret: the message parked at '{key}'" in site.log()


def test_what_was_signed_for_another_key_is_not_sent(site, intruder, key):
    elsewhere = f"{key}-elsewhere"
    with site.held(elsewhere):
        site.tasks.work.delay(elsewhere)
        site.wait_queued(elsewhere)
        ((run, signed),) = intruder.parked(elsewhere).items()
    site.journal.wait(elsewhere)

    assert is_signed_with([SECRET], elsewhere, run, signed)
    intruder.park(key, signed, run)
    intruder.wait_left(key, run)
    assert len(site.journal.read(elsewhere)) == 1


def test_what_is_not_signed_is_not_taken_from_the_channel(site, intruder, key):
    run = f"{uuid.uuid4()}:0:0:0"
    right = sign(SECRET, key, run, parked_as(run, key, envelope("work", key, "signed")))
    (channel,) = intruder.channels()

    intruder.push(channel, key, envelope("work", f"{key}-unsigned"))
    intruder.push(channel, key, right, run)
    site.journal.wait(key)

    assert site.journal.read(f"{key}-unsigned") == []
    assert f"the message parked at '{key}'" in site.log()
