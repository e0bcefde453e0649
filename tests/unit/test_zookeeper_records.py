"""What other software has written among a ZooKeeper's nodes is not taken for ours."""

from __future__ import annotations

import pytest

pytest.importorskip("kazoo")

from celery_distlock.stores.zookeeper.completions import held_back_of
from celery_distlock.stores.zookeeper.node_data import Facts, facts_of
from celery_distlock.stores.zookeeper.queues import escaped, unescaped

OURS = Facts("owner", "run", 30.0, 7)

GARBAGE = [b"", b"\xff", b"[" * 100_000, b"null", b"5", b"[1]", b'{"x": 1}']


@pytest.mark.parametrize(
    "data",
    [
        *GARBAGE,
        OURS._replace(owner=5).data(),
        OURS._replace(run=None).data(),
        OURS._replace(seconds="x").data(),
        OURS._replace(seconds=float("inf")).data(),
        OURS._replace(token="7").data(),
    ],
)
def test_a_nodes_data_that_are_none_of_ours_say_nothing(data):
    assert facts_of(data) == Facts()


def test_what_a_node_of_ours_says_is_read():
    assert facts_of(OURS.data()) == OURS


@pytest.mark.parametrize("data", [*GARBAGE, b'{"held_back": "x"}', b'{"held_back": Infinity}'])
def test_a_mark_that_is_none_of_ours_is_none(data):
    assert held_back_of(data) is None


def test_a_mark_of_ours_is_read():
    assert held_back_of(b'{"held_back": 0.0}') == 0.0


def test_a_folder_whose_name_is_none_of_ours_can_be_listed():
    assert unescaped("%FF") == "\udcff"
    assert unescaped(escaped("k ä/:{}")) == "k ä/:{}"
