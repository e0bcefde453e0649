"""A server that answers, and not what was asked for: an outage that says to what, and what came."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
import redis

from celery_distlock import AsyncLock, Lock
from celery_distlock.errors import QuorumError, StoreError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest, Severity, Status
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.queue_store import QueueStore
from tests.stores.scriptless.fake import NOTHING, FakeServer


def _fields(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


ANSWERS = {
    "a number": b":1\r\n",
    "no parts": b"*0\r\n",
    "too few parts": b"*2\r\n$4\r\nbusy\r\n:1\r\n",
    "parts of parts": b"*1\r\n*1\r\n*1\r\n:1\r\n",
    "a status of no script": b"*1\r\n$3\r\nxyz\r\n",
    "a grant of nothing": b"*1\r\n$7\r\ngranted\r\n",
    "no fields": b"*1\r\n$2\r\n[]\r\n",
    "fields without a status": b"*1\r\n$2\r\n{}\r\n",
    "a time of no number": _fields(b'{"status": "busy", "ttl_ms": "x"}'),
    "an owner of no text": _fields(b'{"status": "busy", "holder": 1}'),
    "an infinite time": _fields(b'{"status": "busy", "ttl_ms": Infinity}'),
    "runs without envelopes": _fields(b'{"status": "busy", "woken": [{"run": "r"}]}'),
    "runs of no fields": _fields(b'{"status": "busy", "woken": {"run": "r"}}', b"e"),
    "lists in lists": _fields(b"[" * 100_000),
}


class Liar(FakeServer):
    """Answers the same to all but what a connection begins with."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(NOTHING)
        self._always = answer

    @property
    def host(self) -> str:
        return self.url.partition("//")[2].partition("/")[0]

    def _answer(self, words: list[bytes]) -> bytes:
        return b"+OK\r\n" if words[0] == b"CLIENT" else self._always


@pytest.fixture
def liar():
    """Start a server that answers so, whatever it is asked."""
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(Liar(answer))


@pytest.fixture(params=ANSWERS.values(), ids=ANSWERS)
def server(request, liar):
    return liar(request.param)


def unreadable(asked: str = ""):
    words = f"its answer to .*{asked}.* cannot be read: "
    return pytest.raises(StoreUnavailableError, match=words)


def test_an_unreadable_answer_that_may_be_a_grant_leaves_no_holder(server):
    async def enter() -> None:
        async with AsyncLock("k", store=f"redis://{server.host}/0", timeout=1.0):
            raise AssertionError

    with unreadable("acquire") as caught, Lock("k", store=f"redis://{server.host}/0", timeout=1.0):
        raise AssertionError
    assert "must answer as Redis and Valkey do" in caught.value.remedy
    with unreadable("acquire"):
        asyncio.run(enter())


@pytest.mark.parametrize(
    "look",
    [
        lambda store: store.inspect("k"),
        lambda store: ListingStore.of(store).inspect_many(["k"]),
        lambda store: list(ListingStore.of(store).find_keys()),
        lambda store: QueueStore.of(store).waiters("k"),
        lambda store: QueueStore.of(store).parking.parked("k", "r"),
        lambda store: QueueStore.of(store).calls.delayed("k"),
        lambda store: list(QueueStore.of(store).parking.find_parked("t")),
        lambda store: QueueStore.of(store).parking.destinations(["k"]),
        lambda store: store.timetable.dues(),
        lambda store: store.check(),
        lambda store: store.retry_delay("k", 1.0, (1.0, 2.0), 1.0),
        lambda store: store.time(1.0),
        lambda store: list(store.parking.sweep(1.0)),
    ],
)
def test_a_look_reports_that(liar, opened, look):
    with unreadable():
        look(opened(f"redis://{liar(ANSWERS['too few parts']).host}/0"))


def test_doctor_doubts_a_server_whose_report_cannot_be_read(server, opened):
    (found,) = opened(f"redis://{server.host}/0").describe()

    assert found.severity is Severity.DOUBT
    assert "reports nothing about itself" in found.message


