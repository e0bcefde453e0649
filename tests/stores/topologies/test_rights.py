"""The users of docs/reference/places.md: they may do all that locks need, and nothing else."""

from __future__ import annotations

import inspect
import itertools
import re
import shlex
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import redis

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest, queue_store
from celery_distlock.stores.base import Store
from celery_distlock.stores.queue_parts import Sent, Settled
from celery_distlock.stores.queue_store import QueueStore, ready
from celery_distlock.stores.redis.permissions import IN_A_CLUSTER, REHEARSAL
from celery_distlock.stores.redis.server_errors import said
from celery_distlock.stores.requests import SendRequest
from celery_distlock.stores.values import (
    ALONE,
    Action,
    Completion,
    Ownership,
    ParkRequest,
    PeerChannel,
    RenewOutcome,
    Route,
    Status,
    Want,
    WokenTask,
)
from tests.stores.topologies import drill
from tests.topologies.cluster import slot_of
from tests.waiting import wait_until
from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_distlock.testing import EmbeddedServer
    from tests.topologies import Cluster

PAGE = (ROOT / "docs/reference/places.md").read_text()
SHORT, EXACT, OF_A_CLUSTER, OF_SENTINELS = re.findall(
    r"^ACL SETUSER .+(?:\n    .+)*", PAGE, re.MULTILINE
)
LUA = ROOT / "celery_distlock/stores/redis/scripts"
METHODS = {
    name
    for name, _ in inspect.getmembers(Store, inspect.isfunction)
    if not name.startswith("_") and "publish" not in name  # those ask no server
}
FORBIDDEN = [
    "FLUSHALL",
    "FLUSHDB",
    "KEYS *",
    "SWAPDB 0 1",
    "SCRIPT FLUSH",
    "FUNCTION FLUSH",
    "FUNCTION LIST",
    "MIGRATE 127.0.0.1 1 {prefix}:k 0 100",
    "CONFIG GET *",
    "CONFIG SET appendonly no",
    "ACL LIST",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "SHUTDOWN",
    "REPLICAOF NO ONE",
    "CLUSTER FAILOVER",
    "CLUSTER RESET",
    "GET someone-elses",
    "SET someone-elses x",
    "DEL someone-elses",
    "RENAME {prefix}:k someone-elses",
    "PUBLISH someone-elses x",
    "SPUBLISH someone-elses x",
    "SUBSCRIBE someone-elses",
    "PSUBSCRIBE *",
    "MONITOR",
    """EVAL "return redis.call('FLUSHALL')" 0""",
    """EVAL "return redis.call('KEYS', '*')" 0""",
    """EVAL "return redis.call('GET', 'someone-elses')" 0""",
    """EVAL "return redis.call('PUBLISH', 'someone-elses', 'x')" 0""",
]


class Account(NamedTuple):
    """A user of the servers at *url*, as the page describes one."""

    url: str
    client: redis.Redis  # of one of them


def set_user(node: EmbeddedServer, rules: str, prefix: str) -> None:
    """Give the user *prefix* the rights that the page describes, for locks of that prefix."""
    words = [word.replace("distlock:", f"{prefix}:") for word in rules.split()]
    words[2] = prefix
    with node.client() as client:
        client.execute_command(*words)


@contextmanager
def account(node: EmbeddedServer, url: str, prefix: str) -> Iterator[Account]:
    scheme, _, rest = url.partition("://")
    with redis.Redis(port=node.port, username=prefix, password="password") as client:
        yield Account(f"{scheme}://{prefix}:password@{rest}", client)


@pytest.fixture(params=[SHORT, EXACT], ids=["short", "exact"])
def one_server(
    request: pytest.FixtureRequest,
    private_server: Callable[..., Any],
    prefix: str,
) -> Iterator[Account]:
    server = private_server()
    set_user(server, request.param, prefix)
    with account(server, server.url, prefix) as user:
        yield user


@pytest.fixture
def one_server_as_admin(
    private_server: Callable[..., EmbeddedServer], prefix: str
) -> tuple[EmbeddedServer, str]:
    """A server, and the URL of a user that does not exist yet."""
    server = private_server()
    return server, server.url.replace("redis://", f"redis://{prefix}:password@")


