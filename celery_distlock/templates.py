"""A template over a task's parameters: parsed at its declaration, filled in for each call."""

import inspect
import re
import string
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from .arguments import SCALARS, digest, item, plain
from .errors import ConfigurationError, LockKeyError
from .key import Key

__all__ = ["Template", "has_address"]

WIDEST = 10_000  # characters that a format in a template may ask for

_ROOT = re.compile(r"[^.\[]*")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")  # in the text of an object without one
_CONVERSIONS: Mapping[str | None, Callable[[Any], Any]] = {
    None: lambda value: value,
    "r": repr,
    "s": str,
    "a": ascii,
}
# By the type that an argument has after a message, what it may have been, and what to write then.
_ARRIVES_AS = {
    str: "an enum arrives as its value: write {%s}",
    int: "an enum arrives as its value: write {%s}",
    list: "a named tuple arrives as a list: write {%s[0]}",
    dict: "an object may arrive as a dictionary: write {%s[id]}",
}

_Step = tuple[Callable[[Any, Any], Any], Any]


class _Field(NamedTuple):
    """A text, and the field behind it if there is one."""

    text: str
    name: str | None = None  # as it is written
    root: str = ""  # the parameter
    steps: tuple[_Step, ...] = ()
    convert: Callable[[Any], Any] = plain
    spec: str = ""

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with the value; raise what `str.format` would, or `TypeError`."""
        if self.name is None:
            return self.text
        value = values[self.root]
        for get, name in self.steps:
            value = get(value, name)
        value = plain(value)
        made = format(self.convert(value), self.spec)
        if type(value) not in SCALARS and has_address(made):
            raise TypeError(
                f"the text of a {type(value).__name__} has an address, which differs in each"
                f" process; name what identifies it, as in {{{self.root}.id}}"
            )
        return self.text + made


class Template:
    """
    A template as `lock_key` takes it.

    Args:
        named: The template, or a `Key` of it.
        task: The task's name, for ``{task}`` and for messages.
        signature: That of the task's function, without ``self``.

    Attributes:
        key: The template with its terms.
        reads: The parameters that it is filled in with.

    Raises:
        ConfigurationError: It does not parse, or names no parameter of the task.
    """

    def __init__(self, named: str | Key, task: str, signature: inspect.Signature) -> None:
        text = named.template if isinstance(named, Key) else named
        self._text = text
        self._task = task
        parameters = set(signature.parameters)
        try:
            self._fields = [_field(*piece) for piece in string.Formatter().parse(text)]
        except ValueError as error:
            raise ConfigurationError(
                f"task {task}: lock_key {text!r} does not parse: {error}"
            ) from None
        roots = {field.root for field in self._fields if field.name is not None}
        self._wants_digest = "digest" in roots - parameters
        self.reads = parameters if self._wants_digest else roots & parameters
        unknown = roots - parameters - {"task", "digest"}
        if unknown:
            raise ConfigurationError(self._unknown(min(unknown), parameters))
        if not text:
            raise ConfigurationError(f"task {task}: lock_key is an empty template")
        self.key = named if isinstance(named, Key) else Key(text)

    def _unknown(self, field: str, parameters: set[str]) -> str:
        known = sorted(parameters | {"task", "digest"})
        close = get_close_matches(field, known, n=1)
        hint = f"did you mean {{{close[0]}}}?" if close else f"it can name {', '.join(known)}"
        what = f"{{{field}}}" if field else "a field without a name"
        return (
            f"task {self._task}: lock_key {self._text!r} names {what}, which is no parameter of the"
            f" task; {hint}"
        )

    def fill(self, arguments: Mapping[str, Any]) -> Key:
        """
        Return the key of a call with *arguments*, by the names of the parameters.

        Raises:
            LockKeyError: It cannot be made of them.
        """
        values: dict[str, Any] = {"task": self._task}
        if self._wants_digest:
            values["digest"] = digest(arguments, task=self._task)
        values.update(arguments)
        made = []
        for field in self._fields:
            try:
                made.append(field.fill(values))
            except Exception as error:  # attribute access and __format__ run users' code
                raise LockKeyError(self._failed(field, values, error), self._task) from error
        key = "".join(made)
        if not key:
            raise LockKeyError(f"task {self._task}: lock_key gave an empty key", self._task)
        return self.key.of(key)

    def _failed(self, field: _Field, values: Mapping[str, Any], error: Exception) -> str:
        words = f"{{{field.name}}}: {type(error).__name__}: {error}"
        arrives = _ARRIVES_AS.get(type(values[field.root])) if field.steps else None
        if arrives is not None and isinstance(error, AttributeError):
            words += f"; {arrives % field.root}"
        return (
            f"task {self._task}: lock_key {self._text!r} cannot be made from these arguments:"
            f" {words}"
        )


def has_address(text: str) -> bool:
    """Whether *text* has that of an object without one, which differs in each process."""
    return _ADDRESS.search(text) is not None


def _field(text: str, name: str | None, spec: str | None, conversion: str | None) -> _Field:
    """
    Return a piece of a template, as `string.Formatter.parse` gives its parts.

    Raises:
        ValueError: `str.format` could not make it of any argument.
    """
    if name is None:
        return _Field(text)
    root = _ROOT.match(name)[0]  # type: ignore[index]  # matches always
    steps: list[_Step] = []
    if root:
        string.Formatter().get_field(f"_{name}", (), {f"_{root}": _Recorder(steps)})
    if conversion not in _CONVERSIONS:
        raise ValueError(f"there is no conversion !{conversion}")
    _check_spec(spec or "")
    return _Field(text, name, root, tuple(steps), _CONVERSIONS[conversion], spec or "")


class _Recorder:
    """Has every attribute and every item, and notes each step to them."""

    def __init__(self, steps: list[_Step]) -> None:
        object.__setattr__(self, "steps", steps)

    def __getattribute__(self, name: str) -> "_Recorder":
        object.__getattribute__(self, "steps").append((getattr, name))
        return self

    def __getitem__(self, key: Any) -> "_Recorder":
        object.__getattribute__(self, "steps").append((item, key))
        return self


def _check_spec(spec: str) -> None:
    """Raise :exc:`ValueError` for what would let a call's arguments, or a slip, fill the memory."""
    if "{" in spec:
        raise ValueError(f"the format {spec!r} is made from an argument; write the number itself")
    if any(int(number) > WIDEST for number in re.findall(r"\d+", spec)):
        raise ValueError(f"the format {spec!r} is wider than {WIDEST} characters")
