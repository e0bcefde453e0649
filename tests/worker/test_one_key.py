"""One value makes one key, whichever way a call goes and whatever serializes it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from kombu.serialization import dumps, loads

from celery_distlock import Lock
from celery_distlock.errors import LockKeyError
from tests.argument_values import VALUES, State
from tests.fidelity import SERIALIZERS

if TYPE_CHECKING:
    from tests.worker.conftest import Site

APP = "tests.apps.keyed"
ENV = {"C_FORCE_ROOT": "1"}  # Celery's leave to read pickles as root, as tests in a container are
WORKERS: list[dict[str, Any]] = [{"concurrency": 2}]
VIA = ("broker", "store")


def travels(value: Any, serializer: str) -> bool:
    """Whether *serializer* can write it, and read that."""
    try:
        kind, encoding, body = dumps([value], serializer=serializer)
        loads(body, kind, encoding, accept=[kind])
    except Exception:  # noqa: BLE001  # each serializer has others
        return False
    return True


def calls(site: Site, name: str) -> list[tuple[Any, dict[str, Any]]]:
    """All values with all options by which a call can be sent."""
    ways = itertools.product(VALUES, SERIALIZERS, VIA)
    return [
        (value, {"serializer": serializer, "lock_via": via})
        for value, serializer, via in ways
        if travels(value, serializer)
        # A callable gets what the task's own serializer gives, so only what that can write.
        and (name != "code" or travels(value, "json"))
    ]


@pytest.mark.parametrize("name", ["whole", "repr", "digest", "code"])
def test_every_way_and_every_serializer_make_the_key_that_the_task_reports(site: Site, name):
    task = site.tasks.TASKS[name]
    sent = [(each, task.apply_async((each[0],), **each[1])) for each in calls(site, name)]
    assert {each[1]["serializer"] for each, _ in sent} == set(SERIALIZERS)

    wrong = []
    for (value, how), result in sent:
        found, expected = result.get(timeout=60), task.key_for(value)
        if found != [expected]:
            wrong.append((value, how, found, expected))

    assert wrong == []


@pytest.mark.parametrize("name", ["whole", "repr", "digest", "code"])
@pytest.mark.parametrize("way", ["direct", "apply"])
def test_a_call_without_a_message_takes_the_key_that_the_task_reports(site: Site, name, way):
    task = site.tasks.TASKS[name]
    call = {"direct": task, "apply": lambda value: task.apply((value,)).get()}[way]

    for value in VALUES:
        assert call(value) == [task.key_for(value)], value


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_a_template_reaches_into_a_dictionary_whose_keys_are_no_texts(site: Site, serializer):
    value = {7: "x", "state": State.PAID, "more": (1,)}
    if serializer == "yaml":  # which has no enums
        value["state"] = "paid"

    sent = site.tasks.inside.apply_async((value,), serializer=serializer)

    assert sent.get(timeout=60) == [site.tasks.inside.key_for(value)] == ["inside:x:paid:1"]


def test_a_lock_of_the_key_that_a_task_reports_keeps_its_message_out(site: Site):
    task, paid = site.tasks.TASKS["whole"], State.PAID
    with Lock(task.key_for(paid), store=site.store):
        result = task.delay(paid)
        site.wait_queued("whole:paid")

    assert result.get(timeout=60) == ["whole:paid"]


def test_equal_calls_are_joined_whatever_serializes_them(site: Site):
    once, value = site.tasks.once, [(1, State.PAID), {7: None}]
    with site.held("once"):
        first = once.apply_async((value,), serializer="pickle")
        second = once.apply_async((value,), serializer="json")

        assert second.joined
        assert second.id == first.id


def test_a_template_that_looks_into_what_no_message_has_is_refused_by_name_everywhere(site: Site):
    task, paid = site.tasks.by_state, State.PAID
    words = r"task by_state: .*\{value\.value\}.*an enum arrives as its value: write \{value\}"

    for call in (task, task.key_for, lambda value: task.apply((value,)).get()):
        with pytest.raises(LockKeyError, match=words):
            call(paid)
    with pytest.raises(LockKeyError, match=words):
        task.delay(paid).get(timeout=60)