@pytest.fixture(params=[SHORT, EXACT], ids=["short", "exact"])
def cluster(
    request: pytest.FixtureRequest, shared_cluster: Cluster, prefix: str
) -> Iterator[Account]:
    for node in shared_cluster.servers:
        set_user(node, request.param, prefix)
        set_user(node, OF_A_CLUSTER, prefix)
    with account(shared_cluster.masters[0], shared_cluster.url, prefix) as user:
        yield user
    for node in shared_cluster.servers:
        node.ask("ACL", "DELUSER", prefix)


def push(store: Store, wake: WokenTask) -> None:
    """Push what was woken to a channel that it was not parked from."""
    channel = store.channels.open_channel(lambda wake: None)
    assert channel is not None
    with closing(channel):
        peer = PeerChannel(channel.address, 1)
        store.channels.register_channel(["queue"], peer, 60.0)
        assert store.channels.find_channels(["queue"]) == [peer]
        assert store.channels.push(wake, [peer.address])
        store.parking.keep_reserved([wake], 60.0)


def reserve_or_queue(store: QueueStore) -> None:
    """Have a run take several keys, and none."""
    route = Route(("waits", "there"))
    request = StandRequest("t7:0:0:0", route, park_request=ParkRequest(b"r"))
    assert queue_store.reserve_or_queue(store, request).status is Status.RESERVED
    assert store.parking.cancel("waits", "t7:0:0:0").released
    assert not store.parking.reserve_one("gone", "t7:0:0:0", first=False, comes=False).released
    assert not store.parking.leave_one("gone", "t7:0:0:0", first=False, at="there").released
    assert list(ready(store, WokenTask("waits", "t7:0:0:0", b"", route))) == []


def let_time_pass(store: Store) -> None:
    """Note what is due, be the ticker, and be it no more."""
    assert isinstance(store, QueueStore)
    assert store.acquire(AcquireRequest("rests", "a", 60.0)).status is Status.GRANTED
    park = AcquireRequest("rests", "b", 60.0, queue=ParkRequest(b"e"), run="t8:0:0:0")
    assert store.acquire(park).status is Status.PARKED
    with closing(store.timetable.ticker_inbox("ticker")) as inbox:
        assert store.timetable.claim_due("ticker", inbox, 60.0).leads
        assert store.release(ReleaseRequest("rests", "a", keep_for=("resting:1", 0.2))).released
        inbox.wait(60.0)  # it is called
        assert store.timetable.dues().many == 1
        claim = wait_until(
            lambda: [c for c in [store.timetable.claim_due("ticker", inbox, 60.0)] if c.names],
            what="the end",
        )[0]
        again: dict[str, float | None] = {}
        (wake,) = store.parking.wake_due(claim.names, again)
        assert store.drop(wake).released
        store.timetable.claim_due("ticker", inbox, 0.0, Settled(claim.number, again))
    assert store.timetable.dues() == ("", 0, 0.0)


def record(store: Store) -> None:
    """Take a key from its holder, as an operator does."""
    store.subscribed("taken")
    store.check_want("taken", Want(2, 3))
    assert store.acquire(AcquireRequest("taken", "a", 60.0)).status is Status.GRANTED
    assert store.audit.record_action("taken", Action("release", "ann@ops", owners=("a",)))
    assert store.release(ReleaseRequest("taken", "a")).released
    assert store.renew([Ownership("taken", "a", 60.0)], 30.0)[0][0] is RenewOutcome.LOST
    assert store.audit.why_lost("taken", "a").startswith("taken by ann@ops")
    assert [action.name for action in store.audit.actions("taken")] == ["release"]


