"""
Tokens rise over all grants, whichever nodes give them and whatever their clocks say.

The clocks of servers on one machine are one, so nodes whose clocks are ahead are made by what such
a node would have noted: a last token of a later time.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Status
from tests.losses import Losses
from tests.stores.redlock.records import record, take
from tests.waiting import wait_until

HOUR = 3600 * 10**6  # microseconds

pytestmark = pytest.mark.usefixtures("patience")


def note(node, token, key="k"):
    node.ask("SET", record(key, "fence"), str(token))


def noted(node, key="k"):
    return int(node.ask("GET", record(key, "fence")) or 0)


def now():
    return time.time_ns() // 1000


def test_a_token_is_the_time_of_its_grant(shared_store):
    assert abs(take(shared_store, "a") - now()) < 60 * 10**6


def test_the_nodes_agree_on_the_token(masters, store):
    token = take(store, "a")

    tokens = {node.ask("HGET", record("k", "lock"), "token") for node in masters.servers}
    assert tokens == {str(token)}
    assert {noted(node) for node in masters.servers} == {token}


@pytest.mark.parametrize("ahead", [1, 2, 3, 5])
def test_a_token_is_above_what_nodes_noted_whose_clocks_are_ahead(masters, store, ahead):
    take(store, "a")
    store.release(ReleaseRequest("k", "a"))
    fast = now() + HOUR
    for node in masters.servers[:ahead]:
        note(node, fast)

    token = take(store, "b")

    # What no majority has noted was no grant, so it need not be exceeded.
    if ahead >= 3:
        assert token > fast
    agreed = [node for node in masters.servers if noted(node) == token]
    assert len(agreed) >= 3


def test_a_token_that_one_node_knows_of_the_majority_is_exceeded(masters, store):
    """The nodes that granted it are gone, but for one."""
    first, second, third, fourth, fifth = masters.servers
    fourth.kill()
    fifth.kill()
    for node in (first, second, third):
        note(node, now() + HOUR)
    before = take(store, "a")
    store.release(ReleaseRequest("k", "a"))
    assert before > now()
    fourth.start()
    fifth.start()
    first.kill()
    second.kill()
    wait_until(
        lambda: store.acquire(AcquireRequest("warm", "a", 30.0)).status is Status.GRANTED,
        what="the nodes to answer",
    )

    assert take(store, "b") > before


def test_tokens_rise_whichever_nodes_grant_them(masters, open_redlock):
    """Each grant by another majority, with clocks that are apart by hours."""
    stores = [open_redlock(masters.url) for _ in range(3)]
    choose = random.Random(1)
    for number, node in enumerate(masters.servers):
        note(node, now() + choose.randrange(5) * HOUR + number)
    tokens = []
    for n, (one, other) in enumerate(itertools.combinations(masters.servers, 2)):
        one.pause()
        other.pause()
        for each in range(3):
            store, owner = stores[(n + each) % 3], f"o{n}.{each}"
            # A node that was stopped hears of the last release a moment later.
            reply = wait_until(lambda s=store, o=owner: granted(s, o), what="the key")
            tokens.append(reply.token)
            store.release(ReleaseRequest("k", owner))
        one.resume()
        other.resume()
        for store in stores:
            wait_until(lambda s=store: all_answer(s), what="the nodes to answer")

    assert tokens == sorted(set(tokens))


def granted(store, owner):
    reply = store.acquire(AcquireRequest("k", owner, 30.0))
    return reply if reply.status is Status.GRANTED else None


def all_answer(store):
    store._nodes.ask([], timeout=0.0)
    return not store._nodes.failures()


def test_one_round_is_enough_for_most_grants(shared_store, monkeypatch):
    for n in range(5):
        take(shared_store, f"warm{n}", "warm")
        shared_store.release(ReleaseRequest("warm", f"warm{n}"))
    losses = Losses(monkeypatch)

    for n in range(100):
        take(shared_store, f"o{n}")
        shared_store.release(ReleaseRequest("k", f"o{n}"))

    votes = [call for calls in losses.sent for call in calls if call.script.name == "vote"]
    assert len(votes) < 5 * 110


def test_what_is_sent_has_what_the_scripts_header_names(shared_store, monkeypatch):
    losses = Losses(monkeypatch)
    take(shared_store, "a")

    for calls in losses.sent:
        for call in calls:
            _, _, _, *keys = call.head.split(b"\r\n")[1::2]
            assert [key.rpartition(b":")[2].decode() for key in keys] == list(call.script.keys)
            assert len(call.arguments) == len(call.script.arguments)
