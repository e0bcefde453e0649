"""
The commands that the scripts and the store use, for a server in this process.

Each behaves as in Redis. It changes the keys in one step of the interpreter: after an exception in
the middle, such as one raised by a time limit, it was executed completely or not at all.
"""

import inspect
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

from .keyspace import Entries, Hash, Keyspace, RefusedError, SortedSet

Answer: TypeAlias = "int | bytes | list[Any] | None"
Words: TypeAlias = tuple[bytes, ...]

_PLACES = 17  # decimals of a sum
_EITHER = (b"(", b"[")  # before a member where a range begins or ends
_BEGINNING = b"0"  # the cursor at the beginning and the end of a scan, which is one step


class Status(bytes):
    """A status answer, such as OK."""


OK = Status(b"OK")


class Command(NamedTuple):
    """
    A command.

    Attributes:
        execute: Called with the keys and the words after the command's name.
        least: The smallest number of words.
        most: The largest number of words.
    """

    execute: Callable[..., Any]
    least: int
    most: float


COMMANDS: dict[bytes, Command] = {}


def _command(execute: Callable[..., Answer]) -> Callable[..., Answer]:
    """Register a function as the command with its name and its parameters."""
    _, *words = inspect.signature(execute).parameters.values()
    least = sum(word.kind is word.POSITIONAL_OR_KEYWORD for word in words)
    most = least if least == len(words) else math.inf
    name = execute.__name__.strip("_").upper().encode()
    COMMANDS[name] = Command(execute, least, most)
    return execute


# Numbers, patterns and options


def number(value: float) -> bytes:
    """Return a number in the format of a server."""
    return b"%d" % value if math.isfinite(value) and value == int(value) else repr(value).encode()


def _integer(word: bytes) -> int:
    if not re.fullmatch(rb"-?[1-9]\d{0,18}|0", word) or not -(2**63) <= int(word) < 2**63:
        raise RefusedError("value is not an integer or out of range")
    return int(word)


def _float(word: bytes, complaint: str = "value is not a valid float") -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if math.isnan(value) or word.strip() != word or b"_" in word:
        raise RefusedError(complaint)
    return value


@lru_cache(maxsize=256)
def _pattern(glob: bytes) -> re.Pattern[bytes]:
    """Compile a server's pattern, with ``*``, ``?``, ``[a-z]`` and backslashes."""
    parts = re.findall(rb"\\.|\[\^?(?:\\.|[^\]])*\]?|.", glob, re.DOTALL)
    return re.compile(b"".join(map(_translated, parts)), re.DOTALL)


def _translated(part: bytes) -> bytes:
    if part[:1] == b"[" and len(part) > 1:
        inverted, inner = part[1:2] == b"^", part[1:].removeprefix(b"^").removesuffix(b"]")
        choices = re.sub(
            rb"\\(.)|([\[\]\\^&~|])", lambda each: re.escape(each[1] or each[2]), inner
        )
        return b"[%b%b]" % (b"^" * inverted, choices) if choices else b"(?!)"
    if len(part) > 1:
        return re.escape(part[1:])
    return {b"*": b".*", b"?": b"."}.get(part, re.escape(part))


def _options(words: Words, counts: dict[bytes, int]) -> dict[bytes, Words]:
    """Return the options in *words* with their values; *counts* has the number of each's values."""
    found: dict[bytes, Words] = {}
    rest = list(words)
    while rest:
        name = rest.pop(0).upper()
        if name not in counts or len(rest) < counts[name]:
            raise RefusedError("syntax error")
        found[name] = tuple(rest[: counts[name]])
        del rest[: counts[name]]
    return found


def _expiry(keys: Keyspace, word: bytes, unit_ms: int, name: str) -> float:
    """Return the time (ms) when that many units are over."""
    after_ms = _integer(word) * unit_ms
    if after_ms + keys.now_us // 1000 >= 2**63 or after_ms < -(2**63):
        raise RefusedError(f"invalid expire time in '{name}' command")
    return keys.now_us / 1000 + after_ms


