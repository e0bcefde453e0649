from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from celery_distlock import stores
from celery_distlock.errors import ConfigurationError
from celery_distlock.stores import Ability, Store, open_store
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.urls import redact
from tests import servers


@pytest.fixture
def new_prefix():
    """Of stores that nothing is sent to."""
    return servers.new_prefix()


@pytest.mark.parametrize(
    ("url", "kind", "identity"),
    [
        ("redis://localhost", RedisStore, "redis://localhost:6379/0"),
        ("redis://", RedisStore, "redis://localhost:6379/0"),
        ("redis://db1:7000/3", RedisStore, "redis://db1:7000/3"),
        ("REDIS://db1:7000/3", RedisStore, "redis://db1:7000/3"),
        (" redis://db1:7000/3\n", RedisStore, "redis://db1:7000/3"),
        ("redis://db1:7000?db=3", RedisStore, "redis://db1:7000/3"),
        ("redis://user:secret@db1", RedisStore, "redis://db1:6379/0"),
        ("unix:///run/redis.sock?db=2", RedisStore, "unix:///run/redis.sock?db=2"),
        ("redis+socket:///run/redis.sock", RedisStore, "unix:///run/redis.sock?db=0"),
        ("redis+socket:///run/r.sock?virtual_host=2", RedisStore, "unix:///run/r.sock?db=2"),
        ("memory://", MemoryStore, "memory://"),
        ("memory://here", MemoryStore, "memory://here"),
    ],
)
def test_the_scheme_chooses_the_store(new_prefix, url, kind, identity):
    store = open_store(url, new_prefix)

    assert type(store) is kind
    assert isinstance(store, Store)
    assert store.identity == f"{identity}#{new_prefix}"


def test_rediss_is_redis_over_tls(new_prefix):
    store = open_store("rediss://db1?ssl_cert_reqs=none", new_prefix)

    assert isinstance(store, RedisStore)
    assert issubclass(store._servers._settings[0], redis.SSLConnection)
    assert store.address == "rediss://db1:6379/0"


@pytest.mark.parametrize(
    "url",
    ["rediss+cluster://a:7000,b:7000/0", "redlocks://a:1,b:2,c:3/0", "sentinels://a:1,b:2/0"],
)
def test_an_address_says_that_it_is_over_tls(new_prefix, url):
    query = "?service=m" if url.startswith("sentinels") else ""

    assert open_store(f"{url}{query}", new_prefix).address == f"{url}{query}"


def test_the_prefix_is_distlock_by_default():
    assert open_store("memory://test-open-default").identity.endswith("#distlock")


def test_one_url_and_prefix_is_one_store(new_prefix):
    store = open_store("memory://", new_prefix)

    assert open_store("memory://", new_prefix) is store
    assert open_store("memory://other", new_prefix) is not store
    assert open_store("memory://", f"{new_prefix}-other") is not store


def test_stores_of_one_place_have_one_identity_with_any_user(new_prefix):
    one = open_store("redis://:secret@localhost:6379/0", new_prefix)
    other = open_store("redis://localhost", new_prefix)

    assert one.identity == other.identity


def test_opening_a_store_sends_nothing(new_prefix):
    open_store("redis://no-such-host.invalid:1", new_prefix)


def test_what_the_stores_can_do(new_prefix):
    assert open_store("redis://localhost", new_prefix).abilities == set(Ability)
    assert Ability.SHARE not in open_store("memory://", new_prefix).abilities


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("reddis://localhost", "did you mean 'redis'?"),
        ("memry://", "did you mean 'memory'?"),
        ("amqp://localhost", "there are memory, redis, redis+cluster"),
        ("localhost:6379", "there are"),
        ("", "there are"),
    ],
)
def test_an_unknown_scheme_gets_a_suggestion(url, hint):
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)

    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:port/0",
        "redis://localhost:99999/0",
        "redis://localhost/0?socket_timeout=soon",
        "redis://localhost?db=first",
        "redis://[::1",
        "redis://localhost/0?no_such_option=1",
        "rediss://localhost/0?ssl_cert_reqs=sometimes",
    ],
)
def test_a_malformed_url_is_refused_when_it_is_opened(new_prefix, url):
    with pytest.raises(ConfigurationError):
        open_store(url, new_prefix)


