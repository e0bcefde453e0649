"""Load the scripts of this package and enforce what their headers declare."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Script", "load"]

_HEADER = re.compile(r"^-- (KEYS|ARGV|USES)[ ]*(.*)$", re.MULTILINE)
_OFTEN = re.compile(r"^-- OFTEN (.*)$", re.MULTILINE)  # functions that most calls of a script need
_TOGETHER = re.compile(r"^-- TOGETHER (.*)$", re.MULTILINE)  # those that the first one needs
# A full server refuses a script's first write, but not this one: it changes nothing.
_NEVER_REFUSED, _FIRST_WRITE = "-- NEVER REFUSED\n", "redis.call('ZREM', KEYS[2], '')\n"
# Beginnings of lines that continue the line before.
_GOES_ON = re.compile(r"[ \t\n})]|end\b|else|until\b")
# Not those that tests lengthen.
_CONSTANT = re.compile(
    r"^local (?!(?:GRANT|CLAIM|UNSENT)_MS )([A-Z][A-Z_]*)"
    r" = ('[^'\n]*'|[\d.]+(?: [/^] \d+)?)(?: --.*)?\n",
    re.MULTILINE,
)
_NO_CODE = re.compile(r"(--[^\n]*|'[^'\n]*')")
_FUNCTION = re.compile(r"^local function (\w+)", re.MULTILINE)
_FEW = 12  # functions that a script makes at once, before it checks whether it needs more
_WHEN_CALLED = """local F
local F_begin = function()
F = setmetatable({often}, {{ __index = function(_, F_name)
local F_made
{choice}F[F_name] = F_made
return F_made
end }})
end
F_begin()
"""
_VARIABLES = re.compile(
    r"\b(?:local|for) (?!function\b)([\w, ]+?)(?: in\b| =|\n|$)|function[^(\n]*\(([^)]*)\)"
)
_FIELD = re.compile(r"[{,]\s*(\w+) = ")
_LOCAL = re.compile(r"local (?:function )?(\w+(?:, \w+)*)")
_PLAIN = r"(?:false|true|nil|math\.huge|\w+ = |[^a-z(])*"
_DEFINITION = re.compile(rf"local (?:function .*|[\w, ]+(?:=\s{_PLAIN})?)", re.DOTALL)
_WORD = re.compile(r"(?:(?<![\w.:])|(?<=\.\.))[A-Za-z_]\w*")  # not of a field


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """
    A script with its header: the names of its keys and arguments, and its digest.

    The first `required` arguments must be given; the header has the others in brackets.
    """

    name: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]
    required: int
    source: str
    sha: str


class _Part(NamedTuple):
    """
    A statement at the margin of a script: its names, and whether it only defines them.

    If it is a function, `home` is the table of which it becomes a field.
    """

    text: str
    words: frozenset[str]
    names: tuple[str, ...]
    defines: bool
    home: str = ""


@cache
def load(name: str) -> Script:
    """
    Return the script *name*, with what it needs of the scripts that its header uses.

    A function, or a variable that begins with a plain value, is placed before the first statement
    that needs it, and left out if none does: at each call a server makes a script's functions
    again, as far as that call gets. Where a script uses others, most are made when they are first
    called.

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
    if "USES" in header:
        parts = list(_in_tables(name, parts))
    source = "".join(part.text for part in parts)
    if "USES" in header:
        homes = {each: part.home for part in parts for each in part.names if part.home}
        source = _by_table(source, homes)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, keys, arguments, len(required.split()), source, sha)


def _by_table(source: str, homes: dict[str, str]) -> str:
    """
    Return a source whose functions are fields of tables, and whose constants are inlined.

    A function has at most 200 variables; and making one takes longer, the more variables there are
    that others use.

    Raises:
        ValueError: A variable has the name of a function.
    """
    values = dict(_CONSTANT.findall(source))
    parts = _NO_CODE.split(_CONSTANT.sub("", source))
    if twice := _variables("".join(parts[::2])) & homes.keys():
        raise ValueError(f"a variable is called as a function is: {', '.join(sorted(twice))}")

    def replaced(word: re.Match[str]) -> str:
        if word.string.startswith(" = function(", word.end()):
            return word[0]
        value = f"({values[word[0]]})" if word[0] in values else word[0]
        return f"{homes[value]}.{value}" if value in homes else value

    parts[::2] = [_WORD.sub(replaced, _FUNCTION.sub(r"\1 = function", part)) for part in parts[::2]]
    return "".join(parts)


