"""Loads the scripts that lie beside it and holds their headers to their word."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Script", "load"]

_HEADER = re.compile(r"^-- (KEYS|ARGV|USES)[ ]*(.*)$", re.MULTILINE)
_GOES_ON = re.compile(r"[ \t\n})]|end\b|else|until\b")  # so begins what belongs to the line before
_NO_CODE = re.compile(r"--.*|(?P<text>'[^'\n]*')")
_LOCAL = re.compile(r"local (?:function )?(\w+(?:, \w+)*)")
_DEFINITION = re.compile(r"local (?:function .*|[\w, ]+(?:= (?:false|true|[^a-z(])*)?)", re.DOTALL)
_WORD = re.compile(r"(?:(?<![\w.])|(?<=\.\.))[A-Za-z_]\w*")  # of no field


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


class _Part(NamedTuple):
    """A statement at the margin of a script: what it names, and whether it does nothing else."""

    text: str
    words: frozenset[str]
    names: tuple[str, ...]
    defines: bool


@cache
def load(name: str) -> Script:
    """
    Return the script *name*, with what it needs of those that its header says it uses.

    A function, or a variable that begins with a plain value, stands before the first statement that
    needs it, and where none does, nowhere: at each call a server makes a script's functions anew,
    as far as that call gets.

    Raises:
        ValueError: The header is missing, or does not begin with the keys of one that it uses; or a
            name is defined twice, or only by what needs it.
    """
    header = _header(name)
    if "KEYS" not in header:
        raise ValueError(f"{name}.lua has no header")
    keys = tuple(header["KEYS"].split())
    for other in map(load, header.get("USES", "").split()):
        if other.keys != keys[: len(other.keys)]:
            raise ValueError(f"{name}.lua uses {other.name}.lua and names other KEYS")
    required, _, optional = header.get("ARGV", "").rstrip("]").partition("[")
    arguments = (*required.split(), *optional.split())
    source = "".join(part.text for part in _in_order_of_need(name, _parts(name)))
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, keys, arguments, len(required.split()), source, sha)


@cache
def _text(name: str) -> str:
    return (files(__package__) / f"{name}.lua").read_text(encoding="utf-8")


@cache
def _header(name: str) -> dict[str, str]:
    text = _text(name)
    return dict(_HEADER.findall(text)) if text.startswith(f"-- {name}.lua: ") else {}


@cache
def _parts(name: str) -> tuple[_Part, ...]:
    """Return the parts of what a script uses, and then its own."""
    used = _header(name).get("USES", "").split()
    return (*(part for other in used for part in _parts(other)), *_parts_of(_text(name)))


def _parts_of(text: str) -> Iterator[_Part]:
    pieces, is_comment = [""], False
    for line in text.splitlines(keepends=True):
        if not (is_comment or _GOES_ON.match(line)):
            pieces.append("")
        pieces[-1] += line
        is_comment = line.startswith("--")
    for piece in pieces:
        code = _NO_CODE.sub(lambda found: "''" if found["text"] else "", piece).strip()
        if code:
            local = _LOCAL.match(code)
            names = tuple(local[1].split(", ")) if local else ()
            defines = _DEFINITION.fullmatch(code) is not None
            yield _Part(piece, frozenset(_WORD.findall(code)), names, defines)


def _in_order_of_need(script: str, parts: Iterable[_Part]) -> Iterator[_Part]:
    """Give the statements in their order, each after what it is the first to need."""
    places: dict[str, tuple[int, _Part]] = {}
    given: set[str] = set()
    open_names: set[str] = set()

    def needed(part: _Part) -> Iterator[_Part]:
        if early := open_names & part.words:
            raise ValueError(f"{script}.lua needs itself for: {', '.join(sorted(early))}")
        given.update(part.names)
        open_names.update(part.names if part.defines else ())
        wanted = part.words & places.keys() - given
        for name in sorted(wanted, key=places.__getitem__):
            if name not in given:
                yield from needed(places[name][1])
        open_names.difference_update(part.names)
        yield part

    for place, part in enumerate(parts):
        if twice := places.keys() & part.names:
            raise ValueError(f"{script}.lua defines twice: {', '.join(sorted(twice))}")
        places.update(dict.fromkeys(part.names, (place, part)))
        if not part.defines:
            yield from needed(part)
