"""How keys and other names are told to people: in log lines, states, events, spans and errors."""

import hashlib

__all__ = ["SHOWN_LENGTH", "shown"]

SHOWN_LENGTH = 200  # characters


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
