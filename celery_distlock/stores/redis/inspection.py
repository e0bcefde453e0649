"""What a store over Redis tells of all its keys: the half of it that looks, and counts."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from redis.exceptions import ResponseError

from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.naming import shown
from celery_distlock.stores.base import Complaints, batches
from celery_distlock.stores.findings import Finding
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.listing import CountingStore, ListingStore
from celery_distlock.stores.values import (
    UNREADABLE,
    Holder,
    KeyState,
    Limit,
    Route,
    Starts,
    Waiter,
    WokenTask,
    read_rates,
)

from . import scripts
from .answers import (
    Answer,
    Fields,
    is_ours,
    since_of,
    sum_counters,
    text,
    token_of,
    unreadable,
    want_of,
)
from .connections import TIMEOUT, Command, command, time_left
from .records import Records
from .request_runner import RequestRunner
from .scanning import SCAN_BATCH, Cursor, KeysWith, keys_of, literal, names_at
from .server_errors import is_transient
from .server_reports import describe_server
from .topology import Topology

__all__ = ["SWEEP_BATCH", "RedisInspection"]

logger = logging.getLogger(__name__)

SHARED = "several:"  # the owner in the record of a key that several hold
SWEEP_BATCH = 100  # keys a round trip
_PLACES = (("queue", "p:"), ("woken", ""), ("later", ""))  # of runs, with what goes before them

_LIMIT = re.compile(r"(-|\d{1,15})(?:/(\S*))? (\d{1,15}) (\d{1,16}) (.*)", re.DOTALL)


class RedisInspection(ListingStore, CountingStore):
    """See the module. What it needs is set by the class that inherits from it."""

    _servers: Topology
    _records: Records
    _requests: RequestRunner
    _complaints: Complaints

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        yield from keys_of(chain(self._held(pattern), self._waited_for()), pattern)

    def _held(self, pattern: str) -> Iterator[list[str]]:
        answered, away = 0, []

        def ask(scan: Command) -> Any:
            """Return a cursor and records; of a node that is away, where others are, none."""
            nonlocal answered
            try:
                found = self._requests.ask([scan], "the list of keys").answers[0]
            except StoreUnavailableError as error:
                if self._servers.in_order:
                    raise
                away.append(error)
                return b"0", ()
            answered += 1
            return found

        holds = KeysWith(self._records.stem, pattern)
        yield from names_at(self._servers, holds, ask, self._requests.reading)
        if away and not answered:
            raise away[0]
        for error in away:
            self._leave_out(error)

    def _waited_for(self) -> Iterator[list[str]]:
        try:
            for names in self._waiting_names():
                yield [name for name in names if is_ours(name)]
        except StoreUnavailableError as error:
            if self._servers.in_order:
                raise
            self._leave_out(error)
        except StoreError as error:
            self._complaints.tell("", "keys that nobody holds are not listed: %s", error)

    def _leave_out(self, error: StoreUnavailableError) -> None:
        self.left_out += 1
        logger.warning("a part of the keys is not listed: %s", error)

    def _waiting_names(self) -> Iterator[list[str]]:
        """Return the names that the index has, of keys with parked tasks; some have none now."""
        for cursor in Cursor():
            scan = self._records.command("parked", "ZSCAN", "{}", cursor.at, "COUNT", SWEEP_BATCH)
            answer = self._requests.ask([scan], "the names of parked tasks").answers[0]
            with self._requests.reading("ZSCAN", answer) as (cursor.at, found):
                names = list(dict.fromkeys(text(name) for name in found[::2]))
            if names:
                yield names

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        states = []
        for some in batches(keys, SWEEP_BATCH):
            calls = [self._records.call(_INSPECT, slot_name(key)) for key in some]
            for key, answer in zip(some, self._requests.attempt(calls).answers, strict=True):
                if isinstance(answer, Exception):
                    self._pass_over(slot_name(key), answer)
                    states.append(KeyState("", 0, "", 0.0, 0.0, 0))
                else:
                    with self._requests.reading(_INSPECT, answer):
                        states.append(self._state(key, answer))
        return states

    def _pass_over(self, name: str, refusal: Exception) -> None:
        """Let one key's spoilt records not keep the others from being seen; say so once."""
        if isinstance(refusal, ResponseError) and not is_transient(refusal):
            why = self._requests.refusal(refusal, key_of(name))
            self._complaints.tell(name, "%s: it is passed over, and wakes nobody", why)
        elif self._servers.in_order:
            raise self._requests.outage(refusal) from refusal
        else:  # its node is away; others go on
            self.left_out += 1
            logger.warning("%s is passed over: %s", shown(key_of(name)), refusal)

    def _state(self, key: str, answer: bytes) -> KeyState:
        """Return what inspect.lua says."""
        told = Fields.read(answer)
        owner = told.text("owner")
        token = token_of(told.raw("token")) or UNREADABLE if owner else 0
        if token == UNREADABLE:
            why = unreadable(self.address, key, told.raw("token"))
            self._complaints.tell(slot_name(key), "%s", why)
        state = KeyState(
            owner,
            token,
            told.text("run"),
            max(0, token) / 1e6,  # a token is the time of its grant
            time_left(told.number("ttl_ms")),
            told.number("waiting"),
            since_of(told.raw("oldest")),
            told.number("woken"),
            told.text("task"),
            limit=_limit(told.text("limit")),
            rest=told.number("rest_ms") / 1000,
            starts=_starts(told),
            later=told.number("later"),
            due=told.number("due_ms") / 1000,
            opens=told.seconds("opens_ms"),
            identities=told.number("identities"),
        )
        return _shared(state, told) if owner == SHARED else state

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        call = self._records.call(_WAITERS, slot_name(key), first, first + limit - 1)
        answer = self._requests.ask([call], key).answers[0]
        with self._requests.reading(_WAITERS, answer):
            found = Fields.read(answer)
            woken = [_waiter(each, woken=True) for each in found.each("woken")]
            return woken + [_waiter(each, woken=False) for each in found.each("queue")]

    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        mask = literal(f"{task_id}:") + "*"
        for names in self._waiting_names() if key is None else [[slot_name(key)]]:
            for place in _PLACES:  # one after the other: a run may go on to the next one meanwhile
                for name, run in self._runs_like(mask, names, *place):
                    if task_id_of(run) == task_id:
                        yield key_of(name), run

    def parked(self, key: str, run: str) -> Waiter | None:
        stem = self._records.stem(slot_name(key))
        tasks, woken = f"{stem}tasks", f"{stem}woken"
        fields = f"e:{run}", f"s:{run}", f"t:{run}", f"k:{run}", f"w:p:{run}"
        calls = [
            command(tasks.encode(), "HMGET", tasks, *fields),
            command(woken.encode(), "ZSCORE", woken, run),
        ]
        found, due = self._requests.ask(calls, key).answers
        with self._requests.reading("HMGET", found) as (envelope, arrival, task, keys, want):
            if envelope is None:
                return None
            route = Route.read(text(keys)) if keys else None
            since, is_woken = since_of(arrival), due is not None
            return Waiter("", run, since, envelope, is_woken, text(task), route, want_of(want))

    def _runs_like(
        self, mask: str, names: Sequence[str], record: str, kind: str
    ) -> Iterator[tuple[str, str]]:
        """Yield the runs like *mask*, each with its key's name; all keys are asked at once."""
        cursors = dict.fromkeys(names, b"0")
        while cursors:
            scans = [self._scan(name, record, kind + mask, at) for name, at in cursors.items()]
            answers = zip(list(cursors), self._requests.attempt(scans).answers, strict=True)
            for name, answer in answers:
                if isinstance(answer, Exception):
                    self._pass_over(name, answer)
                    del cursors[name]
                    continue
                with self._requests.reading("ZSCAN", answer) as (cursors[name], found):
                    runs = [text(member).removeprefix(kind) for member in found[::2]]
                yield from ((name, run) for run in runs)
            cursors = {name: at for name, at in cursors.items() if at != b"0"}

    def _scan(self, name: str, record: str, mask: str, cursor: bytes) -> Command:
        where = f"{self._records.stem(name)}{record}"
        words = ("MATCH", mask, "COUNT", SCAN_BATCH)
        return command(where.encode("utf-8", "surrogateescape"), "ZSCAN", where, cursor, *words)

    def wake_again(self, key: str) -> Iterator[WokenTask]:
        name = slot_name(key)
        self._requests.ask([self._records.index("add", name)], key)  # lest it was lost
        calls = [self._records.call(script, name, SWEEP_BATCH) for script in (_ROUSE, _SWEEP)]
        answer = self._requests.ask(calls, key).answers[-1]
        with self._requests.reading(_SWEEP, answer):
            wakes = Answer(answer).wakes(name)
        yield from wakes

    def count(self, counts: Mapping[str, float]) -> None:
        add = self._records.call_without_key(_COUNT, json.dumps(counts))
        self._requests.ask_once([add], TIMEOUT)

    def counts(self) -> dict[str, float]:
        asked = self._requests.ask(
            [self._records.command("counts", "HGETALL", "{}")], "the counters"
        )
        with self._requests.reading("HGETALL", asked.answers[0]) as found:
            return sum_counters(found)

    def describe(self) -> Iterator[Finding]:
        return describe_server(self._servers, self._requests.attempt)


