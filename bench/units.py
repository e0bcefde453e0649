"""A key that several may hold: what a unit costs, and how many of them are in use."""

import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import locks
from contention import QUESTIONS, jain, sent
from figures import Figure, Part, Row, in_turn, median, ratio
from semaphores import OURS, adapter, open_semaphore, present
from team import Team
from uncontended import COLUMNS, figures_of, in_pairs, seconds_of

from celery_distlock import Lock
from celery_distlock.testing import EmbeddedServer

UNITS = 8
HOLD = 0.005  # seconds
SECONDS = 2.0  # of a round
ROUNDS = 3  # they are long
CROWD = 32  # processes that want a unit
READERS, WRITERS = 18, 2
KEY = "units"
LOOK = 0.01  # seconds between two looks at how many units are taken

NO_DOCKET = (
    "docket's ConcurrencyLimit is left out: it is part of docket's own tasks, and nothing else can"
    " take it."
)
NO_RIVAL = (
    "No other is here: redis-py and the rest above have no lock for readers and writers."
    " portalocker's RedisLock is one, and is not measured."
)


class Stay(NamedTuple):
    """One grant, by the clock that all processes share."""

    asked: float
    begin: float
    end: float
    alone: bool = False

    @property
    def waited(self) -> float:
        return self.begin - self.asked


class Rush(NamedTuple):
    """What all processes got in one round."""

    rate: float  # grants a second
    commands: float  # that the clients sent, for each grant
    taken: float  # units that are taken, on average, of all
    fairness: float  # Jain's index of the processes' grants
    stays: list[Stay]


