"""
The records of a prefix: their names, the calls of scripts on them, and what scripts reply.

Answers that are no plain token or number are parsed by :mod:`.answers`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery_distlock.errors import StoreError
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.stores.queue_parts import Timetable
from celery_distlock.stores.requests import ReleaseRequest
from celery_distlock.stores.values import ALONE, UNREADABLE, Release, Reply, Status, Want, WokenTask

from . import scripts
from .answers import DIGITS, EXACT, Answer, text, together
from .connections import Command, command, fields, milliseconds, script_call, time_left
from .request_runner import Answered

if TYPE_CHECKING:
    from .parts import Reach

RELEASE = scripts.load("release")
_INDEX = scripts.load("index")


class Records:
    """
    See the module.

    Args:
        prefix: What all names begin with.
        replicas: The number of replicas that must confirm what must not be lost.
    """

    def __init__(self, prefix: str, replicas: int = 0) -> None:
        self.prefix = prefix
        self._replicas = replicas
        self._stem = f"{prefix}:{{"
        self._add = self.command("parked", "ZADD", "{}", 0)._replace(replicas=replicas)

    @property
    def times(self) -> str:
        """The prefix of the records of the times when keys are due; all in one slot."""
        return f"{self.prefix}:{{ticker}}:"

    def stem(self, name: str) -> str:
        """Return the prefix of a key's record names; all of them are in one slot."""
        return f"{self._stem}{name}}}:"

    def call(
        self, script: scripts.Script, name: str, *arguments: Any, confirmed: bool = False
    ) -> Command:
        """Return a call of *script* on a key's records."""
        call = script_call(script, (self.stem(name),), *arguments)
        return call._replace(replicas=self._replicas) if confirmed and self._replicas else call

    def release(
        self, request: ReleaseRequest, channel: tuple[str, str] = ("", ""), **more: object
    ) -> Command:
        """Return the call of `RELEASE`; *more* are fields that one kind of store has."""
        key, owner, run, completion, _, keep_for, _, _ = request
        if keep_for is not None:
            keep_run, keep_s = keep_for
            more.update(keep_run=keep_run, keep_ms=milliseconds(keep_s))
        optional = fields(**more)
        options = (*channel, optional) if optional else channel if channel[0] else ()
        return self.call(RELEASE, slot_name(key), owner, run, completion._value_, *options)

    def call_at(self, script: scripts.Script, names: Sequence[str], *arguments: Any) -> Command:
        """Return a confirmed call of *script* on the records of several keys."""
        call = script_call(script, tuple(map(self.stem, names)), *arguments)
        return call._replace(replicas=self._replicas)

    def call_without_key(self, script: scripts.Script, *arguments: Any) -> Command:
        """Return a call of *script* on records that belong to no key."""
        return script_call(script, (f"{self.prefix}:",), *arguments)

    def command(self, record: str, *words: Any) -> Command:
        """Return a command on a *record* that belongs to no key; the word ``{}`` is its name."""
        name = f"{self.prefix}:{record}".encode()
        return command(name, *(name if word == "{}" else word for word in words))

    def index(self, action: str, name: str) -> Command:
        """Return a call on the index of names with parked tasks: ``add``, or ``remove``."""
        if action == "add":
            return self._add._replace(arguments=(name,))
        return self.call_without_key(_INDEX, name)

    def index_is_whole(self, seconds: float, only: str) -> Command:
        """Return the command that marks the index as complete for *seconds*; *only*: NX or XX."""
        # At the index's node, and lost with it.
        whole = f"{self.prefix}:{{{self.prefix}:parked}}:whole"
        return command(whole.encode(), "SET", whole, 1, only, "PX", milliseconds(seconds))


def wanted(want: Want) -> str:
    """Return *want* as the scripts take it."""
    return "" if want == ALONE else want.written()


