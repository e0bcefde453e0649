"""How a cluster's index, of the keys at which somebody may be parked, is made whole again."""

from collections.abc import Iterator
from typing import Any

from celery_distlock import clock

from .connections import Command
from .parts import Part
from .scanning import KeysWith, names_at

__all__ = ["IndexMender"]

MENDED = 600.0  # seconds for which an index is taken for whole
MENDER = 60.0  # seconds after which another mends it, if who has begun does not go on
MENDING = 0.2  # seconds of a sweep, at most: a cluster may have many keys that are not ours


class IndexMender(Part):
    """
    Mends the index, a part of it at each sweep.

    Its node may have lost some of it, or all, and the keys' nodes nothing.
    """

    _parts: Iterator[None] | None = None  # of what is being mended

    def go_on(self, *, begins: bool) -> None:
        """Mend the index for a moment; begin with it if nobody has of late."""
        if self._parts is None:
            if not begins or not self._take_for_whole(MENDER, "NX"):
                return
            self._parts = self._mend()
        until = clock.monotonic() + MENDING
        for _ in self._parts:
            if clock.monotonic() > until:
                if self._take_for_whole(MENDER, "XX"):
                    return
                break  # it has been lost meanwhile: begin again
        self._parts = None

    def _mend(self) -> Iterator[None]:
        """Note again each such key, some at a time; where a node is away, it is done again soon."""
        away: list[Exception] = []

        def ask(scan: Command) -> Any:
            (answer,) = self._requests.attempt_beside([scan])
            if not isinstance(answer, Exception):
                return answer
            away.append(answer)
            return b"0", ()

        parked = KeysWith(self._records.stem, record="tasks")
        for names in names_at(self._servers, parked, ask, self._requests.reading):
            calls = [self._records.index("add", name) for name in names]
            noted = self._requests.attempt_beside(calls)
            away.extend(each for each in noted if isinstance(each, Exception))
            yield
        if not away:
            self._take_for_whole(MENDED, "XX")

    def _take_for_whole(self, seconds: float, only: str) -> bool:
        """Note that nobody has to mend the index; only where that is not noted (NX), or is (XX)."""
        note = self._records.index_is_whole(seconds, only)
        return self._requests.attempt_beside([note]) == [b"OK"]
