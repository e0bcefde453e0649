"""How a store on one server grows: keys, delayed calls, identities, holders, and what does not."""

import time
from collections.abc import Callable, Iterator

from figures import Figure, Part, Row
from many import (
    HOURS,
    INTERVAL,
    MESSAGE,
    MODELS,
    Pipeline,
    Work,
    fill,
    multiply,
    opened,
    sweep,
    ticking,
    used_memory,
)

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis.parking import REST
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import Identity, SendRequest
from celery_distlock.stores.values import ALONE, Want
from celery_distlock.testing import EmbeddedServer

KEYS = 10_000, 100_000, 1_000_000
CROWD = 100_000  # delayed calls, identities
HOLDERS = 10_000
WAITING = 100_000
LANES = {"without lanes": 0, "in lanes of a hundred": 100, "in a lane each": 1}
TURNS = 2_000
SHARE = Want(1, 0)


def keys(server: EmbeddedServer, scale: float) -> Iterator[Part]:
    store, before, made, rows = opened(server, "keys"), used_memory(server), 0, []
    for size in (int(most * scale) for most in KEYS):
        fill(store, made, min(size, MODELS))
        multiply(server, store, "stock", max(made, MODELS), size)
        made = size
        each = (used_memory(server) - before) / size
        rows.append(_keys_row(size, each, *sweep(server, store)))
    _empty(server)
    yield Part(
        "keys",
        "Keys that are held, with a task parked at each",
        "share of a core",
        ["server CPU of a sweep", "a key", "commands a key", "next sweep after", "memory a key"],
        rows,
    )


def _keys_row(size: int, memory: float, took: float, work: Work) -> Row:
    period = max(INTERVAL, (1 + REST) * took)
    figures = (
        Figure(work.cpu, "s", 2),
        Figure(work.cpu / size * 1e6, "µs", 1),
        Figure(work.commands / size),
        Figure(period, "s", 1),
        Figure(memory, "bytes", 0),
    )
    return Row(f"{size:,} keys", Figure(work.cpu / period, at_most=0.25), figures)


def crowds(server: EmbeddedServer, scale: float) -> Iterator[Part]:
    many = int(CROWD * scale)
    fillings: dict[str, tuple[int, Callable[[RedisStore, int], None], str]] = {
        "nothing": (1, lambda *_: None, ""),
        "delayed calls, a key each": (many, _delay, "later"),
        "delayed calls of one key": (many, lambda *about: _delay(*about, "one"), ""),
        "identities of one key": (many, lambda *about: _identify(*about, "one"), ""),
        "identities, a key each": (many, _identify, "unique"),
        "holders of one key": (int(HOLDERS * scale), _share, ""),
    }
    yield Part(
        "crowds",
        "What sweep and ticker cost beside them",
        "share of a core",
        [
            *("server CPU of a sweep", "commands", "ticker's commands"),
            *("one more request and release", "commands of it", "memory of each"),
        ],
        [_crowd_row(server, name, *filling, scale) for name, filling in fillings.items()],
    )


def _crowd_row(
    server: EmbeddedServer,
    name: str,
    size: int,
    make: Callable[[RedisStore, int], None],
    kind: str,
    scale: float,
) -> Row:
    store, before = opened(server, "crowd"), used_memory(server)
    if kind:
        make(store, min(size, MODELS))
        multiply(server, store, kind, MODELS, size)
    else:
        make(store, size)
    memory = (used_memory(server) - before) / size
    took, swept = sweep(server, store)
    period, seconds = max(INTERVAL, (1 + REST) * took), 10.0 * scale
    ticked = ticking(server, store, seconds)
    pair = _pair(server, store, SHARE if make is _share else ALONE)
    _empty(server)
    figures = (
        Figure(swept.cpu * 1000, "ms", 1),
        Figure(swept.commands, "", 0),
        Figure(ticked.commands / seconds, "/s", 1),
        *_cost(pair),
        Figure(memory, "bytes", 0) if size > 1 else "",
    )
    share = swept.cpu / period + ticked.cpu / seconds
    title = f"{size:,} {name}" if size > 1 else name
    return Row(title, Figure(share, "", 3, at_most=0.25), figures)


def _delay(store: RedisStore, size: int, key: str = "") -> None:
    with Pipeline(store) as pipeline:
        for number in range(size):
            run = f"{number:032x}:0:0:0"
            call = SendRequest(key or f"later:{number}", run, MESSAGE, delay=HOURS)
            pipeline.add(lambda call=call: store.calls.send(call))


def _identify(store: RedisStore, size: int, key: str = "") -> None:
    with Pipeline(store) as pipeline:
        for number in range(size):
            place, run = key or f"unique:{number}", f"{number:032x}:0:0:0"
            if not key or number == 0:
                held = AcquireRequest(place, "holder", HOURS)
                pipeline.add(lambda held=held: store.acquire(held))
            call = SendRequest(place, run, MESSAGE, identity=Identity(f"{number:032x}"))
            pipeline.add(lambda call=call: store.calls.send(call))


