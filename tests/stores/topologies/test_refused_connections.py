"""Servers that do not take us as a client: each is an outage, and its words say what to set."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from celery_distlock.errors import QuorumError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis import request_runner
from celery_distlock.stores.redis.connections import TurnedAwayError
from celery_distlock.stores.redis.server_errors import said
from celery_distlock.stores.values import ParkRequest
from tests import servers
from tests.topologies import TlsFront

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"
HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
DENIED = b"-DENIED Redis is running in protected mode because protected mode is enabled\r\n"


@pytest.fixture(params=["", "?scripts=off"], ids=["scripts", "plain"])
def ask(opened, request):
    """Ask the server at a URL for a key, twice: the second time over what the first one left."""
    if request.param:
        servers.skip_without("SET with IFEQ")

    def try_it(url: str, match: str) -> None:
        store = opened(url + request.param)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=match) as caught:
                store.acquire(AcquireRequest("k", "a", 5.0))
            assert "hunter2" not in str(caught.value)

    return try_it


@pytest.fixture
def server(private_server):
    return private_server()


@contextmanager
def speaker(answer: bytes, *, at_once: bool = False, last: bool = True) -> Iterator[str]:
    """What answers whatever it is asked with *answer*; hangs up after that if it is the *last*."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            kept = []
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    break
                if not at_once:
                    connection.recv(65536)
                connection.sendall(answer)
                kept.append(connection)
                if last:
                    kept.pop().close()
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def as_user(server, *rights: str, database: int = 0) -> str:
    """The URL for a user that has nothing but these *rights*."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "clerk", "reset", "on", ">hunter2", *rights)
    return f"redis://clerk:hunter2@127.0.0.1:{server.port}/{database}"


def test_a_database_that_is_not_there(ask, server):
    ask(server.url.removesuffix("0") + "99", "no database of that number")


@pytest.mark.parametrize("limit", ["proto-max-bulk-len", "client-query-buffer-limit"])
def test_a_message_that_is_larger_than_a_servers_limit_names_it(opened, private_server, limit):
    store = opened(private_server(options={limit: "1mb"}).url)
    store.acquire(AcquireRequest("k", "a", 60.0))
    queue = ParkRequest(b"." * 1_500_000)

    with pytest.raises(StoreUnavailableError, match=limit):
        store.acquire(AcquireRequest("k", "", 60.0, queue=queue, run="run"))
    assert store.release(ReleaseRequest("k", "a")).released


def test_a_database_that_is_not_there_of_most_servers_of_several(opened, server):
    hosts = [f"127.0.0.1:{server.port}"]
    store = opened(f"redlock://{','.join(hosts * 1)},localhost:{server.port},[::1]:1/99")

    with pytest.raises(QuorumError, match="no database of that number"):
        store.acquire(AcquireRequest("k", "a", 5.0))


def test_a_password_that_is_missing(ask, server):
    with server.client() as client:
        client.config_set("requirepass", "hunter2")

    ask(server.url, "a password is missing in the URL")


def test_a_password_that_is_wrong(ask, server):
    with server.client() as client:
        client.config_set("requirepass", "secret")

    ask(server.url.replace("//", "//:hunter2@"), "user and password in the URL are not")


def test_a_password_too_many(ask, server):
    ask(server.url.replace("//", "//:hunter2@"), "the server has none|user and password")


def test_a_user_that_is_switched_off(ask, server):
    ask(as_user(server, "+@all", "~*", "off"), "user and password in the URL are not")


def test_a_user_that_may_not_choose_the_database(ask, server):
    ask(as_user(server, "+@all", "~*", "-select", database=1), r"this user lacks \+select")


def test_a_user_without_any_right(ask, server):
    ask(as_user(server), r"this user lacks \+(evalsha|set)")


def test_too_many_clients(ask, server):
    with server.client() as client:
        client.config_set("maxclients", 1)
        ask(server.url, "max number of clients.*'maxclients'")


def test_a_cluster_has_but_one_database():
    refusal = TurnedAwayError("SELECT is not allowed in cluster mode")

    assert "redis+cluster://" in said(refusal, "distlock")


def test_a_replica_that_has_lost_its_master(ask, private_server):
    master = private_server()
    replica = private_server(
        options={
            "replicaof": f"127.0.0.1 {master.port}",
            "replica-serve-stale-data": "no",
        }
    )
    master.stop()

    ask(replica.url, "Link with MASTER is down|read only replica")


def test_a_server_that_starts(ask):
    with speaker(LOADING, last=False) as url:
        ask(url, "loading the dataset")


@pytest.mark.parametrize("at_once", [False, True])
def test_a_server_in_protected_mode(ask, at_once):
    with speaker(DENIED, at_once=at_once) as url:
        ask(url, "protected mode")


def test_a_web_server(ask):
    with speaker(HTTP) as url:
        ask(url, r"not a Redis server \(.*(HTTP/1.1 400|got .H. as reply)")  # hiredis: one byte


def test_a_server_that_speaks_first(ask):
    with speaker(b"SSH-2.0-OpenSSH_9.2\r\n", at_once=True, last=False) as url:
        ask(url, r"not a Redis server")


def test_a_server_that_wants_tls(ask):
    with speaker(TLS_ALERT) as url:
        ask(url, "rediss://")


def test_a_server_without_tls(ask, monkeypatch):
    monkeypatch.setattr(request_runner, "TIMEOUT", 0.25)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as it is to that greeting
        ask(f"rediss://127.0.0.1:{silent.getsockname()[1]}/0", r"may have no TLS: .* redis://")


def test_a_file_for_tls_that_is_not_there(ask, server, tmp_path):
    url = server.url.replace("redis://", "rediss://")
    ask(f"{url}?ssl_ca_certs={tmp_path}/ca.pem", "No such file .*a file for TLS")


def test_one_that_wants_a_certificate_of_ours(opened, redis_server, private_topology):
    front = private_topology(TlsFront(redis_server, mutual=True))
    store = opened(f"{front.bare_url}?ssl_ca_certs={front.ca_certs}")

    with pytest.raises(StoreUnavailableError, match="ssl_certfile") as caught:
        store.acquire(AcquireRequest("k", "a", 5.0))
    assert "rediss://" not in str(caught.value).removeprefix(store.address)
