"""Sends tasks through the store: ``python -m tests.apps.sender KEY COUNT [once]``."""

from __future__ import annotations

import sys

from tests.apps.failing import work, work_once


def main() -> None:
    key, count = sys.argv[1], int(sys.argv[2])
    task = work_once if sys.argv[3:] == ["once"] else work
    for number in range(count):
        task.apply_async((key, number), lock_via="store")
        print(number, flush=True)  # noqa: T201  # it was accepted


if __name__ == "__main__":
    main()
