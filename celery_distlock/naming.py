"""How keys and other names are told to people: in log lines, states, events, spans and errors."""

import hashlib
import re
from collections.abc import Sequence

__all__ = [
    "NAMED",
    "PARKED",
    "RESTING",
    "SHOWN_LENGTH",
    "holder_name",
    "is_resting",
    "shown",
    "some_of",
    "taken_by",
    "unescaped",
]

SHOWN_LENGTH = 200  # characters
NAMED = 3  # of many, that are named
PARKED = "parked:"  # what the owner of a key that is reserved for a parked run begins with
RESTING = "resting:"  # what the run's name begins with for which a key is kept that rests


def is_resting(owner: str) -> bool:
    """Whether *owner* stands for nobody: its key rests, and is kept for a run that never comes."""
    return owner.startswith(PARKED + RESTING)


def holder_name(owner: str) -> str:
    """Return the task or thread that the text of an owner names, with its host and process."""
    if owner.startswith(PARKED):
        return f"task {shown(owner.removeprefix(PARKED).rsplit(':', 3)[0])}"
    parts = owner.split("|")
    if len(parts) != 4:
        return shown(owner)
    host, pid, label, _ = map(unescaped, parts)
    return shown(f"{label if label.endswith(']') else f'thread {label}'} on {host}, process {pid}")


def taken_by(owner: str) -> str:
    """Return the end of a sentence about a key that *owner* has; empty: an unknown owner."""
    if is_resting(owner):
        return "rests"
    if owner.startswith(PARKED):
        return f"is reserved for {holder_name(owner)}"
    return f"is held by {holder_name(owner)}" if owner else "is held"


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


def printable(text: str) -> str:
    """Return *text* on one line, without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some_of(names: Sequence[str]) -> str:
    """Return the first of *names*, and whether there are more."""
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def unescaped(name: str) -> str:
    """Return the text that was written in a record with escapes for what records cannot have."""
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), name)


_ESCAPE = re.compile(r"%(?:u([0-9A-F]{4})|([0-9A-F]{2}))")
