"""What a store over Redis tells of all its keys: the half of it that looks, and counts."""

import json
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Protocol

from celery_distlock import lua
from celery_distlock.keys import key_of, slot_name

from .base import KeyState, Store, Waiter, Wake
from .refusals import described, facts_of
from .servers import Servers
from .wires import TIMEOUT, Call, command, script_call, time_left

__all__ = ["SWEEP_BATCH", "RedisListing", "state_of", "text", "told_by"]

SWEEP_BATCH = 100  # keys a round trip
SCAN_BATCH = 1000  # records that the server looks at, a round trip

_QUESTIONS = (("INFO",), ("CONFIG", "GET", "save"), ("TIME",))
_GLOB = re.compile(r"[\\*?\[\]]")
_PLAIN = re.compile(r"[\w:.,;/*-]*", re.ASCII)  # a pattern that a server reads as fnmatch does


class Answered(Protocol):
    """What came of a request."""

    @property
    def answers(self) -> list[Any]:
        """One for each call."""


class RedisListing(Store):
    """See the module. The other half has the means to ask."""

    _servers: Servers

    @abstractmethod
    def _ask(self, calls: Sequence[Call], what: str) -> Answered:
        """Send *calls* together until they are answered."""

    @abstractmethod
    def _attempt(self, calls: Sequence[Call]) -> Answered:
        """As `_ask`, but what went wrong with a call is its answer."""

    @abstractmethod
    def _ask_once(self, calls: Sequence[Call], timeout: float) -> list[Any]:
        """Send *calls*, and do not repeat them."""

    @abstractmethod
    def _stem(self, name: str) -> str:
        """Return what the names of a key's records begin with."""

    @abstractmethod
    def _call(self, script: lua.Script, name: str, *arguments: Any) -> Call:
        """Return a call of *script* on a key's records."""

    @abstractmethod
    def _command(self, record: str, *words: Any) -> Call:
        """Return a call on a *record* that is no key's; the word ``{}`` stands for its name."""

    @abstractmethod
    def _index(self, action: str, name: str) -> Call:
        """Return a call on the index of names with parked tasks."""

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        seen: set[str] = set()
        for names in chain(self._held_names(pattern), self._waiting_names()):
            found = dict.fromkeys(key_of(name) for name in names)
            new = [key for key in found if key not in seen and fnmatchcase(key, pattern)]
            if new:
                seen.update(new)
                yield new

    def _held_names(self, pattern: str) -> Iterator[list[str]]:
        head, tail = (_GLOB.sub(r"\\\g<0>", part) for part in self._stem("\0").split("\0"))
        mask = f"{head}{pattern if _PLAIN.fullmatch(pattern) else '*'}{tail}lock"
        first, last = len(self._stem("")) - 2, -len("}:lock")
        for node in self._servers.nodes():
            for cursor in _Cursor():
                scan = command(b"", "SCAN", cursor.at, "MATCH", mask, "COUNT", SCAN_BATCH)
                asked = self._ask([scan._replace(node=node)], "the list of keys")
                cursor.at, found = asked.answers[0]
                yield [text(record)[first:last] for record in found]

    def _waiting_names(self) -> Iterator[list[str]]:
        """Return the names that the index has, of keys with parked tasks; some have none now."""
        for cursor in _Cursor():
            scan = self._command("parked", "ZSCAN", "{}", cursor.at, "COUNT", SWEEP_BATCH)
            cursor.at, found = self._ask([scan], "the names of parked tasks").answers[0]
            if found:
                yield list(dict.fromkeys(text(name) for name in found[::2]))

    def look(self, keys: Sequence[str]) -> list[KeyState]:
        states = []
        for first in range(0, len(keys), SWEEP_BATCH):
            some = keys[first : first + SWEEP_BATCH]
            calls = [self._call(_INSPECT, slot_name(key)) for key in some]
            states += [state_of(answer) for answer in self._ask(calls, "the keys").answers]
        return states

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        call = self._call(_WAITERS, slot_name(key), first, first + limit - 1)
        woken, *facts = self._ask([call], key).answers[0]
        found = zip(facts[::3], facts[1::3], facts[2::3], strict=True)
        return [_waiter(*each, woken=number < woken) for number, each in enumerate(found)]

    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        mask = _GLOB.sub(r"\\\g<0>", f"{task_id}:") + "*"
        for names in self._waiting_names() if key is None else [[slot_name(key)]]:
            for name in names:
                for record, kind in (("queue", "p:"), ("woken", "")):
                    for member in self._members(f"{self._stem(name)}{record}", kind + mask):
                        yield key_of(name), member.removeprefix(kind)

    def parked(self, key: str, run: str) -> Waiter | None:
        stem = self._stem(slot_name(key))
        tasks, woken = f"{stem}tasks", f"{stem}woken"
        calls = [
            command(tasks.encode(), "HMGET", tasks, f"e:{run}", f"s:{run}"),
            command(woken.encode(), "ZSCORE", woken, run),
        ]
        (envelope, arrival), due = self._ask(calls, key).answers
        if envelope is None:
            return None
        return Waiter("", run, float(arrival or 0) / 1e6, envelope, due is not None)

    def _members(self, record: str, mask: str) -> Iterator[str]:
        words = "MATCH", mask, "COUNT", SCAN_BATCH
        for cursor in _Cursor():
            scan = command(record.encode(), "ZSCAN", record, cursor.at, *words)
            cursor.at, found = self._ask([scan], "a parked task").answers[0]
            yield from map(text, found[::2])

    def rouse(self, key: str) -> Iterator[Wake]:
        name = slot_name(key)
        self._ask([self._index("add", name)], key)  # lest it was lost
        for waiter in self.waiters(key):
            if waiter.woken:
                self.came_back(Wake(name, waiter.run, b""))
        _, *found = self._ask([self._call(_SWEEP, name, SWEEP_BATCH)], key).answers[0]
        for run, envelope in zip(found[::2], found[1::2], strict=True):
            yield Wake(name, text(run), envelope)

    def count(self, counts: Mapping[str, float]) -> None:
        stem = self._stem("").removesuffix("{}:")
        self._ask_once([script_call(_COUNT, (stem,), json.dumps(counts))], TIMEOUT)

    def counts(self) -> dict[str, float]:
        found = self._ask([self._command("counts", "HGETALL", "{}")], "the counters").answers[0]
        return {text(what): float(by) for what, by in zip(found[::2], found[1::2], strict=True)}

    def facts(self) -> Iterator[tuple[str, str]]:
        return told_by(self._servers, self._attempt)


