"""
Convert a task's arguments to the name of its lock, and that to a name that is safe in Redis.

This module does not depend on Celery: a task is a name and a signature here.
"""

import dis
import functools
import hashlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from .arguments import digest
from .errors import ConfigurationError, LockKeyError
from .key import Key
from .naming import shown, unescaped
from .rate import Rate
from .templates import Template, has_address

DEFAULT_TEMPLATE = "{task}:{digest}"

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
_Bind = Callable[..., inspect.BoundArguments]
Receive = Callable[[Any], Any]  # returns what a worker receives of an argument

# From Python 3.14 on annotations are evaluated on access, and may name what is imported only for
# type checkers.
AS_TEXT: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    AS_TEXT = {"annotation_format": annotationlib.Format.STRING}

SLOT_NAME_LENGTH = 160  # characters of a key that are stored readable; a longer one is hashed

_RULE = "a template, a Key, a list of them, or a callable with the task's own parameters"


class KeyRule:
    """
    Makes the keys of one task from the arguments of a call.

    Built once, when the task is declared, so that all errors of the declaration are raised then.

    Args:
        rule: A template, a `Key`, a list of both, or a callable that returns any of these or None.
            What a callable returns is used as it is, not as a template.
        task: The task's name, for ``{task}`` and for messages.
        signature: The signature of the task's function, without ``self``.
        validate: Converts a call's arguments to those that the function gets, if they differ.
        any_keywords: Whether a call may have keywords that are not parameters: a base of the task
            takes them away before the function is called. They are not part of a key.
        rate: An additional limit on how often each of the keys may be taken.
        option: The task's option that *rule* is, for messages.

    Attributes:
        declared: The keys that *rule* names itself, with their templates; empty for a callable.
        most: The most keys that one call may have, as far as known now.
        takes_order: Whether calls wait in the store, where a key's `order` can be kept.

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
        option: str = "lock_key",
    ) -> None:
        self.task = task
        self._named = f"task {task}: {option}"  # in messages
        self._rate = rate
        self._signature = signature
        self._validate = validate
        parameters = signature.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        any_named = inspect.Parameter.VAR_KEYWORD in kinds
        self._takes_any = any_named and inspect.Parameter.VAR_POSITIONAL in kinds
        self._drops_keywords = any_keywords and not any_named
        by_place = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        # The parameters' names, if a call may pass all of them by position.
        self._by_place = tuple(signature.parameters) if by_place else None
        self._templates: list[Template] = []
        self._callable: Callable[..., Any] | None = None
        self.takes_order = True
        self.declared: tuple[Key, ...] = ()
        named = _as_list(rule)
        if named:
            self._templates = [Template(each, task, signature, option) for each in named]
            self._read = {name for template in self._templates for name in template.reads}
            self._check_declared([template.key for template in self._templates])
            self.most = len(self.declared)
        elif callable(rule):
            self._callable = rule
            self._check_callable(rule)
            self.most = _most_returned(rule)
        else:
            raise ConfigurationError(f"task {task}: {option} must be {_RULE}, not {rule!r}")

    def _check_declared(self, keys: list[Key]) -> None:
        self.declared = tuple(self._limited(keys))
        try:
            self._distinct(keys)
        except LockKeyError as error:  # it would be raised for every call
            raise ConfigurationError(str(error)) from None

    @property
    def runs_no_code(self) -> bool:
        """Whether keys are made by templates alone, without calling a function of the user's."""
        return self._callable is None and self._validate is None

    @property
    def may_order(self) -> bool:
        """Whether a key may have an order."""
        return self._callable is not None or any(key.order for key in self.declared)

    @property
    def compares_calls(self) -> bool:
        """Whether a key has a digest of all arguments."""
        return any(template.wants_digest for template in self._templates)

    def keys(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive | None = None
    ) -> tuple[Key, ...]:
        """
        Return the keys of one call, without repetitions; none means: run unlocked.

        The `template` of each is the key itself.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
            receive: Returns what the worker receives of an argument; None: these have been
                received.

        Raises:
            TypeError: The arguments do not fit the task's signature; the message is Python's, with
                the task's name.
            LockKeyError: A key cannot be made from these arguments, or one text is asked for in two
                ways.
        """
        made = self._made(self._signature.bind, args, kwargs, receive)
        return made if self._rate is None else self._limited(made)

    def own_keys(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive
    ) -> tuple[Key, ...]:
        """
        Return the keys of one call without the additional *rate*.

        Arguments that no template reads may be missing.
        """
        return self._made(self._signature.bind_partial, args, kwargs, receive)

    def _made(
        self, bind: _Bind, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive | None
    ) -> tuple[Key, ...]:
        if self._callable is not None:
            args, kwargs = self._as_the_function(args, kwargs, receive)
            self._bind(bind, args, kwargs)
            return self._call(self._callable, args, kwargs)
        arguments = self._bound(bind, args, kwargs, receive, self._read)
        keys = [template.fill(arguments) for template in self._templates]
        return (keys[0],) if len(keys) == 1 else self._distinct(keys)

    def digest(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive | None = None
    ) -> str:
        """
        Return the digest of one call's arguments, including defaults.

        Raises:
            TypeError: As for :meth:`keys`.
            LockKeyError: A value has no stable form.
        """
        signature = self._signature
        arguments = self._bound(signature.bind, args, kwargs, receive, signature.parameters)
        return digest(arguments, task=self.task, instead="lock_unique=Unique(by={})")

    def _limited(self, keys: Sequence[Key]) -> tuple[Key, ...]:
        """Return *keys* with the additional rate."""
        return tuple(keys if self._rate is None else [key.at_most(self._rate) for key in keys])

    def _distinct(self, keys: list[Key]) -> tuple[Key, ...]:
        """Return *keys* without repetitions."""
        found: dict[str, Key] = {}
        for key in keys:
            other = found.setdefault(key.template, key)
            if other != key:
                raise LockKeyError(
                    f"{self._named} wants {shown(key.template)!r} in two ways,"
                    f" {other!r} and {key!r}; name it once",
                    task=self.task,
                )
        return tuple(found.values())

    def _as_the_function(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive | None
    ) -> Arguments:
        """Return the arguments as the task's function gets them in a worker."""
        if self._drops_keywords:
            kwargs = self._known(kwargs)
        if receive is not None:
            args = [receive(each) for each in args]
            kwargs = {name: receive(each) for name, each in kwargs.items()}
        return (args, kwargs) if self._validate is None else self._validate(args, kwargs)

    def _known(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keywords that the function itself takes."""
        known = self._signature.parameters
        return {name: value for name, value in kwargs.items() if name in known}

    def _bound(
        self,
        bind: _Bind,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        receive: Receive | None,
        read: Collection[str],
    ) -> Mapping[str, Any]:
        """
        Return the arguments by the names of the parameters, including defaults.

        Those that are not *read* may be missing, if *bind* allows it, and stay as they are given.
        """
        if self._validate is not None:
            (args, kwargs), receive = self._as_the_function(args, kwargs, receive), None
        if self._drops_keywords:
            kwargs = self._known(kwargs)
        names = self._by_place
        if not kwargs and names is not None and len(args) == len(names):  # as most calls are
            given = dict(zip(names, args, strict=True))
            return given if receive is None else _received(given, receive, read)
        bound = self._bind(bind, args, kwargs)
        if receive is not None:  # not the defaults, which are in no message
            bound.arguments = _received(bound.arguments, receive, read)
        bound.apply_defaults()
        for name in self._signature.parameters:
            if name in read and name not in bound.arguments:
                raise TypeError(f"{self.task}() missing a required argument: {name!r}")
        return bound.arguments

    def _bind(
        self, bind: _Bind, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        try:
            return bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.task}() {error}") from None

    def _call(
        self, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Key, ...]:
        try:
            made = rule(*args, **kwargs)
        except Exception as error:
            raise LockKeyError(
                f"{self._named} raised {type(error).__name__}: {error}",
                task=self.task,
            ) from error
        if made is None:
            return ()
        keys = _as_list(made)
        if keys is None:
            raise LockKeyError(
                f"{self._named} must return a string, a Key, a list of them or None, not {made!r}",
                task=self.task,
            )
        return self._distinct([self._returned(key) for key in keys])

    def _returned(self, key: str | Key) -> Key:
        """Return the key that a callable has named."""
        if not key:
            raise LockKeyError(f"{self._named} gave an empty key", task=self.task)
        made = key if isinstance(key, Key) else Key(key)
        if made.order is not None and not self.takes_order:
            raise LockKeyError(
                f"{self._named} returned {made!r}: calls that wait in the broker cannot be put in"
                " order; declare lock_via='store' with it",
                task=self.task,
            )
        if has_address(made.template):
            raise LockKeyError(
                f"{self._named} returned {shown(made.template)!r}, and an address"
                " differs in each process; name what identifies the object, as in order.id",
                task=self.task,
            )
        return made

    def _check_callable(self, rule: Callable[..., Any]) -> None:
        try:
            accepted = inspect.signature(rule, **AS_TEXT)
        except (TypeError, ValueError):  # a builtin without a signature: the call will show
            return
        # For a function that takes any arguments, the callable decides which there are.
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
                    f"{self._named}{accepted} cannot be called with the task's own"
                    f" parameters {self._signature}: {error}"
                ) from None


def _as_list(rule: Any) -> Sequence[str | Key] | None:
    """Return what *rule* names, a text or a key or a list of both; None: it is something else."""
    if isinstance(rule, str | Key):
        return (rule,)
    is_list = isinstance(rule, list | tuple) and all(isinstance(each, str | Key) for each in rule)
    return rule if is_list else None


def _received(given: Mapping[str, Any], receive: Receive, read: Collection[str]) -> dict[str, Any]:
    received = dict(given)
    for name in read:
        if name in received:
            received[name] = receive(received[name])
    return received


def _most_returned(function: Any) -> int:
    """Return the length of the longest list or tuple literal in a ``return`` of *function*."""
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


_ESCAPED = {c: f"%{ord(c):02X}" for c in "{}%"} | {chr(c): f"%{c:02X}" for c in (*range(33), 127)}
_ESCAPED |= {chr(c): f"%u{c:04X}" for c in range(0xD800, 0xE000)}  # surrogates have no UTF-8
_ESCAPES = str.maketrans(_ESCAPED)
_UNSAFE = re.compile(f"[{re.escape(''.join(_ESCAPED))}]")


class Name(str):
    """The slot name of a key whose text is unknown, accepted in place of a key."""

    __slots__ = ()


def slot_name(key: str) -> str:
    """
    Return the form of *key* between the braces of its records' names.

    It has no braces, blanks or control characters, is never empty unless the key is, has at most
    about 160 characters, and differs for different keys. A long key is cut and followed by its
    SHA-256 after ``%#``, with which no escape begins; so is a key that looks like such a name.
    """
    return key if type(key) is Name else _slot_name(key)


@functools.lru_cache(maxsize=64)  # a task asks for the same key several times in a row
def _slot_name(key: str) -> str:
    name = key.translate(_ESCAPES) if _UNSAFE.search(key) else key
    if len(name) <= SLOT_NAME_LENGTH and not _HASHED.fullmatch(key):
        return name
    tail = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[:80]}%#{tail}"


_HASHED = re.compile(r".{80}%#[0-9a-f]{64}", re.DOTALL)


def key_of(name: str) -> str:
    """Return the key whose :func:`slot_name` is *name*; a `Name` if it cannot be derived."""
    if _HASHED.fullmatch(name):
        return Name(name)
    return unescaped(name)


def as_key(text: str) -> str:
    """Return the key that a user means by *text*: itself, or the listed form of a long one."""
    return Name(text) if _HASHED.fullmatch(text) else text
