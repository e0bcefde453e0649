"""
Marks of ended runs, by which a second delivery is recognised for one to two hours.

A mark is a node ``done/<hour>/<2 digits>/<the others>``, so that old ones are deleted by the hour.
"""

import json
import logging
import math
import re
from typing import NamedTuple

from celery_distlock import clock
from celery_distlock.process.threads import DaemonThread

from .queues import digest
from .sessions import FAILURES, TIMEOUT, Exchange, SessionManager, words, zk

logger = logging.getLogger(__name__)

HOUR = 3600  # seconds
_HOUR = re.compile(r"[0-9]{1,12}")
HOUSEKEEPING = 60.0  # seconds between two searches for old marks


class CompletedRun(NamedTuple):
    """The end of a run. If its second delivery is held back: the seconds, and those `left`."""

    path: str
    held_back: float
    left: float


def held_back_of(data: bytes) -> float | None:
    """Return for how many seconds a mark holds its run back; None if it is not a valid mark."""
    try:
        seconds = json.loads(data)["held_back"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    known = isinstance(seconds, int | float) and 0 <= seconds < math.inf
    return float(seconds) if known else None


class Completions:
    """The marks in *folder*. Old ones are deleted now and then when marks are made."""

    def __init__(self, contact: SessionManager, folder: str) -> None:
        self.folder = folder
        self._contact = contact
        self._tidied_at = clock.monotonic()

    def make(self, talk: Exchange, name: str, run: str, held_back: float = 0.0) -> None:
        """Mark *run*, which held the key *name*, as ended or as held back."""
        path = self._paths(talk, name, run)[0]
        data = json.dumps({"held_back": held_back}).encode()
        try:
            talk.result(talk.client.create_async(path, data, makepath=True))
        except zk.NodeExistsError:
            talk.rewrite(path, data)
        now = clock.monotonic()
        if self._tidied_at + HOUSEKEEPING <= now:
            self._tidied_at = now
            DaemonThread("distlock-tidy", self.tidy).start()

    def find(self, talk: Exchange, name: str, run: str) -> list[CompletedRun]:
        """Return the marks of *run* in this hour and in the last one, the latest first."""
        paths = self._paths(talk, name, run)
        found = []
        for path, looking in [(path, talk.client.get_async(path)) for path in paths]:
            got = talk.found(looking)
            held_back = None if got is None else held_back_of(got[0])
            if held_back is not None:
                left = max(0.0, got[1].mtime / 1000 + held_back - talk.session.time())
                found.append(CompletedRun(path, held_back, left if held_back else 0.0))
        return found

    def _paths(self, talk: Exchange, name: str, run: str) -> list[str]:
        hour, text = int(talk.session.time() // HOUR), digest(f"{name} {run}")
        return [f"{self.folder}/{each}/{text[:2]}/{text[2:]}" for each in (hour, hour - 1)]

    def tidy(self) -> None:
        """Delete the marks of past hours, unless another process did so within the last minute."""
        try:
            talk = self._contact.talk(TIMEOUT)
            _, stat = talk.result(talk.client.get_async(self.folder))
            now = talk.session.time()
            if now < stat.mtime / 1000 + HOUSEKEEPING * 0.9:
                return
            talk.result(talk.client.set_async(self.folder, b"", stat.version))
            for hour in talk.children(self.folder):
                if _HOUR.fullmatch(hour) and int(hour) < now // HOUR - 1:
                    talk.client.delete(f"{self.folder}/{hour}", recursive=True)
        except zk.BadVersionError:
            pass  # another process has just begun
        except FAILURES as error:
            logger.debug("old marks will be deleted later: %s", words(error))
