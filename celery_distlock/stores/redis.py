"""
The store over one Redis or Valkey server.

Speaks to the server through redis-py's connections, not its client: a request that got no answer is
repeated here, with the same owner, and nowhere else. A client of the user's is never touched.
"""

import contextlib
import logging
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit
from weakref import WeakSet

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from celery_distlock import clock, lua
from celery_distlock.errors import ConfigurationError, StoreError, StoreUnavailableError
from celery_distlock.keys import slot_name

from .base import (
    Ability,
    Desk,
    Ended,
    Inbox,
    KeyState,
    Ownership,
    Parcel,
    Release,
    RenewOutcome,
    Reply,
    Status,
    Store,
    Wake,
)

__all__ = ["RedisStore"]

logger = logging.getLogger(__name__)

TIMEOUT = 5.0  # seconds for one answer; a slower server is treated as gone
PAUSES = (0.0, 0.05, 0.25)  # seconds before the first, second and third attempt at a request
SWEEP_BATCH = 100  # keys a round trip
IDLE_PING = 10.0  # seconds after which a silent subscription is asked whether it is still there

# Refusals that pass: the server starts, fails over, is full, or its operator has locked us out.
# redis-py takes the code away from some of them and makes it their class.
_PASSING_KINDS = (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)
_PASSING = re.compile(
    r"LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY |OOM|MISCONF|NOREPLICAS|UNBLOCKED"
    r"|NOAUTH|WRONGPASS|NOPERM|ACL failure|max number of clients"
)
_ANSWERLESS = (RedisConnectionError, RedisTimeoutError, OSError)


