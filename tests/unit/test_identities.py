"""The names of owners and executions are read as they were written."""

from __future__ import annotations

import os
import socket

import pytest

from celery_distlock.stores.identities import ExecutionId, Owner, is_own, new_owner


@pytest.mark.parametrize("task_id", ["an-id", "with:colons:1:2:3", ""])
def test_an_execution_id_is_read_as_it_was_written(task_id):
    execution = ExecutionId(task_id, 1, 2, 3)

    assert ExecutionId.parse(str(execution)) == execution


@pytest.mark.parametrize(
    "text", ["", "run", "a:b:c:d", "a:1:2:3x", "a:1:2:²", f"a:1:2:{'9' * 5000}"]
)
def test_of_another_text_what_replaces_the_id_is_read(text):
    assert ExecutionId.parse(text) == (text.rsplit(":", 3)[0], 0, 0, 0)


@pytest.mark.parametrize(
    ("run", "own"),
    [
        ("task:0:0:1", True),
        ("task:0:0:0", True),
        ("task:3:0:0", True),
        ("task:1:0:1", False),
        ("task:0:0:2", False),
        ("other:0:0:0", False),
    ],
)
def test_what_a_replaced_task_has_is_for_the_one_in_its_place(run, own):
    assert is_own(run, "task:0:0:1") is own


@pytest.mark.parametrize("label", ["shop.reserve[42]", "MainThread", "a|b [c]", "", "{%7C}\n"])
def test_an_owner_is_read_as_it_was_written(label):
    text = new_owner(label)
    owner = Owner.parse(text)

    assert owner is not None
    assert (owner.host, owner.pid, owner.label) == (socket.gethostname(), os.getpid(), label)
    assert str(owner) == text


@pytest.mark.parametrize(
    ("label", "task", "task_id"),
    [("shop.reserve[42]", "shop.reserve", "42"), ("Thread-1", "Thread-1", ""), ("a]", "a]", "")],
)
def test_the_label_of_a_task_has_its_name_and_its_id(label, task, task_id):
    owner = Owner.parse(new_owner(label))

    assert owner is not None
    assert (owner.task, owner.task_id) == (task, task_id)


@pytest.mark.parametrize(
    "text", ["", "somebody", "parked:run:0:0:0", "a|b|c|d", "a|1|c", "a|1|c|d|e"]
)
def test_an_owner_of_another_form_is_none(text):
    assert Owner.parse(text) is None
