"""Parse a script's answer to a request for keys, in a store over Redis."""

from collections.abc import Mapping, Sequence
from typing import Any

from celery_distlock.errors import StoreError
from celery_distlock.keys import slot_name
from celery_distlock.stores.queue_parts import Timetable
from celery_distlock.stores.values import Release, Reply, Status, WokenTask

from . import scripts
from .answers import Answer, together, token_of, unreadable
from .connections import time_left
from .parts import Part, Reach
from .request_runner import Answered


class Replies(Part):
    """Parses answers; records in *timetable* the keys that time alone opens."""

    def __init__(self, reach: Reach, timetable: Timetable) -> None:
        super().__init__(reach)
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
                _, token, slot = answer
                return Reply(Status.GRANTED, asked_at, self.token(key, token), slot=slot)
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
            return Reply(status, asked_at, token, wake=wake, slot=slot)
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