def test_so_it_is_without_scripts(server, opened):
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        opened(f"redis://{server.host}/0?scripts=off").acquire(AcquireRequest("k", "a", 5.0))


def test_one_of_several_masters_has_no_vote_then(server, opened, private_server):
    honest = [f"127.0.0.1:{private_server().port}" for _ in range(2)]
    store = opened(f"redlock://{','.join([*honest, server.host])}/0")

    assert store.acquire(AcquireRequest("k", "a", 5.0)).status is Status.GRANTED
    assert store.inspect("k").owner == "a"
    assert [*ListingStore.of(store).find_keys()] == [["k"]]
    assert store.check() is not None
    assert store.release(ReleaseRequest("k", "a")).released


@pytest.mark.parametrize("answer", [*ANSWERS.values(), b"-OOM it is full\r\n"])
def test_a_master_that_is_slow_is_awaited_then(liar, opened, private_server, answer):
    quick, slow = private_server(), private_server()
    hosts = [f"127.0.0.1:{server.port}" for server in (quick, slow)]
    store = opened(f"redlock://{','.join([*hosts, liar(answer).host])}/0")
    assert store.acquire(AcquireRequest("k", "a", 5.0)).status is Status.GRANTED

    def pause() -> None:
        with redis.Redis(port=slow.port) as client:
            client.client_pause(100)

    pause()
    assert store.inspect("k").owner == "a"
    pause()
    assert [state.owner for state in ListingStore.of(store).inspect_many(["k"])] == ["a"]
    pause()
    assert store.release(ReleaseRequest("k", "a")).released


def test_a_majority_of_several_masters_is_reported(server, liar, opened):
    hosts = [server.host, *(liar(b":1\r\n").host for _ in range(2))]
    store = opened(f"redlock://{','.join(hosts)}/0")

    with pytest.raises(QuorumError, match="its answer to the script vote cannot be read"):
        store.acquire(AcquireRequest("k", "a", 5.0))
    with pytest.raises(QuorumError, match="its answer to the script inspect cannot be read"):
        store.inspect("k")


def test_a_map_of_a_cluster(server, opened):
    with pytest.raises(StoreUnavailableError, match=r"cannot be read|no node"):
        opened(f"redis+cluster://{server.host}").acquire(AcquireRequest("k", "a", 5.0))


def test_a_master_that_a_sentinel_names(liar, opened):
    sentinel = liar(ANSWERS["a number"].replace(b":", b"*") + b"$1\r\nx\r\n")
    store = opened(f"sentinel://{sentinel.host}/0?service=main")

    with pytest.raises(StoreUnavailableError, match="SENTINEL cannot be read"):
        store.acquire(AcquireRequest("k", "a", 5.0))


@pytest.mark.parametrize("place", ["redis", "redis+cluster"])
@pytest.mark.parametrize("answer", [b"-MOVED\r\n", b"-ASK 1 there\r\n", b":x\r\n"])
def test_bytes_that_are_no_answer(liar, opened, place, answer):
    with pytest.raises(StoreUnavailableError, match=r"not a Redis server"):
        opened(f"{place}://{liar(answer).host}").acquire(AcquireRequest("k", "a", 5.0))


@pytest.mark.parametrize("answer", [b"-MOVED 1 localhost:1\r\n", b"-ASK 1 localhost:1\r\n"])
def test_one_node_of_a_cluster_is_reported_as_that(liar, opened, answer):
    with pytest.raises(StoreError, match=r"redis\+cluster:// finds the others"):
        opened(f"redis://{liar(answer).host}/0").acquire(AcquireRequest("k", "a", 5.0))


def test_a_slot_that_no_cluster_has(liar, opened, monkeypatch):
    cluster = liar(b"-MOVED 16384 localhost:1\r\n")
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n"
    port = int(cluster.host.partition(":")[2])
    answer = cluster._answer
    monkeypatch.setattr(
        cluster, "_answer", lambda words: slots % port if words[-1] == b"SLOTS" else answer(words)
    )

    with pytest.raises(StoreUnavailableError):
        opened(f"redis+cluster://{cluster.host}").acquire(AcquireRequest("k", "a", 5.0))
