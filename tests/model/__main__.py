"""Explores all models: ``python -m tests.model``, perhaps with how many states of each at most."""

from __future__ import annotations

import sys

from .configurations import DEEP, SMALL
from .explorer import Counterexample, explore


def main() -> int:
    """Print what was found of each model; return 1 if something is wrong."""
    most, wrong = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000, 0
    for size, models in (("small", SMALL), ("deep", DEEP)):
        for name, model in models.items():
            try:
                found: object = explore(model, most)
            except Counterexample as error:
                found, wrong = error, 1
            print(f"{size}: {name}: {found}", flush=True)  # noqa: T201
    return wrong


if __name__ == "__main__":
    sys.exit(main())