class RedisStore(Store):
    """See the module. *url* as redis-py takes it, also Celery's ``redis+socket://``."""

    abilities = frozenset(Ability)

    def __init__(self, url: str, prefix: str) -> None:
        self._settings = _connection_settings(url)
        self._prefix = prefix
        self.address = _address(self._settings[1])
        self.identity = f"{self.address}#{prefix}"
        self._index = f"{prefix}:parked".encode()
        self._wires: dict[float, _Wire] = {}
        self._post: _Post | None = None
        self._spoilt: set[str] = set()
        self._one_by_one = False  # a cluster, where keys are in slots of their own
        self._mutex = threading.Lock()
        self._post_mutex = threading.Lock()  # its own: to subscribe can take seconds
        _stores.add(self)

    def acquire(
        self,
        key: str,
        owner: str,
        lease: float,
        *,
        queue: Inbox | Parcel | None = None,
        run: str = "",
        repeated: bool = False,
        keep: bool = False,
    ) -> Reply:
        mode, detail, desk = "try", b"", ""
        if isinstance(queue, Parcel):
            mode, (detail, desk) = "park", queue
            self._ask([_call(_INDEX, [self._index], [slot_name(key), "add"])], key)
        elif queue is not None:
            mode, detail = "wait", queue.address.encode()
        name = slot_name(key)
        arguments = [owner, _ms(lease), mode, run, int(repeated), int(keep), detail, desk]
        asked = self._ask([_call(_ACQUIRE, self._names(name), arguments)], key)
        return _reply(name, asked.answers[0], asked.asked_at)

    def acquire_all(
        self, keys: Sequence[str], owners: Sequence[str], lease: float, *, run: str = ""
    ) -> list[Reply] | None:
        if self._one_by_one:
            return None
        records = [record for key in keys for record in self._names(slot_name(key))]
        call = _call(_ACQUIRE_ALL, records, [run, _ms(lease), " ".join(owners)])
        try:
            asked = self._ask([call], ", ".join(keys))
        except StoreError as error:
            if not _is_of_several_slots(error.__cause__):
                raise
            self._one_by_one = True
            return None
        tokens = asked.answers[0]
        if not tokens and asked.repeats:
            # The request before, whose answer was lost, may have taken what is left of them.
            for key, owner in zip(keys, owners, strict=True):
                self.dispatch(self.release(key, owner).wake)
        return [Reply(Status.GRANTED, asked.asked_at, int(each)) for each in tokens] or None

    def line_up(self, key: str, run: str, parcel: Parcel, timeout: float) -> Reply:
        name, asked_at = slot_name(key), clock.monotonic()
        calls = [
            _call(_INDEX, [self._index], [name, "add"]),
            _call(_ACQUIRE, self._names(name), ["", 1, "line", run, 0, 0, *parcel]),
        ]
        answers = self._ask_once(calls, timeout)
        return _reply(name, answers[1], asked_at)

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        commands = [
            _call(_RENEW, self._names(slot_name(hold.key))[:1], [hold.owner, _ms(hold.lease)])
            for hold in holds
        ]
        asked_at = clock.monotonic()
        try:
            answers = self._exchange(self._wire(timeout), commands)
        except (RedisError, OSError) as error:
            logger.warning("%s did not answer a renewal: %s", self.address, error)
            answers = [error] * len(holds)
        return [(_RENEWALS.get(_plain(a), RenewOutcome.UNKNOWN), asked_at) for a in answers]

    def release(
        self,
        key: str,
        owner: str,
        *,
        run: str = "",
        ended: Ended = Ended.NO,
        inbox: Inbox | None = None,
        keep_for: tuple[str, float] | None = None,
    ) -> Release:
        keep_run, keep_s = keep_for or ("", 0.0)
        address = inbox.address if inbox is not None else ""
        keep_ms = _ms(keep_s) if keep_for else 0
        arguments = [owner, run, ended.value, address, keep_run, keep_ms]
        name = slot_name(key)
        return _released(name, self._ask([_call(_RELEASE, self._names(name), arguments)], key))

    def drop(self, wake: Wake, *, mark: bool = True) -> Release:
        drop = _call(_DROP, self._names(wake.name), [wake.run, int(mark)])
        return _released(wake.name, self._ask([drop], wake.name))

    @property
    def listening(self) -> bool:
        return self._post is not None

    def inbox(self, key: str, owner: str) -> Inbox:
        with self._post_mutex:
            if self._post is None:
                channel = f"{self._prefix}:inbox:{uuid.uuid4().hex}"
                self._post = _Post(_Subscription(self._connection(TIMEOUT), channel))
            post = self._post
        return post.open(owner)

    def desk(self, receive: Callable[[Wake], None]) -> Desk:
        channel = f"{self._prefix}:desk:{uuid.uuid4().hex}"
        return _RedisDesk(_Subscription(self._connection(TIMEOUT), channel), receive)

    def sent(self, wake: Wake) -> None:
        self._ask([_call(_SENT, self._names(wake.name), [wake.run, 0])], wake.name)

    def came_back(self, wake: Wake) -> None:
        self._ask([_call(_SENT, self._names(wake.name), [wake.run, 1])], wake.name)

    def sweep(self, interval: float) -> Iterator[Wake]:
        turn = ("SET", f"{self._prefix}:sweeper", "1", "NX", "PX", _ms(interval * 0.9))
        if self._ask([turn], "the sweeper's turn").answers[0] is None:
            return
        for names in self._waiting_names():
            calls = [_call(_SWEEP, self._names(name), [SWEEP_BATCH]) for name in names]
            answers = self._ask(calls, "the sweep", optional=True).answers
            quiet = []
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, ResponseError):
                    self._pass_over(name, answer)
                    continue
                waiting, *found = answer
                for run, envelope in zip(found[::2], found[1::2], strict=True):
                    yield Wake(name, _text(run), envelope)
                if not waiting:
                    quiet.append(_call(_INDEX, [self._index], [name, "strike"]))
            if quiet:
                self._ask(quiet, "the sweep")

    def _pass_over(self, name: str, refusal: ResponseError) -> None:
        """Let one key's spoilt records not keep the others from being swept; say so once."""
        if _passes(refusal):
            raise StoreUnavailableError(f"{self.address} cannot serve: {refusal}") from refusal
        if name not in self._spoilt:
            self._spoilt.add(name)
            logger.error("%s: no parked task wakes", self._refusal(refusal, name))

    def _waiting_names(self) -> Iterator[list[str]]:
        cursor = b"0"
        while True:
            scan = ("ZSCAN", self._index, cursor, "COUNT", SWEEP_BATCH)
            cursor, found = self._ask([scan], "the sweep").answers[0]
            if found:
                yield list(dict.fromkeys(_text(name) for name in found[::2]))
            if cursor == b"0":
                return

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        look = [_call(_INSPECT, self._names(slot_name(key))[:2], [])]
        answers = self._ask(look, key).answers if timeout is None else self._ask_once(look, timeout)
        owner, token, run, ttl_ms, waiting = answers[0]
        return KeyState(
            _text(owner),
            int(token or 0),
            _text(run),
            int(token or 0) / 1e6,  # a token is the time of its grant
            _seconds(ttl_ms),
            waiting,
        )

    def check(self) -> list[str]:
        probe = f"{self._prefix}:probe:{uuid.uuid4().hex}"
        reply = self.acquire(probe, "probe", 1.0)
        self.release(probe, "probe")
        if reply.status is not Status.GRANTED:
            raise StoreError(f"{self.address}: the test lock was not granted but {reply.status}")
        published = ("PUBLISH", f"{self._prefix}:probe", "")
        asked = self._ask([("INFO",), published], "INFO", optional=True)
        info, heard = asked.answers
        doubts = list(_doubts(_text(info))) if isinstance(info, bytes) else []
        if isinstance(heard, ResponseError):
            doubts.append(
                f"this user may not publish to {self._prefix}:*, so waiters and parked tasks are"
                f" served late (ACL SETUSER ... &{self._prefix}:*)"
            )
        return doubts

    def close(self) -> None:
        with self._mutex:
            wires, self._wires = list(self._wires.values()), {}
            post, self._post = self._post, None
        for wire in wires:
            wire.close()
        if post is not None:
            post.close()

    def forget_connections(self) -> None:
        """Drop what a fork inherited, without a word to the server: it is the parent's."""
        self._wires = {}
        self._post = None
        self._mutex = threading.Lock()
        self._post_mutex = threading.Lock()

    def _names(self, name: str) -> list[bytes]:
        stem = f"{self._prefix}:{{{name}}}:".encode()
        return [stem + record for record in _RECORDS]

    def _connection(self, timeout: float) -> "_Connect":
        connection_class, settings = self._settings
        limits = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        return _Connect(connection_class, {**settings, **limits})

    def _wire(self, timeout: float) -> "_Wire":
        timeout = min(TIMEOUT, 2.0 ** math.floor(math.log2(max(timeout, 0.02))))
        wire = self._wires.get(timeout)
        if wire is None:
            with self._mutex:
                wire = self._wires.setdefault(timeout, _Wire(self._connection(timeout)))
        return wire

    def _ask(
        self,
        commands: Sequence[Sequence[Any]],
        what: str,
        *,
        optional: bool = False,
    ) -> "_Asked":
        """Send *commands* in one round trip until they are answered, three times at most."""
        wire = self._wire(TIMEOUT)
        failure: Exception | None = None
        for repeats, pause in enumerate(PAUSES):
            if failure is not None:
                time.sleep(pause * clock.jitter(0.5, 1.0))
            asked_at = clock.monotonic()
            try:
                answers = self._exchange(wire, commands)
            except _ANSWERLESS as error:
                failure = error
                continue
            except ResponseError as error:  # refused while the connection was made
                answers, optional = [error], False
            except RedisError as error:
                raise StoreError(f"{self.address} does not answer as a Redis: {error}") from error
            refusal = next((a for a in answers if isinstance(a, ResponseError)), None)
            if refusal is None or optional:
                return _Asked(answers, asked_at, repeats)
            if not _passes(refusal):
                raise self._refusal(refusal, what) from refusal
            failure = refusal
        raise StoreUnavailableError(f"{self.address} cannot serve: {failure}") from failure

    def _ask_once(self, commands: Sequence[Sequence[Any]], timeout: float) -> list[Any]:
        try:
            answers = self._exchange(self._wire(timeout), commands)
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"{self.address} did not answer: {error}") from error
        refusal = next((a for a in answers if isinstance(a, ResponseError)), None)
        if refusal is not None:
            raise StoreUnavailableError(f"{self.address}: {refusal}") from refusal
        return answers

    def _exchange(self, wire: "_Wire", commands: Sequence[Sequence[Any]]) -> list[Any]:
        answers = wire.exchange(commands)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            # All of them again: every request may be repeated, and order is kept.
            answers = wire.exchange([_in_full(command) for command in commands])
        return answers

    def _refusal(self, error: ResponseError, what: str) -> StoreError:
        if "WRONGTYPE" in str(error):
            return StoreError(
                f"{self.address}: the records of lock {what!r} are of another type; something else"
                f" writes under the prefix {self._prefix!r}: {error}"
            )
        return StoreError(f"{self.address} refused {what!r}: {error}")


