"""Locked tasks compared with plain ones, with tasks that retry, and with other libraries."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from cpu_time import server_cpu
from figures import Figure, Part, Row, in_turn, median, ratio
from workers import Times, Worker

from celery_distlock import Lock
from celery_distlock.errors import LockLostError
from celery_distlock.testing import EmbeddedServer

SLOTS = 4
NOOPS = 2000  # tasks in one round
QUEUED_ONCE = 500
CONTENDED = 200  # tasks on one key
HOLD = 0.010  # seconds each
IDEAL = CONTENDED * HOLD
SHORT = 0.002  # seconds of many tasks on a few keys
FEW_KEYS = {100: None, 10: 0.75, 3: 0.65}  # how many, and what part of the throughput remains
MORE_CPU = {"of the pool": 150.0, "of the server": 60.0}  # µs at most, for the lock of a task
COUNTDOWNS = (1.0, 0.1)  # seconds
RETRIED_ROUNDS = 2  # they take long
CROWD = 10_000  # parked tasks


def tasks(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    with Worker(server, SLOTS) as worker:
        warm_up(worker)
        for measure in (noops, cpu, few_keys, one_key, queued_once):
            yield measure(worker, rounds)
        with Worker(server, 1, "one slot") as single:
            yield hot_key(worker, single, rounds)


def warm_up(worker: Worker) -> None:
    from app import locked, once_queued, plain

    for task in (plain, locked, *once_queued.values()):
        worker.time(task, numbers(200))


def numbers(count: int) -> list[tuple[int]]:
    return [(number,) for number in range(count)]


def noops(worker: Worker, rounds: int) -> Part:
    from app import locked, one_by_one, plain

    def run(task: Any) -> Callable[[], float]:
        return lambda: worker.time(task, numbers(NOOPS)).running

    times = in_turn({"plain": run(plain), "locked": run(locked)}, rounds)
    alone = in_turn({"locked": run(locked)}, min(3, rounds))["locked"]
    # What is parked is thrown away in the end, and the lock with it.
    with suppress(LockLostError), Lock("one", lease=600.0, store=worker.url):
        worker.time(one_by_one, [(0.0,)] * CROWD)
        crowded = in_turn({"locked": run(locked)}, min(3, rounds))["locked"]
        worker.forget_parked("one")
    return Part(
        "noops",
        f"{NOOPS:,} tasks that do nothing, each with a key of its own, {SLOTS} slots",
        "tasks/s / those of the other",
        ["this", "the other"],
        [
            _throughput("locked / plain", times["plain"], times["locked"], 0.92),
            _throughput(f"locked, with {CROWD:,} parked / without them", alone, crowded, 0.95),
        ],
    )


def _throughput(name: str, others: list[float], ours: list[float], goal: float | None) -> Row:
    figures = [Figure(NOOPS / median(times), "/s", 0) for times in (ours, others)]
    return Row(name, Figure(ratio(others, ours), at_least=goal), figures)


def cpu(worker: Worker, rounds: int) -> Part:
    from app import locked, plain

    parts = ["of the main process", "of the pool", "of the server"]

    def look() -> list[float]:
        return [*worker.cpu(), server_cpu(worker.client)]

    def run(task: Any) -> list[float]:
        before = look()
        worker.time(task, numbers(NOOPS))
        return [(b - a) / NOOPS * 1e6 for a, b in zip(before, look(), strict=True)]

    works = {"plain": partial(run, plain), "locked": partial(run, locked)}
    found = in_turn(works, rounds)
    sums = {name: [sum(each) for each in found[name]] for name in works}
    used = {name: [median(each) for each in zip(*found[name], strict=True)] for name in works}
    most = [
        before + MORE_CPU[part] if part in MORE_CPU else None
        for part, before in zip(parts, used["plain"], strict=True)
    ]
    goals = {"plain": [None] * len(parts), "locked": most}
    rows = [
        Row(
            name,
            Figure(ratio(sums[name], sums["plain"])),
            [
                Figure(each, "µs", 0, at_most=goal)
                for each, goal in zip(used[name], goals[name], strict=True)
            ],
        )
        for name in works
    ]
    title = f"CPU time of one of {NOOPS:,} tasks that do nothing, {SLOTS} slots"
    return Part("cpu", title, "all of it / plain", parts, rows)


def few_keys(worker: Worker, rounds: int) -> Part:
    from app import on_few_keys, unlocked

    plain = "plain"
    works = {plain: partial(worker.time_counted, unlocked, [(SHORT,)] * NOOPS)}
    for many in FEW_KEYS:
        calls = [(number % many, SHORT) for number in range(NOOPS)]
        works[f"on {many} keys"] = partial(worker.time_counted, on_few_keys, calls)
    times = {
        name: [seconds for seconds, _ in results]
        for name, results in in_turn(works, rounds).items()
    }
    return Part(
        "few_keys",
        f"{NOOPS:,} tasks of {SHORT * 1e3:.0f} ms, on a few keys, {SLOTS} slots",
        "tasks/s / those of plain ones",
        ["this", "the other"],
        [
            _throughput(name, times[plain], times[name], least)
            for name, least in zip(list(works)[1:], FEW_KEYS.values(), strict=True)
        ],
    )


def one_key(worker: Worker, rounds: int) -> Part:
    from app import by_retry, one_by_one

    ours = "celery-distlock, requeue"
    works = {ours: partial(worker.time_counted, one_by_one, [(HOLD,)] * CONTENDED)}
    for countdown in COUNTDOWNS:
        name = f"redis-py Lock, self.retry(countdown={countdown:g})"
        works[name] = partial(worker.time_counted, by_retry, [(HOLD, countdown)] * CONTENDED)
    results = in_turn(works, min(RETRIED_ROUNDS, rounds))
    return Part(
        "one_key",
        f"{CONTENDED} tasks of {HOLD * 1e3:.0f} ms, all for one key, {SLOTS} slots",
        "time / ours",
        ["until the last has ended", "/ sum of the tasks", "runs a task"],
        [_makespan(name, results[name], results[ours]) for name in works],
    )


def hot_key(worker: Worker, single: Worker, rounds: int) -> Part:
    from app import one_by_one, one_by_store, unlocked

    calls = [(HOLD,)] * CONTENDED
    plain = "plain tasks in a worker with one slot"
    works = {
        "locked": partial(worker.time_counted, one_by_one, calls),
        "locked, sent through the store": partial(worker.time_counted, one_by_store, calls),
        plain: partial(single.time_counted, unlocked, calls),
    }
    for work in works.values():
        work()  # to warm up
    times = {
        name: [seconds for seconds, _ in results]
        for name, results in in_turn(works, rounds).items()
    }
    goals = dict(zip(works, (1.03, 1.10, None), strict=True))
    return Part(
        "hot_key",
        f"{CONTENDED} tasks of {HOLD * 1e3:.0f} ms, all for one key, {SLOTS} slots, compared with"
        " plain ones in a worker with one slot",
        "time / one slot",
        ["until the last has ended", "/ sum of the tasks"],
        [
            Row(
                name,
                Figure(ratio(times[name], times[plain]), at_most=goals[name]),
                [Figure(median(times[name]), "s"), Figure(median(times[name]) / IDEAL)],
            )
            for name in works
        ],
    )


def _makespan(
    name: str, results: list[tuple[float, float]], ours: list[tuple[float, float]]
) -> Row:
    times = [seconds for seconds, _ in results]
    return Row(
        name,
        Figure(ratio(times, [seconds for seconds, _ in ours])),
        [
            Figure(median(times), "s"),
            Figure(median(times) / IDEAL),
            Figure(median(runs for _, runs in results), places=1),
        ],
    )


def queued_once(worker: Worker, rounds: int) -> Part:
    from app import absent, locked, once_queued, plain

    tasks = {"plain": plain, "celery-distlock": locked, **once_queued}
    works = {name: partial(worker.time, task, numbers(QUEUED_ONCE)) for name, task in tasks.items()}
    times = in_turn(works, rounds)
    return Part(
        "queued_once",
        f"Sending and running {QUEUED_ONCE} tasks that do nothing, each with a key of its own",
        "time / plain tasks",
        ["sending one", "running one"],
        [_sent_and_run(name, times[name], times["plain"]) for name in tasks],
        absent,
    )


def _sent_and_run(name: str, times: list[Times], plain: list[Times]) -> Row:
    return Row(
        name,
        Figure(ratio([sum(each) for each in times], [sum(each) for each in plain])),
        [
            Figure(median(each.sending for each in times) / QUEUED_ONCE * 1e6, "µs", 0),
            Figure(median(each.running for each in times) / QUEUED_ONCE * 1e6, "µs", 0),
        ],
    )