# Any keys


@_command
def ping(_: Keyspace, *message: bytes) -> Answer:
    if len(message) > 1:
        raise RefusedError("wrong number of arguments for 'ping' command")
    return message[0] if message else Status(b"PONG")


@_command
def time(keys: Keyspace) -> Answer:
    return [b"%d" % part for part in divmod(keys.now_us, 1_000_000)]


@_command
def exists(keys: Keyspace, name: bytes, *others: bytes) -> Answer:
    return sum(map(keys.holds, (name, *others)))


@_command
def del_(keys: Keyspace, name: bytes, *others: bytes) -> Answer:
    return sum(map(keys.remove, (name, *others)))


@_command
def pexpire(keys: Keyspace, name: bytes, after: bytes) -> Answer:
    return int(keys.expire(name, _expiry(keys, after, 1, "pexpire")))


@_command
def expire(keys: Keyspace, name: bytes, after: bytes) -> Answer:
    return int(keys.expire(name, _expiry(keys, after, 1000, "expire")))


@_command
def pttl(keys: Keyspace, name: bytes) -> Answer:
    expires_ms = keys.expires_ms(name)
    if expires_ms is None:
        return -2
    return -1 if expires_ms == math.inf else math.ceil(expires_ms - keys.now_us / 1000)


@_command
def scan(keys: Keyspace, cursor: bytes, *options: bytes) -> Answer:
    return _scanned(cursor, options, ((name,) for name in keys))


def _scanned(cursor: bytes, options: Words, items: Iterable[tuple[bytes, ...]] | None) -> Answer:
    """Return all items whose first word matches the pattern, in one step."""
    if not re.fullmatch(rb"\d{1,19}", cursor):
        raise RefusedError("invalid cursor")
    if items is None:  # a server does not check the options either
        return [_BEGINNING, []]
    given = _options(options, {b"MATCH": 1, b"COUNT": 1})
    if b"COUNT" in given and _integer(*given[b"COUNT"]) < 1:
        raise RefusedError("syntax error")
    if b"MATCH" in given:
        is_like = _pattern(*given[b"MATCH"]).fullmatch
        items = (item for item in items if is_like(item[0]))
    return [_BEGINNING, [word for item in items for word in item]]


# Channels


@_command
def publish(keys: Keyspace, channel: bytes, message: bytes) -> Answer:
    return keys.publish(channel, message)


COMMANDS[b"SPUBLISH"] = COMMANDS[b"PUBLISH"]


# Strings


@_command
def get(keys: Keyspace, name: bytes) -> Answer:
    return keys.read(name, bytes)


@_command
def set_(keys: Keyspace, name: bytes, value: bytes, *options: bytes) -> Answer:
    given = _options(options, {b"NX": 0, b"XX": 0, b"GET": 0, b"PX": 1})
    if b"NX" in given and b"XX" in given:
        raise RefusedError("syntax error")
    expires_ms = math.inf
    if b"PX" in given:
        (after,) = given[b"PX"]
        expires_ms = _expiry(keys, after, 1, "set")
        if _integer(after) <= 0:
            raise RefusedError("invalid expire time in 'set' command")
    before = keys.read(name, bytes) if b"GET" in given else None
    there = keys.holds(name)
    done = not (there if b"NX" in given else b"XX" in given and not there)
    if done:
        keys.put(name, value, expires_ms)
    if b"GET" in given:
        return before
    return OK if done else None


# Hashes


def _fields(keys: Keyspace, name: bytes) -> Hash:
    return keys.read(name, Hash) or Hash()