class _Asked(NamedTuple):
    """The answers, the local clock before the attempt that brought them, and how many failed."""

    answers: list[Any]
    asked_at: float
    repeats: int


def _released(name: str, asked: _Asked) -> Release:
    answer = asked.answers[0]
    if isinstance(answer, list):
        return Release(True, Wake(name, _text(answer[0]), answer[1]))
    # A repeated release finds the key gone if the first one was executed and its answer lost.
    return Release(answer == 1 or asked.repeats > 0)


def _is_of_several_slots(refusal: BaseException | None) -> bool:
    # redis-py 5 has the class, but does not make it of this refusal.
    return isinstance(refusal, ClusterCrossSlotError) or "CROSSSLOT" in str(refusal)


def _passes(refusal: RedisError) -> bool:
    return isinstance(refusal, _PASSING_KINDS) or bool(_PASSING.search(str(refusal)))


def _reply(name: str, answer: Any, asked_at: float) -> Reply:
    if not isinstance(answer, list):
        return Reply(Status.GRANTED, asked_at, int(answer))
    status = Status(answer[0].decode())
    if len(answer) == 1:
        return Reply(status, asked_at)
    _, token, holder, holder_run, ttl_ms, place, woken, envelope = answer
    return Reply(
        status,
        asked_at,
        int(token or 0),
        _text(holder),
        _text(holder_run),
        _seconds(ttl_ms),
        place,
        Wake(name, _text(woken), envelope) if woken else None,
    )


