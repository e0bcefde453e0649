"""
How locks grow, and what does not: minutes, in parts.

    python bench/scale.py [--scale 0.1] [--json PATH] [part ...]
    python bench/report.py build/scale.json docs/explanation/scale.md

Counted commands and the server's CPU time, which other work on the machine changes little.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from distance import distance
from figures import Part
from growth import crowds, keys, one_key, queues
from idle import idle
from machine import describe
from masters import masters
from results import DEFAULT, Results
from run import shown

from celery_distlock.testing import EmbeddedServer

PARTS: dict[str, Callable[[EmbeddedServer, float], Iterable[Part]]] = {
    measure.__name__: measure
    for measure in (keys, crowds, queues, one_key, masters, idle, distance)
}


def main() -> int:
    """Measure, show and save."""
    options = _options()
    with EmbeddedServer() as server:
        machine = describe(server, ("celery", "redis"))
    parts = []
    for name in options.parts or PARTS:
        with EmbeddedServer() as server:
            parts += [shown(part) for part in PARTS[name](server, options.scale)]
        Results(machine, parts).save(options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how locks grow.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual numbers")
    parser.add_argument("--json", type=Path, default=DEFAULT.with_name("scale.json"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
