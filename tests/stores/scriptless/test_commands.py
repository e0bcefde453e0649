"""Which commands the store uses, where it has which, and what it says where it has none."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_distlock.errors import ConfigurationError, StoreError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.scriptless import ScriptlessStore
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.redis.urls import wants_scripts
from celery_distlock.stores.values import Completion, Ownership, ParkRequest, RenewOutcome, Status
from tests import servers
from tests.losses import Losses
from tests.stores.scriptless.fake import NOTHING, REDIS_8_4, TAIR, VALKEY_8_1, FakeServer
from tests.topologies import url_of_user
from tests.topologies.node import Node

native = servers.needs("SET with IFEQ")


def live(store, key="k"):
    """Take a key, keep it, hand it on and give it up; return what came of it."""
    first = store.acquire(AcquireRequest(key, "a", 30.0, run="run"))
    assert store.acquire(AcquireRequest(key, "b", 30.0)).holder == "a"
    ((renewed, _),) = store.renew([Ownership(key, "a", 60.0)], 5.0)
    assert renewed is RenewOutcome.RENEWED
    ((held, _),) = store.renew([Ownership(key, "b", 60.0)], 5.0)
    assert held is RenewOutcome.HELD
    assert store.inspect(key).remaining > 31
    assert not store.release(ReleaseRequest(key, "b")).released
    assert store.release(ReleaseRequest(key, "a", run="run", keep_for=("run", 30.0))).released
    assert store.acquire(AcquireRequest(key, "b", 30.0)).holder == "parked:run"
    claimed = store.acquire(AcquireRequest(key, "c", 30.0, run="run"))
    assert claimed.token == first.token
    ended = Completion.YES_AND_MAY_COME_AGAIN
    assert store.release(ReleaseRequest(key, "c", run="run", completion=ended)).released
    assert (
        store.acquire(AcquireRequest(key, "d", 30.0, run="run", redelivered=True)).status
        is Status.DONE
    )
    ((lost, _),) = store.renew([Ownership(key, "c", 60.0)], 5.0)
    assert lost is RenewOutcome.LOST
    assert store.acquire(AcquireRequest(key, "e", 30.0)).token > first.token
    return store.release(ReleaseRequest(key, "e")).released


@pytest.mark.parametrize(
    ("words", "used"),
    [
        (TAIR, {"CAS", "CAD"}),
        (REDIS_8_4, {"SET", "DELEX"}),
        (VALKEY_8_1, {"SET"}),
    ],
    ids=["Tair", "Redis 8.4", "Valkey 8.1"],
)
def test_the_store_speaks_the_words_of_each_kind_of_server(words, used):
    """With a fake server, because none of the real ones is here: see `FakeServer`."""
    with FakeServer(words) as server, closing(ScriptlessStore(server.url, "test")) as store:
        assert store.check() == []
        del server.asked[:]

        assert live(store)

    comparing = {"CAS", "CAD", "DELEX", "DELIFEQ"}
    assert set(server.asked) & comparing == used & comparing
    assert "EVALSHA" not in server.asked


def test_the_commands_are_asked_for_once(monkeypatch, store):
    losses = Losses(monkeypatch)

    live(store)
    live(store, "another")

    probes = [calls for calls in losses.sent if b":probe:" in calls[0].key]
    assert len(probes) == 1


def test_a_server_without_such_commands_is_named_with_what_is_missing():
    """With a fake server that has neither; an old Redis is one in truth."""
    with FakeServer(NOTHING) as server, closing(ScriptlessStore(server.url, "test")) as store:
        for call in (store.check, lambda: store.acquire(AcquireRequest("k", "a", 30.0))):
            with pytest.raises(StoreError, match=r"compare and set .*SET with IFEQ .* CAS"):
                call()


@native
def test_it_works_for_a_user_without_the_right_to_run_scripts(redis_server, prefix):
    url = url_of_user(redis_server, "scriptless", "secret", "~* &* +@all -@scripting")
    with closing(RedisStore(url, prefix)) as scripted, pytest.raises(StoreError):
        scripted.acquire(AcquireRequest("k", "a", 30.0))

    with closing(ScriptlessStore(f"{url}?scripts=off", prefix)) as store:
        assert live(store)
        assert store.check() == []


def test_no_script_is_ever_sent(monkeypatch, store):
    losses = Losses(monkeypatch)

    live(store)

    assert all(call.script is None for calls in losses.sent for call in calls)


def test_a_password_is_in_no_message():
    with closing(ScriptlessStore("redis://u:secret@127.0.0.1:1/0?scripts=off", "p")) as store:
        with pytest.raises(StoreError) as caught:
            store.acquire(AcquireRequest("k", "a", 30.0))
        assert "secret" not in f"{caught.value} {store.identity}"


def test_records_that_scripts_have_made_are_refused(redis_server, store, prefix):
    with closing(RedisStore(redis_server.url, prefix)) as scripted:
        scripted.acquire(AcquireRequest("k", "a", 30.0))

        with pytest.raises(StoreError, match="with scripts"):
            store.acquire(AcquireRequest("k", "b", 30.0))
        store.acquire(AcquireRequest("l", "b", 30.0))
        with pytest.raises(StoreError, match="of another type"):
            scripted.acquire(AcquireRequest("l", "a", 30.0))
        assert scripted.identity != store.identity


def test_a_record_that_is_none_of_ours_is_refused(redis_server, store, prefix):
    with redis_server.client() as client:
        client.set(f"{prefix}:{{k}}:lock", "something")

    with pytest.raises(StoreError, match="is not ours"):
        store.acquire(AcquireRequest("k", "a", 30.0))


def test_nothing_can_be_parked(store):
    with pytest.raises(StoreError, match="no task can be parked without scripts"):
        store.acquire(AcquireRequest("k", "a", 30.0, queue=ParkRequest(b"e"), run="run"))


@native
def test_it_follows_sentinels(shared_sentinels, prefix):
    url = shared_sentinels.url()
    url += ("&" if "?" in url else "?") + "scripts=off"
    with closing(ScriptlessStore(url, prefix)) as store:
        assert live(store)


@native
def test_it_follows_a_cluster(shared_cluster, prefix):
    with closing(ScriptlessStore(f"{shared_cluster.url}?scripts=off", prefix)) as store:
        for n in range(20):
            assert live(store, f"k{n}")


@native
def test_a_full_server_refuses_renewals_and_grants_and_takes_releases(prefix):
    with Node() as server, closing(ScriptlessStore(f"{server.url}?scripts=off", prefix)) as store:
        assert store.acquire(AcquireRequest("k", "a", 30.0)).status is Status.GRANTED
        server.ask("CONFIG", "SET", "maxmemory", "1")

        with pytest.raises(StoreError):
            store.acquire(AcquireRequest("l", "b", 30.0))
        ((outcome, _),) = store.renew([Ownership("k", "a", 30.0)], 5.0)
        assert outcome is RenewOutcome.UNKNOWN
        assert store.release(ReleaseRequest("k", "a")).released


@pytest.mark.parametrize(
    ("query", "wanted"), [("", True), ("?scripts=on", True), ("?scripts=off", False)]
)
def test_a_url_says_whether_scripts_are_wanted(query, wanted):
    assert wants_scripts(f"redis://host/0{query}") is wanted


def test_another_word_for_it_is_refused():
    with pytest.raises(ConfigurationError, match="scripts are 'on' or 'off', not 'none'"):
        wants_scripts("redis://host/0?scripts=none")


def test_a_renewal_finds_the_commands_of_a_server_that_took_the_place_of_another():
    with FakeServer(TAIR) as server, closing(ScriptlessStore(server.url, "test")) as store:
        store.acquire(AcquireRequest("k", "a", 30.0))
        server.words = REDIS_8_4

        assert store.renew([Ownership("k", "a", 60.0)], 5.0)[0][0] is RenewOutcome.UNKNOWN
        assert store.renew([Ownership("k", "a", 60.0)], 5.0)[0][0] is RenewOutcome.RENEWED
