"""What the doctor finds, and says to do."""

from __future__ import annotations

import functools
import json
import re
from contextlib import closing

import pytest
import redis

from celery_distlock import Key, LockedTask
from celery_distlock.keys import slot_name
from celery_distlock.ops.cli import doctor
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import AcquireRequest, QueueStore, open_store
from celery_distlock.stores.requests import SendRequest
from celery_distlock.stores.values import Limit, ParkRequest, Want
from tests import parked_runs, servers
from tests.worker.intruder import envelope, parked_as

PERSISTENT = {"appendonly": "yes"}
TIMED = {"latency", "clock"}


@pytest.fixture
def examine(invoke, bare_site):
    """Return the exit status and the findings by subject, or every one of them."""

    def run(url: str, *options: str, every: bool = False):
        for _ in range(5):
            done = invoke("--url", url, "doctor", "--json", *options)
            invoke("--url", bare_site.env["DISTLOCK_TEST_BROKER"], "list")  # flags are the app's
            report = json.loads(done.stdout)
            assert report["status"] == done.exit_code
            found: dict = {}
            for finding in report["findings"]:
                found.setdefault(finding["subject"], finding)  # of several, the worst comes first
            if not TIMED & {name for name, each in found.items() if each["verdict"] == "doubt"}:
                break  # else it is this machine that was stopped
        return done.exit_code, report["findings"] if every else found

    return run


@pytest.fixture
def ask():
    clients = []

    def connect(server):
        clients.append(redis.Redis.from_url(server.url))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_a_good_server_is_fine(examine, private_server):
    status, found = examine(private_server(options=PERSISTENT).url)

    assert status == 0
    assert {finding["verdict"] for finding in found.values()} == {"ok"}
    assert {
        *("locks", "server", "memory", "persistence", "replicas", "clock"),
        *("publish", "latency", "tasks", "parked", "ticker"),
    } == set(found)
    assert found["ticker"]["found"] == "no worker is the ticker; 0 scheduled keys"


@pytest.mark.parametrize(
    ("options", "subject", "cure"),
    [
        ({"appendonly": "no", "save": '""'}, "persistence", "appendonly yes"),
        ({**PERSISTENT, "maxmemory-policy": "allkeys-lru"}, "memory", "noeviction"),
    ],
    ids=["no persistence", "eviction"],
)
def test_a_doubt_has_status_1_and_comes_with_its_cure(
    examine, private_server, options, subject, cure
):
    status, found = examine(private_server(options=options).url)

    doubts = [name for name, finding in found.items() if finding["verdict"] == "doubt"]
    assert (status, doubts) == (1, [subject])
    assert cure in found[subject]["cure"]


def test_a_probe_may_allow_doubts_and_still_sees_that_there_can_be_no_locks(
    examine, private_server
):
    server = private_server(options={"appendonly": "no", "save": '""'})

    status, found = examine(server.url, "--allow-doubts")
    server.stop()
    without, _ = examine(server.url, "--allow-doubts")

    assert (status, found["persistence"]["verdict"]) == (0, "doubt")
    assert without == 2


def test_a_user_without_the_right_to_publish_is_reported(examine, private_server, ask):
    server = private_server(options=PERSISTENT)
    ask(server).execute_command(
        *("ACL", "SETUSER", "mute", "on", ">pw", "~*", "+@all", "resetchannels")
    )
    url = server.url.replace("redis://", "redis://mute:pw@")

    status, found = examine(url)

    assert status == 1
    assert found["publish"]["verdict"] == "doubt"
    assert "may not publish" in found["publish"]["found"]


def test_rights_that_are_missing_are_named_with_their_cure(examine, private_server, ask):
    server = private_server(options=PERSISTENT)
    rights = ("~*", "&*", "+@all", "-zrank", "-scan")
    ask(server).execute_command("ACL", "SETUSER", "few", "on", ">pw", *rights)
    ask(server).execute_command("ACL", "SETUSER", "none", "on", ">pw", "+info")

    status, found = examine(server.url.replace("redis://", "redis://few:pw@"))
    assert (status, found["rights"]["verdict"]) == (1, "doubt")
    assert found["rights"]["found"] == "this user lacks the rights +zrank +scan"
    assert "ACL SETUSER" in found["rights"]["cure"]

    status, found = examine(server.url.replace("redis://", "redis://none:pw@"))
    assert (status, found["locks"]["verdict"]) == (2, "bad")
    assert "this user lacks +evalsha" in found["locks"]["found"]
    assert " +hset " in found["locks"]["found"]
    assert "ACL SETUSER" in found["locks"]["cure"]