def every_request(store: Store) -> None:
    """Ask *store* all that it can be asked, and look what comes of it."""
    names = noting(store)

    assert [found for found in store.check() if found.subject != "persistence"] == []
    drill.hand_over(store, "handed over")
    drill.push(store, "pushed")
    record(store)

    assert store.acquire(AcquireRequest("k", "a", 60.0, run="t1:0:0:0")).status is Status.GRANTED
    assert store.renew([Ownership("k", "a", 60.0)], 30.0)[0][0] is RenewOutcome.RENEWED
    assert store.recall("k", "a")
    for run in ("t2:0:0:0", "t3:0:0:0"):
        assert (
            store.parking.park_if_held("k", run, ParkRequest(b"envelope"), 30.0).status
            is Status.PARKED
        )
    park_request = ParkRequest(b"envelope")
    asked = store.acquire(
        AcquireRequest("k", "b", 60.0, queue=park_request, run="t4:0:0:0", redelivered=True)
    )
    assert asked.status is Status.PARKED
    assert store.inspect("k").waiting == store.inspect_many(["k"])[0].waiting == 3
    assert store.inspect_for("k", ALONE)[1] is False
    assert [
        len(found) for found in (store.waiters("k"), list(store.parking.find_parked("t2")))
    ] == [3, 1]
    assert store.parking.parked("k", "t2:0:0:0") is not None
    assert "k" in {key for found in store.find_keys() for key in found}
    assert store.parking.cancel("k", "t4:0:0:0").released
    assert store.retry_delay("k", 0.0, (0.1, 60.0), 30.0)

    released = store.release(
        ReleaseRequest("k", "a", run="t1:0:0:0", completion=Completion.YES_AND_MAY_COME_AGAIN)
    )
    assert released.wake is not None
    push(store, released.wake)
    store.dispatch(released.wake)
    store.parking.mark_published(released.wake)
    store.parking.mark_returned(released.wake)
    found = wait_until(lambda: list(store.parking.sweep(0.01)), what="a sweep")
    assert [wake.run for wake in found] == ["t2:0:0:0"]
    assert [wake.run for wake in store.parking.wake_again("k")] == ["t2:0:0:0"]
    assert (
        store.acquire(AcquireRequest("k", "c", 60.0, run="t2:0:0:0", retain=True)).status
        is Status.GRANTED
    )
    assert store.release(ReleaseRequest("k", "c", keep_for=("t2:0:0:0", 60.0))).released
    assert store.drop(released.wake).released

    assert (
        store.parking.park_if_held("next", "t6:0:0:0", park_request, 30.0, store.time(30.0)).holder
        == ""
    )
    assert [wake.run for wake in store.parking.wake_next("next")] == ["t6:0:0:0"]

    assert store.acquire(AcquireRequest("left", "a", 60.0)).status is Status.GRANTED
    assert (
        store.parking.park_if_held("left", "t5:0:0:0", ParkRequest(b"envelope"), 30.0).status
        is Status.PARKED
    )
    woken = store.release(ReleaseRequest("left", "a")).wake
    assert woken is not None
    store.parking.mark_left(woken)
    assert store.drop(woken).released

    together = keys_of_one_slot()
    replies = store.acquire_all(together, ["a", "b"], 60.0)
    assert [reply.status for reply in replies or ()] == [Status.GRANTED] * 2

    reserve_or_queue(store)
    let_time_pass(store)

    store.count({"acquired||t": 2.0})
    assert store.counts()["acquired||t"] == 2.0
    assert not [fact for fact in store.describe() if "reports nothing about itself" in fact.message]
    store.close()

    assert names == METHODS


def noting(store: Store) -> set[str]:
    """Return what will hold the names of the methods of *store* that are called from now on."""
    called: set[str] = set()

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (called.add(name), method(*given, **named))[1]

    for name in METHODS:
        setattr(store, name, noted(name, getattr(store, name)))
    return called


def keys_of_one_slot() -> list[str]:
    seen: dict[int, str] = {}
    for key in map(str, itertools.count()):
        other = seen.setdefault(slot_of(f"{{{key}}}"), key)
        if other != key:
            return [other, key]
    raise AssertionError


def allowed(user: Account, command: str) -> bool:
    try:
        user.client.execute_command(*shlex.split(command))
    except redis.RedisError as error:
        return not re.search(
            "(?i)no permission|unknown command|executing the script can't", str(error)
        )
    return True


def test_one_servers_user_may_do_all_that_locks_need(opened, one_server):
    every_request(opened(one_server.url))
    assert one_server.client.execute_command("WAIT", 0, 1) == 0  # for distlock_replicas


def test_a_clusters_user_may_do_all_that_locks_need(opened, cluster):
    every_request(opened(cluster.url))
    assert cluster.client.execute_command("WAIT", 0, 1) is not None
    assert cluster.client.execute_command("ASKING")


def test_a_user_of_servers_and_one_of_sentinels_may_do_all_that_locks_need(
    opened, shared_sentinels, prefix, monkeypatch
):
    monkeypatch.setattr("celery_distlock.stores.redis.sentinels.SENTINEL_TIMEOUT", 4.0)
    users = [(node, SHORT) for node in shared_sentinels.servers]
    users += [(node, OF_SENTINELS) for node in shared_sentinels.sentinels]
    for node, rules in users:
        set_user(node, rules, prefix)
    try:
        with account(shared_sentinels.master, shared_sentinels.url(), prefix) as user:
            sentinels = f"&sentinel_username={prefix}&sentinel_password=password"
            every_request(opened(user.url + sentinels))
    finally:
        for node, _ in users:
            node.ask("ACL", "DELUSER", prefix)


