"""A process that sends tasks through the store: ``python -m tests.apps.sender KEY COUNT``."""

from __future__ import annotations

import sys

from tests.apps.failing import work


def main() -> None:
    key, count = sys.argv[1], int(sys.argv[2])
    for number in range(count):
        work.apply_async((key, number), lock_via="store")
        print(number, flush=True)  # noqa: T201  # it was accepted


if __name__ == "__main__":
    main()
