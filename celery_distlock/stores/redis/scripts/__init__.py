"""Loads the scripts that lie beside it and holds their headers to their word."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Script", "load"]

_HEADER = re.compile(r"^-- (KEYS|ARGV)[ ]*(.*)$", re.MULTILINE)
_USES = re.compile(r"^-- USES (\w+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """
    A script with its header: the names of its keys and arguments, and its digest.

    The first `required` arguments have to be given; in the header the others stand in brackets.
    """

    name: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]
    required: int
    source: str
    sha: str


@cache
def load(name: str) -> Script:
    """
    Return the script *name*, with each ``-- USES other`` line replaced by that other script.

    Raises:
        ValueError: The header is missing, or does not begin with the keys of one that it uses.
    """
    text = (files(__package__) / f"{name}.lua").read_text(encoding="utf-8")
    header = dict(_HEADER.findall(text))
    if "KEYS" not in header or not text.startswith(f"-- {name}.lua: "):
        raise ValueError(f"{name}.lua has no header")
    keys = tuple(header["KEYS"].split())
    required, _, optional = header.get("ARGV", "").rstrip("]").partition("[")
    arguments = (*required.split(), *optional.split())

    def used(match: re.Match[str]) -> str:
        other = load(match[1])
        if other.keys != keys[: len(other.keys)]:
            raise ValueError(f"{name}.lua uses {other.name}.lua and names other KEYS")
        return other.source

    source = _USES.sub(used, text)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, keys, arguments, len(required.split()), source, sha)
