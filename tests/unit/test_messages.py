"""What is sealed of a task's request: its message, and nothing that was put beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery.app.task import Context

from celery_distlock.runtime.messages import LockHeader, seal
from celery_distlock.runtime.received import HEADER, Received


def request_of(facts: dict[str, Any], **received: Any) -> Context:
    """A request such as Celery makes of a message with headers of these *facts*."""
    properties = {HEADER: Received(**received).to_properties()}
    others = {"properties": properties, "hostname": "one@here", "delivery_info": {}}
    return Context({**facts, **others}, args=[1], kwargs={}, called_directly=False)


def sealed(request: Context) -> dict[str, Any]:
    headers: dict[str, Any] = json.loads(seal(request, LockHeader()))["headers"]
    del headers[HEADER]
    return headers


@pytest.mark.parametrize("put", [object(), "text"])
def test_what_is_put_into_a_request_does_not_become_a_header(put):
    headers = {"id": "1", "task": "work", "_trace": "of-7"}
    request = request_of(headers, headers=tuple(headers))
    request.span = put

    assert sealed(request) == headers


def test_a_header_that_was_made_what_cannot_be_sent_is_left_out():
    request = request_of({"id": "1", "task": "work", "trace": "of-7"}, headers=("id", "trace"))
    request.trace = object()

    assert sealed(request) == {"id": "1"}


def test_of_a_request_whose_headers_are_not_known_all_is_kept_that_can_be_sent():
    request = request_of({"id": "1", "task": "work", "trace": "of-7"})
    request.span = object()

    assert sealed(request) == {"id": "1", "task": "work", "trace": "of-7"}


def test_the_body_is_the_one_that_came_whatever_becomes_of_the_arguments():
    request = request_of({"id": "1", "task": "work"}, body="[[1], {}, {}]")
    request.args.clear()

    envelope = json.loads(seal(request, LockHeader()))

    assert envelope["text"]
    assert envelope["body"] == "W1sxXSwge30sIHt9XQ=="
