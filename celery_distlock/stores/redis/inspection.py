"""The read side of a store over Redis: list, inspect and count its keys."""

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from redis.exceptions import ResponseError

from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.naming import shown
from celery_distlock.stores.base import batches
from celery_distlock.stores.holders import Asked
from celery_distlock.stores.values import (
    UNREADABLE,
    Holder,
    KeyState,
    Limit,
    Starts,
    Waiter,
    Want,
    read_rates,
)

from . import scripts
from .answers import Fields, is_ours, since_of, text, want_of
from .connections import Command, time_left
from .parts import SWEEP_BATCH, Part
from .records import token_of, unreadable, wanted
from .scanning import Cursor, KeysWith, keys_of, names_at
from .server_errors import is_transient

logger = logging.getLogger(__name__)

SHARED = "several:"  # the owner in the record of a shared key

_LIMIT = re.compile(r"(?:@(\S+) )?(-|\d{1,15})(?:/(\S*))? (\d{1,15}) (\d{1,16}) (.*)", re.DOTALL)


class Inspection(Part):
    """See the module; the methods do what those of a store do."""

    left_out = 0

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        yield from keys_of(chain(self._held(pattern), self._waited_for()), pattern)

    def _held(self, pattern: str) -> Iterator[list[str]]:
        answered, unreachable = 0, []

        def ask(scan: Command) -> Any:
            """Return a cursor and records; none for an unreachable node if there are others."""
            nonlocal answered
            try:
                found = self._requests.ask([scan], "the list of keys").answers[0]
            except StoreUnavailableError as error:
                if self._servers.in_order:
                    raise
                unreachable.append(error)
                return b"0", ()
            answered += 1
            return found

        holds = KeysWith(self._records.stem, pattern)
        yield from names_at(self._servers, holds, ask, self._requests.reading)
        if unreachable and not answered:
            raise unreachable[0]
        for error in unreachable:
            self._leave_out(error)

    def _waited_for(self) -> Iterator[list[str]]:
        try:
            for names in self.waiting_names():
                yield [name for name in names if is_ours(name)]
        except StoreUnavailableError as error:
            if self._servers.in_order:
                raise
            self._leave_out(error)
        except StoreError as error:
            self._complaints.report("", "keys without a holder are not listed: %s", error)

    def _leave_out(self, error: StoreUnavailableError) -> None:
        self.left_out += 1
        logger.warning("some keys are not listed: %s", error)

    def waiting_names(self) -> Iterator[list[str]]:
        """Return the names in the index, of keys with parked tasks; some may have none now."""
        for cursor in Cursor():
            scan = self._records.command("parked", "ZSCAN", "{}", cursor.at, "COUNT", SWEEP_BATCH)
            answer = self._requests.ask([scan], "the names of parked tasks").answers[0]
            with self._requests.reading("ZSCAN", answer) as (cursor.at, found):
                names = list(dict.fromkeys(text(name) for name in found[::2]))
            if names:
                yield names

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        return self._inspect(key, timeout)[0]

    def inspect_for(
        self, key: str, want: Want, timeout: float | None = None
    ) -> tuple[KeyState, bool]:
        return self._inspect(key, timeout, wanted(want))

    def _inspect(self, key: str, timeout: float | None, *want: str) -> tuple[KeyState, bool]:
        look = [self._records.call(_INSPECT, slot_name(key), *want)]
        answers = (
            self._requests.ask(look, key).answers
            if timeout is None
            else self._requests.ask_once(look, timeout)
        )
        with self._requests.reading(_INSPECT, answers[0]) as answer:
            fields = Fields.read(answer)
            return self._state(key, fields), fields.flag("admits")

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        states = []
        for some in batches(keys, SWEEP_BATCH):
            calls = [self._records.call(_INSPECT, slot_name(key)) for key in some]
            for key, answer in zip(some, self._requests.attempt(calls).answers, strict=True):
                if isinstance(answer, Exception):
                    self.pass_over(slot_name(key), answer)
                    states.append(KeyState("", 0, "", 0.0, 0.0, 0))
                else:
                    with self._requests.reading(_INSPECT, answer):
                        states.append(self._state(key, Fields.read(answer)))
        return states

    def pass_over(self, name: str, refusal: Exception) -> None:
        """Skip one key with corrupt records, so that the others are still seen; log it once."""
        if isinstance(refusal, ResponseError) and not is_transient(refusal):
            why = self._requests.refusal(refusal, key_of(name))
            self._complaints.report(name, "%s: the key is skipped, and wakes no task", why)
        elif self._servers.in_order:
            raise self._requests.outage(refusal) from refusal
        else:  # its node is unreachable; the others are still listed
            self.left_out += 1
            logger.warning("%s is skipped: %s", shown(key_of(name)), refusal)

    def _state(self, key: str, fields: Fields) -> KeyState:
        """Return the state that inspect.lua has reported."""
        owner = fields.text("owner")
        token = token_of(fields.raw("token")) or UNREADABLE if owner else 0
        if token == UNREADABLE:
            why = unreadable(self._servers.address, key, fields.raw("token"))
            self._complaints.report(slot_name(key), "%s", why)
        limits = dict(_limits(fields.text("limit")))
        state = KeyState(
            owner,
            token,
            fields.text("run"),
            max(0, token) / 1e6,  # a token is the time of its grant
            time_left(fields.number("ttl_ms")),
            fields.number("waiting"),
            since_of(fields.raw("oldest")),
            fields.number("woken"),
            fields.text("task"),
            limit=limits.pop(None, None),
            lane_limits=tuple((lane, each) for lane, each in limits.items() if lane is not None),
            rest=fields.number("rest_ms") / 1000,
            starts=_starts(fields),
            later=fields.number("later"),
            due=fields.number("due_ms") / 1000,
            opens=fields.seconds("opens_ms"),
            identities=fields.number("identities"),
            asked=_asked(fields),
        )
        return _shared(state, fields) if owner == SHARED else state

    def waiters(self, key: str, *lane: str, first: int = 0, limit: int = 100) -> list[Waiter]:
        call = self._records.call(_WAITERS, slot_name(key), first, first + limit - 1, *lane)
        answer = self._requests.ask([call], key).answers[0]
        with self._requests.reading(_WAITERS, answer):
            found = Fields.read(answer)
            woken = [_waiter(each, woken=True) for each in found.each("woken")]
            return woken + [_waiter(each, woken=False) for each in found.each("queue")]