def _share(store: RedisStore, size: int) -> None:
    with Pipeline(store) as pipeline:
        for number in range(size):
            share = AcquireRequest("one", f"holder:{number}", HOURS, want=SHARE)
            pipeline.add(lambda share=share: store.acquire(share))


def _pair(server: EmbeddedServer, store: RedisStore, want: Want) -> Work:
    """Return the mean work for a request at the key of the crowd, and its release."""

    def ask(number: int) -> None:
        owner = f"another:{number}"
        store.acquire(AcquireRequest("one", owner, 60.0, want=want))
        store.release(ReleaseRequest("one", owner))

    return _work_of(server, ask, range(TURNS))


def queues(server: EmbeddedServer, scale: float) -> Iterator[Part]:
    """Measure a key for which many wait, in lanes or not."""
    size, turns = int(WAITING * scale), max(20, int(TURNS * scale))
    found = {
        name: _queue(server, size, each and size // each, turns) for name, each in LANES.items()
    }
    plain = found["without lanes"][0][0].cpu
    rows = [
        Row(
            f"{size:,} {name}",
            Figure(works[0].cpu / plain, at_most=1.15),
            [*(figure for work in works for figure in _cost(work)), Figure(memory, "bytes", 0)],
        )
        for name, (works, memory) in found.items()
    ]
    columns = [
        *("handed over and claimed", "commands", "one more call", "commands of it"),
        *("sweep of the key", "commands of a sweep", "memory of each"),
    ]
    yield Part("queues", "Tasks that wait for one key", "CPU / without lanes", columns, rows)


def _queue(
    server: EmbeddedServer, size: int, lanes: int, turns: int
) -> tuple[tuple[Work, ...], float]:
    """Return the mean work for a hand-over, a call and a sweep, and the bytes of a waiter."""
    store, before, owners = opened(server, "queue"), used_memory(server), ["holder"]

    def want(number: int) -> Want:
        return Want(lane=f"{number % lanes}") if lanes else ALONE

    def send(number: int) -> None:
        run = f"{number:032x}:0:0:0"
        store.calls.send(SendRequest("one", run, MESSAGE, want(number)))

    def hand_over(_: int) -> None:
        run = store.release(ReleaseRequest("one", owners.pop())).wake.run
        owners.append(f"owner:{run}")
        number = int(run.partition(":")[0], 16)
        store.acquire(AcquireRequest("one", owners[0], HOURS, run=run, want=want(number)))

    store.acquire(AcquireRequest("one", *owners, HOURS))
    with Pipeline(store) as pipeline:
        for number in range(size):
            pipeline.add(lambda number=number: send(number))
    memory = (used_memory(server) - before) / size
    works = (
        _work_of(server, hand_over, range(turns)),
        _work_of(server, send, range(size, size + turns)),
        _work_of(server, lambda _: list(store.parking.wake_next("one")), range(turns)),
    )
    _empty(server)
    return works, memory


def _work_of(server: EmbeddedServer, call: Callable[[int], object], numbers: range) -> Work:
    """Return the mean work for a call."""
    with server.client(socket_timeout=None) as client:
        before = Work.of(client)
        for number in numbers:
            call(number)
        return _each(Work.of(client).since(before), len(numbers))


def _cost(work: Work) -> tuple[Figure, Figure]:
    return Figure(work.cpu * 1e6, "µs", 0), Figure(work.commands, "", 1)


def one_key(server: EmbeddedServer, scale: float) -> Iterator[Part]:
    """Measure what does not grow: the hand-overs of one key."""
    store, key, turns = opened(server, "one"), "one", max(20, int(TURNS * scale))
    with server.client(socket_timeout=None) as client:
        store.acquire(AcquireRequest(key, "first", HOURS))
        park = [f"{number:032x}:0:0:0" for number in range(turns)]
        before, owner = Work.of(client), "first"
        for run in park:
            store.acquire(AcquireRequest(key, "", HOURS, MESSAGE, run))
            wake = store.release(ReleaseRequest(key, owner)).wake
            owner = f"owner:{wake.run}"
            store.acquire(AcquireRequest(key, owner, HOURS, run=wake.run))
        handed = _each(Work.of(client).since(before), turns)
        before = Work.of(client)
        for number in range(turns):
            store.acquire(AcquireRequest(f"free:{number}", "owner", 60.0))
            store.release(ReleaseRequest(f"free:{number}", "owner"))
        free = _each(Work.of(client).since(before), turns)
    _empty(server)
    rows = [_rate("parked, handed over and claimed", handed), _rate("free: acquire, release", free)]
    columns = ["server CPU", "commands", "scripts"]
    yield Part("one_key", "What one core of a master does", "at most a second", columns, rows)


def _each(work: Work, turns: int) -> Work:
    return Work(*(number / turns for number in work))


def _rate(name: str, each: Work) -> Row:
    return Row(name, Figure(1 / each.cpu, "", 0), [*_cost(each), Figure(each.scripts, "", 1)])


def _empty(server: EmbeddedServer) -> None:
    with server.client(socket_timeout=None) as client:
        client.flushall(asynchronous=True)
        while int(client.info("memory").get("lazyfree_pending_objects", 0)):
            time.sleep(0.1)
