"""How long a lock takes from one process, which releases it, to another, which waits for it."""

import random
import time
from collections.abc import Iterator
from functools import partial

from figures import Figure, Part, Row, in_turn, median, ratio
from locks import OURS, adapter, open_lock, present
from team import Team

from celery_distlock.testing import EmbeddedServer

KEY = "handed over"
TIMES = 10  # in one round
# Seconds that the waiter waits before; evenly spread over the period of a lock that polls.
PAUSE, SPREAD = 0.02, 0.1
HOLDER, WAITER = 0, 1


def handoff(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    locks, absent = present()
    with Team(2) as team:
        works = {lock: partial(_median, team, server, lock) for lock in locks}
        in_turn(works, 1)  # connections, subscriptions, scripts
        times = in_turn(works, rounds)
    rows = [
        Row(
            adapter(lock).NAME,
            Figure(ratio(times[lock], times[OURS])),
            [Figure(median(times[lock]) * 1e3, "ms", at_most=1.0 if lock == OURS else None)],
        )
        for lock in locks
    ]
    yield Part(
        "handoff",
        "From release to the next one's acquire, between two processes",
        "time / ours",
        ["median"],
        rows,
        absent,
    )


def _median(team: Team, server: EmbeddedServer, lock: str) -> float:
    return median(_hand_over(team, server, lock) for _ in range(TIMES))


def _hand_over(team: Team, server: EmbeddedServer, lock: str) -> float:
    team.submit(HOLDER, take, lock, server.url)
    team.hear(HOLDER)
    team.submit(WAITER, take_and_release, lock, server.url)
    team.submit(HOLDER, release, lock, server.url, PAUSE + SPREAD * random.random())
    # Both read the same clock: on Linux, CLOCK_MONOTONIC.
    released = team.hear(HOLDER)
    return team.hear(WAITER) - released


def take(lock: str, url: str) -> None:
    open_lock(lock, url, KEY).acquire()


def take_and_release(lock: str, url: str) -> float:
    wanted = open_lock(lock, url, KEY)
    wanted.acquire()
    acquired = time.monotonic()
    wanted.release()
    return acquired


def release(lock: str, url: str, after: float) -> float:
    time.sleep(after)
    begin = time.monotonic()
    open_lock(lock, url, KEY).release()
    return begin