def _limits(written: str) -> Iterator[tuple[str | None, Limit]]:
    """Yield the limits that limit.lua has written, each with its lane; None: that of the key."""
    for match in filter(None, map(_LIMIT.fullmatch, written.split("\n"))):
        lane, capacity, rates, until_ms, since, author = match.groups()
        units, until = None if capacity == "-" else int(capacity), int(until_ms) / 1000
        limit = Limit(units, until, author, int(since) / 1e6, read_rates(rates or ""))
        yield None if lane is None else key_of(lane), limit


def _asked(fields: Fields) -> Asked:
    asked = fields.text("asked")
    by = "a newer call" if asked.startswith("n") else "an operator"
    return Asked(since_of(asked.lstrip("n").encode()), by) if asked else Asked()


def _starts(fields: Fields) -> tuple[Starts, ...]:
    counts = [
        Starts(each.number("limit"), each.number("per") / 1e6, each.number("begun"))
        for each in fields.each("starts")
    ]
    return tuple(sorted(counts, key=lambda starts: starts.per))


def _shared(state: KeyState, fields: Fields) -> KeyState:
    """Return *state* with the concurrent holders of the key."""
    capacity = fields.raw("capacity")
    holders = [
        Holder(
            each.text("owner"),
            each.text("run"),
            each.number("units"),
            each.number("slot"),
            since_of(each.raw("since")),
            each.number("left_ms") / 1000,
            each.text("task"),
            _asked(each),
        )
        for each in fields.each("holders")
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
        used=fields.number("used"),
        capacity=int(capacity) if capacity.isdigit() and len(capacity) < 10 else 0,
    )


def _waiter(fields: Fields, *, woken: bool) -> Waiter:
    _, _, owner = fields.text("blocked").partition(" ")
    since, want = since_of(fields.raw("since")), want_of(fields.raw("want"))
    run, task, leaves = fields.text("run"), fields.text("task"), fields.seconds("leaves_ms")
    return Waiter(owner, run, since, b"", woken, task, want=want, leaves=leaves)


_INSPECT, _WAITERS = map(scripts.load, ("inspect", "waiters"))