def _variables(code: str) -> set[str]:
    return {
        word.strip() for found in _VARIABLES.findall(code) for word in ",".join(found).split(",")
    }


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
    """Return the parts of what a script uses, each once, and then its own."""
    return tuple(part for each in _used(name) for part in _parts_of(_text(each)))


def _in_tables(script: str, parts: Sequence[_Part]) -> Iterator[_Part]:
    """
    Yield the functions of a script as fields of tables, each after the variables it needs.

    If a statement needs few, they are made before it. From the first statement on that needs more,
    each function is made when it is first called, except those that the header names as OFTEN.
    """
    statements = [place for place, part in enumerate(parts) if not part.defines]
    begin = 0
    for number, place in enumerate(statements):
        before = parts[begin:place]
        functions = [part for part in before if part.home]
        if len(functions) > _FEW:
            yield from _when_called(script, parts[begin:])
            return
        yield from (part for part in before if not part.home)
        if functions:
            yield _table(f"F{number}", functions)
        yield parts[place]
        begin = place + 1


def _fields(functions: Sequence[_Part]) -> str:
    return "{\n" + "".join(f"{part.text.rstrip()},\n" for part in functions) + "}"


def _table(home: str, functions: Sequence[_Part]) -> _Part:
    names = tuple(name for part in functions for name in part.names)
    return _Part(f"local {home}\n{home} = {_fields(functions)}\n", frozenset(), names, True, home)


def _when_called(script: str, parts: Sequence[_Part]) -> Iterator[_Part]:
    """
    Yield all variables, then the functions, each made when it is called, then the statements.

    All of that is done by one function: to create a function costs less where the enclosing one
    already has the variables of the script. Functions that most calls need are created at once.

    Raises:
        ValueError: A function needs what a later statement computes, or the header names a function
            that the script does not have.
    """
    functions = [part for part in parts if part.home]
    statements = [part for part in parts if not part.defines]
    computed = {name for part in statements for name in part.names}
    for part in functions:
        own = _variables(part.text) | set(_FIELD.findall(part.text))
        if late := part.words & computed - own:
            raise ValueError(f"{script}.lua needs before it is computed: {', '.join(sorted(late))}")
    yield from (part for part in parts if part.defines and not part.home)
    names = set(" ".join(_OFTEN.findall(_text(script))).split())
    often = [part for part in functions if part.names[0] in names]
    if unknown := names - {part.names[0] for part in often}:
        raise ValueError(f"{script}.lua has no such function: {', '.join(sorted(unknown))}")
    functions = _with_others(script, functions, names)
    by_length: dict[int, list[_Part]] = {}
    for part in functions:
        if part.names[0] not in names:
            by_length.setdefault(len(part.names[0]), []).append(part)
    choice = _choice(sorted(by_length.items()))
    text = _WHEN_CALLED.format(often=_fields(often), choice=choice)
    yield _Part(text, frozenset(), tuple(part.names[0] for part in functions), True, "F")
    yield from statements


def _with_others(script: str, functions: Sequence[_Part], often: set[str]) -> list[_Part]:
    """Return the functions; the first of those that are made together makes the others, too."""
    parts = {part.names[0]: part for part in functions}
    for group in [found for each in _used(script) for found in _TOGETHER.findall(_text(each))]:
        first, *others = group.split()
        texts = [parts[name].text for name in others if name in parts.keys() - often]
        if first in parts:
            made = _FUNCTION.sub(r"F.\1 = function", "".join(texts))
            parts[first] = parts[first]._replace(text=parts[first].text + made)
    return list(parts.values())


def _choice(by_length: Sequence[tuple[int, Sequence[_Part]]]) -> str:
    """Return statements that make the function of a name; its length leaves few to compare."""
    if len(by_length) > 1:
        middle = len(by_length) // 2
        shorter, others = _choice(by_length[:middle]), _choice(by_length[middle:])
        return f"if #F_name < {by_length[middle][0]} then\n{shorter}else\n{others}end\n"
    ((_, functions),) = by_length
    return (
        "else".join(
            f"if F_name == '{part.names[0]}' then\n{_FUNCTION.sub('F_made = function', part.text)}"
            for part in functions
        )
        + "end\n"
    )


def _used(name: str, begun: dict[str, None] | None = None) -> list[str]:
    """Return the scripts that a script uses, each after those that it uses, then itself."""
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
    """Yield the statements in their order, each after the definitions that it needs first."""
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
