"""Processes that all want one lock, again and again."""

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import redis
from figures import Figure, Part, Row, in_turn, median, ratio
from locks import OURS, adapter, open_lock, present
from team import Team

from celery_distlock.testing import EmbeddedServer

HOLD = 0.005  # seconds
SIZES = {1: 1.0, 8: 1.5, 32: 2.5}  # processes, and for how many seconds
ROUNDS = 3  # they are long
KEY = "contended"
QUESTIONS = 2  # for counting the commands, counted along


class Turns(NamedTuple):
    """What one process got: grants in time, and how long it waited for each, also those after."""

    grants: int
    waits: list[float]


class Race(NamedTuple):
    """What all of them got in one round."""

    rate: float  # grants a second
    commands: float  # that the clients sent, for each grant
    fairness: float  # Jain's index of the processes' grants
    waits: list[float]


def contention(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    locks, absent = present()
    rows: list[Row] = []
    with Team(max(SIZES)) as team:
        for lock in locks:
            warm_up(team, server, lock)
        for size, seconds in SIZES.items():
            works = {lock: partial(_race, team, server, lock, size, seconds) for lock in locks}
            races = in_turn(works, min(ROUNDS, rounds))
            rows += [_row(size, lock, races[lock], races[OURS]) for lock in locks]
    yield Part(
        "contention",
        f"One lock, held for {HOLD * 1e3:.0f} ms, wanted by many processes",
        "grants/s / ours",
        ["processes", "grants", "commands a grant", "Jain's index", "p99 wait"],
        rows,
        absent,
    )


def _row(size: int, lock: str, races: Sequence[Race], ours: Sequence[Race]) -> Row:
    crowded = lock == OURS and size == max(SIZES)
    waits = [wait for race in races for wait in race.waits]
    return Row(
        adapter(lock).NAME,
        Figure(ratio([race.rate for race in races], [race.rate for race in ours])),
        [
            Figure(size, places=0),
            Figure(median(race.rate for race in races), "/s", 0),
            Figure(median(race.commands for race in races), at_most=3.0 if lock == OURS else None),
            Figure(
                median(race.fairness for race in races), at_least=0.99 if lock == OURS else None
            ),
            Figure(_p99(waits) * 1e3, "ms", 0, at_most=220.0 if crowded else None),
        ],
    )


def _race(team: Team, server: EmbeddedServer, lock: str, size: int, seconds: float) -> Race:
    with server.client() as client:
        before = sent(client)
        begin = time.monotonic() + 0.05
        turns = team.together(size, want, lock, server.url, begin, begin + seconds)
        commands = sent(client) - before - QUESTIONS
    grants = [turn.grants for turn in turns]
    waits = [wait for turn in turns for wait in turn.waits]
    return Race(sum(grants) / seconds, commands / len(waits), jain(grants), waits)


def warm_up(team: Team, server: EmbeddedServer, lock: str) -> None:
    """Make connections and subscriptions, and load scripts."""
    team.together(max(SIZES), prepare, lock, server.url)
    _race(team, server, lock, max(SIZES), 1.0)


def prepare(lock: str, url: str) -> None:
    open_lock(lock, url, KEY)


def want(lock: str, url: str, begin: float, end: float) -> Turns:
    """Take and hold the lock from *begin* to *end*; those that wait then are served as well."""
    wanted = open_lock(lock, url, KEY)
    time.sleep(max(0.0, begin - time.monotonic()))
    grants, waits = 0, []
    while (asked := time.monotonic()) < end:
        wanted.acquire()
        granted = time.monotonic()
        time.sleep(HOLD)
        wanted.release()
        waits.append(granted - asked)
        grants += granted < end
    return Turns(grants, waits)


def jain(shares: Sequence[int]) -> float:
    """Return 1 if all are equal, and 1/n if one of n has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _p99(waits: list[float]) -> float:
    return statistics.quantiles(waits, n=100, method="inclusive")[-1]


def sent(client: redis.Redis) -> int:
    # Commands cannot be distinguished from those that scripts call, neither in commandstats nor by
    # connection. But what these locks send is read one command at a time. Pings keep idle
    # subscriptions alive, those of locks that others' rounds leave idle among them.
    reads = int(client.info("stats")["total_reads_processed"])
    pings = client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]
    return reads - int(pings)
