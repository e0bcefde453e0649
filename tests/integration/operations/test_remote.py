"""``celery inspect locks``, ``celery control release_lock`` and ``inspect stats``, as typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import redis
from celery.bin.base import CLIContext
from celery.bin.control import control as control_command
from celery.bin.control import inspect
from click.testing import CliRunner

from celery_distlock import Key, Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Want
from celery_distlock.worker import control
from tests.waiting import wait_until

WORKERS = [{"concurrency": 2}, {"pool": "threads", "concurrency": 2}]
COMMANDS = {"inspect": inspect, "control": control_command}


@pytest.fixture
def celery(site):
    """Run a command of ``celery``, here or in a process; return what its JSON says by worker."""

    def run(kind: str, *words: str, here: bool = True):
        names = ",".join(worker.name for worker in site.workers)
        options = ["--timeout", "20", "--json", "--destination", names]
        if here:
            obj = CLIContext(app=site.app, no_color=True, workdir=None)
            done = CliRunner().invoke(COMMANDS[kind], [*options, *words], obj=obj)
            assert done.exit_code == 0, done.output
        else:
            done = subprocess.run(
                [sys.executable, "-m", "celery", "-A", site.tasks.__name__, kind, *options, *words],
                env=site.workers[0].env,
                capture_output=True,
                check=True,
                text=True,
                timeout=60,
            )
        data = json.loads(done.stdout)
        # `control` prints a list of what each worker says, `inspect` a mapping.
        return data if isinstance(data, dict) else {k: v for each in data for k, v in each.items()}

    return run


def test_each_worker_lists_the_locks_of_its_own_tasks(site, celery, key):
    results = [site.tasks.work_requeue.delay(f"{key}:{n}", n, key) for n in range(2)]
    for number in range(2):
        site.wait_held(f"{key}:{number}")

    def ask():
        # A worker gives the store a quarter of a second, so that its event loop does not wait.
        replies = celery("inspect", "locks", f"{key}:*")
        return replies if all(isinstance(each, list) for each in replies.values()) else None

    replies = wait_until(ask, timeout=60, what="every worker's list")

    listed = [lock for locks in replies.values() for lock in locks]
    assert sorted(lock["task_id"] for lock in listed) == sorted(result.id for result in results)
    assert {lock["task"] for lock in listed} == {"work_requeue"}
    for worker in site.workers:
        pids = {lock["pid"] for lock in replies[worker.name]}
        assert pids <= {worker.pid, *worker.children()}
    for lock in listed:
        assert lock["token"] == site.look(lock["key"]).token
        assert 0 < lock["remaining"] <= site.tasks.LEASE
    site.journal.open(key)
    for result in results:
        result.get(timeout=30)


@pytest.mark.parametrize("here", [True, False])
def test_the_list_is_empty_where_nothing_matches(site, celery, key, here):
    replies = celery("inspect", "locks", key, here=here)

    assert replies == {worker.name: [] for worker in site.workers}


def test_a_lock_is_released_once_though_all_workers_are_asked(site, celery, key):
    held = site.tasks.catch_loss.delay(key)
    site.wait_held(key)
    waiting = [site.tasks.work_requeue.delay(key, None, key) for _ in range(2)]
    site.wait_queued(key, 2)

    replies = celery("control", "release_lock", key)

    answers = [answer["ok"] for answer in replies.values()]
    assert len(answers) == 2
    assert "another worker is releasing it, or has just done so" in answers
    (released,) = [answer for answer in answers if answer.startswith("released")]
    assert f"catch_loss[{held.id}]" in released
    assert site.look(key).waiting == 1
    site.journal.open(key)
    assert [result.get(timeout=30) for result in waiting] == [0, 0]


def test_a_lock_s_key_that_reads_like_the_command_is_no_obstacle(site, celery, key):
    with site.held(f"release_lock {key}"):
        site.tasks.work_requeue.delay(key, None, key)
        site.wait_held(key)

        answers = [answer["ok"] for answer in celery("control", "release_lock", key).values()]

    assert len([answer for answer in answers if answer.startswith("released")]) == 1
    site.journal.open(key)


def test_a_holder_s_name_is_shown_without_terminal_sequences(site, celery, key):
    site.store.acquire(AcquireRequest(key, "host|1|\x1b]0;pwned\x07[id]|1", 30.0))

    answers = [answer["ok"] for answer in celery("control", "release_lock", key).values()]

    (released,) = [answer for answer in answers if answer.startswith("released")]
    assert released.isprintable()
    assert r"held by \x1b]0;pwned\x07[id] on host" in released


def test_a_lock_without_an_end_is_null_in_the_list(site, key):
    """Asked of this process, where no renewal gives the lock an end in between."""
    with site.held(key), redis.Redis.from_url(site.app.conf.result_backend) as client:
        _, _, others = client.hget(site.record(key), "x").partition(b" ")
        client.hset(site.record(key), "x", b"%d %b" % (10**30, others))

        (lock,) = control.locks(SimpleNamespace(app=site.app), pattern=key)

    assert (lock["key"], lock["remaining"]) == (key, None)
    assert lock["since"] > 0


def test_a_key_that_several_hold_is_not_taken_from_all_of_them(site, celery, key):
    for name in ("one", "two"):
        owner = f"host|1|shop.f[{name}]|{name}"
        site.store.acquire(AcquireRequest(key, owner, 30.0, want=Want(1, 5)))

    answers = celery("control", "release_lock", key).values()

    (error,) = [answer["error"] for answer in answers if "error" in answer]
    assert f"'{key}' has 2 holders: shop.f[one] on host, process 1, " in error
    assert len(site.look(key).holders) == 2


def test_one_of_several_holders_is_listed_where_it_runs(site, key):
    """Asked of this process, which has two units of it."""
    other = AcquireRequest(key, "host|1|shop.f[other]|x", 30.0, want=Want(1, 5))
    site.store.acquire(other)
    with Lock(Key(key, capacity=5, weight=2), store=site.store):
        (lock,) = control.locks(SimpleNamespace(app=site.app), pattern=key)

        assert (lock["mode"], lock["units"], lock["slot"]) == ("shared", 2, None)
        assert (lock["pid"], lock["token"]) == (os.getpid(), site.look(key).token)
    site.store.release(ReleaseRequest(key, other.owner))


def test_every_holder_of_one_key_is_listed_by_the_worker_that_it_runs_in(site, celery, key):
    gate = f"{key}:gate"
    running = [site.tasks.work_shared.delay(key, n, gate) for n in range(4)]  # two in each worker
    wait_until(lambda: len(site.look(key).holders) == 4, timeout=60, what="four holders")

    def ask():
        replies = celery("inspect", "locks", key)
        return replies if all(isinstance(each, list) for each in replies.values()) else None

    replies = wait_until(ask, timeout=60, what="every worker's list")

    listed = [lock for locks in replies.values() for lock in locks]
    assert sorted(lock["task_id"] for lock in listed) == sorted(result.id for result in running)
    assert sorted(lock["slot"] for lock in listed) == [0, 1, 2, 3]
    site.journal.open(gate)
    for result in running:
        result.get(timeout=30)


def test_a_free_key_is_said_to_be_free(site, celery, key):
    answers = [answer["ok"] for answer in celery("control", "release_lock", key).values()]

    assert f"no task holds {key!r}" in answers


def test_stats_say_where_the_locks_are(site, celery):
    for stats in celery("inspect", "stats").values():
        locks = stats["locks"]
        assert locks["store"] == site.app.conf.result_backend
        assert locks["prefix"] == site.app.conf.distlock_prefix
        assert locks["lease"] == site.tasks.LEASE
        assert locks["tasks"] > 10


def test_events_begin_and_end_as_the_workers_others_do(site, listener, key):
    names = [worker.name for worker in site.workers]
    asked = {"destination": names, "reply": True, "timeout": 30}
    site.tasks.work_requeue.delay(f"{key}-before").get(timeout=30)
    site.app.control.enable_events(**asked)
    site.tasks.work_requeue.delay(key).get(timeout=30)
    wait_until(lambda: "released" in listener.kinds(key), what="the event", timeout=60)
    site.app.control.disable_events(**asked)
    site.tasks.work_requeue.delay(f"{key}-after").get(timeout=30)
    site.app.control.enable_events(**asked)
    site.tasks.work_requeue.delay(f"{key}-last").get(timeout=30)

    wait_until(lambda: listener.kinds(f"{key}-last"), what="the last events", timeout=60)
    assert listener.kinds(f"{key}-before") == listener.kinds(f"{key}-after") == []
    site.app.control.disable_events(**asked)
