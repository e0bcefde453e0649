"""Find the keys that have a record, in steps that do not block a server."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from celery_distlock.keys import key_of

from .connections import Command, command
from .reading import Reading
from .topology import Topology

SCAN_BATCH = 1000  # records per round trip that the server examines
_GLOB = re.compile(r"[\\*?\[\]]")
_PLAIN = re.compile(r"[\w:.,;/*-]*", re.ASCII)  # a pattern that a server reads as fnmatch does


def literal(text: str) -> str:
    """Return the pattern that matches only *text*."""
    return _GLOB.sub(r"\\\g<0>", text)


class KeysWith:
    """
    How to find the keys that have a record: a lock, if they are held.

    Args:
        stem: Returns the prefix of a key's record names.
        pattern: Of the keys; more may be found, see `keys_of`.
        record: Which of their records.
    """

    def __init__(
        self, stem: Callable[[str], str], pattern: str = "*", record: str = "lock"
    ) -> None:
        head, tail = map(literal, stem("\0").split("\0"))
        self._mask = f"{head}{pattern if _PLAIN.fullmatch(pattern) else '*'}{tail}{record}"
        self._first, self._last = len(stem("")) - 2, -len(f"}}:{record}")

    def scan(self, cursor: bytes) -> Command:
        """Return a call for the next of them; the first cursor is ``0``, and the last one, too."""
        return command(b"", "SCAN", cursor, "MATCH", self._mask, "COUNT", SCAN_BATCH)

    def found(self, answer: tuple[bytes, Sequence[bytes]]) -> tuple[bytes, list[str]]:
        """Return the cursor of *answer*, and the names of the keys that have its records."""
        cursor, records = answer
        found = []
        for record in records:
            with contextlib.suppress(UnicodeDecodeError):  # otherwise it is not one of ours
                found.append(record.decode()[self._first : self._last])
        return cursor, found


def names_at(
    servers: Topology,
    keys: KeysWith,
    ask: Callable[[Command], Any],
    reading: Callable[[str, Any], Reading],
) -> Iterator[list[str]]:
    """Return the names of all such *keys* at *servers*; some may come twice."""
    for node in servers.nodes():
        for cursor in Cursor():
            answer = ask(keys.scan(cursor.at)._replace(node=node))
            with reading("SCAN", answer):
                cursor.at, names = keys.found(answer)
            yield names


def keys_of(found: Iterable[Sequence[str]], pattern: str) -> Iterator[list[str]]:
    """
    Return the keys of the names that were *found*, each once, if they match *pattern*.

    Empty batches are returned, too, so that a caller with a time limit can check it.
    """
    seen: set[int] = set()  # a fourth of what the keys themselves would take
    for names in found:
        keys = dict.fromkeys(key_of(name) for name in names)
        new = [key for key in keys if hash(key) not in seen and fnmatchcase(key, pattern)]
        seen.update(map(hash, new))
        yield new


class Cursor:
    """Iterates until the server has set it to 0 again."""

    def __init__(self) -> None:
        self.at = b""

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> "Cursor":
        if self.at == b"0":
            raise StopIteration
        self.at = self.at or b"0"
        return self