def _limit(written: str) -> Limit | None:
    """Return the limit that limit.lua has written, if it has not ended."""
    match = _LIMIT.fullmatch(written)
    if match is None:
        return None
    capacity, rates, until_ms, since, author = match.groups()
    units = None if capacity == "-" else int(capacity)
    return Limit(units, int(until_ms) / 1000, author, int(since) / 1e6, read_rates(rates or ""))


def _starts(told: Fields) -> tuple[Starts, ...]:
    counts = [
        Starts(each.number("limit"), each.number("per") / 1e6, each.number("begun"))
        for each in told.each("starts")
    ]
    return tuple(sorted(counts, key=lambda starts: starts.per))


def _shared(state: KeyState, told: Fields) -> KeyState:
    """Return *state* with those who have the key beside others."""
    capacity = told.raw("capacity")
    holders = [
        Holder(
            each.text("owner"),
            each.text("run"),
            each.number("units"),
            each.number("slot"),
            since_of(each.raw("since")),
            each.number("left_ms") / 1000,
            each.text("task"),
        )
        for each in told.each("holders")
    ]
    if not holders:
        return state._replace(owner="", token=0, run="", since=0.0, remaining=0.0)
    first = holders[0]
    return state._replace(
        owner=first.owner,
        run=first.run,
        since=first.since,
        remaining=first.remaining,
        holders=tuple(holders),
        used=told.number("used"),
        capacity=int(capacity) if capacity.isdigit() and len(capacity) < 10 else 0,
    )


def _waiter(told: Fields, *, woken: bool) -> Waiter:
    _, _, owner = told.text("blocked").partition(" ")
    since, want = since_of(told.raw("since")), want_of(told.raw("want"))
    return Waiter(owner, told.text("run"), since, b"", woken, told.text("task"), want=want)


_COUNT, _INSPECT, _ROUSE, _SWEEP, _WAITERS = map(
    scripts.load, ("count", "inspect", "rouse", "sweep", "waiters")
)
