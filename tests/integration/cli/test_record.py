"""The record of what operators do: by which user, when and why; and that those affected have it."""

from __future__ import annotations

import getpass
import json
import re
import socket
import time
import uuid
from types import SimpleNamespace

import pytest
import redis
from celery.exceptions import TaskRevokedError

from celery_distlock import Key, Lock
from celery_distlock.errors import LockLostError, StoreUnavailableError
from celery_distlock.ops.admin import Admin
from celery_distlock.stores import Ability, AcquireRequest
from celery_distlock.stores.redis.actions import RedisAudit
from celery_distlock.worker import control
from tests.integration.cli.test_acting import wait_parked
from tests.waiting import wait_until

WORKERS = [{"concurrency": 2}]
SHARED = True
ME = f"{getpass.getuser()}@{socket.gethostname()}"
WHY = "INC-1: the import hangs"
TAKEN = rf"taken by {re.escape(ME)} at 20\d\d-\d\d-\d\dT[\d:]+\+00:00: {WHY}"


def recorded(invoke, key):
    """What ``show --json`` says operators did, the last first."""
    return json.loads(invoke("show", key, "--json").stdout)["actions"]


# A holder that loses its key


@pytest.mark.parametrize("task", ["turn_long", "sleep_long"])
def test_a_task_that_loses_its_key_reports_the_new_holder_and_the_reason(site, invoke, key, task):
    result = getattr(site.tasks, task).delay(key)
    site.journal.wait(key, timeout=60)

    assert invoke("release", key, "--force", "--reason", WHY).exit_code == 0

    with pytest.raises(LockLostError, match=TAKEN):
        result.get(timeout=60)
    site.workers[0].wait_log(f"{task}[{result.id}] lost its lock '{key}'")
    logged = rf"lost its lock '{key}' \(token \d+\): {TAKEN}"
    assert re.search(logged, site.workers[0].log())


def test_a_task_whose_key_has_gone_to_the_next_says_so_too(site, invoke, key):
    result = site.tasks.turn_long.delay(key)
    site.journal.wait(key, timeout=60)
    invoke("release", key, "--force", "--reason", WHY)
    site.store.acquire(AcquireRequest(key, "next", 60.0))

    with pytest.raises(LockLostError, match=TAKEN):
        result.get(timeout=60)


def lose_at_a_release(lock, lease):
    lock.release()


def lose_at_a_renewal(lock, lease):
    lease.extend(30.0)


def lose_at_an_upgrade(lock, lease):
    lease.upgrade()


def lose_at_a_downgrade(lock, lease):
    lease.downgrade()


def lose_at_a_rest(lock, lease):
    lease.cool_down(1.0)


@pytest.mark.parametrize(
    ("wanted", "lose"),
    [
        ({}, lose_at_a_release),
        ({}, lose_at_a_renewal),
        ({}, lose_at_a_rest),
        ({}, lose_at_a_downgrade),
        ({"capacity": 3}, lose_at_a_release),
        ({"capacity": 3}, lose_at_a_renewal),
        ({"capacity": 3}, lose_at_an_upgrade),
        ({"capacity": 3}, lose_at_a_rest),
    ],
)
def test_every_way_to_find_a_loss_names_the_new_holder(bare_site, invoke, key, wanted, lose):
    lost = []
    lock = Lock(Key(key, **wanted), store=bare_site.store, lease=300.0)
    lease = lock.acquire() and lock.lease
    receiver = lost.append
    bare_site.tasks.signals.lock_lost.connect(
        lambda reason, **_: receiver(reason), weak=False, dispatch_uid="record"
    )
    try:
        assert invoke("release", key, "--force", "--reason", WHY).exit_code == 0
        with pytest.raises(LockLostError) as raised:
            lose(lock, lease)
    finally:
        bare_site.tasks.signals.lock_lost.disconnect(dispatch_uid="record")

    assert re.search(TAKEN, raised.value.reason)
    assert [reason for reason in lost if re.search(TAKEN, reason)]


def test_a_key_that_is_lost_otherwise_names_no_operator(bare_site, invoke, key):
    with pytest.raises(LockLostError, match="the store no longer knew it") as raised:  # noqa: PT012, SIM117
        with Lock(key, store=bare_site.store, lease=300.0):
            invoke("pause", key, "--reason", "of others")
            with redis.Redis.from_url(bare_site.app.conf.result_backend) as client:
                client.delete(bare_site.record(key))

    assert "taken by" not in str(raised.value)


def test_a_key_is_released_though_the_record_cannot_be_written(bare_site, invoke, key, monkeypatch):
    def refuse(self, key, action):
        raise StoreUnavailableError("out of memory")

    monkeypatch.setattr(RedisAudit, "record_action", refuse)
    bare_site.store.acquire(AcquireRequest(key, "h|1|shop.f[x]|n", 60.0))

    done = invoke("release", key, "--force", "--reason", WHY)

    assert (done.exit_code, "was taken from shop.f[x]" in done.stdout) == (0, True)
    assert "its author and its reason could not be recorded" in done.stderr


# What is recorded


