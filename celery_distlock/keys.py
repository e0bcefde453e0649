"""
From a task's arguments to the name of its lock, and from that to a name that is safe in Redis.

Knows nothing of Celery: a task is a name and a signature here.
"""

import dataclasses
import datetime
import decimal
import dis
import functools
import hashlib
import inspect
import itertools
import json
import re
import string
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from types import TracebackType
from typing import Any

from .errors import ConfigurationError, LockKeyError
from .key import Key
from .naming import shown, unescaped
from .rate import Rate

__all__ = [
    "AS_TEXT",
    "DEFAULT_TEMPLATE",
    "Arguments",
    "KeyRule",
    "Name",
    "as_key",
    "digest",
    "key_of",
    "slot_name",
    "told_by",
]

DEFAULT_TEMPLATE = "{task}:{digest}"

Arguments = tuple[Sequence[Any], Mapping[str, Any]]

# What tells objects of a type apart in a digest. Others add types that this ring does not know.
told_by: dict[type[Any], Callable[[Any], Any]] = {
    datetime.datetime: datetime.datetime.isoformat,  # before what it is a kind of
    datetime.date: datetime.date.isoformat,
    datetime.time: datetime.time.isoformat,
    datetime.timedelta: datetime.timedelta.total_seconds,
    uuid.UUID: str,
    decimal.Decimal: str,
    TracebackType: lambda _: None,  # beside its exception it tells nothing more
}
# From Python 3.14 on annotations are evaluated when asked for, and may name what is imported for
# type checkers alone.
AS_TEXT: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    AS_TEXT = {"annotation_format": annotationlib.Format.STRING}

WIDEST = 10_000  # characters that a format in a template may ask for
SLOT_NAME_LENGTH = 160  # characters of a key that are stored readable; a longer one is hashed

_RULE = "a template, a Key, a list of them, or a callable with the task's own parameters"
_ROOT = re.compile(r"[^.\[]*")