class _Connect:
    """Makes connections to one server."""

    def __init__(self, connection_class: type[Connection], settings: dict[str, Any]) -> None:
        self._class = connection_class
        self._settings = settings

    def __call__(self) -> Connection:
        return self._class(**self._settings)


class _Wire:
    """Connections to one server, each used by one thread at a time."""

    def __init__(self, connect: _Connect) -> None:
        self._connect = connect
        self._idle: list[Connection] = []

    def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send *commands* together and return their answers; a refusal is an answer."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            connection.send_packed_command(_packed(commands), check_health=False)
            answers = [_answer(connection) for _ in commands]
        except BaseException as error:
            # Also when a time limit's exception strikes: half an answer may be left in there.
            connection.disconnect()
            if isinstance(error, _ANSWERLESS):
                self.close()  # the others are of the same age, and as likely to be dead
            raise
        self._idle.append(connection)
        return answers

    def close(self) -> None:
        while self._idle:
            self._idle.pop().disconnect()


def _answer(connection: Connection) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error.with_traceback(None)  # which would keep all callers' frames, and their holds


class _Subscription:
    """
    One channel and one thread that listens to it, over any number of connections.

    A push can be lost, so nobody may rely on one; `on_connected` says that some may have been.
    """

    def __init__(self, connect: _Connect, channel: str) -> None:
        self.channel = channel
        self.on_connected: Callable[[], None] = _nothing
        self.on_message: Callable[[bytes], None] = _nothing
        self._connect = connect
        self._listening = threading.Event()
        self._closed = False
        self._connection: Connection | None = None

    def start(self) -> None:
        """Listen; what is pushed once this has returned is received, if the server answers."""
        threading.Thread(target=self._run, name="distlock-inbox", daemon=True).start()
        self._listening.wait(TIMEOUT)

    def close(self) -> None:
        self._closed = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.disconnect()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001  # whatever it is, the thread has to live on
                if not self._closed:
                    logger.warning("no pushes for now, the subscription broke: %s", error)
            finally:
                self._listening.clear()
            if not self._closed:
                time.sleep(clock.jitter(0.2, 1.0))  # spreads reconnections

    def _listen(self) -> None:
        connection = self._connection = self._connect()
        try:
            connection.send_command("SUBSCRIBE", self.channel)
            while not self._closed:
                if not connection.can_read(IDLE_PING):
                    connection.send_command("PING", check_health=False)
                    if not connection.can_read(TIMEOUT):
                        raise RedisTimeoutError("no answer to a ping")
                self._take(connection.read_response())
        finally:
            connection.disconnect()

    def _take(self, message: Any) -> None:
        kind, _, payload = message if len(message) == 3 else (b"", b"", b"")
        if kind == b"subscribe":
            self._listening.set()
            self.on_connected()
        elif kind == b"message":
            self.on_message(payload)


