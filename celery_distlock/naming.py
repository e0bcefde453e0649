"""How keys and other names are told to people: in log lines, states, events, spans and errors."""

import hashlib
from collections.abc import Sequence

__all__ = ["NAMED", "RESTING", "SHOWN_LENGTH", "is_resting", "shown", "some_of"]

SHOWN_LENGTH = 200  # characters
NAMED = 3  # of many, that are named
RESTING = "resting:"  # what the run's name begins with for which a key is kept that rests


def is_resting(owner: str) -> bool:
    """Whether *owner* stands for nobody: its key rests, and is kept for a run that never comes."""
    return owner.startswith(f"parked:{RESTING}")


def shown(name: str) -> str:
    """
    Return *name* as people are told it, which is never long.

    A long one is cut, and followed by the beginning of its SHA-256: of a key, that is the one which
    its records are named by. What has no UTF-8, from a record that is none of ours, is escaped.
    """
    if len(name) > SHOWN_LENGTH:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        name = f"{name[: SHOWN_LENGTH - 21]}... #{digest}"
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def some_of(names: Sequence[str]) -> str:
    """Return the first of *names*, and whether there are more."""
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