class KeyRule:
    """
    How the keys of one task are made from the arguments of a call.

    Built once, when the task is declared, so that whatever can be wrong with the declaration is
    said then.

    Args:
        rule: A template, a `Key`, a list of both, or a callable that returns any of these or None.
            What a callable returns stands as it is: it is no template.
        task: The task's name, for ``{task}`` and for messages.
        signature: The signature of the task's function, without ``self``.
        validate: What makes of a call's arguments those that the function gets, if they differ.
        any_keywords: A call may have keywords that are no parameters: a base of the task takes them
            away before the function is called. They are no part of a key.
        rate: How often each of the keys may be taken besides what *rule* says.

    Attributes:
        declared: The keys that *rule* names itself, with their templates; of a callable it is not
            known.
        most: How many keys one call may have, as far as that is known now.

    Raises:
        ConfigurationError: *rule* is of another type, a template does not parse or names no
            parameter of the task, or a callable cannot take the task's parameters.
    """

    def __init__(
        self,
        rule: Any,
        *,
        task: str,
        signature: inspect.Signature,
        validate: Callable[[Sequence[Any], Mapping[str, Any]], Arguments] | None = None,
        any_keywords: bool = False,
        rate: Rate | None = None,
    ) -> None:
        self.task = task
        self._rate = rate
        self._signature = signature
        self._validate = validate
        parameters = signature.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        any_named = inspect.Parameter.VAR_KEYWORD in kinds
        self._takes_any = any_named and inspect.Parameter.VAR_POSITIONAL in kinds
        self._drops_keywords = any_keywords and not any_named
        by_place = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        # The parameters' names, if a call may give all of them by their place.
        self._by_place = tuple(signature.parameters) if by_place else None
        self._templates: list[_Template] = []
        self._callable: Callable[..., Any] | None = None
        self.declared: tuple[Key, ...] = ()
        named = _as_list(rule)
        if named and rate is not None:
            named = [_limited(each, rate) for each in named]
        if named:
            self._templates = [_Template(each, task, signature) for each in named]
            self.declared = tuple(template.key for template in self._templates)
            self._check_declared()
            self.most = len(self.declared)
        elif callable(rule):
            self._callable = rule
            self._check_callable(rule)
            self.most = _most_returned(rule)
        else:
            raise ConfigurationError(f"task {task}: lock_key must be {_RULE}, not {rule!r}")

    def _check_declared(self) -> None:
        try:
            self._distinct(list(self.declared))
        except LockKeyError as error:  # so it would be of every call
            raise ConfigurationError(str(error)) from None

    @property
    def runs_no_code(self) -> bool:
        """Whether keys are made by templates alone, without calling a function of the user's."""
        return self._callable is None and self._validate is None

    def keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Key, ...]:
        """
        Return the keys of one call, without repetitions; none means: run unlocked.

        The `template` of each is the key itself.

        Raises:
            TypeError: The arguments do not fit the task's signature, said as Python says it, with
                the task's name.
            LockKeyError: A key cannot be made from these arguments, or one text is asked for in two
                ways.
        """
        args, kwargs = self._arguments(args, kwargs)
        if self._callable is not None:
            self._bind(args, kwargs)
            return self._call(self._callable, args, kwargs)
        arguments = self._bound(args, kwargs)
        return self._distinct([template.render(arguments) for template in self._templates])

    def digest(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """
        Return the digest of one call's arguments, with those that have defaults.

        Raises:
            TypeError: As :meth:`keys`.
            LockKeyError: A value has no stable form.
        """
        args, kwargs = self._arguments(args, kwargs)
        return digest(self._bound(args, kwargs), task=self.task)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments that the function gets."""
        if self._drops_keywords:
            known = self._signature.parameters
            kwargs = {name: value for name, value in kwargs.items() if name in known}
        return (args, kwargs) if self._validate is None else self._validate(args, kwargs)

    def _distinct(self, keys: list[Key]) -> tuple[Key, ...]:
        """Return *keys* without repetitions."""
        if len(keys) == 1:
            return (keys[0],)
        found: dict[str, Key] = {}
        for key in keys:
            other = found.setdefault(key.template, key)
            if other != key:
                raise LockKeyError(
                    f"task {self.task}: lock_key wants {shown(key.template)!r} in two ways,"
                    f" {other!r} and {key!r}; name it once",
                    task=self.task,
                )
        return tuple(found.values())

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments by the names of the parameters, with those that have defaults."""
        names = self._by_place
        if not kwargs and names is not None and len(args) == len(names):  # as most calls are
            return dict(zip(names, args, strict=True))
        bound = self._bind(args, kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.task}() {error}") from None

    def _call(
        self, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Key, ...]:
        try:
            made = rule(*args, **kwargs)
        except Exception as error:
            raise LockKeyError(
                f"task {self.task}: lock_key raised {type(error).__name__}: {error}", task=self.task
            ) from error
        if made is None:
            return ()
        keys = _as_list(made)
        if keys is None:
            raise LockKeyError(
                f"task {self.task}: lock_key must return a string, a Key, a list of them or None,"
                f" not {made!r}",
                task=self.task,
            )
        found = [key if isinstance(key, Key) else Key(_checked(key, self.task)) for key in keys]
        if self._rate is not None:
            found = [key.at_most(self._rate) for key in found]
        return self._distinct(found)

    def _check_callable(self, rule: Callable[..., Any]) -> None:
        try:
            accepted = inspect.signature(rule, **AS_TEXT)
        except (TypeError, ValueError):  # a builtin that does not tell: its call will
            return
        # A function that takes any arguments leaves to the callable to say which there are.
        bind = accepted.bind_partial if self._takes_any else accepted.bind
        required = [
            p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in self._signature.parameters.values()
        ]
        probes = [_probe(self._signature, list(self._signature.parameters))]
        if not all(required):
            names = [
                n for n, must in zip(self._signature.parameters, required, strict=True) if must
            ]
            probes.append(_probe(self._signature, names))
        for args, kwargs in probes:
            try:
                bind(*args, **kwargs)
            except TypeError as error:
                raise ConfigurationError(
                    f"task {self.task}: lock_key{accepted} cannot be called with the task's own"
                    f" parameters {self._signature}: {error}"
                ) from None


def _as_list(rule: Any) -> Sequence[str | Key] | None:
    """Return what *rule* names, a text or a key or a list of both; None: it is something else."""
    if isinstance(rule, str | Key):
        return (rule,)
    is_list = isinstance(rule, list | tuple) and all(isinstance(each, str | Key) for each in rule)
    return rule if is_list else None


def _limited(named: str | Key, rate: Rate) -> str | Key:
    """Return *named* with a rate besides; not what is no key, which is complained of later."""
    if isinstance(named, str):
        if not named:
            return named
        named = Key(named)
    return named.at_most(rate)


class _Template:
    """One parsed template; see :class:`KeyRule`."""

    def __init__(self, named: str | Key, task: str, signature: inspect.Signature) -> None:
        text = named.template if isinstance(named, Key) else named
        self._text = text
        self._task = task
        self._parameters = set(signature.parameters)
        roots = self._roots(text)
        self._wants_digest = "digest" in roots and "digest" not in self._parameters
        unknown = roots - self._parameters - {"task", "digest"}
        if unknown:
            raise ConfigurationError(self._unknown(min(unknown)))
        if not text:
            raise ConfigurationError(f"task {task}: lock_key is an empty template")
        self.key = named if isinstance(named, Key) else Key(text)

    def _roots(self, text: str) -> set[str]:
        roots = set()
        try:
            for _, field, spec, conversion in string.Formatter().parse(text):
                if field is not None:
                    _check_field(field, conversion)
                    _check_spec(spec or "")
                    roots.add(_ROOT.match(field)[0])  # type: ignore[index]  # matches always
        except ValueError as error:
            raise ConfigurationError(
                f"task {self._task}: lock_key {text!r} does not parse: {error}"
            ) from None
        return roots

    def _unknown(self, field: str) -> str:
        known = sorted(self._parameters | {"task", "digest"})
        close = get_close_matches(field, known, n=1)
        hint = f"did you mean {{{close[0]}}}?" if close else f"it can name {', '.join(known)}"
        what = f"{{{field}}}" if field else "a field without a name"
        return (
            f"task {self._task}: lock_key {self._text!r} names {what}, which is no parameter of the"
            f" task; {hint}"
        )

    def render(self, arguments: Mapping[str, Any]) -> Key:
        values: dict[str, Any] = {"task": self._task}
        if self._wants_digest:
            values["digest"] = digest(arguments, task=self._task)
        values.update(arguments)
        try:
            key = self._text.format_map(values)
        except Exception as error:  # attribute access and __format__ run users' code
            raise LockKeyError(
                f"task {self._task}: lock_key {self._text!r} cannot be made from these arguments:"
                f" {type(error).__name__}: {error}",
                task=self._task,
            ) from error
        return self.key.of(_checked(key, self._task))


class _Anything:
    """Has every attribute and every item."""

    def __getattr__(self, name: str) -> "_Anything":
        return self

    def __getitem__(self, item: Any) -> "_Anything":
        return self


def _check_field(field: str, conversion: str | None) -> None:
    """Raise :exc:`ValueError` for what `str.format` could not make of any argument."""
    root = _ROOT.match(field)[0]  # type: ignore[index]  # matches always
    if root:
        string.Formatter().get_field(f"_{field}", (), {f"_{root}": _Anything()})
    if conversion is not None and conversion not in ("r", "s", "a"):
        raise ValueError(f"there is no conversion !{conversion}")


def _check_spec(spec: str) -> None:
    """Raise :exc:`ValueError` for what would let a call's arguments, or a slip, fill the memory."""
    if "{" in spec:
        raise ValueError(f"the format {spec!r} is made from an argument; write the number itself")
    if any(int(number) > WIDEST for number in re.findall(r"\d+", spec)):
        raise ValueError(f"the format {spec!r} is wider than {WIDEST} characters")


def _most_returned(function: Any) -> int:
    """Return the length of the longest list or tuple that a ``return`` of *function* spells out."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    steps = [] if code is None else list(dis.get_instructions(code))
    return max(
        (
            step.arg or 0
            for step, next_step in itertools.pairwise(steps)
            if step.opname in ("BUILD_LIST", "BUILD_TUPLE") and next_step.opname == "RETURN_VALUE"
        ),
        default=0,
    )


def _probe(signature: inspect.Signature, names: Iterable[str]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name in names:
        parameter = signature.parameters[name]
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = None
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            args.append(None)
    return args, kwargs


def _checked(key: str, task: str) -> str:
    if not key:
        raise LockKeyError(f"task {task}: lock_key gave an empty key", task=task)
    return key


def digest(value: Any, *, task: str = "") -> str:
    """
    Return a short digest that is equal for values that mean the same to a message's receiver.

    The order of dictionary keys does not matter, and types that JSON folds together (tuples and
    lists, keys 1 and "1") fold together, so that a call has one digest before and after its
    message has travelled. 128 bits of SHA-256.

    Raises:
        LockKeyError: A value has no stable form, an object without ``__json__`` for example.
    """
    try:
        text = json.dumps(_canonical(value, task), sort_keys=True, separators=(",", ":"))
    except LockKeyError:
        raise
    except Exception as error:  # users' own __json__, or a value that contains itself
        where = f"task {task}: " if task else ""
        raise LockKeyError(
            f"{where}{{digest}} cannot be made of these arguments: {type(error).__name__}: {error}",
            task,
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:32]  # JSON is ASCII here


def _canonical(value: Any, task: str) -> Any:
    # A float keeps its point: JSON does, so 1 and 1.0 are two values on both sides.
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_field_name(k): _canonical(v, task) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item, task) for item in value]
    if isinstance(value, AbstractSet):
        items = [_canonical(item, task) for item in value]
        return {"\0set": sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}
    return _tagged(value, task)


def _tagged(value: Any, task: str) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"\0bytes": bytes(value).hex()}
    if isinstance(value, BaseException):
        return {f"\0{type(value).__qualname__}": str(value)}
    for kind, told in told_by.items():
        if isinstance(value, kind):
            return {f"\0{kind.__name__}": _canonical(told(value), task)}
    if callable(getattr(value, "__json__", None)):
        return _canonical(value.__json__(), task)
    if callable(getattr(value, "model_dump", None)):
        return _canonical(value.model_dump(), task)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _canonical(fields, task)
    where = f"task {task}: " if task else ""
    raise LockKeyError(
        f"{where}{{digest}} cannot stand for a {type(value).__name__}: name what identifies it in"
        f" lock_key, as in 'order:{{order.id}}'",
        task=task,
    )


def _field_name(name: Any) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    if name is None or isinstance(name, bool | float):
        return json.dumps(name)
    return str(name)


_ESCAPED = {c: f"%{ord(c):02X}" for c in "{}%"} | {chr(c): f"%{c:02X}" for c in (*range(33), 127)}
_ESCAPED |= {chr(c): f"%u{c:04X}" for c in range(0xD800, 0xE000)}  # surrogates have no UTF-8
_ESCAPES = str.maketrans(_ESCAPED)


class Name(str):
    """The slot name of a key that it does not tell, to be given where a key is asked for."""

    __slots__ = ()


def slot_name(key: str) -> str:
    """
    Return the form of *key* that stands between the braces of its records' names.

    Without braces, blanks and control characters, never empty for a key that is not, at most
    about 160 characters long, and different for different keys: a long key is cut and followed
    by its SHA-256 behind ``%#``, which no escape begins with. So is one that reads as such a name.
    """
    return key if type(key) is Name else _slot_name(key)


@functools.lru_cache(maxsize=64)  # of a task's key it is wanted several times in a row
def _slot_name(key: str) -> str:
    name = key.translate(_ESCAPES)
    if len(name) <= SLOT_NAME_LENGTH and not _HASHED.fullmatch(key):
        return name
    tail = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[:80]}%#{tail}"


_HASHED = re.compile(r".{80}%#[0-9a-f]{64}", re.DOTALL)


def key_of(name: str) -> str:
    """Return the key whose :func:`slot_name` is *name*; of one that it does not tell, a `Name`."""
    if _HASHED.fullmatch(name):
        return Name(name)
    return unescaped(name)


def as_key(text: str) -> str:
    """Return the key that somebody means by *text*: itself, or what a list showed of a long one."""
    return Name(text) if _HASHED.fullmatch(text) else text
