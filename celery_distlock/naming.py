"""How to show keys and other names to people: in log lines, states, events, spans and errors."""

import hashlib
import re
from collections.abc import Sequence

SHOWN_LENGTH = 200  # characters
NAMED = 3  # the number of names that are listed
PARKED = "parked:"  # prefix of the owner of a key that is reserved for a parked execution
RESTING = "resting:"  # prefix of the placeholder execution for which a resting key is reserved


def is_resting(owner: str) -> bool:
    """Whether *owner* is a placeholder: its key rests, and no execution will claim it."""
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
    Return *name* as it is shown to people, with limited length.

    A long name is cut, and followed by the beginning of its SHA-256: of a key, this is the hash in
    the names of its records. Characters without UTF-8, as in foreign records, are escaped.
    """
    if len(name) > SHOWN_LENGTH:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        name = f"{name[: SHOWN_LENGTH - 21]}... #{digest}"
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Return *text* on one line, without control sequences for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some_of(names: Sequence[str]) -> str:
    """Return the first of *names*, with an ellipsis if there are more."""
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def unescaped(name: str) -> str:
    """Return the text of a record with the escapes for unsafe characters undone."""
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), name)


_ESCAPE = re.compile(r"%(?:u([0-9A-F]{4})|([0-9A-F]{2}))")
