from __future__ import annotations

import socket
from contextlib import closing

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests import processes, servers
from tests.topologies import (
    UNIX_SOCKET,
    Cluster,
    Masters,
    Replicated,
    Sentinels,
    TlsFront,
    unix_socket,
    url_of_user,
)
from tests.topologies.cluster import slot_of

faults = pytest.mark.faults


def ping(url: str) -> bool:
    with closing(redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0))) as client:
        return client.ping()


def end(server, how: str) -> None:
    getattr(server, how)()


def refusal(server, *command) -> str:
    """Why *server* refuses *command*: in the error's type or, of older drivers, in its text."""
    with pytest.raises(redis.ResponseError) as caught:
        server.ask(*command)
    return f"{type(caught.value).__name__} {caught.value}".upper()


def replicate(server, value: str, *, replicas: int, timeout: float = 30.0) -> int:
    """Set ``key``, and return how many replicas have it after *timeout*, or earlier if enough."""
    with closing(server.client()) as client:
        client.set("key", value)
        return client.wait(replicas, int(timeout * 1000))  # for what this connection wrote


# Replication


def test_a_replica_has_what_its_master_got(private_topology):
    topology = private_topology(Replicated(replicas=2, password="secret"))

    assert replicate(topology.master, "value", replicas=2) == 2

    assert [replica.ask("GET", "key") for replica in topology.replicas] == ["value", "value"]
    assert ping(topology.url)


@faults
def test_a_replica_that_is_cut_off_misses_what_comes_until_it_is_restored(private_topology):
    topology = private_topology(Replicated())
    [replica] = topology.replicas
    assert replicate(topology.master, "old", replicas=1) == 1

    topology.cut(replica)

    assert replicate(topology.master, "new", replicas=1, timeout=0.1) == 0
    assert replica.ask("GET", "key") == "old"
    topology.restore(replica)
    assert replica.ask("GET", "key") == "new"


@faults
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_promoted_replica_is_followed_also_by_the_old_master_when_it_is_back(
    private_topology, how
):
    topology = private_topology(Replicated(replicas=2))
    old, [promoted, other] = topology.master, topology.replicas
    end(old, how)

    topology.promote(promoted)
    topology.restore(old)

    assert topology.master is promoted
    assert topology.url == promoted.url
    assert topology.replicas == [old, other]
    assert replicate(promoted, "value", replicas=2) == 2


# Sentinels


@faults
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_sentinels_replace_a_master_that_is_gone_and_take_it_back_as_a_replica(
    private_topology, how
):
    topology = private_topology(Sentinels())
    old = topology.master
    end(old, how)

    new = topology.wait_for_new_master(old)

    assert topology.master is new is not old
    topology.restore(old)
    assert topology.master is new
    assert old.ask("ROLE")[:3] == ["slave", "127.0.0.1", new.port]


@faults
def test_sentinels_fail_over_on_request_with_passwords_too(private_topology):
    topology = private_topology(Sentinels(password="secret", sentinel_password="quiet"))
    old = topology.master

    new = topology.fail_over()

    assert topology.master is new is not old
    assert old.ask("ROLE")[:3] == ["slave", "127.0.0.1", new.port]
    for server, password in [(new, "secret"), (topology.sentinels[0], "quiet")]:
        assert ping(f"redis://:{password}@{server.address}")
        with pytest.raises(redis.AuthenticationError):
            ping(f"redis://{server.address}")


@faults
def test_a_sentinel_that_was_killed_still_knows_what_it_knew(private_topology):
    topology = private_topology(Sentinels(replicas=1))
    topology.fail_over()
    sentinel = topology.sentinels[0]
    identity = sentinel.ask("SENTINEL", "MYID")
    sentinel.kill()

    sentinel.start()

    assert sentinel.ask("SENTINEL", "MYID") == identity
    address = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", topology.name)
    assert ":".join(address) == topology.master.address


def test_the_driver_finds_the_master_by_way_of_the_sentinels(shared_sentinels):
    hosts = [("127.0.0.1", sentinel.port) for sentinel in shared_sentinels.sentinels]
    finder = redis.Sentinel(hosts)

    assert finder.discover_master("locks") == ("127.0.0.1", shared_sentinels.master.port)

    for sentinel in finder.sentinels:
        sentinel.close()
    assert shared_sentinels.url(2) == (
        f"sentinel://{','.join(f'{host}:{port}' for host, port in hosts)}/2?service=locks"
    )
    assert shared_sentinels.celery_url == ";".join(
        f"sentinel://{host}:{port}" for host, port in hosts
    )


# Clusters


@pytest.fixture(scope="module")
def moving_cluster():
    """A cluster whose slots these tests move, and nothing else."""
    with Cluster(replicas=0, password="secret") as cluster:
        yield cluster


def another_master(cluster, key):
    return next(master for master in cluster.masters if master is not cluster.node_of(key))


def test_the_driver_reaches_every_key_of_a_cluster(shared_cluster):
    names = [f"test-topologies-{i}" for i in range(20)]
    with closing(redis.RedisCluster("127.0.0.1", shared_cluster.servers[0].port)) as client:
        for name in names:
            client.set(name, name, ex=60)

        assert [client.get(name) for name in names] == [name.encode() for name in names]

    for name in names:
        assert shared_cluster.node_of(name).ask("GET", name) == name
    assert len({shared_cluster.node_of(name) for name in names}) == 3