def units(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    yield one_unit(server, rounds)
    with Team(CROWD) as team:
        yield all_units(team, server, rounds)
        yield readers(team, server, rounds)


def one_unit(server: EmbeddedServer, rounds: int) -> Part:
    names, absent = present()
    of_units = {name: open_semaphore(name, server.url, "one of eight", UNITS) for name in names}
    alone = {
        name: locks.open_lock(lock, server.url, "free")
        for name, lock in (("alone", locks.OURS), (locks.BARE, locks.BARE))
    }
    found = in_pairs(server.url, {**of_units, **alone}, rounds)
    times = seconds_of(found)

    def row(name: str, shown: str, terms: str, goal: float | None = None) -> Row:
        cost = Figure(ratio(times[name], times[locks.BARE]), at_most=goal)
        return Row(shown, cost, [*figures_of(found[name]), terms])

    ours, *others = names
    bare = locks.adapter(locks.BARE)
    return Part(
        "one_unit",
        f"Acquire + release of one of {UNITS} units, all free",
        "time / bare lock",
        [*COLUMNS, "terms"],
        [
            row(ours, adapter(ours).NAME, adapter(ours).TERMS, 1.25),
            row("alone", f"{adapter(ours).NAME}, all of it", "a plain lock", 1.10),
            row(locks.BARE, bare.NAME, "one holder; as above"),
            *(row(name, adapter(name).NAME, adapter(name).TERMS) for name in others),
        ],
        absent,
    )


def all_units(team: Team, server: EmbeddedServer, rounds: int) -> Part:
    names, absent = present()
    for name in names:  # connections, subscriptions, scripts
        team.together(CROWD, prepare, name, server.url)
        _rush(team, server, name, seconds=0.5)
    works = {name: partial(_rush, team, server, name) for name in names}
    rushes = in_turn(works, min(ROUNDS, rounds))
    return Part(
        "all_units",
        f"{UNITS} units, each held for {HOLD * 1e3:.0f} ms, wanted by {CROWD} processes",
        "grants/s / ours",
        [
            "grants",
            "commands a grant",
            "units taken",
            "in use",
            "at once, at most",
            "Jain's index",
            "p99 wait",
        ],
        [_row(name, rushes[name], rushes[OURS]) for name in names],
        [*absent, NO_DOCKET],
    )


def _row(name: str, rushes: Sequence[Rush], ours: Sequence[Rush]) -> Row:
    goal = name == OURS
    stays = [stay for rush in rushes for stay in rush.stays]
    return Row(
        adapter(name).NAME,
        Figure(ratio([rush.rate for rush in rushes], [rush.rate for rush in ours])),
        [
            Figure(median(rush.rate for rush in rushes), "/s", 0),
            Figure(median(rush.commands for rush in rushes), at_most=3.0 if goal else None),
            Figure(median(rush.taken for rush in rushes), at_least=0.97 if goal else None),
            Figure(median(in_use(rush.stays) for rush in rushes)),
            Figure(
                max(at_once(rush.stays) for rush in rushes),
                places=0,
                at_most=UNITS if goal else None,
            ),
            Figure(median(rush.fairness for rush in rushes), at_least=0.99 if goal else None),
            Figure(_p99([stay.waited for stay in stays]) * 1e3, "ms", 0),
        ],
    )


def _rush(team: Team, server: EmbeddedServer, name: str, seconds: float = SECONDS) -> Rush:
    with server.client() as client:
        before = sent(client)
        begin = time.monotonic() + 0.05
        for member in range(CROWD):
            team.submit(member, take, name, server.url, begin, begin + seconds)
        looks = list(_look(client, name, begin, begin + seconds))
        stays = [team.hear(member) for member in range(CROWD)]
        commands = sent(client) - before - QUESTIONS - len(looks)
    grants = [sum(stay.begin < begin + seconds for stay in each) for each in stays]
    everything = [stay for each in stays for stay in each]
    return Rush(
        sum(grants) / seconds,
        commands / len(everything),
        sum(looks) / len(looks) / UNITS,
        jain(grants),
        everything,
    )


def prepare(name: str, url: str) -> None:
    open_semaphore(name, url, KEY, UNITS)


def _look(client: Any, name: str, begin: float, end: float) -> Iterator[int]:
    """Count the units that are taken, when all have begun and until they end."""
    time.sleep(max(0.0, begin + 4 * HOLD - time.monotonic()))
    while time.monotonic() < end:
        yield adapter(name).taken(client, KEY, UNITS)
        time.sleep(LOOK)


def take(name: str, url: str, begin: float, end: float) -> list[Stay]:
    """Take and hold a unit from *begin* to *end*; those that wait then are served as well."""
    return list(_stays(open_semaphore(name, url, KEY, UNITS), begin, end))


def _stays(wanted: Any, begin: float, end: float, alone: bool = False) -> Iterator[Stay]:
    time.sleep(max(0.0, begin - time.monotonic()))
    while (asked := time.monotonic()) < end:
        wanted.acquire()
        granted = time.monotonic()
        time.sleep(HOLD)
        done = time.monotonic()  # before any waiter is notified
        wanted.release()
        yield Stay(asked, granted, done, alone)


def in_use(stays: Sequence[Stay]) -> float:
    """Return which part of the units is held while all want one."""
    begin = min(stay.begin for stay in stays)
    end = max(stay.asked for stay in stays)
    held = sum(min(stay.end, end) - stay.begin for stay in stays if stay.begin < end)
    return held / (end - begin) / UNITS


def at_once(stays: Sequence[Stay]) -> int:
    """Return how many had a unit at one moment, at most."""
    changes = sorted([(stay.begin, 1) for stay in stays] + [(stay.end, -1) for stay in stays])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def readers(team: Team, server: EmbeddedServer, rounds: int) -> Part:
    shared, alone = f"{READERS} shared, {WRITERS} alone", "all of them alone"
    works = {
        shared: partial(_mix, team, server, WRITERS),
        alone: partial(_mix, team, server, READERS + WRITERS),
    }
    for work in works.values():  # connections, subscriptions, scripts
        work(seconds=1.0)
    mixes = in_turn(works, min(ROUNDS, rounds))
    return Part(
        "readers",
        f"{READERS} readers and {WRITERS} writers of one key, {HOLD * 1e3:.0f} ms each",
        "grants/s / all of them alone",
        ["grants", "of it readers", "with a writer", "writers' p99 wait", "in phases"],
        [
            _mixed(shared, mixes[shared], mixes[alone], goal=True),
            _mixed(alone, mixes[alone], mixes[alone]),
        ],
        [NO_RIVAL],
    )


class Mix(NamedTuple):
    """What readers and writers got in one round."""

    rate: float  # grants a second
    stays: list[Stay]


def _mixed(name: str, mixes: Sequence[Mix], alone: Sequence[Mix], *, goal: bool = False) -> Row:
    stays = [stay for mix in mixes for stay in mix.stays]
    shared = sum(not stay.alone for stay in stays)
    waits = [stay.waited for stay in stays if stay.alone]
    phases = [count for mix in mixes for count in waited_phases(mix.stays)]
    return Row(
        name,
        Figure(
            ratio([mix.rate for mix in mixes], [mix.rate for mix in alone]),
            at_least=5.0 if goal else None,
        ),
        [
            Figure(median(mix.rate for mix in mixes), "/s", 0),
            Figure(100 * shared / len(stays), "%", 0),
            Figure(
                sum(with_a_writer(mix.stays) for mix in mixes),
                places=0,
                at_most=0 if goal else None,
            ),
            Figure(_p99(waits) * 1e3, "ms", 0),
            Figure(_p99(phases), places=0, at_most=2 if goal else None),
        ],
    )


def _mix(team: Team, server: EmbeddedServer, writers: int, *, seconds: float = SECONDS) -> Mix:
    begin = time.monotonic() + 0.05
    crowd = range(READERS + WRITERS)
    for member in crowd:
        team.submit(member, read_or_write, server.url, begin, begin + seconds, member < writers)
    stays = [stay for member in crowd for stay in team.hear(member)]
    grants = sum(stay.begin < begin + seconds for stay in stays)
    return Mix(grants / seconds, stays)


def read_or_write(url: str, begin: float, end: float, alone: bool) -> list[Stay]:
    """Take a lock again and again from *begin* to *end*, *alone* or as one of several holders."""
    return list(_stays(open_pages(url, alone), begin, end, alone))


@cache
def open_pages(url: str, alone: bool) -> Lock:
    return Lock("pages", shared=not alone, store=url)


def phases_of(stays: Sequence[Stay]) -> list[Stay]:
    """Put readers together that no exclusive holder was between."""
    phases: list[Stay] = []
    for stay in sorted(stays, key=lambda stay: stay.begin):
        if phases and not stay.alone and not phases[-1].alone:
            phases[-1] = phases[-1]._replace(end=max(phases[-1].end, stay.end))
        else:
            phases.append(stay)
    return phases


def waited_phases(stays: Sequence[Stay]) -> list[int]:
    """Return how many phases of others each writer has waited for."""
    phases = phases_of(stays)
    return [
        sum(phase.begin < stay.begin and phase.end > stay.asked for phase in phases)
        for stay in stays
        if stay.alone
    ]


def with_a_writer(stays: Sequence[Stay]) -> int:
    """Return how many grants broke exclusion: a writer together with any other holder."""
    ordered = sorted(stays, key=lambda stay: stay.begin)
    wrong, last_end, alone_until = 0, 0.0, 0.0
    for stay in ordered:
        wrong += stay.begin < (last_end if stay.alone else alone_until)
        last_end = max(last_end, stay.end)
        if stay.alone:
            alone_until = max(alone_until, stay.end)
    return wrong


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
