"""
Connections to Redis servers, and the commands sent over them.

These use redis-py's connections, not its client: only the store repeats a request that got no
answer, with the same owner. A client of the user's is never touched.
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from celery_distlock import clock

from . import scripts
from .topology import PushTarget, Topology

TIMEOUT = 5.0  # seconds for one answer; a slower server is treated as gone
KEPT = 32  # the most idle connections to keep, per time limit
UNUSED = 60.0  # seconds after which connections that were idle all the time are closed
RESTED = 0.5  # seconds without a request after which to check whether the server has hung up
_KINDS: dict[str, Callable[[str], ResponseError]] = {
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "MASTERDOWN": MasterDownError,
    "MOVED": MovedError,
    "TRYAGAIN": TryAgainError,
}
# Errors of redis-py's parser for bytes that are not an answer, or for a MOVED without a node.
UNREADABLE = (InvalidResponse, RecursionError, TypeError, ValueError)
ANSWERLESS = (RedisConnectionError, RedisTimeoutError, OSError)
# All records of a script are in one slot, so this error occurs only while that slot is moved.
_BROKEN_OFF = re.compile(r"attempted to access a non local key", re.IGNORECASE)
# A status, or the named fields of an answer: JSON, in which quotes of a text are escaped.
_NOTHING_DONE = re.compile(rb'busy|free|done|\{.*"status":"(?:busy|free|done)".*', re.DOTALL)
# redis-py ignores what the server sends before it hangs up, so the reason has to be guessed.
_HUNG_UP = re.compile(r"closed by server|reset by peer|Broken pipe", re.IGNORECASE)
_SHUT = (
    "(immediately: a server does so if it wants TLS, with a URL that begins with rediss://, or in"
    " protected mode, for other hosts)"
)
_SHUT_OVER_TLS = (
    "(immediately: a server does so if it wants another client certificate: ssl_certfile and"
    " ssl_keyfile)"
)
_NO_TLS = "(if it can be reached, it may have no TLS: then its URL begins with redis://)"
MUCH = 1_000_000  # bytes; no server has a lower limit for requests
_TOO_MUCH = (
    "(it was sent {} MB: its proto-max-bulk-len or client-query-buffer-limit may be below that)"
)
_NO_FILE = "(a file for TLS that the URL or its options name)"


class TooFewReplicasError(ResponseError):
    """The request was executed, and fewer replicas than wanted have confirmed it."""

    def __init__(self, confirmed: int, wanted: int) -> None:
        super().__init__(f"{confirmed} of {wanted} replicas have confirmed it")
        self.confirmed = confirmed
        self.wanted = wanted


class BrokenOffError(TryAgainError):
    """
    A script has executed a part of the request, possibly for good.

    While a cluster moves a slot, a missing record is looked up at the other node: so a script that
    has removed a record ends when it accesses that record again.
    """


class NotRedisError(RedisConnectionError):
    """The software at the server's address does not speak Redis' protocol."""


class TurnedAwayError(ResponseError):
    """The server has refused the first commands of a connection, and so all that follow."""


class Command(NamedTuple):
    """
    One command.

    Attributes:
        key: The key by whose slot a cluster places it.
        head: The words before the arguments, packed.
        words: The number of these words.
        arguments: The other words.
        script: The script, if it calls one.
        node: The server to ask, whatever the key; None: the one that has the key.
        replicas: The number of replicas that must confirm what the answer promises; otherwise the
            answer is a :exc:`TooFewReplicasError`. Costs no extra round trip.
        brief: Whether to wait for its answer only for a moment, where its server is known not to
            answer.
    """

    key: bytes
    head: bytes
    words: int
    arguments: Sequence[Any] = ()
    script: scripts.Script | None = None
    replicas: int = 0
    node: Any = None
    brief: bool = False

    def in_full(self) -> "Command":
        """Return the call with the script's source instead of its digest."""
        if self.script is None:
            return self
        evalsha, source = _packed("EVALSHA", self.script.sha), _packed("EVAL", self.script.source)
        return self._replace(head=source + self.head.removeprefix(evalsha))


