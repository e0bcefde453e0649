"""What several masters report together of all their keys."""

from __future__ import annotations

import pytest

from celery_distlock.errors import QuorumError, StoreError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Status
from tests.servers import grant
from tests.stores.redlock.records import PREFIX, record, take, vote
from tests.waiting import wait_until


def kill(node):
    node.kill()


def hang(node):
    node.pause()


def empty(node):
    node.restart()


breaking = pytest.mark.parametrize("broken", [kill, hang, empty])


def found(store, pattern="*"):
    return sorted(key for keys in store.find_keys(pattern) for key in keys)


@pytest.mark.usefixtures("patience")
@breaking
def test_keys_are_listed_without_two_of_five_nodes(masters, store, broken):
    names = [f"k{number}" for number in range(1200)]
    for name in names:
        take(store, "a", name)
    for node in masters.servers[:2]:
        broken(node)

    assert found(store) == sorted(names)
    assert found(store, "k11?") == [f"k11{digit}" for digit in range(10)]
    assert [state.owner for state in store.inspect_many(["k0", "k1", "x"])] == ["a", "a", ""]


def test_a_key_that_a_minority_has_votes_for_is_not_listed(masters, store):
    take(store, "a", "held")
    for node in masters.servers[:2]:
        vote(node, "k", "b")

    assert found(store) == ["held"]
    assert [state.owner for state in store.inspect_many(["held", "k"])] == ["a", ""]


def test_nodes_that_do_not_answer_count_as_votes_as_in_a_look(masters, store):
    for node in masters.servers[:2]:
        vote(node, "k", "b")
    masters.servers[4].kill()

    assert found(store) == ["k"]
    assert store.inspect_many(["k"])[0] == store.inspect("k")._replace(
        remaining=pytest.approx(30.0, abs=30.0)
    )
    assert store.inspect("k").owner == "b"


@pytest.mark.parametrize("broken", [kill, hang])
def test_without_a_majority_nothing_is_reported(masters, store, broken):
    take(store, "a")
    for node in masters.servers[:3]:
        broken(node)

    for ask in (
        lambda: list(store.find_keys()),
        lambda: store.inspect_many(["k"]),
        lambda: store.count({"acquired||t": 1.0}),
        store.counts,
    ):
        with pytest.raises(QuorumError, match="2 of 5 nodes"):
            ask()


@pytest.mark.usefixtures("patience")
def test_nodes_that_go_while_they_are_asked_are_done_without(masters, store, monkeypatch):
    names = [f"k{number}" for number in range(2000)]
    for name in names:
        take(store, "a", name)
    ask_again, gone = store._ask_again, list(masters.servers[:2])

    def kill_and_ask(*words):
        while gone:
            gone.pop().kill()
        ask_again(*words)

    monkeypatch.setattr(store, "_ask_again", kill_and_ask)

    assert found(store) == sorted(names)
    assert not gone


def test_foreign_records_are_reported_as_that(masters, store):
    take(store, "a", "fine")
    for node in masters.servers:
        node.ask("SET", record("k", "lock"), "?")

    with pytest.raises(StoreError, match=r"'k'.*another type"):
        store.inspect("k")


@pytest.mark.usefixtures("patience")
@breaking
def test_counts_are_there_without_two_of_five_nodes(masters, store, broken):
    store.count({"acquired||t": 1.0})
    for node in masters.servers[:2]:
        broken(node)
    store.count({"acquired||t": 2.0, "woken||t": 1.0})

    assert store.counts() == {"acquired||t": 3.0, "woken||t": 1.0}


def test_a_node_that_was_away_for_a_count_does_not_make_it_less(masters, store):
    away = masters.servers[0]
    store.count({"acquired||t": 1.0})
    away.kill()
    store.count({"acquired||t": 2.0})
    away.restart()
    store.count({"acquired||t": 4.0})
    wait_until(lambda: store.counts() and not store._nodes.failures(), what="the node's return")

    assert store.counts() == {"acquired||t": 7.0}


def test_counters_go_a_month_after_the_last_count(masters, store):
    store.count({"acquired||t": 1.0})

    for node in masters.servers:
        wait_until(lambda node=node: node.ask("EXISTS", f"{PREFIX}:counts"), what="the count")
        assert 0 < node.ask("TTL", f"{PREFIX}:counts") <= 30 * 86400


def test_each_node_reports_itself(masters, store):
    masters.servers[3].kill()

    facts = list(store.describe())

    messages = [fact.message for fact in facts if fact.subject == "server"]
    for node, found_of_it in zip(masters.servers, messages, strict=True):
        assert found_of_it.endswith(f"({node.address})")
        assert ("master" in found_of_it) is node.answers
    clocks = [fact.figures["offset"] for fact in facts if fact.subject == "clock"]
    assert len(clocks) == 4
    assert max(map(abs, clocks)) < 60.0


def test_a_key_whose_records_were_damaged_hides_no_other(masters, store, caplog):
    take(store, "a", "good")
    for node in masters.servers[:3]:
        node.ask("RPUSH", record("bad", "lock"), "x")

    assert [state.owner for state in store.inspect_many(["bad", "good"])] == ["", "a"]
    assert "'bad' are of another type" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [("x", grant(b"\xff"), "token", "5"), ("x", grant("o"), "token", "abc"), ("x", grant("o"))],
    ids=["owner", "token", "no token"],
)
def test_votes_that_cannot_be_read_spoil_their_own_key_alone(masters, store, fields):
    for node in masters.servers[:3]:
        node.ask("HSET", record("bad", "lock"), *fields)
    take(store, "a", "good")

    state, good = store.inspect_many(["bad", "good"])

    assert good.owner == "a"
    assert store.acquire(AcquireRequest("bad", "b", 30.0)).status is Status.BUSY
    assert store.release(ReleaseRequest("bad", state.owner)).released
    take(store, "b", "bad")


@pytest.mark.parametrize("last", ["abc", "inf", "9" * 30])
def test_a_last_token_that_is_none_keeps_no_request_from_the_key(masters, store, last):
    for node in masters.servers:
        node.ask("SET", record("k", "fence"), last)

    assert 10**15 < take(store, "a") < 2**53
