"""A template over a task's parameters: parsed at its declaration, filled in for each call."""

import inspect
import re
import string
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from .arguments import SCALARS, digest, item, plain
from .errors import ConfigurationError, LockKeyError
from .key import Key

WIDEST = 10_000  # characters that a format in a template may ask for

_ROOT = re.compile(r"[^.\[]*")
# What other languages use for a field, or what slips produce; with its name, if any.
_UNFILLED = re.compile(
    r"\{([^\W\d]\w*)(?:[.\[!:][^{}]*)?\}"  # of an f-string, or of doubled braces
    r"|%\((\w+)\)[a-z]|%[sdr](?!\w)"
    r"|\$\{?([^\W\d]\w*)|<([^\W\d]\w*)>"
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")  # in the repr of an object without its own
_CONVERSIONS: Mapping[str | None, Callable[[Any], Any] | None] = {
    None: None,
    "r": repr,
    "s": str,
    "a": ascii,
}
# By the type that an argument has after a message: what it may have been, and what to write.
_ARRIVES_AS = {
    str: "an enum arrives as its value: write {%s}",
    int: "an enum arrives as its value: write {%s}",
    list: "a named tuple arrives as a list: write {%s[0]}",
    dict: "an object may arrive as a dictionary: write {%s[id]}",
}

_Step = tuple[Callable[[Any, Any], Any], Any]


class _Field(NamedTuple):
    """A text, and the field after it, if any."""

    text: str
    name: str | None = None  # as it is written
    root: str = ""  # the parameter
    steps: tuple[_Step, ...] = ()
    convert: Callable[[Any], Any] | None = None
    spec: str = ""

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with the value; raise what `str.format` would, or `TypeError`."""
        if self.name is None:
            return self.text
        value = values[self.root]
        for get, name in self.steps:
            value = get(value, name)
        if type(value) not in SCALARS:
            value = plain(value)
        made = format(value if self.convert is None else self.convert(value), self.spec)
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
        option: The task's option that it is, for messages.

    Attributes:
        key: The template with its terms.
        reads: The parameters that it is filled in with.
        wants_digest: It has a digest of all arguments.

    Raises:
        ConfigurationError: It does not parse, or names no parameter of the task.
    """

    def __init__(
        self, named: str | Key, task: str, signature: inspect.Signature, option: str = "lock_key"
    ) -> None:
        text = named.template if isinstance(named, Key) else named
        self._text = text
        self._task = task
        self._named = f"task {task}: {option}"  # in messages
        parameters = set(signature.parameters)
        try:
            self._fields = [_field(*piece) for piece in string.Formatter().parse(text)]
        except ValueError as error:
            raise ConfigurationError(
                f"task {task}: {option} {text!r} does not parse: {error}"
            ) from None
        roots = {field.root for field in self._fields if field.name is not None}
        self.wants_digest = "digest" in roots - parameters
        self.reads = parameters if self.wants_digest else roots & parameters
        unknown = roots - parameters - {"task", "digest"}
        if unknown:
            raise ConfigurationError(self._unknown(min(unknown), parameters))
        if not text:
            raise ConfigurationError(f"task {task}: {option} is an empty template")
        self.key = named if isinstance(named, Key) else Key(text)
        self._lane: Template | None = None
        if self.key.order is not None and self.key.order.lane:
            self._lane = Template(self.key.order.lane, task, signature, f"{option}: Order")
            self.reads = self.reads | self._lane.reads
        # A constant key may have any name; `by` of a rule names a parameter.
        bare = option != "lock_key" and not self.reads and text in parameters
        self._warn_of_unfilled(list(signature.parameters), [(text, text)] * bare)

    def _warn_of_unfilled(self, parameters: list[str], bare: list[tuple[str, str]]) -> None:
        """Warn of text that looks like a field and is none, so that too many calls have one key."""
        pieces = (each.text + ("" if each.name is None else "\0") for each in self._fields)
        matches = _UNFILLED.finditer("".join(pieces))
        found = [(match[0], match[match.lastindex or 0]) for match in matches] + bare
        named = [(shape, name) for shape, name in found if name in parameters]
        shape, name = next(iter(named or ([] if self.reads else found)), ("", ""))
        if shape and parameters:
            right = name if name in parameters else parameters[0]
            warnings.warn(
                f"{self._named} {self._text!r} has the text {shape!r} in every key: to put an"
                f" argument there, write {{{right}}}",
                stacklevel=2,
            )

    def _unknown(self, field: str, parameters: set[str]) -> str:
        known = sorted(parameters | {"task", "digest"})
        close = get_close_matches(field, known, n=1)
        hint = f"did you mean {{{close[0]}}}?" if close else f"it can name {', '.join(known)}"
        what = f"{{{field}}}" if field else "a field without a name"
        return (
            f"{self._named} {self._text!r} names {what}, which is no parameter of the task; {hint}"
        )

    def fill(self, arguments: Mapping[str, Any]) -> Key:
        """
        Return the key of a call with *arguments*, by the names of the parameters.

        Raises:
            LockKeyError: It cannot be made of them.
        """
        key = self._text_with(arguments)
        if not key:
            raise LockKeyError(f"{self._named} gave an empty key", self._task)
        if self._lane is None or self.key.order is None:
            return self.key.of(key)
        return self.key.of(key, self.key.order.of(self._lane._text_with(arguments)))

    def _text_with(self, arguments: Mapping[str, Any]) -> str:
        values: dict[str, Any] = {"task": self._task}
        if self.wants_digest:
            values["digest"] = digest(arguments, task=self._task)
        values.update(arguments)
        made = []
        for field in self._fields:
            try:
                made.append(field.fill(values))
            except Exception as error:  # attribute access and __format__ run users' code
                raise LockKeyError(self._failed(field, values, error), self._task) from error
        return "".join(made)

    def _failed(self, field: _Field, values: Mapping[str, Any], error: Exception) -> str:
        words = f"{{{field.name}}}: {type(error).__name__}: {error}"
        arrives = _ARRIVES_AS.get(type(values[field.root])) if field.steps else None
        if arrives is not None and isinstance(error, AttributeError):
            words += f"; {arrives % field.root}"
        return f"{self._named} {self._text!r} cannot be made from these arguments: {words}"


def has_address(text: str) -> bool:
    """Whether *text* contains an object's address, which differs in each process."""
    return _ADDRESS.search(text) is not None


def unfilled_in(key: str) -> str:
    """Return the part of a *key* that looks like an unfilled field of a template; or nothing."""
    match = _UNFILLED.search(key) if "{" in key or "%" in key else None
    return match[0] if match and match[0][0] in "{%" else ""


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
    """Accepts every attribute and every item, and records each access."""

    def __init__(self, steps: list[_Step]) -> None:
        object.__setattr__(self, "steps", steps)

    def __getattribute__(self, name: str) -> "_Recorder":
        object.__getattribute__(self, "steps").append((getattr, name))
        return self

    def __getitem__(self, key: Any) -> "_Recorder":
        object.__getattribute__(self, "steps").append((item, key))
        return self


def _check_spec(spec: str) -> None:
    """Raise :exc:`ValueError` for a format with which a call's arguments could fill the memory."""
    if "{" in spec:
        raise ValueError(f"the format {spec!r} is made from an argument; write the number itself")
    if any(int(number) > WIDEST for number in re.findall(r"\d+", spec)):
        raise ValueError(f"the format {spec!r} is wider than {WIDEST} characters")