class Replies:
    """Parses answers; records in *timetable* the keys that time alone opens."""

    def __init__(self, reach: "Reach", timetable: Timetable) -> None:
        self._servers, _, self._requests, _ = reach
        self._timetable = timetable

    def reply(
        self, script: scripts.Script, key: str, answer: Any, asked_at: float, *, parks: bool = True
    ) -> Reply:
        """Parse the *answer* to *script* on *key*; without *parks* the caller asks again."""
        if isinstance(answer, bytes):  # as most answers are
            return Reply(Status.GRANTED, asked_at, self.token(key, answer))
        with self._requests.reading(script, answer):
            if not isinstance(answer, list):
                return Reply(Status.GRANTED, asked_at, self.token(key, answer))
            if answer[0] == b"granted":
                _, token, slot, *more = answer
                waited_for, token = text(more[0]) if more else "", self.token(key, token)
                return Reply(Status.GRANTED, asked_at, token, slot=slot, waited_for=waited_for)
            return self.read(key, Answer(answer), [slot_name(key)], asked_at, parks=parks)

    def read(
        self, key: str, answer: Answer, names: Sequence[str], asked_at: float, *, parks: bool = True
    ) -> Reply:
        """Return the reply in the *answer* to a request for *key*; it may wake tasks at *names*."""
        status, place = Status(answer.text("status")), answer.number("place")
        wake = together(answer.wakes(*names))
        if status is Status.GRANTED:
            self._note_opening(slot_name(key), answer)
            token, slot = self.token(key, answer.raw("token")), answer.number("slot")
            waited_for = answer.text("waited_for")
            return Reply(status, asked_at, token, wake=wake, slot=slot, waited_for=waited_for)
        due = 0.0 if place else answer.opens or 0.0
        if parks or not due:  # otherwise the caller asks again
            self._note_opening(slot_name(key), answer)
        since = answer.raw("since")
        return Reply(
            status,
            asked_at,
            max(0, token_of(answer.raw("token"))),
            answer.text("holder"),
            answer.text("run"),
            time_left(answer.number("ttl_ms")),
            max(0, place),
            wake,
            int(since) if since.isdigit() else 0,
            due=due,
            is_open=answer.flag("is_open"),
            for_time=answer.flag("for_time"),
        )

    def released(self, name: str, script: scripts.Script, asked: Answered) -> Release:
        """Return the outcome in the answer to *script* for a change that may wake executions."""
        answer = asked.answers[0]
        if isinstance(answer, int):
            # A repeated release finds the key gone if the first was executed and its answer lost.
            return Release(answer > 0 or asked.unanswered > 0)
        with self._requests.reading(script, answer):
            return Release(True, self.wakes(name, Answer(answer)))

    def token(self, key: str, value: bytes | None) -> int:
        """Return the token of a grant."""
        token = token_of(value)
        if token <= 0:
            raise StoreError(unreadable(self._servers.address, key, value))
        return token

    def wakes(self, name: str, answer: Answer) -> WokenTask | None:
        """Return what a script has woken at a key; record when time alone opens it."""
        self._note_opening(name, answer)
        return together(answer.wakes(name))

    def note_opens(self, opens: Mapping[str, float | None]) -> None:
        """Record in how many seconds keys open; None: not by time."""
        dues = {name: seconds for name, seconds in opens.items() if seconds is not None}
        if dues:
            self._timetable.note_due(dues)

    def _note_opening(self, name: str, answer: Answer) -> None:
        if answer.opens is not None:
            self._timetable.note_due({name: answer.opens})


def token_of(value: bytes | None) -> int:
    """Return the token of a record; 0 if it has none, `UNREADABLE` if it is corrupt."""
    if not value:
        return 0
    if value.isdigit() and len(value) <= DIGITS and (token := int(value)) < EXACT:
        return token
    return UNREADABLE


def unreadable(address: str, key: str, token: bytes | None) -> str:
    """Return the error text for a lock's unreadable token, with a remedy."""
    return (
        f"{address}: the record of lock {shown(key)!r} is corrupt: its token is"
        f" {shown(text(token))!r}; `celery locks release --force` frees the key"
    )