@_command
def hset(keys: Keyspace, name: bytes, field: bytes, value: bytes, *more: bytes) -> Answer:
    if len(more) % 2:
        raise RefusedError("wrong number of arguments for 'hset' command")
    pairs = dict(zip((field, *more[::2]), (value, *more[1::2]), strict=True))
    fields = keys.read(name, Hash)
    if fields is None:
        keys.put(name, Hash(pairs))
        return len(pairs)
    before = len(fields)
    fields.update(pairs)
    return len(fields) - before


@_command
def hget(keys: Keyspace, name: bytes, field: bytes) -> Answer:
    return _fields(keys, name).get(field)


@_command
def hmget(keys: Keyspace, name: bytes, field: bytes, *more: bytes) -> Answer:
    return list(map(_fields(keys, name).get, (field, *more)))


@_command
def hgetall(keys: Keyspace, name: bytes) -> Answer:
    return [word for pair in _fields(keys, name).items() for word in pair]


@_command
def hexists(keys: Keyspace, name: bytes, field: bytes) -> Answer:
    return int(field in _fields(keys, name))


@_command
def hlen(keys: Keyspace, name: bytes) -> Answer:
    return len(_fields(keys, name))


@_command
def hdel(keys: Keyspace, name: bytes, field: bytes, *more: bytes) -> Answer:
    fields = _fields(keys, name)
    gone = {field, *more} & fields.keys()
    if len(gone) == len(fields):
        keys.remove(name)
    else:
        deque(map(fields.pop, gone, repeat(None)), maxlen=0)
    return len(gone)


@_command
def hincrbyfloat(keys: Keyspace, name: bytes, field: bytes, by: bytes) -> Answer:
    if math.isinf(_float(by)):
        raise RefusedError("value is NaN or Infinity")
    before = _fields(keys, name).get(field, b"0")
    if math.isinf(_float(before, "hash value is not a float")):
        raise RefusedError("increment would produce NaN or Infinity")
    total = Decimal(before.decode()) + Decimal(by.decode())
    written = f"{total:.{_PLACES}f}".rstrip("0").rstrip(".").encode()
    hset(keys, name, field, written)
    return written


@_command
def hscan(keys: Keyspace, name: bytes, cursor: bytes, *options: bytes) -> Answer:
    fields = keys.read(name, Hash)
    return _scanned(cursor, options, None if fields is None else fields.items())


# Sorted sets


def _members(keys: Keyspace, name: bytes) -> SortedSet:
    return keys.read(name, SortedSet) or SortedSet()


@_command
def zadd(keys: Keyspace, name: bytes, score: bytes, member: bytes, *more: bytes) -> Answer:
    rest, flags = [score, member, *more], set()
    while rest and rest[0].upper() in (b"NX", b"XX"):
        flags.add(rest.pop(0).upper())
    if not rest or len(rest) % 2:
        raise RefusedError("syntax error")
    if len(flags) > 1:
        raise RefusedError("XX and NX options at the same time are not compatible")
    added = [(_float(word), each) for word, each in zip(rest[::2], rest[1::2], strict=True)]
    members = keys.read(name, SortedSet)
    entries = SortedSet() if members is None else members
    before = len(entries)
    for value, each in added:
        if not flags or (each in entries.scores) is (b"XX" in flags):
            entries.add(each, value)
    if members is None and entries:
        keys.put(name, entries)
    return len(entries) - before


@_command
def zrem(keys: Keyspace, name: bytes, member: bytes, *more: bytes) -> Answer:
    return _remove(keys, name, (member, *more))


def _remove(keys: Keyspace, name: bytes, gone: Sequence[bytes]) -> int:
    members = _members(keys, name)
    there = members.scores.keys() & gone
    if len(there) == len(members):
        keys.remove(name)
    else:
        members.remove(there)
    return len(there)


@_command
def zremrangebyscore(keys: Keyspace, name: bytes, low: bytes, high: bytes) -> Answer:
    found = _between(keys, name, low, high)
    return _remove(keys, name, [member for _, member in found])