def test_each_act_is_recorded_with_author_time_and_reason(bare_site, invoke, key):
    began = time.time()
    bare_site.store.acquire(AcquireRequest(key, "h|1|shop.f[x]|n", 60.0))
    for words in (
        ["limit", key, "2", "--rate", "10/m", "--for", "1h"],
        ["pause", key],
        ["resume", key],
        ["limit", key, "1"],
        ["limit", key, "--clear"],
        ["release", key, "--force"],
    ):
        assert invoke(*words, "--reason", WHY).exit_code == 0

    acts = recorded(invoke, key)

    names = ["release", "resume", "limit", "resume", "pause", "limit"]
    assert [each["action"] for each in acts] == names
    assert {(each["author"], each["reason"]) for each in acts} == {(ME, WHY)}
    assert [each["about"] for each in acts][:-1] == [
        "from shop.f[x] on h, process 1",
        *("", "1 unit", "", ""),
    ]
    assert re.fullmatch(r"2 units, 10/m, until 20\S+", acts[-1]["about"])
    assert acts[0]["owners"] == ["h|1|shop.f[x]|n"]
    assert all(abs(each["at_seconds"] - began) < 60 for each in acts)
    assert acts[0]["at"].startswith("20")
    (row,) = [line for line in invoke("show", key).stdout.splitlines() if line[:6] == "pause\t"]
    assert row.split("\t")[1] == ME
    assert row.split("\t")[-1] == WHY


def test_what_was_not_done_is_not_recorded(invoke, key):
    for words in (["release", "--force"], ["resume"], ["wake"], ["drop", "--all", "--force"]):
        key_words = ["--key", key] if words[0] == "drop" else [key]
        assert invoke(*words, *key_words, "--reason", WHY).exit_code == 1

    assert recorded(invoke, key) == []


def test_the_record_is_bounded_and_expires(bare_site, invoke, key):
    admin = Admin(bare_site.app)
    for number in range(30):
        admin.limit(key, 2, reason=str(number))
    admin.limit(key, None)

    acts = recorded(invoke, key)
    with redis.Redis.from_url(bare_site.app.conf.result_backend) as client:
        name = bare_site.record(key, "actions")
        left_ms, many = client.pttl(name), client.zcard(name)

    assert (len(acts), many) == (10, 10)
    assert [each["reason"] for each in acts[1:]] == [str(n) for n in range(29, 20, -1)]
    assert 0 < left_ms <= 30 * 86_400_000


def test_a_dropped_task_s_result_and_the_record_have_author_and_reason(site, locks, invoke, key):
    with site.held(key):
        results = [site.tasks.work_requeue.delay(key, uuid.uuid4().hex) for _ in range(3)]
        for result in results:
            wait_parked(site, key, result.id)

        assert locks("drop", results[0].id, "--force", "--reason", WHY).returncode == 0
        assert locks("drop", "--all", "--key", key, "--force").returncode == 0

        acts = recorded(invoke, key)
    with pytest.raises(TaskRevokedError, match=f"by {re.escape(ME)}: {WHY}"):
        results[0].get(timeout=60)
    with pytest.raises(TaskRevokedError, match=f"by {re.escape(ME)}$"):
        results[1].get(timeout=60)
    assert [(each["action"], each["about"], each["reason"]) for each in acts] == [
        ("drop", "all: 2 tasks", ""),
        ("drop", f"work_requeue[{results[0].id}]", WHY),
    ]


def test_a_release_by_remote_control_is_recorded_with_its_author(bare_site, invoke, key):
    bare_site.store.acquire(AcquireRequest(key, "h|1|shop.f[x]|n", 60.0))
    state = SimpleNamespace(app=bare_site.app, hostname="celery@vm")

    control.release_lock(state, key=key, reason=WHY)  # it goes on where it cannot answer in time

    (act,) = wait_until(lambda: recorded(invoke, key), timeout=60, what="the record")
    assert (act["author"], act["reason"]) == ("remote control, carried out by celery@vm", WHY)


@pytest.mark.parametrize("reason", ["x" * 201, "  "], ids=["long", "empty"])
def test_a_reason_fits_on_a_line(invoke, key, reason):
    done = invoke("pause", key, "--reason", reason)

    if reason.strip():
        assert done.exit_code == 2
        assert "201 characters" in done.stderr
        assert "INC-4711" in done.stderr
    else:
        assert recorded(invoke, key)[0]["reason"] == ""
        invoke("resume", key)


def test_a_reason_is_one_line_without_what_a_terminal_would_obey(bare_site, invoke, key):
    invoke("pause", key, "--reason", "first\nsecond \x1b]0;title\x07")

    assert recorded(invoke, key)[0]["reason"] == r"first second \x1b]0;title\x07"
    assert "\x1b" not in invoke("show", key).stdout
    invoke("resume", key)


def test_a_store_without_a_record_says_so_where_a_reason_is_given(
    bare_site, invoke, key, monkeypatch
):
    lacking = bare_site.store.abilities - {Ability.QUEUE}
    monkeypatch.setattr(bare_site.store, "abilities", lacking, raising=False)
    bare_site.store.acquire(AcquireRequest(key, "h|1|shop.f[x]|n", 60.0))

    done = invoke("release", key, "--force", "--reason", WHY)

    assert done.exit_code == 0
    assert "does not record operators' actions" in done.stderr


def test_what_others_write_into_the_record_is_passed_over(bare_site, invoke, key):
    invoke("pause", key, "--reason", WHY)
    name = bare_site.record(key, "actions")
    with redis.Redis.from_url(bare_site.app.conf.result_backend) as client:
        for entry in (b"", b"\xff", b"1 {}", b'2 {"name": 1}', b"3 [" + b"[" * 10_000):
            client.zadd(name, {entry: 1})
        assert [each["action"] for each in recorded(invoke, key)] == ["pause"]

        client.delete(name)
        client.set(name, "spoilt")
        with Lock(key + "2", store=bare_site.store):
            assert invoke("resume", key).exit_code == 0
        client.delete(name)