def _nothing(*_args: Any) -> None:
    """Do nothing."""


class _Post:
    """Carries grants to this process's blocked waiters: one subscription for all of them."""

    def __init__(self, subscription: _Subscription) -> None:
        self.subscription = subscription
        self._waiters: dict[str, threading.Event] = {}
        subscription.on_connected = self._wake_all
        subscription.on_message = self._wake
        subscription.start()

    def open(self, owner: str) -> "_RedisInbox":
        self._waiters[owner] = event = threading.Event()
        return _RedisInbox(self, owner, event)

    def drop(self, owner: str) -> None:
        self._waiters.pop(owner, None)

    def close(self) -> None:
        self.subscription.close()

    def _wake_all(self) -> None:
        for event in list(self._waiters.values()):
            event.set()

    def _wake(self, payload: bytes) -> None:
        event = self._waiters.get(_text(payload))
        if event is not None:
            event.set()


class _RedisDesk(Desk):
    def __init__(self, subscription: _Subscription, receive: Callable[[Wake], None]) -> None:
        self.address = subscription.channel
        self._subscription = subscription
        self._receive = receive
        subscription.on_message = self._take
        subscription.start()

    def close(self) -> None:
        self._subscription.close()

    def _take(self, payload: bytes) -> None:
        lock_length, run_length, rest = payload.split(b" ", 2)
        end = int(lock_length)
        middle = end + int(run_length)
        name = _text(rest[:end]).partition("{")[2].rpartition("}")[0]
        self._receive(Wake(name, _text(rest[end:middle]), rest[middle:]))


class _RedisInbox(Inbox):
    def __init__(self, post: _Post, owner: str, event: threading.Event) -> None:
        self.address = post.subscription.channel
        self._post = post
        self._owner = owner
        self._event = event

    def wait(self, timeout: float) -> None:
        if self._event.wait(timeout):
            self._event.clear()

    def close(self) -> None:
        self._post.drop(self._owner)


