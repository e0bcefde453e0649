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
# A full server refuses a script's first write, but not this one: it changes nothing.
_NEVER_REFUSED, _FIRST_WRITE = "-- NEVER REFUSED\n", "redis.call('ZREM', KEYS[2], '')\n"
_GOES_ON = re.compile(r"[ \t\n})]|end\b|else|until\b")  # so begins what belongs to the line before
# Not those that tests lengthen.
_CONSTANT = re.compile(
    r"^local ([A-Z][A-Z_]*)(?<!_MS) = ('[^'\n]*'|[\d.]+(?: [/^] \d+)?)(?: --.*)?\n", re.MULTILINE
)
_NO_CODE = re.compile(r"(--[^\n]*|'[^'\n]*')")
_SECTION = re.compile(r"^-- (?:EAGER|LAZY (\w+))\n", re.MULTILINE)
_FUNCTION = re.compile(r"^local function (\w+)", re.MULTILINE)
_LAZY = """local {0} = {{}}
setmetatable({0}, {{ __index = function(_, name)
setmetatable({0}, nil)
{1}return {0}[name]
end }})
"""
_VARIABLES = re.compile(r"\b(?:local|for) (?!function\b)([\w, ]+)|function[^(\n]*\(([^)]*)\)")
_LOCAL = re.compile(r"local (?:function )?(\w+(?:, \w+)*)")
_DEFINITION = re.compile(r"local (?:function .*|[\w, ]+(?:= (?:false|true|[^a-z(])*)?)", re.DOTALL)
_WORD = re.compile(r"(?:(?<![\w.:])|(?<=\.\.))[A-Za-z_]\w*")  # of no field


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
    """
    A statement at the margin of a script: what it names, and whether it does nothing else.

    If these are functions, `home` is the table of which they are fields.
    """

    text: str
    words: frozenset[str]
    names: tuple[str, ...]
    defines: bool
    home: str = ""


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
    for other in _used(name):
        used = _header(other).get("KEYS", "").split()
        if used != list(keys[: len(used)]):
            raise ValueError(f"{name}.lua uses {other}.lua and names other KEYS")
    required, _, optional = header.get("ARGV", "").rstrip("]").partition("[")
    arguments = (*required.split(), *optional.split())
    parts = list(_in_order_of_need(name, _parts(name)))
    source = "".join(part.text for part in parts)
    if "USES" in header:
        homes = {each: part.home for part in parts for each in part.names if part.home}
        source = _by_table(source, homes)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, keys, arguments, len(required.split()), source, sha)


def _by_table(source: str, homes: dict[str, str]) -> str:
    """
    Return a source whose functions are fields of tables, and whose constants are in their places.

    A function has at most 200 variables; and to make one takes the longer the more variables there
    are that others use.

    Raises:
        ValueError: A variable is called as a function is.
    """
    values = dict(_CONSTANT.findall(source))
    parts = _NO_CODE.split(_CONSTANT.sub("", source))
    for found in _VARIABLES.finditer("".join(parts[::2])):
        names = {word.strip() for word in (found[1] or found[2] or "").split(",")}
        if twice := names & homes.keys():
            raise ValueError(f"a variable is called as a function is: {', '.join(sorted(twice))}")

    def replaced(word: re.Match[str]) -> str:
        value = f"({values[word[0]]})" if word[0] in values else word[0]
        return f"{homes[value]}.{value}" if value in homes else value

    parts[::2] = [_WORD.sub(replaced, _FUNCTION.sub(r"\1 = function", part)) for part in parts[::2]]
    return "".join(["local F = {}\n" if homes else "", *parts])


@cache
def _text(name: str) -> str:
    text = (files(__package__) / f"{name}.lua").read_text(encoding="utf-8")
    return text.replace(_NEVER_REFUSED, _NEVER_REFUSED + _FIRST_WRITE)


@cache
def _header(name: str) -> dict[str, str]:
    text = _text(name)
    return dict(_HEADER.findall(text)) if text.startswith(f"-- {name}.lua: ") else {}


@cache
def _parts(name: str) -> tuple[_Part, ...]:
    """
    Return the parts of what a script uses, each once, and then its own.

    The functions behind a line ``-- LAZY name`` are one part.
    """
    parts = []
    for each in _used(name):
        _, *sections = _SECTION.split("-- EAGER\n" + _text(each))
        for section, text in zip(sections[::2], sections[1::2], strict=True):
            its_parts = list(_parts_of(text))
            if section:
                parts += [part for part in its_parts if not part.home]
                its_parts = [_lazy(f"F_{section}", [part for part in its_parts if part.home])]
            parts += its_parts
    return tuple(parts)


def _lazy(home: str, functions: list[_Part]) -> _Part:
    """Return functions as one part: all of them are made when one is called first."""
    text = _LAZY.format(home, "".join(part.text for part in functions))
    words = frozenset(word for part in functions for word in part.words)
    return _Part(text, words, tuple(name for part in functions for name in part.names), True, home)


def _used(name: str, begun: dict[str, None] | None = None) -> list[str]:
    """Return the names of what a script uses, each behind what it uses, and then its own."""
    begun = {} if begun is None else begun
    begun[name] = None
    found = []
    for other in _header(name).get("USES", "").split():
        if other not in begun:  # two may use each other
            found += _used(other, begun)
    return [*found, name]


def _parts_of(text: str) -> Iterator[_Part]:
    pieces, is_comment = [""], False
    for line in text.splitlines(keepends=True):
        if not (is_comment or _GOES_ON.match(line)):
            pieces.append("")
        pieces[-1] += line
        is_comment = line.startswith("--")
    for piece in pieces:
        code = _NO_CODE.sub(lambda found: "''" if found[0][0] == "'" else "", piece).strip()
        if code:
            local = _LOCAL.match(code)
            names = tuple(local[1].split(", ")) if local else ()
            defines = _DEFINITION.fullmatch(code) is not None
            home = "F" if code.startswith("local function") else ""
            yield _Part(piece, frozenset(_WORD.findall(code)), names, defines, home)


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