@_command
def zscore(keys: Keyspace, name: bytes, member: bytes) -> Answer:
    score = _members(keys, name).scores.get(member)
    return None if score is None else number(score)


@_command
def zmscore(keys: Keyspace, name: bytes, member: bytes, *more: bytes) -> Answer:
    scores = map(_members(keys, name).scores.get, (member, *more))
    return [None if score is None else number(score) for score in scores]


@_command
def zcard(keys: Keyspace, name: bytes) -> Answer:
    return len(_members(keys, name))


@_command
def zrank(keys: Keyspace, name: bytes, member: bytes) -> Answer:
    return _members(keys, name).rank(member)


@_command
def zscan(keys: Keyspace, name: bytes, cursor: bytes, *options: bytes) -> Answer:
    members = keys.read(name, SortedSet)
    if members is None:
        return _scanned(cursor, options, None)
    return _scanned(cursor, options, ((each, number(score)) for score, each in members.order()))


@_command
def zrange(keys: Keyspace, name: bytes, first: bytes, last: bytes, *options: bytes) -> Answer:
    given = _options(
        options, {b"BYSCORE": 0, b"BYLEX": 0, b"REV": 0, b"LIMIT": 2, b"WITHSCORES": 0}
    )
    reverse = b"REV" in given
    if b"BYSCORE" in given:
        low, high = (last, first) if reverse else (first, last)
        return _listed(_between(keys, name, low, high), given, reverse=reverse)
    if b"BYLEX" in given:
        low, high = (last, first) if reverse else (first, last)
        return _listed(_lexical(keys, name, low, high), given, reverse=reverse)
    if b"LIMIT" in given:
        raise RefusedError(
            "syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX"
        )
    begin, end = _integer(first), _integer(last) + 1
    found = _members(keys, name).order()
    many = len(found)
    begin = max(0, begin + many) if begin < 0 else begin
    end = max(0, end + many) if end <= 0 else end
    if reverse:
        begin, end = max(0, many - end), max(0, many - begin)
    return _listed(found[begin:end], given, reverse=reverse)


@_command
def zrangebyscore(keys: Keyspace, name: bytes, low: bytes, high: bytes, *options: bytes) -> Answer:
    given = _options(options, {b"LIMIT": 2, b"WITHSCORES": 0})
    return _listed(_between(keys, name, low, high), given)


@_command
def zcount(keys: Keyspace, name: bytes, low: bytes, high: bytes) -> Answer:
    return len(_between(keys, name, low, high))


def _between(keys: Keyspace, name: bytes, low: bytes, high: bytes) -> Entries:
    """Return the entries from one score to another; a score after ``(`` is excluded."""
    complaint = "min or max is not a float"
    least, most = (_float(bound.removeprefix(b"(") or b"0", complaint) for bound in (low, high))
    return _members(keys, name).between(least, low[:1] == b"(", most, high[:1] == b"(")


@_command
def zlexcount(keys: Keyspace, name: bytes, low: bytes, high: bytes) -> Answer:
    return len(_lexical(keys, name, low, high))


def _lexical(keys: Keyspace, name: bytes, low: bytes, high: bytes) -> Entries:
    """Return the entries from one member, after ``[``, to another; one after ``(`` is excluded."""
    if low[:1] not in _EITHER or high[:1] not in _EITHER:
        raise RefusedError("min or max not valid string range item")
    return _members(keys, name).lexical(low[1:], low[:1] == b"(", high[1:], high[:1] == b"(")


def _listed(found: Entries, given: dict[bytes, Words], *, reverse: bool = False) -> Answer:
    if reverse:
        found = found[::-1]
    if b"LIMIT" in given:
        offset, count = map(_integer, given[b"LIMIT"])
        found = [] if offset < 0 else found[offset:] if count < 0 else found[offset:][:count]
    if b"WITHSCORES" in given:
        return [word for score, member in found for word in (member, number(score))]
    return [member for _, member in found]
