"""Real workers whose locks are in each place."""

from __future__ import annotations

import json

import pytest

PLACES = ["tls", "sentinels", "replicas", "cluster"]


@pytest.fixture(params=PLACES)
def tasks(request, redis_url, load_app, monkeypatch, prefix):
    match request.param:
        case "tls":
            url = request.getfixturevalue("shared_tls").url
        case "sentinels":
            url = request.getfixturevalue("shared_sentinels").url()
        case "replicas":
            url = request.getfixturevalue("shared_replicated").url + "?replicas=1"
        case "cluster":
            url = request.getfixturevalue("shared_cluster").url
    monkeypatch.setenv("DISTLOCK_TEST_STORE", url)
    return load_app("tests.apps.locked")


def test_tasks_neither_overlap_nor_get_lost(tasks, worker):
    for process in [worker("tests.apps.locked", concurrency=2, wait=False) for _ in range(2)]:
        process.wait_ready()
    keys = [f"key {n}" for n in range(5)]

    results = [tasks.count.delay(key) for key in keys * 20]

    for result in results:
        result.get(timeout=90)
    for key in keys:
        assert tasks.journal.get(key) == 20
        assert not tasks.journal.read(f"{key}:overlaps")
        tokens = tasks.journal.read(f"{key}:tokens")
        assert tokens == sorted(set(tokens))


def test_what_is_parked_is_pushed_to_the_worker(tasks, worker):
    process = worker("tests.apps.locked", concurrency=2)

    results = [tasks.work_requeue.delay("key", n, gate="open") for n in range(8)]
    tasks.journal.wait("key")
    tasks.journal.open("open")

    for result in results:
        result.get(timeout=60)
    assert sorted(tasks.journal.read("key")) == list(range(8))
    assert "UNLOCKED" not in process.log()


def test_the_brokers_sentinels_are_the_locks(
    shared_sentinels, celery_env, load_app, worker, monkeypatch
):
    monkeypatch.setenv("DISTLOCK_TEST_BROKER", shared_sentinels.celery_url)
    monkeypatch.setenv("DISTLOCK_TEST_TRANSPORT", json.dumps(shared_sentinels.celery_options))
    tasks = load_app("tests.apps.locked")
    process = worker("tests.apps.locked", concurrency=2)

    results = [tasks.count.delay("key") for _ in range(10)]

    for result in results:
        result.get(timeout=60)
    assert tasks.journal.get("key") == 10
    assert "locks: sentinel://" in process.log()