@pytest.mark.parametrize(
    "url",
    [
        "reddis://:hunter2@localhost",
        "redis://:hunter2@localhost:port",
        "redis://user:hunter2@localhost/0?db=first",
        "redis://:hunter2/more@localhost:6379/0",
        "redis://:hunter2#more@localhost:6379/0",
        "redis://:hunter2?more@localhost:6379/0",
        "redis://localhost:port/0?password=hunter2",
        "redis://:1234?hunter2@localhost",
        "redis://:1234/hunter2@localhost",
        "redis://localhost/0?pasword=hunter2",
        "redis://localhost/0?hunter2",
        "redis://:hunter2&a=b@localhost:port",
        "redis://:1@hunter2&a=b@localhost:port",
        "redis://user:hunter2?a=b@localhost",
        "user:hunter2@localhost:6379/0",
        "memory://?pasword=hunter2",
        "zookeeper://localhost/?pasword=hunter2",
        "zookeeper://user:1234#hunter2@localhost",
    ],
)
def test_a_password_in_a_refused_url_is_not_shown(new_prefix, url):
    with pytest.raises(ConfigurationError) as caught:
        open_store(url, new_prefix)

    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@localhost", "redis://:***@localhost"),
        ("redis://user:secret@localhost/1", "redis://user:***@localhost/1"),
        ("redis://user:sec:ret@localhost", "redis://user:***@localhost"),
        ("redis://user:s@cret@localhost", "redis://user:***@localhost"),
        ("redis+socket://:secret@/run/r.sock", "redis+socket://:***@/run/r.sock"),
        ("memory://", "memory://"),
        ("redis://h/0?password=se@cret&db=1", "redis://h/0?password=***&db=1"),
        ("redis://h:1/0?pasword=secret&db=1", "redis://h:1/0?pasword=***&db=1"),
        ("redis://h/0?secret&db=1", "redis://h/0?***&db=1"),
        ("sentinel://h/0?service=m&replicas=1", "sentinel://h/0?service=m&replicas=1"),
        ("user:secret@h:1/0", "user:***@h:1/0"),
        ("localhost:6379/0", "localhost:6379/0"),
    ],
)
def test_redact_keeps_all_but_the_password(url, shown):
    assert redact(url) == shown


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("redis://h/0?replica=1", "replicas"),
        ("redis+cluster://h/0?script=off", "scripts"),
        ("sentinel://h/0?service=m&sentinel_pasword=x", "sentinel_password"),
        ("sentinel://h/0?service=m&servise=m", "service"),
        ("redlock://h,i,j/0?pasword=x", "password"),
    ],
)
def test_a_misspelt_option_gets_a_suggestion(new_prefix, url, meant):
    with pytest.raises(ConfigurationError, match=f"did you mean '{meant}'"):
        open_store(url, new_prefix)


@pytest.mark.parametrize("flag", ["CERT_NONE", "none", "CERT_REQUIRED", "required"])
def test_the_certificate_flags_of_celerys_urls_are_understood(new_prefix, flag):
    # Celery documents them in capitals; the broker's URL is the default for ours.
    store = open_store(f"rediss://localhost:1/0?ssl_cert_reqs={flag}", new_prefix)

    connection_class, settings = store._servers._settings
    connection_class(**settings)


def test_a_sockets_password_is_kept(new_prefix):
    store = open_store("redis+socket://user:secret@/run/r.sock?virtual_host=1", new_prefix)

    assert store._servers._settings[1]["password"] == "secret"
    assert store._servers._settings[1]["username"] == "user"


@pytest.mark.usefixtures("lupa")
def test_a_signal_s_handler_may_open_the_store_that_its_thread_is_opening(monkeypatch):
    opened: list[Any] = []
    new_store = stores._new_store

    def interrupted(*how: Any) -> Any:
        monkeypatch.setattr(stores, "_new_store", new_store)
        opened.append(stores.open_store("memory://handler"))
        return new_store(*how)

    monkeypatch.setattr(stores, "_new_store", interrupted)
    thread = threading.Thread(
        target=lambda: opened.append(stores.open_store("memory://handler")), daemon=True
    )
    thread.start()
    thread.join(30)

    assert not thread.is_alive()
    assert len(set(map(id, opened))) == 1
    assert len(opened) == 2
