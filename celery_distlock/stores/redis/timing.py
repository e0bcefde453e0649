"""The times when keys of a store over Redis become due, see `Timetable`."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from celery_distlock.stores.base import batches
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.queue_parts import NO_CLAIM, Claim, Dues, Settled, Timetable

from . import scripts
from .answers import Fields
from .connections import TIMEOUT, Command, milliseconds, script_call
from .inboxes import Inboxes
from .parts import SWEEP_BATCH, Part, Reach

logger = logging.getLogger(__name__)


class RedisTimetable(Part, Timetable):
    """See the module."""

    def __init__(self, reach: Reach, inboxes: Inboxes) -> None:
        super().__init__(reach)
        self._inboxes = inboxes

    def note_due(self, dues: Mapping[str, float]) -> None:
        calls = [
            self._call(_DUE, _written(dict(some)))
            for some in batches(list(dues.items()), SWEEP_BATCH)
        ]
        for answer in self._requests.attempt_briefly(calls):
            if isinstance(answer, Exception):
                words = "the times when keys are due were not recorded; a sweep finds them: %s"
                logger.debug(words, answer)

    def claim_due(
        self, process: str, inbox: Inbox, seconds: float, settled: Settled = NO_CLAIM
    ) -> Claim:
        written = f"{settled.number} {_written(settled.again)}" if settled.again else ""
        for_ms = milliseconds(seconds) if seconds else 0
        call = self._call(_TICK, process, inbox.address, for_ms, SWEEP_BATCH, written)
        (answer,) = self._requests.ask_once([call], TIMEOUT)
        with self._requests.reading(_TICK, answer):
            data = Fields.read(answer)
            pause, late = data.seconds("pause_ms"), data.number("late_ms") / 1000
            pause, due = math.inf if pause is None else pause, tuple(data.texts("names"))
            return Claim(data.flag("leads"), pause, due, late, data.text("claim"))

    def led_for(self) -> float:
        return self._leader(f"{self._records.times}ticker")[1]

    def ticker_inbox(self, process: str) -> Inbox:
        return self._inboxes.inbox(self._records.times, process)

    def dues(self) -> Dues:
        answer = self._requests.ask([self._call(_DUES)], "what is due").answers[0]
        with self._requests.reading(_DUES, answer):
            data = Fields.read(answer)
            return Dues(data.text("ticker"), data.number("many"), data.number("first_ms") / 1000)

    def _call(self, script: scripts.Script, *arguments: Any) -> Command:
        return script_call(script, (self._records.times,), *arguments)


def _written(dues: Mapping[str, float | None]) -> str:
    return " ".join(
        f"{name} {-1 if seconds is None else max(0, math.ceil(seconds * 1000))}"
        for name, seconds in dues.items()
    )


_DUE, _TICK, _DUES = map(scripts.load, ("due", "tick", "dues"))