@pytest.mark.parametrize(
    ("command", "subject"),
    [("HINCRBYFLOAT", "rights"), ("TIME", "locks")],
    ids=["seldom", "always"],
)
def test_a_command_that_a_server_hides_is_named(examine, private_server, command, subject):
    server = private_server(options={**PERSISTENT, "rename-command": f'{command} ""'})

    status, found = examine(server.url)

    assert status == (2 if subject == "locks" else 1)
    assert f"this server has no {command}" in found[subject]["found"]
    assert "rename-command" in found[subject]["cure"]


def test_missing_rights_and_a_hidden_command_are_named(examine, private_server, ask):
    server = private_server(options={**PERSISTENT, "rename-command": 'HINCRBYFLOAT ""'})
    ask(server).execute_command("ACL", "SETUSER", "default", "-zscan")

    _, found = examine(server.url)

    assert "no HINCRBYFLOAT, and this user lacks the rights +zscan" in found["rights"]["found"]


def test_a_password_that_is_missing_is_asked_for(examine, private_server, ask):
    server = private_server()
    ask(server).config_set("requirepass", "secret")

    status, found = examine(server.url)

    assert status == 2
    assert "set a password in the URL" in found["locks"]["cure"]


def test_a_database_that_is_not_there_is_named(examine, private_server):
    status, found = examine(private_server().url.removesuffix("0") + "99")

    assert status == 2
    assert "correct the number at the end of distlock_url" in found["locks"]["cure"]


def test_a_server_that_forbids_info_does_not_fail_the_check(examine, private_server, ask):
    server = private_server(options=PERSISTENT)
    rights = ("~*", "&*", "+@all", "-info", "-config")
    ask(server).execute_command("ACL", "SETUSER", "shy", "on", ">pw", *rights)

    _, found = examine(server.url.replace("redis://", "redis://shy:pw@"))

    assert found["locks"]["verdict"] == "ok"
    assert "reports nothing about itself" in found["server"]["found"]


def test_a_full_server_is_unusable(examine, private_server, ask):
    server = private_server(options=PERSISTENT)
    ask(server).config_set("maxmemory", "1")

    status, found = examine(server.url)

    assert status == 2
    assert found["locks"]["verdict"] == "bad"


def test_a_server_that_is_not_there_is_unusable(examine):
    status, found = examine("redis://user:geheim@127.0.0.1:1/0")

    assert status == 2
    assert set(found) == {"locks"}
    assert "start the server" in found["locks"]["cure"]
    assert "geheim" not in json.dumps(found)


def test_a_wrong_password_is_reported_as_one(examine, private_server, ask):
    server = private_server()
    ask(server).execute_command("ACL", "SETUSER", "somebody", "on", ">right", "~*", "+@all")

    status, found = examine(server.url.replace("redis://", "redis://somebody:wrong-one@"))

    assert status == 2
    assert "password" in found["locks"]["cure"]
    assert "wrong-one" not in json.dumps(found)


def test_a_store_of_one_process_is_unusable(examine):
    status, found = examine("memory://")

    assert status == 2
    assert "within one process" in found["store"]["found"]


@servers.needs("SET with IFEQ")
def test_tasks_whose_policy_the_store_cannot_serve_are_named(examine, private_server):
    status, found = examine(f"{private_server(options=PERSISTENT).url}?scripts=off")

    assert status == 2
    assert found["tasks"]["verdict"] == "bad"
    assert "needs a store that can keep tasks" in found["tasks"]["found"]
    assert "Valkey" in found["server"]["found"]


@servers.needs("SET with IFEQ")
def test_tasks_whose_key_the_store_cannot_let_several_have_are_named(
    examine, private_server, bare_site
):
    @bare_site.app.task(name="several", base=LockedTask, lock_key=Key("k", capacity=3))
    def task(): ...

    bare_site.app.finalize()
    try:
        url = f"{private_server(options=PERSISTENT).url}?scripts=off"
        status, findings = examine(url, every=True)
    finally:
        bare_site.app.tasks.pop(task.name)
        Runtime.of(bare_site.app).plans.pop(task.name)

    named = [each["found"] for each in findings if each["subject"] == "tasks"]
    assert status == 2
    assert any("several: Key('k', capacity=3) needs a store that can" in each for each in named)


def test_keys_that_are_paused_are_named_and_no_doubt(examine, private_server, bare_site):
    server = private_server(options=PERSISTENT)
    status, found = examine(server.url)
    assert "limits" not in found

    prefix = Runtime.of(bare_site.app).settings.prefix
    with closing(open_store(server.url, prefix)) as store:
        for key in ("one", "two"):
            QueueStore.of(store).units.set_limit(key, Limit(0))

    assert examine(server.url)[0] == status
    limits = examine(server.url)[1]["limits"]
    assert limits["verdict"] == "ok"
    assert re.fullmatch(r"(one, two|two, one) are paused by .*", limits["found"])
    assert "celery locks resume" in limits["cure"]


