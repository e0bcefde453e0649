"""Loads the scripts that lie beside it and holds their headers to their word."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Script", "load"]

_HEADER = re.compile(r"^-- (USES|KEYS|ARGV)[ ]*(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A script with its header: the names of its keys and arguments, and its digest."""

    name: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]
    source: str
    sha: str


@cache
def load(name: str) -> Script:
    """
    Return the script *name*, with what its header says it uses put before it.

    Raises:
        ValueError: The header is missing, or names other keys than a script that it uses.
    """
    text = (files(__package__) / f"{name}.lua").read_text(encoding="utf-8")
    header = {word: rest.split() for word, rest in _HEADER.findall(text)}
    if "KEYS" not in header or f"-- {name}.lua: " not in text:
        raise ValueError(f"{name}.lua has no header")
    source = text
    for used in header.get("USES", ()):
        other = load(used)
        if list(other.keys) != header["KEYS"]:
            raise ValueError(f"{name}.lua uses {used}.lua and names other KEYS")
        source = other.source + source
    return Script(
        name,
        tuple(header["KEYS"]),
        tuple(header.get("ARGV", ())),
        source,
        hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest(),
    )
