"""Calls that come later, and those that others like them join: seen, and dropped."""

from __future__ import annotations

import json
import re
import uuid

import pytest
from celery.exceptions import TaskRevokedError

from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import ParkRequest, Want
from tests.integration.cli.test_seeing import rows

SHARED = True
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's backend

LATER = 600.0  # seconds


@pytest.fixture
def later(site, key):
    """A call that comes later to a free key."""
    task = site.tasks.work_requeue
    result = task.apply_async((key,), lock_via="store", countdown=LATER)
    yield result
    for at, run in site.store.parking.find_parked(result.id, key):
        site.store.parking.cancel(at, run)


def documents(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_key_that_has_only_a_delayed_call_is_listed_and_shown(site, invoke, key, later):
    (row,) = rows(invoke("list", key).stdout)
    (listed,) = documents(invoke("list", key, "--waiting", "--json"))
    shown = invoke("show", key)

    assert (row["HOLDER"], row["WAITING"]) == ("-", "0")
    assert row["NOTES"].startswith("1 later, in 9m")
    assert (listed["state"], listed["later"]) == ("free", 1)
    assert LATER - 120 < listed["due_in_seconds"] <= LATER
    assert "later\t1, the first in 9m" in shown.stdout
    assert f"-\tlater\twork_requeue\t{later.id}\t-\tin 9m" in shown.stdout


def test_delayed_calls_wait_behind_those_that_wait(site, invoke, key, later):
    with site.held(key):
        waits = site.tasks.work_requeue.apply_async((key,), lock_via="store")

        table = rows(invoke("queue", key).stdout)
        record = documents(invoke("queue", key, "--json"))[0]["waiters"]
        beyond = documents(invoke("queue", key, "--json", "--first", "1"))[0]["waiters"]
        behind = documents(invoke("queue", key, "--json", "--first", "2"))[0]["waiters"]

    assert [(row["PLACE"], row["KIND"], row["ID"]) for row in table] == [
        ("0", "parked", waits.id),
        ("-", "later", later.id),
    ]
    assert table[1]["WAITS"].startswith("in 9m")
    assert [waiter["due_in_seconds"] is None for waiter in record] == [True, False]
    assert [waiter["task_id"] for waiter in beyond] == [later.id]
    assert behind == []
    waits.get(timeout=60)


def test_calls_that_others_join_are_shown_with_where_they_are(site, invoke, key):
    with site.held(key):
        first = site.tasks.work_once["finished"].delay(key)

        (shown,) = documents(invoke("show", key, "--json"))
        text = invoke("show", key).stdout

    (call,) = shown["calls"]
    assert shown["identities"] == 1
    assert (call["task_id"], call["where"]) == (first.id, "waiting")
    assert call["identity"].startswith("work_once_finished:")
    assert "calls\t1 with an identity" in text
    assert f"\t{first.id}\twaiting" in text
    first.get(timeout=60)


def test_a_delayed_call_that_is_dropped_never_runs(site, invoke, key, later):
    done = invoke("drop", later.id, "--force")

    assert done.exit_code == 0
    assert f"work_requeue[{later.id}] was taken out of the queue of {key}" in done.stdout
    with pytest.raises(TaskRevokedError):
        later.get(timeout=60)
    assert invoke("list", key).stdout == ""
    assert invoke("queue", key).exit_code == 1


@pytest.mark.parametrize("words", ["id", "all"])
def test_a_dropped_run_frees_its_identity(site, invoke, key, words):
    once, note = site.tasks.work_once["seconds"], uuid.uuid4().hex
    with site.held(key):
        first = once.delay(key, note)
        assert once.delay(key, note).id == first.id

        which = [first.id] if words == "id" else ["--all", "--key", key]
        assert invoke("drop", *which, "--force").exit_code == 0

        second = once.delay(key, note)
        assert second.id != first.id
    assert second.get(timeout=60) == 0
    assert site.journal.read(key) == [note]


def test_all_of_a_key_are_dropped_and_no_others(site, invoke, key, later):
    task = site.tasks.work_requeue
    with site.held(key), site.held(f"{key}2"):
        waits = [task.apply_async((key,), lock_via="store") for _ in range(2)]
        other = task.apply_async((f"{key}2",), lock_via="store")

        (document,) = documents(invoke("drop", "--all", "--key", key, "--force", "--json"))

        dropped = {each["task_id"] for each in document["dropped"]}
        assert dropped == {later.id, *(result.id for result in waits)}
        assert {result.state for result in (later, *waits)} == {"REVOKED"}
        assert site.store.inspect(key).waiting == site.store.inspect(key).later == 0
    assert other.get(timeout=60) == 0
    assert site.journal.read(key) == []
    again = invoke("drop", "--all", "--key", key, "--force")
    assert (again.exit_code, again.stdout) == (1, f"Nothing waits at {key}.\n")


def test_to_drop_all_is_asked_with_how_many_there_are(site, terminal, key, later):
    screen = terminal("drop", "--all", "--key", key)
    screen.wait("Drop them? [y/N]:")

    assert f"{key} has 0 waiting, 0 in flight, 1 later." in screen.text
    screen.type("n\n")
    assert screen.status() == 1
    assert site.store.inspect(key).later == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the id of a task, or --all and --key"),
        (["--all"], "--all needs --key"),
        (["an-id", "--all", "--key", "k"], "give the id of a task, or --all and --key"),
    ],
)
def test_what_is_to_be_dropped_has_to_be_said(invoke, words, message):
    done = invoke("drop", *words, "--force")

    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("command", ["wake", "release"])
def test_a_reservation_for_a_waiter_leaves_a_delayed_call_alone(site, invoke, key, later, command):
    done = invoke(command, key, *(["--force"] if command == "release" else []))

    assert done.exit_code == 1
    assert site.store.inspect(key).later == 1


def test_when_a_rate_lets_the_next_in_is_said(site, invoke, key):
    want = Want(1, 0, (Rate(1, LATER),))
    for owner, run in (("first", ""), ("second", "task:0:0:0")):
        park_request = ParkRequest(b"", task="shop.call") if run else None
        request = AcquireRequest(key, owner, 60.0, queue=park_request, run=run, want=want)
        site.store.acquire(request)
        site.store.release(ReleaseRequest(key, owner, started=True))

    (row,) = rows(invoke("list", key).stdout)
    (record,) = documents(invoke("show", key, "--json"))
    shown = invoke("show", key).stdout
    site.store.parking.cancel(key, "task:0:0:0")

    assert re.match(r"next in (10|[89])m", row["NOTES"])
    assert (
        LATER - 120 < record["opens_in_seconds"] <= LATER + 0.005
    )  # it may count that much longer
    assert re.search(r"next\tin (10|[89])m", shown)
