"""What the commands do to tasks that run and wait."""

from __future__ import annotations

import json
import uuid

import pytest
import redis
from celery import chord
from celery.exceptions import ChordError, TaskRevokedError

from celery_distlock.errors import LockLostError
from celery_distlock.keys import slot_name
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import WokenTask
from tests.waiting import wait_until

WORKERS = [{"concurrency": 2}]
SHARED = True
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's backend
TURN_LONG = "tests.apps.locked.turn_long"


def wait_parked(site, key, task_id):
    """Wait until the task is parked, which is later than its state says."""

    def parked():
        return any(run.startswith(task_id) for _, run in site.store.parking.find_parked(task_id))

    wait_until(parked, timeout=60, what=f"{task_id} to be parked at {key}")


@pytest.fixture
def running(site, key):
    """A task that runs under *key* until its lock is lost or the gate of that name is open."""
    result = site.tasks.turn_long.delay(key)
    site.journal.wait(key, timeout=60)
    yield result
    if not result.ready():
        site.forget(key)
        with pytest.raises(LockLostError):
            result.get(timeout=60)


def test_a_running_task_and_those_that_wait_are_seen(site, invoke, key, running):
    parked = site.tasks.work_requeue.delay(key)
    wait_parked(site, key, parked.id)

    (listed,) = [json.loads(line) for line in invoke("list", key, "--json").stdout.splitlines()]
    queue = json.loads(invoke("queue", key, "--json").stdout)

    assert (listed["holder"]["task"], listed["holder"]["task_id"]) == (TURN_LONG, running.id)
    assert listed["holder"]["pid"] in site.workers[0].children()
    assert listed["waiting"] == 1
    assert listed["oldest_seconds"] > listed["since_seconds"]
    (waiter,) = queue["waiters"]
    assert (waiter["place"], waiter["kind"]) == (0, "parked")
    assert (waiter["task"], waiter["task_id"]) == ("work_requeue", parked.id)
    assert waiter["since_seconds"] == listed["oldest_seconds"]
    assert f"0\tparked\twork_requeue\t{parked.id}" in invoke("queue", key).stdout


def test_a_key_that_is_released_by_force_goes_to_the_next(site, invoke, key, running):
    parked = site.tasks.work_requeue.delay(key)
    wait_parked(site, key, parked.id)

    done = invoke("release", key, "--force")

    assert done.exit_code == 0
    assert f"{key} was taken from {TURN_LONG}[{running.id}] on " in done.stdout
    assert f"[{parked.id}]" in done.stdout or "It is free now" in done.stdout
    assert parked.get(timeout=60) == 0
    with pytest.raises(LockLostError):
        running.get(timeout=60)


def test_a_holder_that_is_asked_to_leave_keeps_its_key_until_it_has(site, invoke, key, running):
    parked = site.tasks.work_requeue.delay(key)
    wait_parked(site, key, parked.id)

    done = invoke("recall", key, "--reason", "INC-7")

    assert done.exit_code == 0
    assert f"{TURN_LONG}[{running.id}] on " in done.stdout
    assert f"is asked to leave {key}" in done.stdout
    with pytest.raises(TaskRevokedError, match="INC-7"):
        running.get(timeout=60)
    assert parked.get(timeout=60) == 0
    (action,) = json.loads(invoke("show", key, "--json").stdout)["actions"]
    assert (action["action"], action["reason"], len(action["owners"])) == ("recall", "INC-7", 1)


def test_a_recall_reports_to_scripts_which_holder_it_asked(site, invoke, key, running):
    owner = site.look(key).owner

    document = json.loads(invoke("recall", key, "--holder", running.id, "--json").stdout)

    assert document == {"key": key, "asked": [owner]}


def test_to_recall_the_holder_of_a_free_key_has_status_1(invoke, key):
    done = invoke("recall", key)

    assert done.exit_code == 1
    assert f"{key} has no holder to ask" in done.stdout


def test_a_release_reports_to_scripts_what_it_did(site, invoke, key, running):
    document = json.loads(invoke("release", key, "--yes", "--json").stdout)

    assert document["released"] is True
    assert document["before"]["holder"]["task_id"] == running.id
    assert (document["after"]["state"], document["after"]["holder"]) == ("free", None)
    with pytest.raises(LockLostError):
        running.get(timeout=60)


def test_without_a_terminal_nothing_is_released_that_was_not_forced(site, locks, key, running):
    done = locks("release", key)

    assert (done.returncode, done.stdout) == (2, "")
    assert "--force" in done.stderr
    assert site.look(key).token


def test_to_release_a_free_key_has_status_1(invoke, key):
    done = invoke("release", key, "--force")

    assert done.exit_code == 1
    assert "nothing was done" in done.stdout


def test_a_released_holder_is_asked_for_and_named_in_a_terminal(site, terminal, key, running):
    screen = terminal("release", key)
    screen.wait("Take it away? [y/N]:")
    assert f"{key} is held by {TURN_LONG}[{running.id}] on " in screen.text
    assert "two may run" in " ".join(screen.text.split())

    screen.type("y\n")

    assert screen.status() == 0
    assert "was taken from" in screen.text
    with pytest.raises(LockLostError):
        running.get(timeout=60)


def test_the_answer_no_changes_nothing(site, terminal, key, running):
    token = site.look(key).token
    screen = terminal("release", key)
    screen.wait("[y/N]:")

    screen.type("n\n")

    assert screen.status() == 1
    assert site.look(key).token == token


