"""When keys of a store over Redis become due, see `Timetable`."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from celery_distlock.stores.base import batches
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.queue_parts import NO_CLAIM, Claim, Dues, Settled, Timetable
from celery_distlock.stores.values import WokenTask

from . import scripts
from .answers import Answer, Fields, together
from .connections import TIMEOUT, Command, milliseconds, script_call
from .inspection import SWEEP_BATCH
from .records import Records
from .request_runner import RequestRunner

__all__ = ["RedisTiming"]

logger = logging.getLogger(__name__)

NOT_ANSWERED = 1.0  # seconds until a key is looked at again whose server did not answer


class RedisTiming(Timetable):
    """See the module. What it needs is set by the class that inherits from it."""

    _records: Records
    _requests: RequestRunner

    def _inbox_at(self, stem: str, owner: str) -> Inbox:
        """Return where *owner* is called by the server of the records that begin so."""
        raise NotImplementedError

    def _sweep_calls(self, names: Sequence[str]) -> list[Command]:
        """Return what asks for the sweep of some keys."""
        raise NotImplementedError

    def _swept(
        self, names: Sequence[str], answers: Sequence[Any], opens: dict[str, float | None]
    ) -> Iterator[WokenTask]:
        """Yield whom that has woken; put into *opens* when time lets others enter."""
        raise NotImplementedError

    def _noting(self, name: str, answer: Answer) -> WokenTask | None:
        """Return whom a script has woken; note when time lets others enter, if it told so."""
        self._note_opening(name, answer)
        return together(answer.wakes(name))

    def _note_opening(self, name: str, answer: Answer) -> None:
        if answer.opens is not None:
            self.note_due({name: answer.opens})

    def note_due(self, dues: Mapping[str, float]) -> None:
        calls = [
            self._call(_DUE, _written(dict(some)))
            for some in batches(list(dues.items()), SWEEP_BATCH)
        ]
        for answer in self._requests.attempt_beside(calls):
            if isinstance(answer, Exception):
                words = "when keys are due was not noted, a sweep finds them: %s"
                logger.debug(words, answer)

    def claim_due(
        self, who: str, inbox: Inbox, seconds: float, settled: Settled = NO_CLAIM
    ) -> Claim:
        written = f"{settled.number} {_written(settled.again)}" if settled.again else ""
        for_ms = milliseconds(seconds) if seconds else 0
        call = self._call(_TICK, who, inbox.address, for_ms, SWEEP_BATCH, written)
        (answer,) = self._requests.ask_once([call], TIMEOUT)
        with self._requests.reading(_TICK, answer):
            told = Fields.read(answer)
            pause, late = told.seconds("pause_ms"), told.number("late_ms") / 1000
            pause, due = math.inf if pause is None else pause, tuple(told.texts("names"))
            return Claim(told.flag("leads"), pause, due, late, told.text("claim"))

    def ticker_inbox(self, who: str) -> Inbox:
        return self._inbox_at(self._records.times, who)

    def wake_due(self, names: Sequence[str], again: dict[str, float | None]) -> Iterator[WokenTask]:
        again.update(dict.fromkeys(names, NOT_ANSWERED))
        answers = self._requests.attempt_once(self._sweep_calls(names))
        yield from self._swept(names, answers, again)

    def dues(self) -> Dues:
        answer = self._requests.ask([self._call(_DUES)], "what is due").answers[0]
        with self._requests.reading(_DUES, answer):
            told = Fields.read(answer)
            return Dues(told.text("ticker"), told.number("many"), told.number("first_ms") / 1000)

    def _call(self, script: scripts.Script, *arguments: Any) -> Command:
        return script_call(script, (self._records.times,), *arguments)


def _written(dues: Mapping[str, float | None]) -> str:
    return " ".join(
        f"{name} {-1 if seconds is None else max(0, math.ceil(seconds * 1000))}"
        for name, seconds in dues.items()
    )


_DUE, _TICK, _DUES = map(scripts.load, ("due", "tick", "dues"))