def test_one_servers_user_may_do_nothing_else(one_server, prefix):
    commands = [command.format(prefix=prefix) for command in FORBIDDEN]

    assert [command for command in commands if allowed(one_server, command)] == []


def test_a_clusters_user_may_do_nothing_else(cluster, shared_cluster, prefix):
    # Others use this one, too, so nothing is done.
    answers = {
        command: shared_cluster.servers[0].ask("ACL", "DRYRUN", prefix, *shlex.split(command))
        for command in (each.format(prefix=prefix) for each in FORBIDDEN if "EVAL" not in each)
    }

    assert [command for command, answer in answers.items() if answer == "OK"] == []


def test_every_command_of_the_scripts_is_listed_and_rehearsed():
    scripts = "".join(path.read_text() for path in LUA.glob("*.lua"))
    called = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", scripts)}

    assert called
    assert called <= set(re.findall(r"\+(\w+)", EXACT))
    rehearsed = {words[0].lower() for words in (*REHEARSAL, *IN_A_CLUSTER)}
    assert called - {"publish"} <= rehearsed  # that is asked for itself


def problems(store: Store) -> str:
    """What `Store.check` has to say."""
    try:
        return "; ".join(found.message for found in store.check())
    except StoreUnavailableError as error:
        return str(error)


def test_each_right_that_is_missing_is_named(opened, one_server_as_admin, prefix, monkeypatch):
    monkeypatch.setattr("celery_distlock.stores.redis.request_runner.PAUSES", (0.0,))
    server, url = one_server_as_admin
    for right in [f"+{words[0].lower()}" for words in REHEARSAL] + ["+evalsha", "+publish"]:
        set_user(server, f"{EXACT} -{right[1:]}", prefix)
        store = opened(url)
        if right == "+publish":
            assert "may not publish" in problems(store)
        else:
            assert re.search(rf"this user lacks [^;]*{re.escape(right)}\b", problems(store))
        store.close()  # its connections' user is gone


def test_keys_or_channels_that_a_user_may_not_use_are_named(opened, one_server_as_admin, prefix):
    server, url = one_server_as_admin

    set_user(server, EXACT.replace("~distlock:*", "~elsewhere:*"), prefix)
    with pytest.raises(StoreUnavailableError, match=rf"this user lacks ~{prefix}:\*"):
        opened(url).acquire(AcquireRequest("k", "a", 5.0))
    opened(url).close()

    set_user(server, EXACT.replace("&distlock:*", "&elsewhere:*"), prefix)
    assert f"may not publish to {prefix}:*" in problems(opened(url))


def test_a_cluster_that_may_not_be_asked_for_its_nodes_says_so(opened, cluster, shared_cluster):
    name = urlsplit(cluster.url).username
    for node in shared_cluster.servers:
        node.ask("ACL", "SETUSER", name, "-cluster|slots")
    with pytest.raises(StoreUnavailableError, match=r"lacks \+cluster\|slots") as caught:
        opened(cluster.url).acquire(AcquireRequest("k", "a", 5.0))
    assert "not of a cluster" not in str(caught.value)
    opened(cluster.url).close()

    for node in shared_cluster.servers:
        node.ask("ACL", "SETUSER", name, "+cluster|slots", "-command|info", "-spublish")
    assert "this user lacks the rights +command|info +spublish" in problems(opened(cluster.url))


def test_sentinels_that_may_not_be_asked_say_so(opened, shared_sentinels, prefix):
    for node in shared_sentinels.sentinels:
        set_user(node, "ACL SETUSER _ reset on >password +ping", prefix)
    url = f"{shared_sentinels.url()}&sentinel_username={prefix}&sentinel_password=password"
    right = r"lacks \+sentinel\|get-master-addr-by-name"
    try:
        with pytest.raises(StoreUnavailableError, match=right):
            opened(url).acquire(AcquireRequest("k", "a", 5.0))
        wrong = url.replace("=password", "=wrong")
        with pytest.raises(StoreUnavailableError, match="username-password"):
            opened(wrong).acquire(AcquireRequest("k", "a", 5.0))
    finally:
        for node in shared_sentinels.sentinels:
            node.ask("ACL", "DELUSER", prefix)


