"""A task's request says what its caller sent: nothing that we note about it, and nothing less."""

from __future__ import annotations

import copy
import json
import os
import signal
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import redis

from celery_distlock.keys import slot_name
from celery_distlock.runtime.message_facts import LockHeader
from tests import parked_runs, processes
from tests.waiting import wait_until
from tests.worker.conftest import staffed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site

APP = "tests.apps.handed_on"

SENT: dict[str, dict[str, Any] | None] = {
    "none": None,
    "one": {"x-tenant": "7"},
    "nested": {"x-tenant": "7", "headers": {"x-trace": {"ids": [1, 2]}}},
}


@pytest.fixture(
    scope="module", params=["prefork", pytest.param("threads", marks=pytest.mark.exhaustive)]
)
def site(request, bare_site: Site, tmp_path_factory) -> Iterator[Site]:
    worker = {"pool": request.param, "concurrency": 4}
    with staffed(bare_site, tmp_path_factory.mktemp("workers"), [worker]) as site:
        yield site


@pytest.fixture(params=SENT)
def headers(request) -> dict[str, Any] | None:
    return copy.deepcopy(SENT[request.param])


def saw(site: Site, task_id: str, count: int = 1) -> dict[str, Any]:
    """What the run of that number has seen of its request."""
    seen: dict[str, Any] = site.journal.wait(f"{task_id}:saw", count)[count - 1]
    return seen


def saw_straight(site: Site, task: Any, key: str, headers: Any, how: str = "") -> dict[str, Any]:
    """What one sees that did not wait, or, with *how*, its second run."""
    result = task.apply_async((f"{key}:straight", how), headers=headers)
    return saw(site, result.id, 2 if how else 1)


def parked_by_the_pool(site: Site, key: str, headers: Any) -> str:
    with site.held(key):
        result = site.tasks.locked.apply_async((key,), headers=headers)
        site.wait_queued(key)
    return result.id


def parked_by_the_main_process(site: Site, key: str, headers: Any) -> str:
    first = site.tasks.locked.delay(key, "gate")
    saw(site, first.id)
    result = site.tasks.locked.apply_async((key,), headers=headers)
    site.wait_queued(key)
    site.journal.open(key)
    return result.id


def sent_by_the_broker(site: Site, key: str, headers: Any) -> str:
    with site.held(key):
        result = site.tasks.locked.apply_async((key,), headers=headers)
        site.wait_queued(key)
        site.forget_channel(key)
    return result.id


def resent(site: Site, key: str, headers: Any) -> str:
    with site.held(key):
        result = site.tasks.resent.apply_async((key,), headers=headers)
        wait_until(lambda: result.state == "PARKED", what="a conflict")
    return result.id


def through_the_store(site: Site, key: str, headers: Any) -> str:
    return site.tasks.locked.apply_async((key,), headers=headers, lock_via="store").id


def waiting_in_the_store(site: Site, key: str, headers: Any) -> str:
    with site.held(key):
        result = site.tasks.locked.apply_async((key,), headers=headers, lock_via="store")
        site.wait_queued(key)
    return result.id


def updated_in_the_store(site: Site, key: str, headers: Any) -> str:
    """Sent first with other headers."""
    with site.held(key):
        site.tasks.updating.apply_async((key,), headers={"x-other": "8"})
        result = site.tasks.updating.apply_async((key,), headers=headers)
        site.wait_queued(key)
    assert result.joined
    return result.id


WAYS = [
    parked_by_the_pool,
    parked_by_the_main_process,
    sent_by_the_broker,
    resent,
    through_the_store,
    waiting_in_the_store,
    updated_in_the_store,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_request_says_what_was_sent_whatever_way_it_came(site, key, headers, way):
    plain = saw_straight(site, site.tasks.plain, key, headers)
    straight = saw_straight(site, site.tasks.locked, key, headers)

    came = saw(site, way(site, key, headers))

    assert came == straight
    assert came["headers"] == plain["headers"]
    assert not came["marked"]


@pytest.mark.parametrize("how", ["fail", "postpone"])
def test_a_request_that_was_put_back_says_what_was_sent(site, key, headers, how):
    straight = saw_straight(site, site.tasks.locked, key, headers)

    result = site.tasks.locked.apply_async((key, how), headers=headers)

    assert saw(site, result.id, 2) == straight


@pytest.mark.parametrize("via", ["broker", "store", "park"])
def test_a_retry_says_what_that_of_a_plain_task_says(site, key, headers, via):
    plain = saw_straight(site, site.tasks.plain, key, headers, "retry")

    if via == "park":
        with site.held(key):
            result = site.tasks.locked.apply_async((key, "retry"), headers=headers)
            site.wait_queued(key)
    else:
        result = site.tasks.locked.apply_async((key, "retry"), headers=headers, lock_via=via)

    second = saw(site, result.id, 2)
    assert second["headers"] == plain["headers"]
    assert not second["marked"]


@pytest.mark.parametrize("how", ["apply", "call"])
def test_without_a_message_a_request_says_what_that_of_a_plain_task_says(
    bare_site, key, headers, how
):
    journal, tasks = bare_site.journal, bare_site.tasks

    def run(task: Any) -> dict[str, Any]:
        if how == "apply":
            task_id = task.apply((key,), headers=headers).id
        else:
            task(key)
            task_id = None
        seen: dict[str, Any] = journal.read(f"{task_id}:saw")[-1]
        return seen

    for _ in range(2):
        came, plain = run(tasks.locked), run(tasks.plain)
        assert came["headers"] == plain["headers"]
        assert not came["marked"]


def kill_parent(site: Site, key: str) -> None:
    (pid,) = site.journal.wait(f"{key}:pid")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes.alive(pid), what="its process to be gone")


