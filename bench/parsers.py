"""
Acquire and release locks in an interpreter of its own, with one of redis-py's two parsers.

    python bench/parsers.py hiredis|python URL ROUNDS

redis-py selects the parser when it is imported: hiredis, where that is installed. Its own one is
slower, so everything that uses redis-py's client looks slower than a lock that needs it less.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

HIREDIS, PYTHON = "hiredis", "python"


def has_hiredis() -> bool:
    return find_spec(HIREDIS) is not None


def measured(parser: str, url: str, rounds: int) -> dict[str, list[list[float]]]:
    """Return what :func:`uncontended.measure` finds with *parser*."""
    words = [sys.executable, __file__, parser, url, str(rounds)]
    found = subprocess.run(words, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(found.stdout))


def main() -> None:
    parser, url, rounds = sys.argv[1:]
    if parser == PYTHON:
        sys.modules[HIREDIS] = None  # type: ignore[assignment]  # from now on it cannot be imported
    from uncontended import measure  # it imports redis-py

    json.dump(measure(url, int(rounds)), sys.stdout)


if __name__ == "__main__":
    main()