def test_due_keys_without_a_ticker_are_a_doubt(examine, private_server, bare_site, ask):
    server = private_server(options=PERSISTENT)
    prefix = Runtime.of(bare_site.app).settings.prefix
    with closing(QueueStore.of(open_store(server.url, prefix))) as store:
        store.timetable.note_due({slot_name("soon"): 60.0})
        assert examine(server.url)[1]["ticker"]["verdict"] == "ok"
        # As if it had been noted a minute ago.
        noted = next(name for name in ask(server).scan_iter("*") if b"due" in name)
        ask(server).zincrby(noted, -120_000, slot_name("soon"))

        status, found = examine(server.url)
        assert (status, found["ticker"]["verdict"]) == (1, "doubt")
        assert re.fullmatch(
            r"no worker is the ticker; 1 scheduled key, the first of them due 6\d s ago",
            found["ticker"]["found"],
        )
        assert "start a worker" in found["ticker"]["cure"]

        with closing(store.timetable.ticker_inbox("one@here")) as inbox:
            store.timetable.claim_due("one@here", inbox, 60.0)
            found = examine(server.url)[1]
    assert found["ticker"]["verdict"] == "ok"
    assert found["ticker"]["found"] == "one@here is the ticker; 1 scheduled key"


@pytest.fixture
def forgotten(bare_site):
    """A task with lock options where ``base=LockedTask`` is missing."""

    @bare_site.app.task(name="forgotten", lock_key="{key}", shared=False)
    def task(key): ...

    bare_site.app.finalize()
    yield task.name
    bare_site.app.tasks.pop(task.name)


def test_a_task_that_runs_without_its_lock_is_a_doubt(examine, private_server, forgotten):
    status, found = examine(private_server(options=PERSISTENT).url)

    assert (status, found["tasks"]["verdict"]) == (1, "doubt")
    assert found["tasks"]["found"].startswith(f"{forgotten}: lock options, but not a LockedTask")
    assert "base=LockedTask" in found["tasks"]["cure"]


