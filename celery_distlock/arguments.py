"""
Normalise call arguments, so that a key does not depend on the way that a call arrives.

Serializers change types: JSON turns a tuple into a list, and an enum with text values into a text.
Keys do not depend on that. This module does not depend on Celery.
"""

import dataclasses
import datetime
import decimal
import enum
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from operator import itemgetter
from types import TracebackType
from typing import Any

from .errors import LockKeyError

SCALARS = frozenset({str, int, float, bool, type(None)})  # every serializer keeps these types
_TEXTS = frozenset({str})

# What distinguishes objects of a type in a digest. Other modules add types that this layer does not
# know.
forms: dict[type[Any], Callable[[Any], Any]] = {
    datetime.datetime: datetime.datetime.isoformat,  # before date, its base class
    datetime.date: datetime.date.isoformat,
    datetime.time: datetime.time.isoformat,
    datetime.timedelta: datetime.timedelta.total_seconds,
    uuid.UUID: str,
    decimal.Decimal: str,
    TracebackType: lambda _: None,  # adds nothing to its exception
}


# By base type: how to make an object of exactly that type from a value. A time gets an offset in
# place of its zone, which messages cannot carry.
_PLAIN: dict[type[Any], Callable[[Any], Any]] = {
    kind: lambda value, kind=kind: kind.fromisoformat(kind.isoformat(value))
    for kind in (datetime.datetime, datetime.date, datetime.time)
} | {
    datetime.timedelta: lambda value: datetime.timedelta(
        value.days, value.seconds, value.microseconds
    ),
    uuid.UUID: lambda value: uuid.UUID(int=value.int),
    decimal.Decimal: decimal.Decimal,
}


class _Set(list[Any]):
    """A set's items in an order that is the same in every process."""

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}}}"


def plain(value: Any) -> Any:
    """
    Return *value* in the one form that all serializers agree on.

    An enum becomes its value, and an object of a subclass becomes one of the base type, with the
    same content. Tuples, including named ones, become lists. The keys of a dictionary become texts,
    in order, as in JSON. An object with ``__json__`` becomes what that returns, and a dataclass
    without a ``__str__`` of its own becomes its fields. Other objects stay as they are.
    """
    if type(value) in SCALARS:
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, Mapping):
        return {
            name: plain(each) for name, each in sorted(_by_names(value).items(), key=itemgetter(0))
        }
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, AbstractSet):
        return _Set(sorted(map(plain, value), key=repr))
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if isinstance(value, type):
        return value
    if callable(getattr(value, "__json__", None)):
        return plain(value.__json__())
    for kind, exact in _PLAIN.items():
        if isinstance(value, kind):
            return exact(value)
    if dataclasses.is_dataclass(value) and not _has_own_text(type(value)):
        return plain(_fields(value))
    return value


def _has_own_text(kind: type[Any]) -> bool:
    own: Any = (kind.__str__, kind.__format__)
    return bool(own != (object.__str__, object.__format__))


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _by_names(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {key if type(key) is str else _name(key): each for key, each in value.items()}


def _name(key: Any) -> str:
    """Return a dictionary's *key* as JSON has it."""
    key = plain(key)
    return json.dumps(key) if key is None or isinstance(key, bool | float) else str(key)


def item(value: Any, key: str | int) -> Any:
    """Return ``value[key]``; of a dictionary, what is there after any serializer."""
    return _by_names(value)[str(key)] if isinstance(value, Mapping) else value[key]


def digest(value: Any, *, task: str = "", instead: str = "lock_key={}") -> str:
    """
    Return a short digest that is equal for values that mean the same to a message's receiver.

    The same holds for what `plain` makes of them; 1, ``"1"`` and 1.0 are three values. 128 bits of
    SHA-256.

    Args:
        value: A call's arguments by their names, or anything else.
        task: The task's name, for messages.
        instead: What to write instead, for messages, with ``{}`` for a template.

    Raises:
        LockKeyError: A value has no stable form, an object without ``__json__`` for example. Of a
            dictionary, as of a call's arguments, the message names the item.
    """
    try:
        text = _encoded(value if _is_flat(value) else _stable(plain(value)))
    except Exception as error:  # users' own __json__, or a value that contains itself
        where = f"task {task}: " if task else ""
        raise LockKeyError(f"{where}{{digest}} {_why_not(value, error, instead)}", task) from error
    return hashlib.sha256(text.encode()).hexdigest()[:32]  # JSON is ASCII here


_encoded = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _is_flat(value: Any) -> bool:
    """Whether *value* is a dictionary of texts, numbers and the like, as most arguments are."""
    return (
        type(value) is dict
        and SCALARS.issuperset(map(type, value.values()))
        and _TEXTS.issuperset(map(type, value))
    )


class _FormlessError(TypeError):
    """An object is of a type that has no stable form."""


def _stable(value: Any) -> Any:
    # A float keeps its point, as in JSON: 1 and 1.0 are two values on both sides.
    if type(value) in SCALARS:
        return value
    if isinstance(value, _Set):
        return {"\0set": [_stable(each) for each in value]}
    if isinstance(value, list):
        return [_stable(each) for each in value]
    if isinstance(value, dict):
        return {name: _stable(each) for name, each in value.items()}
    return _tagged(value)


def _tagged(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"\0bytes": value.hex()}
    if isinstance(value, BaseException):
        return {f"\0{type(value).__qualname__}": str(value)}
    for kind, form in forms.items():
        if isinstance(value, kind):
            return {f"\0{kind.__name__}": _stable(plain(form(value)))}
    if not isinstance(value, type):
        if callable(getattr(value, "model_dump", None)):
            return _stable(plain(value.model_dump()))
        if dataclasses.is_dataclass(value):
            return _stable(plain(_fields(value)))
    raise _FormlessError(type(value).__name__)


def _why_not(value: Any, error: Exception, instead: str) -> str:
    if not isinstance(error, _FormlessError):
        return f"cannot be made from these arguments: {type(error).__name__}: {error}"
    named = value.items() if isinstance(value, Mapping) else ()
    name = next((str(name) for name, each in named if _is_formless(each)), "")
    template = f"'order:{{{name or 'order'}.id}}'"
    return (
        f"cannot represent {f'{name}, ' if name else ''}an object of type {error}: name what"
        f" identifies it, as in"
        f" {instead.format(template)}"
    )


def _is_formless(value: Any) -> bool:
    try:
        _stable(plain(value))
    except _FormlessError:
        return True
    return False