def test_a_holder_that_came_after_the_question_keeps_the_key(bare_site, terminal, key):
    bare_site.store.acquire(AcquireRequest(key, "first", 60.0))
    screen = terminal("release", key)
    screen.wait("[y/N]:")
    bare_site.store.release(ReleaseRequest(key, "first"))
    token = bare_site.store.acquire(AcquireRequest(key, "second", 60.0)).token

    screen.type("y\n")

    assert screen.status() == 1
    assert "has changed hands" in screen.text
    assert bare_site.look(key).token == token
    bare_site.store.release(ReleaseRequest(key, "second"))


@pytest.mark.parametrize("by_key", [False, True], ids=["searched", "by key"])
def test_a_dropped_task_never_runs_and_its_waiters_are_notified(site, invoke, key, by_key):
    note = uuid.uuid4().hex
    with site.held(key):
        result = site.tasks.work_requeue.delay(key, note)
        wait_parked(site, key, result.id)

        done = invoke("drop", result.id, "--force", *(["--key", key] if by_key else []))

        assert done.exit_code == 0
        assert f"work_requeue[{result.id}] was taken out of the queue of {key}" in done.stdout
        with pytest.raises(TaskRevokedError):
            result.get(timeout=60)
    assert site.tasks.work_requeue.delay(key, "after").get(timeout=60) == 0
    assert site.journal.read(key) == ["after"]


def test_a_chord_with_a_dropped_member_fails_and_does_not_hang(site, invoke, key):
    with site.held(key):
        members = [site.tasks.work_requeue.s(key), site.tasks.add.s(1, 2)]
        result = chord(members)(site.tasks.total.s())
        member = result.parent.results[0].id
        wait_parked(site, key, member)

        assert invoke("drop", member, "--force").exit_code == 0

        with pytest.raises((ChordError, TaskRevokedError)):
            result.get(timeout=60)
        wait_until(lambda: result.state == "FAILURE", timeout=60, what="the chord's failure")


def test_a_drop_asks_where_the_task_is_parked(site, terminal, key):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        wait_parked(site, key, result.id)
        screen = terminal("drop", result.id)
        screen.wait("Drop it? [y/N]:")
        assert f"{result.id} is parked at {key}" in screen.text

        screen.type("n\n")

        assert screen.status() == 1
    assert result.get(timeout=60) == 0


def test_to_drop_a_task_that_is_not_parked_has_status_1(invoke):
    done = invoke("drop", "no-such-task", "--force")

    assert done.exit_code == 1
    assert "no-such-task is not parked" in done.stdout


def test_a_drop_without_a_terminal_has_to_be_forced(site, invoke, key):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        wait_parked(site, key, result.id)

        done = invoke("drop", result.id)

        assert done.exit_code == 2
        assert "--force" in done.stderr
    assert result.get(timeout=60) == 0


def test_a_wake_without_waiters_has_status_1(invoke, key):
    done = invoke("wake", key)

    assert done.exit_code == 1
    assert key in done.stdout


@pytest.fixture
def abandoned(load_app, worker):
    """An app without a worker, and a task of it whose message the broker has lost."""
    module = load_app("tests.apps.locked")
    store = Runtime.of(module.app).store
    key = f"key-{uuid.uuid4().hex[:8]}"
    process = worker("tests.apps.locked")
    store.acquire(AcquireRequest(key, "somebody", 600.0))
    result = module.work_requeue.delay(key)
    wait_until(
        lambda: list(store.parking.find_parked(result.id)), timeout=60, what="it to be parked"
    )
    process.stop()
    store.dispatch(store.release(ReleaseRequest(key, "somebody")).wake)
    transport = module.app.conf.broker_transport_options
    with redis.Redis.from_url(module.app.conf.broker_url) as broker:
        assert broker.delete(f"{transport['global_keyprefix']}celery") == 1
    return module, key, result


def test_what_the_broker_has_lost_is_woken(abandoned, worker, monkeypatch):
    module, key, result = abandoned
    worker("tests.apps.locked")
    assert Runtime.of(module.app).store.inspect(key).woken == 1

    done = run_here(module.app, "wake", key)

    assert (done.exit_code, done.output) == (0, "1 sent.\n")
    assert result.get(timeout=60) == 0


def test_a_broker_that_does_not_answer_is_reported_in_one_line(abandoned, monkeypatch):
    module, key, _ = abandoned

    def refuse(*_args, **_options):
        raise ConnectionRefusedError("no broker")

    monkeypatch.setattr(Runtime.of(module.app).store.publishers, "known", (refuse,))

    done = run_here(module.app, "wake", key)

    assert done.exit_code == 2
    (line,) = done.output.splitlines()  # click 8.1 keeps no other
    assert "no broker" in line


def test_a_tick_that_the_broker_does_not_take_is_an_error(abandoned, monkeypatch):
    module, key, _ = abandoned
    store = Runtime.of(module.app).store
    (waiter,) = store.waiters(key)
    store.parking.mark_returned(WokenTask(slot_name(key), waiter.run, b""))

    def refuse(*_args, **_options):
        raise ConnectionRefusedError("no broker")

    with monkeypatch.context() as patch:
        patch.setattr(store.publishers, "known", (refuse,))
        done = run_here(module.app, "tick")
    assert done.exit_code == 2
    assert "1 that should have been sent were not" in done.output

    store.parking.mark_returned(WokenTask(slot_name(key), waiter.run, b""))
    done = run_here(module.app, "tick", "--json", "--exit-code")
    document = json.loads(done.output)
    assert (done.exit_code, document["sent"], document["in_flight"]) == (4, 1, 1)
    assert document["queues"] == {"celery": {"waiting": 0, "in_flight": 1, "later": 0}}


def run_here(app, *words):
    from celery.bin.base import CLIContext
    from click.testing import CliRunner

    from celery_distlock.ops.cli import locks

    obj = CLIContext(app=app, no_color=True, workdir=None)
    return CliRunner().invoke(locks, words, obj=obj)
