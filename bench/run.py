"""
What a lock costs, side by side in one run: ``make bench``.

    python bench/run.py [--rounds N] [--json PATH] [part ...]

Every row is a ratio of two things that were timed in turn, so that a machine that is busy or slow
changes both. Absolute figures are for orientation only.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from contention import contention
from coroutines import coroutines
from dues import dues
from far import far
from figures import Part
from handoff import handoff
from leases import leases
from machine import describe
from parked import parked
from rates import rates
from results import DEFAULT, Results, head, lines, misses
from rich.console import Console
from rich.table import Table
from sending import sending
from tasks import tasks
from uncontended import uncontended
from units import units

from celery_distlock.testing import EmbeddedServer

ROUNDS = 5
PARTS: dict[str, Callable[[EmbeddedServer, int], Iterable[Part]]] = {
    measure.__name__: measure
    for measure in (
        uncontended,
        units,
        contention,
        coroutines,
        handoff,
        leases,
        tasks,
        parked,
        dues,
        rates,
        sending,
        far,
    )
}
console = Console(highlight=False, width=120)


def main() -> int:
    """Measure, show and save."""
    options = _options()
    begin = time.monotonic()
    with EmbeddedServer() as server:
        os.environ["BENCH_URL"] = server.url
        machine = describe(server)
        parts = [
            shown(part)
            for name in options.parts or PARTS
            for part in PARTS[name](server, options.rounds)
        ]
    results = Results(machine, parts)
    results.save(options.json)
    for miss in (miss for part in parts for miss in misses(part)):
        console.print(f"[yellow]missed[/]  {miss}")
    console.print(f"{machine}\n{time.monotonic() - begin:.0f} s; saved in {options.json}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare celery-distlock with other libraries.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=DEFAULT, help="where to save the figures")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return options


def shown(part: Part) -> Part:
    table = Table(title=part.title, title_justify="left", caption_justify="left")
    for column in head(part):
        text = column in {"", "terms"}
        table.add_column(column, justify="left" if text else "right", no_wrap=not column)
    for cells in lines(part):
        table.add_row(*cells)
    table.caption = "\n".join(part.notes) or None
    console.print(table, "")
    return part


if __name__ == "__main__":
    sys.exit(main())
