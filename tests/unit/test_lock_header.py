"""Which messages our header is believed in."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from celery.app.task import Context

from celery_distlock.runtime.message_facts import (
    ADDRESSEE,
    HEADER,
    LockHeader,
    Received,
    addressee_of,
    execution_id,
)

MESSAGE: dict[str, Any] = {"id": "a", "retries": 1}
WAY = LockHeader(woken=True, run="a:1:2:0", parked_at="k", requeues=2, attempts=3)


def headers(way: LockHeader, **changes: Any) -> dict[str, Any]:
    return {**MESSAGE, HEADER: {**way.to_header(MESSAGE), ADDRESSEE: "mine"}, **changes}


def test_a_message_has_its_own_header():
    assert LockHeader.of(headers(WAY)) == WAY
    assert execution_id(headers(WAY)) == WAY.run
    assert addressee_of(headers(WAY)) == "mine"


@pytest.mark.parametrize(
    "other", [{"id": "b"}, {"retries": 2}, {"id": None}, {"id": ["a"]}], ids=repr
)
@pytest.mark.parametrize("run", ["a:1:2:0", ""])
def test_the_header_of_another_message_counts_for_nothing(other, run):
    handed_on = headers(LockHeader(run=run, requeues=2, attempts=3, woken=bool(run)), **other)

    assert LockHeader.of(handed_on) == LockHeader()
    assert addressee_of(handed_on) == ""


def test_a_header_that_names_the_run_of_another_message_counts_for_nothing():
    assert LockHeader.of(headers(LockHeader(woken=True, run="b:1:0:0"))) == LockHeader()


@pytest.mark.parametrize(("identity", "believed"), [("a", True), ("b", False)])
def test_of_what_names_no_message_its_run_shows_whose_it_is(identity, believed):
    """So it was written before headers named their message."""
    parked_before = headers(WAY, id=identity)
    del parked_before[HEADER]["id"]

    assert LockHeader.of(parked_before) == (WAY if believed else LockHeader())


@pytest.mark.parametrize("values", [None, 1, [], {}, {"id": {}, "run": 7, "retries": 1}], ids=repr)
def test_what_is_no_header_of_ours_counts_for_nothing(values):
    assert LockHeader.of({**MESSAGE, HEADER: values}) == LockHeader()


def test_a_request_carries_what_came_with_its_message_where_a_task_does_not_see_it():
    received = Received(pushed=True, header=WAY, headers=MESSAGE)
    properties = received.attach_to({"reply_to": "caller", "distlock": {"pushed": False}})
    request = Context({**MESSAGE, "properties": pickle.loads(pickle.dumps(properties))})
    copied = Context(**vars(request))

    assert Received.of(copied) == received
    assert copied.properties == {"reply_to": "caller"}
    assert copied.headers is None
