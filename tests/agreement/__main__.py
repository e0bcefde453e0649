"""Plays many random schedules to two sides: ``python -m tests.agreement --help``."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from celery_distlock.testing import EmbeddedServer

from .player import play_many

BATCH = 500


def main() -> int:
    """Print the first schedule of each batch that finds a difference; return 1 if there is one."""
    asked = _arguments()
    names = tuple(asked.sides.split("+"))
    batches = [
        range(at, min(at + BATCH, asked.schedules)) for at in range(0, asked.schedules, BATCH)
    ]
    begun, found = time.monotonic(), 0
    needs_server = "server" in names
    with EmbeddedServer() if needs_server else nullcontext() as server:
        url = server.url if server else ""
        with ProcessPoolExecutor(asked.processes) as pool:
            played = [pool.submit(play_many, names, asked.seed, batch, url) for batch in batches]
            for future in played:
                for each in future.result():
                    found += 1
                    print(each, end="\n\n", flush=True)  # noqa: T201
    seconds = time.monotonic() - begun
    print(f"{asked.schedules} schedules, {asked.sides}, {seconds:.0f} s: {found} differ")  # noqa: T201
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.agreement")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sides", default="memory+model", help="two of memory, model, server")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
