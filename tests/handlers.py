"""A signal's handler that comes at one line after another of what its thread does."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import FrameType
    from typing import Any

PATIENCE = 20.0  # seconds after which a thread hangs


def hangs_of(
    work: Callable[[], object],
    handler: Callable[[], object],
    functions: Collection[str],
    before: Callable[[], object] = lambda: None,
) -> list[str]:
    """
    Return the lines of *functions*, by name, at which *work* hangs if *handler* is called there.

    None are looked for after the first one. *before* is called before each *work*.
    """
    for number in itertools.count(1):
        before()
        visit = _Visit(handler, functions, number)
        thread = threading.Thread(target=visit.run, args=(work,), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        if thread.is_alive():
            return [visit.where]
        if not visit.where:
            assert number > 1, "none of these functions was called"
            return []
    raise AssertionError


class _Visit:
    def __init__(
        self, handler: Callable[[], object], functions: Collection[str], number: int
    ) -> None:
        self.where = ""
        self._handler = handler
        self._functions = functions
        self._left = number

    def run(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        ours = "celery_distlock" in code.co_filename and code.co_name in self._functions
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                self._handler()
        return self._line
