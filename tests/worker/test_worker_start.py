"""What the worker does with its flags, the app's settings and what is wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import pytest
import redis
from celery import VERSION

from celery_distlock import Lock
from celery_distlock.stores import Ability, open_store
from tests import servers
from tests.integration.lock.proxy import Proxy
from tests.waiting import wait_until
from tests.workers import ROOT

APP = "tests.apps.configured"


@pytest.fixture
def tasks(load_app):
    loaded = load_app(APP)
    yield loaded
    loaded.journal.close()


def fails_to_start(worker, conf=None, options=None, **arguments) -> str:
    """Start a worker that must end with an error, and return its log."""
    env = {
        "DISTLOCK_TEST_CONF": json.dumps(conf or {}),
        "DISTLOCK_TEST_OPTIONS": json.dumps(options or {}),
    }
    process = worker(APP, env=env, wait=False, **arguments)
    assert process.process.wait(60) != 0
    return process.log()


def test_the_flags_are_in_the_help_under_their_group(celery_env):
    command = [sys.executable, "-m", "celery", "-A", APP, "worker", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    own = shown.partition("Distlock Options")[2]
    for flag in ("url", "prefix", "lease", "on-conflict", "disable"):
        assert f"--distlock-{flag}" in own
        assert f"--distlock-{flag}" not in shown.partition("Distlock Options")[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_flags_outweigh_settings_and_options_outweigh_flags(
    tasks, worker, redis_url, prefix, key, celery_env, method
):
    if method == "spawn" and VERSION < (5, 7):
        pytest.skip("the pool of this Celery forks")
    elsewhere = redis_url.removesuffix("/0") + "/1"
    worker(
        APP,
        env={"DISTLOCK_TEST_CONF": json.dumps({"distlock_lease": 100, "distlock_wait": 50})},
        concurrency=2,
        args=[
            *("--distlock-url", elsewhere, "--distlock-prefix", f"{prefix}:flag"),
            *("--distlock-lease", "200", "--distlock-on-conflict", "skip"),
            *(() if method == "fork" else ("--pool-start-method", method)),
        ],
    )
    try:
        running = tasks.look.delay(key, key)
        tasks.journal.wait(key)
        with closing(redis.Redis.from_url(elsewhere)) as client:
            assert 150_000 < client.pttl(f"{prefix}:flag:{{{key}}}:lock") <= 200_000

        assert tasks.look.delay(key).get(timeout=30) is None  # skipped
        failed = tasks.fail_on_conflict.delay(key).get(timeout=30, propagate=False)
        assert type(failed).__name__ == "LockConflictError"
        tasks.journal.open(key)
        assert 150 < running.get(timeout=30) <= 200
        assert 250 < tasks.look_with_own_lease.delay(key).get(timeout=30) <= 300
    finally:
        servers.delete_keys(elsewhere, prefix)


def test_without_flags_the_settings_count(tasks, worker, key, redis_url, prefix):
    conf = {"distlock_lease": 100}
    process = worker(APP, pool="solo", env={"DISTLOCK_TEST_CONF": json.dumps(conf)})

    assert 50 < tasks.look.delay(key).get(timeout=30) <= 100
    assert 250 < tasks.look_with_own_lease.delay(key).get(timeout=30) <= 300
    where = redis_url.removesuffix("/0")
    assert f"locks: {where}/0, prefix '{prefix}:lock', lease 100 s, on conflict requeue" in (
        process.log()
    )


def test_disabled_by_a_flag_tasks_run_unlocked(tasks, worker, key, redis_url, prefix):
    process = worker(APP, pool="solo", args=["--distlock-disable"])

    assert "they are disabled, every task runs WITHOUT its lock" in process.log()
    with Lock(key, store=open_store(redis_url, f"{prefix}:lock")):
        assert tasks.look.delay(key).get(timeout=30) is None
    assert tasks.journal.read(key) == [None]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--distlock-lease", "0"], "--distlock-lease must be a number of seconds"),
        (["--distlock-lease", "-1"], "--distlock-lease must be a number of seconds"),
        (["--distlock-lease", "nan"], "--distlock-lease must be a number of seconds"),
        (["--distlock-lease", "ten"], "--distlock-lease"),
        (["--distlock-on-conflict", "reque"], "'requeue'"),
        (["--distlock-url", "http://localhost"], "http"),
        (["--distlock-url", "redis://h?socket_timeout=5"], "'socket_timeout' is not for locks"),
        (["--distlock-url", "redis://h/abc"], "its database is not a number"),
    ],
)
def test_a_wrong_flag_ends_the_worker(worker, args, message):
    log = fails_to_start(worker, args=args)

    assert message in log
    assert "ready." not in log


@pytest.mark.parametrize(
    ("conf", "options", "message"),
    [
        ({"distlock_lease": 0}, {}, "setting distlock_lease must be a number of seconds"),
        ({"distlock_leese": 1}, {}, "unknown setting distlock_leese; did you mean"),
        ({"distlock_on_conflict": "reque"}, {}, "did you mean 'requeue'?"),
        ({}, {"lock_leese": 1}, "look: unknown option lock_leese; did you mean 'lock_lease'?"),
        ({}, {"lock_lease": "10"}, "look: lock_lease must be a number of seconds"),
    ],
)
def test_a_wrong_declaration_ends_the_worker(worker, conf, options, message):
    log = fails_to_start(worker, conf, options)

    assert message in log
    assert "ready." not in log


@pytest.mark.parametrize(
    ("task", "key", "ability"),
    [
        ("use", "Key('{key}', capacity=3)", "let several hold a key"),
        ("use_two", "Key('{key}', capacity=3, weight=2)", Ability.QUEUE.value),
        ("read", "Key('{key}', shared=True)", "let several hold a key"),
        ("seldom", "Key('{key}', capacity=1, rate='1/h')", Ability.QUEUE.value),
    ],
)
def test_a_key_that_the_store_cannot_share_ends_the_worker(worker, redis_url, task, key, ability):
    env = {"DISTLOCK_TEST_STORE": f"{redis_url}?scripts=off", "DISTLOCK_TEST_ONLY": task}
    process = worker(
        "tests.apps.shares", env=env, wait=False, args=["--distlock-on-conflict", "fail"]
    )

    assert process.process.wait(60) != 0
    assert f"task {task}: {key} needs a store that can {ability}; redis://" in process.log()
    assert "ready." not in process.log()


def test_memory_locks_are_refused_for_prefork(worker):
    log = fails_to_start(worker, {"distlock_url": "memory://"})

    assert "memory:// cannot lock between the processes of a prefork pool" in log
    assert "--pool threads" in log


@pytest.mark.usefixtures("lupa")
def test_memory_locks_are_accepted_for_threads(tasks, worker, key):
    conf = {"distlock_url": "memory://", "distlock_lease": 20}
    worker(APP, pool="threads", concurrency=2, env={"DISTLOCK_TEST_CONF": json.dumps(conf)})

    running = tasks.look.delay(key, key)
    tasks.journal.wait(key)
    parked = tasks.look.delay(key)
    wait_until(lambda: parked.state == "PARKED", what="the second to be parked")
    tasks.journal.open(key)

    assert running.get(timeout=30) <= 20
    assert parked.get(timeout=30) <= 20


# A store that is unreachable


def test_tasks_do_as_they_say_while_the_store_is_unreachable(tasks, worker, private_server, key):
    server = private_server()
    url = server.url
    server.stop()
    env = {"DISTLOCK_TEST_CONF": json.dumps({"distlock_url": url})}
    process = worker(APP, pool="threads", concurrency=2, env=env)
    assert f"locks: {url} cannot serve" in process.log()
    assert tasks.add.delay(1, 2).get(timeout=30) == 3

    later = tasks.look.delay(key)
    failed = tasks.fail_on_outage.delay(key).get(timeout=30, propagate=False)
    ran = tasks.run_on_outage.delay(key)

    assert ran.get(timeout=30) is False
    assert type(failed).__name__ == "StoreUnavailableError"
    assert url in str(failed)
    process.wait_log(f"look[{later.id}] is sent again in ")
    assert f"Task tests.apps.configured.run_on_outage[{ran.id}] runs UNLOCKED" in process.log()
    assert tasks.journal.read(key) == []
    server.start()
    assert later.get(timeout=60) > 0
    assert tasks.journal.read(key) == [None]
    process.wait_log(f"the lock store {url} is back after ")


def test_a_key_that_is_held_for_long_is_a_warning(tasks, worker, key):
    conf = {"distlock_lease": 30, "distlock_warn_held": 0.3}
    process = worker(APP, concurrency=1, env={"DISTLOCK_TEST_CONF": json.dumps(conf)})

    running = tasks.look.delay(key, key)
    process.wait_log(f"look[{running.id}] still holds '{key}' after 0.")
    tasks.journal.open(key)
    running.get(timeout=30)

    assert process.log().count("still holds") == 1


@pytest.mark.parametrize("wrong", ["database", "password", "right", "cluster"])
def test_a_store_that_turns_the_worker_away_ends_its_start(worker, private_server, wrong):
    server = private_server()
    url, remedy = server.url, "set a password in the URL"
    with server.client() as client:
        if wrong == "database":
            url, remedy = url.removesuffix("0") + "99", "correct the number at the end"
        elif wrong == "password":
            client.config_set("requirepass", "secret")
        elif wrong == "right":
            client.execute_command("ACL", "SETUSER", "default", "-select")
            url, remedy = url.removesuffix("0") + "1", "that right by ACL SETUSER"
        else:
            url, remedy = url.replace("redis://", "redis+cluster://"), "redis:// instead of"
        log = fails_to_start(worker, {"distlock_url": url}, pool="threads")

    assert remedy in log
    assert "to start nevertheless, set distlock_start_without_store" in log
    assert "ready." not in log
    assert "Traceback" not in log


@pytest.mark.parametrize("wrong", ["database", "password", "right"])
def test_a_worker_may_start_though_its_store_turns_it_away(
    tasks, worker, private_server, key, wrong
):
    server = private_server()
    url = server.url
    with server.client() as client:
        if wrong == "database":
            url, words = url.removesuffix("0") + "99", "no database of that number"
        elif wrong == "password":
            client.config_set("requirepass", "secret")
            words = "a password is missing in the URL"
        else:
            client.execute_command("ACL", "SETUSER", "default", "-select")
            url, words = url.removesuffix("0") + "1", "this user lacks +select"
        conf = {"distlock_url": url, "distlock_start_without_store": True}
        env = {"DISTLOCK_TEST_CONF": json.dumps(conf)}
        process = worker(APP, pool="threads", concurrency=2, env=env)
        assert words in process.log()
        assert "until it can serve, tasks are sent again every few seconds" in process.log()

        later = tasks.look.delay(key)
        failed = tasks.fail_on_outage.delay(key).get(timeout=30, propagate=False)
        assert type(failed).__name__ == "StoreUnavailableError"
        assert words in str(failed)
        process.wait_log(f"look[{later.id}] is sent again in ")
        assert tasks.journal.read(key) == []
        if wrong == "database":
            return  # nothing can give it to the server while that runs
        if wrong == "password":
            client.config_set("requirepass", "")
        else:
            client.execute_command("ACL", "SETUSER", "default", "+select")
    assert later.get(timeout=60) > 0


def test_a_task_that_runs_while_the_store_goes_and_comes_is_not_lost(
    tasks, worker, private_server, key
):
    server = private_server()
    conf = {"distlock_url": server.url, "distlock_lease": 60}
    env = {"DISTLOCK_TEST_CONF": json.dumps(conf)}
    process = worker(APP, pool="threads", concurrency=2, env=env)
    running = tasks.look.delay(key, key)
    tasks.journal.wait(key)

    server.stop()
    later = tasks.look.delay(f"{key}:later")
    process.wait_log(f"look[{later.id}] is sent again in ")
    tasks.journal.open(key)
    running.get(timeout=30, propagate=False)
    server.start()

    assert later.get(timeout=60) > 0


def test_what_may_be_parked_does_not_run_unlocked_as_well(tasks, worker, redis_url, prefix, key):
    with Proxy(redis_url) as proxy:
        env = {"DISTLOCK_TEST_CONF": json.dumps({"distlock_url": proxy.url})}
        process = worker(APP, pool="threads", concurrency=1, env=env)
        with Lock(key, store=open_store(redis_url, f"{prefix}:lock")):
            with proxy.holding("acquire", executed=True) as conflict:
                ran = tasks.run_on_outage.delay(key)
                conflict.wait()
                proxy.lose("acquire", executed=True, times=3)  # it is parked, and does not learn it
                conflict.let_go()
            process.wait_log(f"run_on_outage[{ran.id}] is sent again in ")
            process.wait_log(f"run_on_outage[{ran.id}] parked")

        assert ran.get(timeout=30) is True
        process.stop()
    assert tasks.journal.read(f"{key}:locked") == [True]


def test_no_password_is_logged(tasks, worker, private_server, key):
    users = ["default on nopass ~* &* +@all", "shop on >S3cret-word ~* &* +@all"]
    server = private_server(options={"user": users})
    url = server.url.replace("redis://", "redis://shop:S3cret-word@")
    conf = {"distlock_url": url, "distlock_sweep_interval": 0.2}
    process = worker(APP, pool="solo", env={"DISTLOCK_TEST_CONF": json.dumps(conf)})
    assert tasks.look.delay(key).get(timeout=30) > 0

    server.stop()
    failed = tasks.fail_on_outage.delay(key).get(timeout=30, propagate=False)
    process.wait_log("cannot be swept")
    process.stop()

    assert "S3cret-word" not in process.log()
    assert "S3cret-word" not in str(failed)


def test_no_password_is_shown_with_the_settings(tasks, worker):
    url = "redis://shop:S3cret-word@127.0.0.1:1/2"
    process = worker(
        APP, pool="solo", env={"DISTLOCK_TEST_CONF": json.dumps({"distlock_url": url})}
    )

    inspect = tasks.app.control.inspect(destination=[process.name], limit=1)
    conf = wait_until(inspect.conf, what="an answer")  # asks again if it did not listen yet

    assert conf[process.name]["distlock_url"] == "redis://shop:***@127.0.0.1:1/2"


def test_what_the_brokers_url_says_to_celery_alone_does_not_keep_a_worker_from_starting(
    celery_env, load_app, worker, redis_url, key, monkeypatch
):
    monkeypatch.setenv("DISTLOCK_TEST_BROKER", f"{redis_url}?heartbeat=0")
    monkeypatch.setenv("DISTLOCK_TEST_BACKEND", f"{redis_url}?socket_timeout=20")
    tasks = load_app(APP)
    process = worker(APP, pool="solo")

    assert tasks.look.delay(key).get(timeout=30) > 0
    assert f"locks: {redis_url}, prefix" in process.log()
    tasks.journal.close()


@pytest.mark.parametrize("scheme", ["http", "redis"])
def test_a_wrong_url_is_reported_without_its_password(worker, scheme):
    url = f"{scheme}://shop:S3cret-word@localhost:port/x"
    log = fails_to_start(worker, {"distlock_url": url})

    assert "S3cret-word" not in log


def test_a_task_with_lock_options_that_is_no_locked_task_is_named(worker):
    process = worker(APP, pool="solo")

    assert "task forgotten has lock options but is no LockedTask" in process.log()
    assert process.log().count("is no LockedTask") == 1


def test_a_task_whose_joined_calls_get_no_result_is_named(worker, redis_url):
    rpc = {"DISTLOCK_TEST_BACKEND": "rpc://", "DISTLOCK_TEST_STORE": redis_url}
    unique = {"lock_unique": "started", "lock_on_conflict": "requeue"}
    options = {"DISTLOCK_TEST_OPTIONS": json.dumps(unique)}
    process = worker(APP, pool="solo", env={**rpc, **options})

    assert "has lock_unique, and with rpc:// a call that is joined" in process.log()


def test_a_wrong_flag_is_said_in_one_line(worker):
    log = fails_to_start(worker, args=["--distlock-lease", "-3"])

    assert "Error: worker flag --distlock-lease must be a number of seconds" in log
    assert "Traceback" not in log
