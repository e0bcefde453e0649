"""Explores the larger models: ``python -m tests.model``, perhaps with how many states of each."""

from __future__ import annotations

import sys

from .configurations import DEEP, SMALL
from .explorer import explore

if __name__ == "__main__":
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    for size, models in (("small", SMALL), ("deep", DEEP)):
        for name, model in models.items():
            print(f"{size}: {name}: {explore(model, most)}", flush=True)  # noqa: T201