def _connection_settings(url: str) -> tuple[type[Connection], dict[str, Any]]:
    """
    Return what redis-py makes of *url*, or of the forms of it that Celery takes.

    Raises:
        ConfigurationError: It does not parse, or names an option that there is not.
    """
    from . import redact  # the package imports this module when it needs it

    try:
        pool = redis.ConnectionPool.from_url(_as_redis_py_says(url))
    except (ValueError, RedisError):  # its message may quote a part of the password
        raise ConfigurationError(
            f"the lock store's URL {redact(url)!r} does not parse; it should be like"
            " redis://user:password@host:6379/0"
        ) from None
    settings = {k: v for k, v in pool.connection_kwargs.items() if "maint_notif" not in k}
    settings |= {"protocol": 2, "decode_responses": False, "health_check_interval": 0}
    if "path" not in settings:
        settings.setdefault("socket_keepalive", True)
    try:
        pool.connection_class(**settings)  # connects when it is used
    except (TypeError, ValueError, RedisError) as error:
        raise ConfigurationError(f"the lock store's URL {redact(url)!r}: {error}") from None
    return pool.connection_class, settings


def _as_redis_py_says(url: str) -> str:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    if parts.scheme == "redis+socket":
        query["db"] = query.pop("virtual_host", "0")
    scheme = parts.scheme.replace("redis+socket", "unix")
    options = f"?{urlencode(query)}" if query else ""
    return f"{scheme}://{parts.netloc}{parts.path}{options}"


def _address(settings: dict[str, Any]) -> str:
    database = settings.get("db") or 0
    if "path" in settings:
        return f"unix://{settings['path']}?db={database}"
    return f"redis://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{database}"


def _call(script: lua.Script, keys: Sequence[bytes], arguments: Iterable[Any]) -> tuple[Any, ...]:
    return (b"EVALSHA", script.sha.encode(), len(keys), *keys, *arguments)


def _in_full(command: Sequence[Any]) -> Sequence[Any]:
    if command[0] != b"EVALSHA":
        return command
    return (b"EVAL", _SOURCES[command[1]], *command[2:])


def _packed(commands: Sequence[Sequence[Any]]) -> list[bytes]:
    """Return *commands* as they are sent; redis-py's own packing takes three times as long."""
    parts = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            raw = word if type(word) is bytes else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return [b"".join(parts)]


def _doubts(info: str) -> Iterator[str]:
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield (
            f"maxmemory-policy is {policy}: the server may evict locks and parked tasks when it is"
            " full; noeviction keeps them"
        )
    if facts.get("role") == "slave":
        yield "this is a replica: locks cannot be taken here"
    if facts.get("aof_enabled") == "0" and not facts.get("rdb_last_save_time"):
        yield "nothing is persisted: parked tasks end with the server"
    version = facts.get("valkey_version") or facts.get("redis_version", "")
    if "valkey_version" not in facts and version and _version(version) < (6, 2):
        yield f"Redis {version} is older than 6.2, the oldest that is supported"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))


def _seconds(ttl_ms: int) -> float:
    # -1: somebody took the expiry away; such a lock ends only by hand.
    return math.inf if ttl_ms == -1 else max(0, ttl_ms) / 1000


def _text(value: bytes | None) -> str:
    return value.decode() if value else ""


def _plain(value: Any) -> int | None:
    return value if isinstance(value, int) else None


_SCRIPTS = [
    lua.load(name)
    for name in (
        *("acquire", "acquire_all", "renew", "release", "drop"),
        *("sent", "sweep", "index", "inspect"),
    )
]
_ACQUIRE, _ACQUIRE_ALL, _RENEW, _RELEASE, _DROP, _SENT, _SWEEP, _INDEX, _INSPECT = _SCRIPTS
_SOURCES = {script.sha.encode(): script.source for script in _SCRIPTS}
_RECORDS = tuple(name.encode() for name in _ACQUIRE.keys)
_RENEWALS = {
    1: RenewOutcome.RENEWED,
    0: RenewOutcome.HELD,
    -1: RenewOutcome.LOST,
    None: RenewOutcome.UNKNOWN,
}
_stores: "WeakSet[RedisStore]" = WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store.forget_connections()


os.register_at_fork(after_in_child=_after_fork)
