"""Fails when a test has been in `shaky.txt` for two weeks: by then its cause has to be cured."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".txt")
LONGEST = timedelta(days=14)


class Shaky(NamedTuple):
    since: date
    test: str
    cause: str


def parse(text: str) -> list[Shaky]:
    """Return the entries of *text*; raise `ValueError` for a line that lacks one of the three."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    entries = [line.split(maxsplit=2) for line in lines]
    return [Shaky(date.fromisoformat(since), test, cause) for since, test, cause in entries]


def overdue(entries: list[Shaky], today: date) -> list[Shaky]:
    """Return the *entries* that have been there for too long, or since a day that is to come."""
    return [each for each in entries if not timedelta() <= today - each.since < LONGEST]


if __name__ == "__main__":
    late = overdue(parse(FILE.read_text()), datetime.now(UTC).date())
    for each in late:
        sys.stderr.write(f"tests/shaky.txt: since {each.since}, cure it: {each.test}\n")
    sys.exit(bool(late))