@pytest.mark.parametrize("child", ["plain", "locked", "parked", "unique"])
def test_a_parent_whose_child_got_its_headers_runs_again_if_its_process_is_killed(site, key, child):
    if not site.workers[0].children():
        pytest.skip("its worker would be killed with it")
    task, child_key = ("locked", key) if child == "parked" else (child, f"{key}:child")
    with site.held(key):
        site.tasks.parent.apply_async((key, task, child_key), headers={"x-tenant": "7"})
        site.wait_queued(key)
    (child_id,) = site.journal.wait(f"{key}:child")
    if child == "parked":
        site.wait_queued(key)
    else:
        assert saw(site, child_id)["headers"] == {"x-tenant": "7"}
        site.app.AsyncResult(child_id).get(timeout=30)

    kill_parent(site, key)

    site.journal.wait(f"{key}:pid", 2)
    site.journal.open(key)
    for each in site.journal.wait(f"{key}:child", 2):
        assert saw(site, each)["headers"] == {"x-tenant": "7"}
    site.wait_free(key)


def test_a_child_has_all_of_its_requeues_whatever_its_parent_had(site, key):
    site.tasks.failing_parent.apply_async((key, "locked"), headers={"x-tenant": "7"})

    (child_id,) = site.journal.wait(f"{key}:child")

    assert saw(site, child_id, 2)["headers"] == {"x-tenant": "7"}
    site.app.AsyncResult(child_id).get(timeout=30)


@pytest.mark.parametrize("how", ["apply", "call"])
def test_a_child_of_what_runs_in_its_parents_process_is_parked_as_any_other(site, key, how):
    child_key = f"{key}:child"
    with site.held(child_key):
        site.tasks.calling_parent.delay(key, how, child_key)
        (child_id,) = site.journal.wait(f"{child_key}:child")
        site.wait_queued(child_key)
    site.app.AsyncResult(child_id).get(timeout=30)


def test_a_result_knows_the_calls_that_its_task_has_sent(site, key):
    for task in (site.tasks.plain_sender, site.tasks.locked_sender):
        result = task.delay(key)
        child_id = result.get(timeout=30)

        assert [child.id for child in result.children] == [child_id]


def test_what_was_parked_before_headers_named_their_message_runs_as_it_was_sent(site, key):
    """As by a worker of the code before 0.1.0, while this one is deployed."""
    sent = {"x-tenant": "7"}
    with site.held(key):
        result = site.tasks.locked.apply_async((key,), headers=sent)
        site.wait_queued(key)
        tasks = site.record(key, "tasks")
        with redis.Redis.from_url(site.app.conf.result_backend) as client:
            ((run, envelope),) = parked_runs.envelopes(client, tasks).items()
            message = json.loads(envelope)
            assert message["headers"]["distlock"].pop("id") == result.id
            client.hset(tasks, f"e:{run}", json.dumps(message))

    assert saw(site, result.id)["headers"] == sent
    result.get(timeout=30)
    site.wait_free(key)
    assert len(site.journal.read(f"{result.id}:saw")) == 1


@pytest.mark.parametrize("child", ["plain", "locked", "unique"])
def test_a_header_that_another_message_had_counts_for_nothing(site, key, child):
    """As workers of the code before 0.1.0 let tasks hand on, while this one is deployed."""
    with site.held(key):
        parent = site.tasks.locked.delay(key)
        site.wait_queued(key)
        run = f"{parent.id}:0:0:0"
        way = LockHeader(woken=True, run=run, parked_at=slot_name(key), requeues=1)
        handed_on = {"x-tenant": "7", "distlock": way.to_header({"id": parent.id})}

        sent = site.tasks.CHILDREN[child].apply_async((f"{key}:child",), headers=handed_on)
        sent.get(timeout=30)

        assert saw(site, sent.id)["headers"] == {"x-tenant": "7"}
        assert site.look(key).waiting == 1
    parent.get(timeout=30)
    assert len(site.journal.read(f"{parent.id}:saw")) == 1


def test_a_task_that_is_locked_no_more_does_not_see_that_it_was(site, key):
    task_id = str(uuid.uuid4())
    way = LockHeader(woken=True, run=f"{task_id}:0:0:0", parked_at=slot_name(key))
    sent = {"x-tenant": "7", "distlock": way.to_header({"id": task_id})}

    site.tasks.plain.apply_async((key,), task_id=task_id, headers=sent).get(timeout=30)

    came = saw(site, task_id)
    assert came["headers"] == {"x-tenant": "7"}
    assert not came["marked"]