@faults
@pytest.mark.parametrize("how", ["kill", "pause", "request"])
def test_a_replica_takes_over_from_its_master(private_topology, how):
    cluster = private_topology(Cluster())
    old = cluster.node_of("key")
    [replica] = cluster.replicas_of(old)
    assert replicate(old, "value", replicas=1) == 1

    new = cluster.fail_over(old, how)

    assert new is replica is cluster.node_of("key")
    assert new.ask("GET", "key") == "value"
    cluster.restore(old)
    assert cluster.replicas_of(new) == [old]
    assert "MOVED" in refusal(old, "GET", "key")


def test_while_a_slot_moves_its_keys_are_asked_for_at_the_target(moving_cluster):
    source, target = moving_cluster.node_of("{moved}"), another_master(moving_cluster, "{moved}")
    source.ask("MSET", "{moved}1", "one", "{moved}2", "two")

    with moving_cluster.moving(slot_of("{moved}"), target) as move:
        move.migrate("{moved}1")

        assert source.ask("GET", "{moved}2") == "two"
        assert "ASK" in refusal(source, "GET", "{moved}1")
        words = refusal(source, "MGET", "{moved}1", "{moved}2")
        assert "TRYAGAIN" in words or "ASK" in words  # Redis 6.2
        assert "MOVED" in refusal(target, "GET", "{moved}1")

    assert "MOVED" in refusal(source, "GET", "{moved}1")
    assert moving_cluster.node_of("{moved}") is target
    assert target.ask("MGET", "{moved}1", "{moved}2") == ["one", "two"]


@pytest.mark.parametrize(
    "way",
    ["reshard", pytest.param("reshard_at_once", marks=servers.needs("CLUSTER MIGRATESLOTS"))],
)
def test_many_slots_move_with_their_keys(moving_cluster, way):
    source, target = moving_cluster.node_of(way), another_master(moving_cluster, way)
    source.ask("SET", way, "value")
    first = slot_of(way)

    getattr(moving_cluster, way)(range(first, first + 5), target)

    assert moving_cluster.node_of(way) is target
    assert moving_cluster.node_of_slot(first + 4) is target
    assert target.ask("GET", way) == "value"


def test_a_cluster_whose_slots_are_not_dealt_out_refuses_keys(private_topology):
    cluster = private_topology(Cluster(masters=1, replicas=0, sharded=False))

    assert "CLUSTERDOWN" in refusal(cluster.servers[0], "GET", "key")


# Several masters, and all of them


def test_masters_know_nothing_of_one_another(shared_masters):
    first, *others = shared_masters.servers
    first.ask("SET", "test-topologies", "value", "EX", 60)

    assert [server.ask("GET", "test-topologies") for server in others] == [None] * 4
    assert shared_masters.url.count(",") == 4


@pytest.mark.parametrize("topology", [Masters(2), Replicated(), Sentinels(sentinels=1)])
def test_nothing_is_left_of_a_topology_at_its_end(topology):
    with topology:
        servers = [*topology.servers, *getattr(topology, "sentinels", [])]
        pids, folders = ([getattr(each, it) for each in servers] for it in ("pid", "folder"))
        servers[-1].pause()

    assert not any(processes.alive(pid) for pid in pids)
    assert not any(folder.exists() for folder in folders)


# TLS, users, Unix sockets


def test_tls_refuses_a_client_that_does_not_know_the_authority(shared_tls):
    assert ping(shared_tls.url)
    with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        ping(shared_tls.bare_url)


def test_mutual_tls_refuses_a_client_without_a_certificate(redis_server, private_topology):
    front = private_topology(TlsFront(redis_server, mutual=True))

    assert ping(front.url)
    with pytest.raises(redis.ConnectionError):
        ping(f"{front.bare_url}?ssl_ca_certs={front.ca_certs}")


def test_tls_passes_on_much_to_many(shared_tls, prefix, redis_url):
    value = b"x" * 5_000_000
    with closing(redis.Redis.from_url(shared_tls.url)) as client:
        client.set(f"{prefix}:key", value, ex=60)
        connections = [client.connection_pool.make_connection() for _ in range(20)]
        for connection in connections:
            connection.send_command("GET", f"{prefix}:key")

        assert all(connection.read_response() == value for connection in connections)

        for connection in connections:
            connection.disconnect()
        client.delete(f"{prefix}:key")


@faults
def test_tls_follows_a_server_that_hangs_up(private_server, private_topology):
    server = private_server()
    front = private_topology(TlsFront(server))
    with closing(redis.Redis.from_url(front.url)) as client:
        for hang_up in (front.cut, server.kill):
            connection = client.connection_pool.make_connection()
            connection.send_command("PING")
            assert connection.read_response() == b"PONG"

            hang_up()

            with pytest.raises(redis.ConnectionError):
                connection.read_response()
        server.start()
        assert client.ping()


def test_tls_ends_with_a_handshake_under_way(redis_server):
    with TlsFront(redis_server) as front:
        port = int(front.bare_url.rpartition(":")[2].partition("/")[0])
        client = socket.create_connection(("127.0.0.1", port))
        assert ping(front.url)

    with client:
        assert client.recv(1) == b""


def test_a_user_may_only_do_what_the_rules_say(private_server):
    server = private_server()
    url = url_of_user(server, "scriptless", "p@ss/word", "~* &* +@all -@scripting")

    with closing(redis.Redis.from_url(url)) as client:
        assert client.set("key", "value")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.eval("return 1", 0)


def test_a_server_listens_on_a_unix_socket_too(private_server):
    assert ping(unix_socket(private_server(options=UNIX_SOCKET)))