_is_refusal = ResponseError.__instancecheck__  # a C function, as every exchange calls it


def command(key: bytes, *words: Any) -> Command:
    """Return a call of a plain command on *key*; empty if any server will do."""
    return Command(key, _packed(*words), len(words))


def script_call(script: scripts.Script, stems: tuple[str, ...], *arguments: Any) -> Command:
    """Return a call of *script* on the records whose names begin with *stems*."""
    first, head, words = _script_head(script, stems)
    return Command(first, head, words, arguments, script)


@functools.lru_cache(maxsize=256)
def _script_head(script: scripts.Script, stems: tuple[str, ...]) -> tuple[bytes, bytes, int]:
    """Return the first name of the records that begin with *stems*, the head, and its words."""
    first, names = _names(script.keys, stems)
    evalsha, words = _evalsha(script, len(stems))
    return first, evalsha + names, words


@functools.lru_cache(maxsize=256)  # the same for several scripts
def _names(records: tuple[str, ...], stems: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Return the first name of the *records* that begin with *stems*, and all of them, packed."""
    raw = [stem.encode("utf-8", "surrogateescape") for stem in stems]
    return raw[0] + records[0].encode(), b"".join(
        [stem.join(_around(records, len(stem))) for stem in raw]
    )


@functools.lru_cache(maxsize=256)
def _around(records: tuple[str, ...], length: int) -> list[bytes]:
    """Return what is sent around a stem of *length* bytes, which is in each name."""
    names = [f"${length + len(record)}\r\n\0{record}\r\n" for record in records]
    return "".join(names).encode().split(b"\0")


@functools.lru_cache(maxsize=256)
def _evalsha(script: scripts.Script, stems: int) -> tuple[bytes, int]:
    """Return the words before the names of the records, packed, and the number of all words."""
    names = stems * len(script.keys)
    return _packed("EVALSHA", script.sha, names), 3 + names


def _packed(*words: Any) -> bytes:
    packed = ""
    for word in words:
        if type(word) is bytes:
            break
        text = f"{word!s}"
        packed += f"${len(text)}\r\n{text}\r\n"
    else:
        if packed.isascii():  # otherwise the length of a text differs from that of its bytes
            return packed.encode()
    parts = []
    for word in words:
        # Text of a record that is not UTF-8 is sent back unchanged.
        raw = word if type(word) is bytes else str(word).encode("utf-8", "surrogateescape")
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


@functools.lru_cache(maxsize=256, typed=True)  # a process sends the same ones again and again
def fields(**given: Any) -> str:
    """Return the named fields of a request, as JSON for a script; false ones are left out."""
    if not any(given.values()):
        return ""
    return _encoded({name: value for name, value in given.items() if value})


_encoded = json.JSONEncoder(ensure_ascii=False).encode


def trimmed(*arguments: Any) -> tuple[Any, ...]:
    """Return *arguments* without the empty ones at their end: most requests are short."""
    if not any(arguments):
        return ()
    number = len(arguments)
    while number and arguments[number - 1] in ("", b""):
        number -= 1
    return arguments[:number]


def milliseconds(of_seconds: float) -> int:
    """Return a time as the server takes it: never 0, which would end it immediately."""
    return max(1, math.ceil(of_seconds * 1000))


def time_left(ttl_ms: int) -> float:
    """Return the seconds that a server reports as left; -1 is for ever."""
    # Other software has removed the expiry then; such a lock ends only by hand.
    return math.inf if ttl_ms == -1 else max(0, ttl_ms) / 1000


def limits(timeout: float) -> dict[str, Any]:
    """Return the settings of a connection that waits *timeout* seconds, and repeats nothing."""
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
    }


class ConnectionFactory:
    """Makes connections to one server."""

    def __init__(self, server: "Server", timeout: float) -> None:
        self._server = server
        self._settings = {**server.settings, **limits(timeout)}

    def __call__(self) -> Connection:
        return self._server.connection_class(**self._settings)

    def is_stale(self, connection: Any, opened_at: float) -> bool:
        """Whether *connection*, opened at that time, may lead to another server than a new one."""
        return opened_at < self._server.refused_at

    def note_refusal(self) -> None:
        """Note that the server has answered that it is not a master."""
        self._server.refused_at = clock.monotonic()


class ConnectionPool:
    """Connections to one server, each used by one thread at a time."""

    def __init__(self, connect: ConnectionFactory, timeout: float) -> None:
        self._connect = connect
        # For replicas: they answer before this side gives up.
        self._patience_ms = math.ceil(timeout * 500)
        self._idle: list[tuple[Connection, float]] = []  # each with the time of its last use
        self._spare = KEPT  # the fewest idle connections since the last count
        self._count_at = clock.monotonic() + UNUSED

    def exchange(self, calls: Sequence[Command]) -> list[Any]:
        """
        Send *calls* together and return their answers; a refusal is an answer.

        Raises:
            RedisError: There was no answer, or the connection was refused.
            OSError: As for RedisError.
        """
        return self.receive(self.send(calls), calls)

    def connect(self) -> None:
        """Connect, unless a connection is idle, so that the next request is sent immediately."""
        self._idle.append((self._idle_one() or self._open(), clock.monotonic()))

    def send(self, calls: Sequence[Command], until: float = math.inf) -> Connection:
        """
        Send *calls*, and return the connection of their answers, for :meth:`receive`.

        Nothing is sent after *until*, by the local clock, if connecting took too long.
        """
        connection = self._idle_one() or self._open()
        try:
            if until < math.inf:
                _ensure_time(until)
            connection.send_packed_command(self._request(calls), check_health=False)
        except BaseException as error:
            self._spoil(connection, error)
            _explain(error, calls)
            raise
        return connection

    def _idle_one(self) -> Connection | None:
        """Return an idle connection; not one that the server has closed since."""
        while True:
            try:
                connection, used_at = self._idle.pop()
            except IndexError:
                return None
            if clock.monotonic() < used_at + RESTED or not _has_ended(connection):
                return connection
            connection.disconnect()

    def _open(self) -> Connection:
        connection = self._connect()
        try:
            connection.connect()
        except BaseException as error:
            self._spoil(connection, error)
            if type(error) is ResponseError:
                raise TurnedAwayError(str(error)) from error
            if isinstance(error, InvalidResponse):
                raise _no_redis(error) from error
            if isinstance(error, UNREADABLE):
                raise RedisConnectionError(f"cannot be connected to: {error}") from error
            if hint := _hint(error, over_tls=isinstance(connection, SSLConnection)):
                raise type(error)(f"{error} {hint}") from error
            raise
        return connection

    def receive(
        self, connection: Connection, calls: Sequence[Command], until: float = math.inf
    ) -> list[Any]:
        """Return the answers to *calls*, which were sent over *connection*."""
        try:
            answers = _answers(connection, calls)
            refusals = list(filter(_is_refusal, answers))
            if refusals and any(isinstance(refusal, NoScriptError) for refusal in refusals):
                if until < math.inf:
                    _ensure_time(until)
                self._ask_in_full(connection, calls, answers)
                refusals = list(filter(_is_refusal, answers))
        except BaseException as error:
            self._spoil(connection, error)
            _explain(error, calls)
            raise
        if not refusals or self._is_fit(refusals):
            self._keep(connection)
        else:
            connection.disconnect()
        return answers

    def _ask_in_full(
        self, connection: Connection, calls: Sequence[Command], answers: list[Any]
    ) -> None:
        """
        Repeat the *calls* from the first one whose script the server did not know.

        The calls before it were executed; those after it may depend on it.
        """
        first = next(
            place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)
        )
        if first and calls[first - 1] is ASKING:
            first -= 1
        again = [call.in_full() for call in calls[first:]]
        connection.send_packed_command(self._request(again), check_health=False)
        answers[first:] = _answers(connection, again)

    def _is_fit(self, refusals: Sequence[ResponseError]) -> bool:
        """Whether a connection that has brought *refusals* may be used again."""
        if any(_is_no_masters(refusal) for refusal in refusals):
            self._connect.note_refusal()
            self.close()  # this is no longer a master: look it up again
            return False
        # The next caller would wait for these replicas, too; or the server has disconnected.
        return not any(
            isinstance(refusal, TooFewReplicasError) or "Protocol error" in str(refusal)
            for refusal in refusals
        )

    def _keep(self, connection: Connection) -> None:
        idle, now = self._idle, clock.monotonic()
        if not idle:  # as always where one thread asks
            self._spare = 0
            idle.append((connection, now))
            return
        self._spare = min(self._spare, len(idle))
        idle.append((connection, now))
        surplus = len(idle) - KEPT
        if now > self._count_at:
            surplus = max(surplus, self._spare)
            self._spare, self._count_at = KEPT, now + UNUSED
        for _ in range(surplus):
            with contextlib.suppress(IndexError):  # other threads took them
                idle.pop(0)[0].disconnect()

    def _spoil(self, connection: Connection, error: BaseException) -> None:
        # Also after a time limit's exception: half an answer may be left in the connection.
        connection.disconnect()
        if isinstance(error, ANSWERLESS):
            self.close()  # the others are of the same age, and as likely to be dead

    def _request(self, calls: Sequence[Command]) -> list[bytes]:
        # redis-py's own packing takes three times as long.
        parts, replicas = [], 0
        for _, head, words, arguments, _, confirming, _, _ in calls:
            number = words + len(arguments)
            parts.append(b"*%d\r\n%b%b" % (number, head, _packed(*arguments)))
            if confirming:
                replicas = max(replicas, confirming)
        if replicas:
            parts.append(b"*3\r\n" + _packed("WAIT", replicas, self._patience_ms))
        return [b"".join(parts)]

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[0].disconnect()


def _hint(error: BaseException, *, over_tls: bool) -> str:
    """Return a hint for the error text of a failed connection."""
    if _has_hung_up(error):
        return _SHUT_OVER_TLS if over_tls else _SHUT
    if over_tls and isinstance(error, RedisTimeoutError):
        return _NO_TLS
    if over_tls and type(error) is RedisConnectionError and "No such file" in str(error):
        return _NO_FILE
    return ""


def _has_ended(connection: Connection) -> bool:
    """Whether an idle connection's server has hung up, or sent unexpected data."""
    try:
        return connection.can_read(0)
    except (RedisError, OSError):
        return True


def _has_hung_up(error: BaseException) -> bool:
    """Whether *error* means that the server has closed the connection."""
    return type(error) is RedisConnectionError and bool(_HUNG_UP.search(str(error)))


def _explain(error: BaseException, calls: Sequence[Command]) -> None:
    """Raise an error with the likely reason why a server hung up on large *calls*."""
    if _has_hung_up(error):
        sent = sum(len(each) for call in calls for each in call.arguments if type(each) is bytes)
        if sent > MUCH:
            raise RedisConnectionError(f"{error} {_TOO_MUCH.format(sent // MUCH)}") from error


def _is_no_masters(refusal: ResponseError) -> bool:
    """Whether a server refuses as a replica; Redis 6.2 hides the code of a script's error."""
    return isinstance(refusal, ReadOnlyError | MasterDownError) or " -READONLY " in str(refusal)


def _ensure_time(until: float) -> None:
    if clock.monotonic() > until:
        raise RedisTimeoutError("the time limit has passed, so the request is not sent")


def _answers(connection: Connection, calls: Sequence[Command]) -> list[Any]:
    answers, wanted = [], 0
    for call in calls:
        answers.append(_one_answer(connection))
        if call.replicas:
            wanted = max(wanted, call.replicas)
    if wanted:
        confirmed = _one_answer(connection)
        if isinstance(confirmed, int) and confirmed < wanted:
            confirmed = TooFewReplicasError(confirmed, wanted)
        if isinstance(confirmed, ResponseError):
            answers = [
                confirmed if call.replicas and _promises(answer) else answer
                for call, answer in zip(calls, answers, strict=True)
            ]
    return answers


def _promises(answer: Any) -> bool:
    """Whether a script has done something that must not be lost."""
    if isinstance(answer, list):
        head = answer[0] if answer else b"free"
        return not (isinstance(head, bytes) and _NOTHING_DONE.fullmatch(head))
    return isinstance(answer, bytes) or answer == 1


def _one_answer(connection: Connection) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        # Its traceback would keep all callers' frames, and their holds.
        return known(error).with_traceback(None)
    except UNREADABLE as error:
        raise _no_redis(error) from error


def _no_redis(error: Exception) -> RedisConnectionError:
    """Return the error for answers that are not Redis': the request was not executed."""
    return NotRedisError(f"not a Redis server ({str(error)[:200]})")


def known(error: ResponseError) -> ResponseError:
    """Return *error* in its own class: redis-py 5 maps some only in its client for clusters."""
    if _BROKEN_OFF.search(str(error)):
        return BrokenOffError(str(error))
    word, _, rest = str(error).partition(" ")
    try:
        return _KINDS[word](rest) if word in _KINDS else error
    except UNREADABLE as unreadable:  # as redis-py's parser raises it, where that reads them
        raise _no_redis(unreadable) from error


class NodeSettings(NamedTuple):
    """How to connect to a server."""

    connection_class: type[Connection]
    settings: dict[str, Any]


class Server:
    """
    One server: a pool for each time limit.

    Attributes:
        refused_at: The local clock when it last answered that it is not a master. Its address may
            lead to another server since, to which older connections do not lead.
    """

    def __init__(self, connection_class: type[Connection], settings: dict[str, Any]) -> None:
        self.connection_class = connection_class
        self.settings = settings
        self.refused_at = -math.inf
        self._pools: dict[float, ConnectionPool] = {}

    def connect(self, timeout: float) -> ConnectionFactory:
        """Return a factory of connections whose operations take at most *timeout* seconds."""
        return ConnectionFactory(self, timeout)

    def pool(self, timeout: float) -> ConnectionPool:
        """Return a pool for answers within *timeout* seconds, or somewhat less."""
        if timeout < TIMEOUT:
            timeout = 2.0 ** math.floor(math.log2(max(timeout, 0.02)))
        pool = self._pools.get(timeout)
        if pool is None:  # no mutex: a signal handler may ask while its thread is here
            pool = self._pools.setdefault(timeout, ConnectionPool(self.connect(timeout), timeout))
        return pool

    def close(self) -> None:
        """Close all connections."""
        pools, self._pools = self._pools, {}
        for pool in list(pools.values()):
            pool.close()


class OneServer(Topology):
    """A server at a fixed address."""

    def __init__(self, address: str, node: NodeSettings) -> None:
        self.address = address
        self._settings = node
        self._node = Server(*node)

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        try:
            return self._node.pool(timeout).exchange(calls)
        except ANSWERLESS as error:
            return [error] * len(calls)

    def place(self, key: bytes, channel: str) -> PushTarget:
        return PushTarget(None, channel)

    def connect(self, node: Hashable) -> ConnectionFactory:
        return self._node.connect(TIMEOUT)

    def close(self) -> None:
        self._node.close()

    def after_fork(self) -> None:
        self._node = Server(*self._settings)


# Makes a cluster's node execute the next command for a slot that it is importing.
ASKING = command(b"", "ASKING")