@pytest.fixture
def past_lock(bare_site):
    """A task whose class has a ``__call__`` that runs it without its lock."""

    class PastLock(LockedTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            return self.run(*args, **kwargs)

    @bare_site.app.task(base=PastLock, name="past_lock", lock_key="{key}", shared=False)
    def task(key): ...

    bare_site.app.finalize()
    yield task.name
    bare_site.app.tasks.pop(task.name)
    for declared in (Runtime.of(bare_site.app).plans, Runtime.of(bare_site.app).detours):
        del declared[task.name]


def test_a_task_whose_call_seems_to_take_no_lock_is_a_doubt(examine, private_server, past_lock):
    status, found = examine(private_server(options=PERSISTENT).url)

    assert (status, found["tasks"]["verdict"]) == (1, "doubt")
    assert found["tasks"]["found"].startswith(f"{past_lock}: the __call__ of ")
    assert "super().__call__" in found["tasks"]["cure"]


@pytest.fixture
def returns_its_coroutine(bare_site):
    """A task whose decorator returns the coroutine that it wraps."""

    async def work(key): ...

    @bare_site.app.task(base=LockedTask, name="pending", lock_key="k", shared=False)
    @functools.wraps(work)
    def task(*args, **kwargs):
        return work(*args, **kwargs)

    bare_site.app.finalize()
    yield task.name
    bare_site.app.tasks.pop(task.name)
    for declared in (Runtime.of(bare_site.app).plans, Runtime.of(bare_site.app).detours):
        del declared[task.name]


def test_a_task_that_seems_to_return_a_coroutine_is_a_doubt(
    examine, private_server, returns_its_coroutine
):
    status, found = examine(private_server(options=PERSISTENT).url)

    assert (status, found["tasks"]["verdict"]) == (1, "doubt")
    assert found["tasks"]["found"].startswith(f"{returns_its_coroutine}: a decorator seems to")
    assert "asyncio.run(...)" in found["tasks"]["cure"]


def test_tasks_whose_joined_calls_get_no_result_are_a_doubt(
    examine, private_server, bare_site, monkeypatch
):
    monkeypatch.setattr(bare_site.app.conf, "result_backend", "rpc://")

    status, found = examine(private_server(options=PERSISTENT).url)

    assert (status, found["tasks"]["verdict"]) == (1, "doubt")
    assert "lock_unique, and with rpc://" in found["tasks"]["found"]


def test_a_strict_task_that_no_worker_begins_is_a_doubt(
    examine, private_server, bare_site, monkeypatch
):
    server = private_server(options=PERSISTENT)
    with closing(open_store(server.url, bare_site.app.conf.distlock_prefix)) as store:
        for run in ("r1:0:0:0", "r2:0:0:0"):
            request = SendRequest("k", run, ParkRequest(b"{}"), want=Want(strict=True))
            QueueStore.of(store).calls.send(request)

    _, found = examine(server.url)
    assert "order" not in found
    monkeypatch.setattr(doctor, "LONG", -60.0)
    status, found = examine(server.url)

    assert (status, found["order"]["verdict"]) == (1, "doubt")
    assert "k: a strict task was dispatched over a minute ago" in found["order"]["found"]
    assert "celery locks drop" in found["order"]["cure"]


def test_a_table_has_a_line_for_each_finding(locks):
    done = locks("doctor", "--samples", "3")

    head, *lines = done.stdout.splitlines()
    assert head == "VERDICT\tSUBJECT\tFOUND\tCURE"
    assert all(len(line.split("\t")) == 4 for line in lines)
    assert any("of 3 requests" in line for line in lines)
    assert done.returncode == 1  # the tests' server persists nothing


def test_a_single_one_is_reported_as_such(examine, private_server, monkeypatch, bare_site):
    runtime = Runtime.of(bare_site.app)
    runtime.import_tasks()  # else they would be declared while nothing is
    (name, plan), *_ = ((name, plan) for name, plan in runtime.plans.items() if plan)
    monkeypatch.setattr(runtime, "plans", {name: plan})
    monkeypatch.setattr(runtime, "declare", lambda *_: None)
    monkeypatch.setattr(runtime, "without_base", lambda _tasks: [])  # it goes by the plans

    _, found = examine(private_server(options=PERSISTENT).url)

    assert found["tasks"]["found"] == "1 locked task has what it needs"
    assert re.fullmatch(r"\S+ used, no limit, noeviction", found["memory"]["found"])


def test_the_doctor_leaves_nothing_behind(examine, private_server, ask):
    server = private_server(options=PERSISTENT)
    examine(server.url)

    left = ask(server).keys("*")

    assert [name for name in left if not name.endswith(b":fence")] == []


def test_what_is_parked_and_not_sent_is_counted_with_the_reasons(
    examine, private_server, bare_site, ask
):
    server = private_server(options=PERSISTENT)
    prefix = bare_site.app.conf.distlock_prefix
    odd = {
        "a": envelope("nobodys.task"),
        "b": envelope("nobodys.task"),
        "c": b"{[",
        "d": envelope("work_requeue", content_type="application/x-yaml"),
        "e": envelope("work_requeue", routing_key="elsewhere"),
        "f": parked_as("f:0:0:0", "f", envelope("work_requeue")),
    }
    for key, parked in odd.items():
        parked_runs.park(ask(server), prefix, key, f"{key}:0:0:0", parked)

    status, findings = examine(server.url, every=True)

    seen = {each["found"]: each["verdict"] for each in findings if each["subject"] == "parked"}
    words = {found.partition(":")[0].partition("because ")[2]: seen[found] for found in seen}
    assert status == 1
    assert words == {
        "its task is no locked task of this app": "doubt",
        "it is not a message": "doubt",
        "accept_content does not have its content type": "doubt",
        "this process knows no such queue": "ok",
    }
    assert any(found.startswith("2 of 6 are left to other workers") for found in seen)


def test_the_doctor_leaves_off_what_takes_long(examine, private_server, bare_site, monkeypatch):
    monkeypatch.setattr(doctor, "LOOKS_FOR", 0.0)
    server = private_server(options=PERSISTENT)
    with closing(open_store(server.url, bare_site.app.conf.distlock_prefix)) as store:
        store.acquire(AcquireRequest("k", "a", 60.0))

    status, found = examine(server.url)

    assert status == 0
    assert found["latency"]["found"].endswith("of 1 requests")
    assert re.fullmatch(
        r"\d+ were examined within the time limit; there may be more", found["keys"]["found"]
    )


def test_the_doctor_leaves_off_among_records_of_others(examine, private_server, ask, monkeypatch):
    monkeypatch.setattr(doctor, "LOOKS_FOR", 0.0)
    server = private_server(options=PERSISTENT)
    ask(server).mset({f"other:{number}": "" for number in range(5000)})

    _, found = examine(server.url)

    assert found["keys"]["found"].startswith("0 were examined")


def test_the_doctor_looks_at_a_sample_of_what_is_parked_only(
    examine, private_server, bare_site, ask
):
    server = private_server(options=PERSISTENT)
    prefix = bare_site.app.conf.distlock_prefix
    with ask(server).pipeline() as pipe:
        for number in range(300):
            run, key = f"{number}:0:0:0", str(number % 30)
            parked = parked_as(run, key, envelope("work_requeue"))
            parked_runs.park(pipe, prefix, key, run, parked)
        pipe.execute()

    _, found = examine(server.url)

    assert found["parked"]["found"] == "200 tasks that were examined would be sent"