def test_a_right_that_scripts_lack_is_an_outage(opened, one_server_as_admin, prefix):
    server, url = one_server_as_admin
    set_user(server, f"{EXACT} -hset", prefix)

    with pytest.raises(StoreUnavailableError):
        opened(url).acquire(AcquireRequest("k", "a", 5.0))


def test_what_a_renewal_lacks_is_named_in_the_log(opened, one_server_as_admin, prefix, caplog):
    server, url = one_server_as_admin
    set_user(server, EXACT, prefix)
    store = opened(url)
    store.acquire(AcquireRequest("k", "a", 60.0))
    set_user(server, f"{EXACT} -evalsha", prefix)

    assert store.renew([Ownership("k", "a", 60.0)], 5.0)[0][0] is RenewOutcome.UNKNOWN
    wait_until(lambda: "this user lacks +evalsha" in caplog.text, what="what is lacking")


class Rights:
    """A user that may do all that locks need, but for what is taken away for a while."""

    def __init__(self, server: EmbeddedServer, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        set_user(server, EXACT, prefix)

    @contextmanager
    def without(self, right: str) -> Iterator[None]:
        with self._server.client() as client:
            client.execute_command("ACL", "SETUSER", self._prefix, f"-{right}")
            yield
            client.execute_command("ACL", "SETUSER", self._prefix, f"+{right}")


@pytest.fixture
def rights(one_server_as_admin, prefix, monkeypatch) -> Rights:
    monkeypatch.setattr("celery_distlock.stores.redis.request_runner.PAUSES", (0.0, 0.0))
    return Rights(one_server_as_admin[0], prefix)


@pytest.mark.parametrize("right", ["zrange", "zrem"])
def test_a_call_that_is_taken_in_by_half_is_not_accepted(
    opened, one_server_as_admin, rights, right
):
    store = opened(one_server_as_admin[1])
    call = SendRequest("k", "run", ParkRequest(b"envelope"), delay=60.0)
    with rights.without(right), pytest.raises(StoreUnavailableError):
        store.calls.send(call)

    assert store.calls.send(call).sent is Sent.LATER
    assert store.inspect("k").later == 1


@pytest.mark.parametrize("right", ["hget", "hset", "zadd", "zrange", "zrem", "zscore"])
def test_a_waiter_outlasts_a_right_that_is_missing_for_a_while(
    opened, one_server_as_admin, rights, right
):
    store = opened(one_server_as_admin[1])
    store.acquire(AcquireRequest("k", "a", 60.0))
    for run, delay in {"one": 0.0, "two": 0.0, "late": 0.01}.items():
        store.calls.send(SendRequest("k", run, ParkRequest(b"envelope"), delay=delay))
    time.sleep(0.05)

    for ask in (
        lambda: list(store.parking.wake_next("k")),
        lambda: store.release(ReleaseRequest("k", "a")),
        lambda: list(store.parking.wake_next("k")),
    ):
        with rights.without(right), suppress(StoreUnavailableError):
            ask()
        state = store.inspect("k")
        assert state.waiting + state.woken + state.later >= 3


@pytest.mark.parametrize("want", [ALONE, Want(1, 2)], ids=["alone", "shared"])
def test_a_lease_that_cannot_be_set_leaves_no_lock_for_ever(
    opened, one_server_as_admin, rights, want
):
    store = opened(one_server_as_admin[1])
    store.acquire(AcquireRequest("k", "a", 60.0))
    for run in ("one", "two"):
        queue = ParkRequest(b"envelope")
        store.acquire(AcquireRequest("k", "", 60.0, queue=queue, run=run, want=want))

    for ask in (
        lambda: store.release(ReleaseRequest("k", "a")),
        lambda: list(store.parking.wake_next("k")),
        lambda: store.acquire(AcquireRequest("free", "a", 60.0, want=want)),
    ):
        with rights.without("pexpire"), suppress(StoreUnavailableError):
            ask()

    assert max(store.inspect("k").remaining, store.inspect("free").remaining) <= 60.0
    store.release(ReleaseRequest("k", "a"))
    list(store.parking.wake_next("k"))
    assert store.inspect("k").woken


@pytest.mark.parametrize("quote", ["'", "`"])
def test_missing_scripts_are_reported_with_the_remedy_in_any_quoting(quote):
    refusal = redis.ResponseError(f"unknown command {quote}EVALSHA{quote}, with args")

    assert "?scripts=off" in said(refusal, "distlock")