def told_by(
    servers: Servers, attempt: Callable[[Sequence[Call]], Answered]
) -> Iterator[tuple[str, str]]:
    """Describe *servers* for people, as `Store.facts` does, by what they answer to *attempt*."""
    for node in servers.nodes():
        asked_at = time.time()
        calls = [command(b"", *words)._replace(node=node) for words in _QUESTIONS]
        info, save, now = attempt(calls).answers
        if not isinstance(info, bytes) or not isinstance(now, list):
            yield "server", f"does not tell of itself: {next(filter(_failed, (info, now)))}"
            continue
        ahead = int(now[0]) + int(now[1]) / 1e6 - (asked_at + time.time()) / 2
        yield from described(facts_of(info, save), ahead)


def _failed(answer: object) -> bool:
    return isinstance(answer, Exception)


class _Cursor:
    """Iterates until the server has set it to 0 again."""

    def __init__(self) -> None:
        self.at = b""

    def __iter__(self) -> "_Cursor":
        return self

    def __next__(self) -> "_Cursor":
        if self.at == b"0":
            raise StopIteration
        self.at = self.at or b"0"
        return self


def text(value: bytes | None) -> str:
    """Return what a server says as text; of nothing, the empty one."""
    return value.decode() if value else ""


def state_of(answer: Sequence[Any]) -> KeyState:
    """Return what inspect.lua says."""
    owner, token, run, ttl_ms, waiting, oldest, woken = answer
    return KeyState(
        text(owner),
        int(token or 0),
        text(run),
        int(token or 0) / 1e6,  # a token is the time of its grant
        time_left(ttl_ms),
        waiting,
        float(oldest) / 1e6,
        woken,
    )


def _waiter(member: bytes, arrival: bytes, envelope: bytes, *, woken: bool) -> Waiter:
    kind, _, who = text(member).partition(":")
    since = float(arrival) / 1e6
    if kind == "p":
        return Waiter("", who, since, envelope, woken)
    return Waiter(who.partition(" ")[2], "", since)


_COUNT, _INSPECT, _SWEEP, _WAITERS = map(lua.load, ("count", "inspect", "sweep", "waiters"))
