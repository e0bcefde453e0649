"""Repair a cluster's index of the keys that may have parked tasks."""

from collections.abc import Iterator
from typing import Any

from celery_distlock import clock

from .connections import Command
from .parts import Part
from .scanning import KeysWith, names_at

MENDED = 600.0  # seconds for which an index counts as complete
MENDER = 60.0  # seconds after which another process takes over an abandoned repair
MENDING = 0.2  # seconds of a sweep, at most: a cluster may have many foreign keys


class IndexMender(Part):
    """
    Repairs the index, a part of it at each sweep.

    Its node may have lost some of it, or all, while the keys' nodes have lost nothing.
    """

    _parts: Iterator[None] | None = None  # of the current repair

    def go_on(self, *, begins: bool) -> None:
        """Repair the index for a moment; start if no process has done so recently."""
        if self._parts is None:
            if not begins or not self._take_for_whole(MENDER, "NX"):
                return
            self._parts = self._mend()
        until = clock.monotonic() + MENDING
        for _ in self._parts:
            if clock.monotonic() > until:
                if self._take_for_whole(MENDER, "XX"):
                    return
                break  # the mark was lost in between: begin again
        self._parts = None

    def _mend(self) -> Iterator[None]:
        """Add each such key again, in batches; soon repeated if a node is unreachable."""
        unreachable: list[Exception] = []

        def ask(scan: Command) -> Any:
            (answer,) = self._requests.attempt_briefly([scan])
            if not isinstance(answer, Exception):
                return answer
            unreachable.append(answer)
            return b"0", ()

        parked = KeysWith(self._records.stem, record="tasks")
        for names in names_at(self._servers, parked, ask, self._requests.reading):
            calls = [self._records.index("add", name) for name in names]
            noted = self._requests.attempt_briefly(calls)
            unreachable.extend(each for each in noted if isinstance(each, Exception))
            yield
        if not unreachable:
            self._take_for_whole(MENDED, "XX")

    def _take_for_whole(self, seconds: float, only: str) -> bool:
        """Mark the index as complete; only if it is not marked (NX), or only if it is (XX)."""
        note = self._records.index_is_whole(seconds, only)
        return self._requests.attempt_briefly([note]) == [b"OK"]
