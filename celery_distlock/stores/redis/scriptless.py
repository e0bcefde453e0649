"""
A lock where scripts are forbidden, by the compare-and-set commands of newer servers.

A key's record is one string: its owner, execution and token. It is created by ``SET NX``, and
changed and deleted only by commands that compare it with its earlier value. There is no queue, so a
waiter polls, and nothing can be parked.

A grant takes two round trips. A process that has created the record reads the last token, raises it
(the fence record never falls) and then writes the new token into its record; before that it does
not hold the key. A process that creates the record later reads the fence later, so its token is
higher. A process that was too slow, and has lost the key since, finds that its record no longer
exists, and cannot write it.

Two things need scripts. One is a renewal that never shortens a lease: this process orders its own
requests, and one that does not know the record asks first; but if two processes renew one owner's
hold at the same time, the shorter renewal may come last. The other is a renewal that a full server
accepts: ``SET`` is refused at ``maxmemory``, and the lock ends with its lease.
"""

import functools
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from celery_distlock import clock
from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.process.notifications import log
from celery_distlock.stores.base import Complaints, batches, forget_after_fork
from celery_distlock.stores.findings import Finding
from celery_distlock.stores.listing import CountingStore, ListingStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import (
    Ability,
    Completion,
    KeyState,
    Ownership,
    ParkRequest,
    Release,
    RenewOutcome,
    Reply,
    Status,
    WokenTask,
)

from .answers import EXACT, micros_of, sum_counters
from .connections import TIMEOUT, Command, command, milliseconds, time_left
from .parts import SWEEP_BATCH
from .records import Records, token_of
from .request_runner import RequestRunner
from .scanning import KeysWith, keys_of, names_at
from .server_errors import is_of_other_type, is_transient, said
from .server_reports import describe_server, memory_findings, parse_info
from .urls import locate

logger = logging.getLogger(__name__)

TURNS = 5  # times that a record may change between reading and changing it
UNSETTLED_MS = 1000  # at least, for the second round trip of a grant
# The least seconds that an execution has to be settled; these are as in scripts/queue.lua.
CLAIM = 5.0
DONE_MS = 3600000
COUNTS_S = 30 * 86400  # as in scripts/count.lua
FENCE_MS = 3600000  # as in scripts/grant.lua: a token only has to outlive a clock that was set back
PROBE_MS = 5000
LONGEST = 1e10
REMEMBERED = 10_000  # records that this process need not look up


class ScriptlessStore(ListingStore, CountingStore):
    """See the module; *url* as :func:`~celery_distlock.stores.redis.urls.locate` takes it."""

    abilities = frozenset({Ability.RECOGNISE, Ability.SHARE})

    def __init__(self, url: str, prefix: str, **options: str) -> None:
        self._servers, self._replicas = locate(url, options)
        self._prefix = prefix
        self._records = Records(prefix)
        self.address = self._servers.address
        self.identity = f"{self.address}#{prefix} without scripts"
        self._requests = RequestRunner(self._servers, prefix, "or with scripts")
        self._known: _Commands | None = None
        self._complaints = Complaints()
        self.forget_connections(forked=False)
        forget_after_fork(self)

    def forget_connections(self, *, forked: bool = True) -> None:
        """Drop the parent's connections after a fork, without sending anything over them."""
        self._held: dict[tuple[str, str], _Held] = {}
        self._renewing = threading.Lock()
        if forked:
            self._servers.after_fork()

    def acquire(self, request: AcquireRequest) -> Reply:
        key = request.key
        if isinstance(request.queue, ParkRequest):
            raise StoreError(f"{self.address}: no task can be parked without scripts")
        self.check_want(key, request.want)
        self._commands(key)
        for _ in range(TURNS):
            seen = self._make(request)
            if seen.record is None:
                continue  # it ended just after it had been in the way
            reply = self._second_delivery(request, seen)
            if reply is not None:
                return reply
            if not seen.record.is_for(request):
                return seen.busy()
            reply = self._settle(request, seen)
            if reply is not None:
                return reply
        raise StoreUnavailableError(
            f"{self.address}: the record of {shown(key)!r} is gone each time"
        )

    def _make(self, request: AcquireRequest) -> "_Seen":
        """Create the record if there is none, and read the one that is there then."""
        slot = slot_name(request.key)
        name, fence = self._record(slot), self._record(slot, "fence")
        lease_ms = max(_ms(request.lease), UNSETTLED_MS)
        record = _Record(request.owner, request.run)
        make = command(name, "SET", name, record.text, "NX", "PX", lease_ms)
        look = [
            *self._look(slot),
            command(name, "TIME"),
            command(fence, "ZSCORE", fence, "last"),
        ]
        if request.may_have_ended:
            mark = self._record(slot, f"ended:{request.run}")
            look += [command(mark, "GET", mark), command(mark, "PTTL", mark)]
        asked = self._ask([[make], look], request.key)
        with self._requests.reading("GET, PTTL, TIME and ZSCORE", asked.answers) as answers:
            _, text, ttl_ms, time, last, *mark_found = answers
            now = micros_of(time)
            return _Seen(
                asked.first_at,
                self._parsed(text, request.key),
                time_left(ttl_ms),
                now,
                max(0, token_of(last)),
                mark_found[0] if mark_found else None,
                time_left(mark_found[1]) if mark_found else 0.0,
            )

    def _second_delivery(self, request: AcquireRequest, seen: "_Seen") -> Reply | None:
        """Return the reply to a second delivery, and release what was taken for it."""
        record = seen.record
        if seen.mark is None or record is None:
            return None
        if record.owner == request.owner and record.token:
            return None
        if record.is_for(request):
            self._remove(slot_name(request.key), record, request.key)
        if seen.mark == b"done":
            return Reply(Status.DONE, seen.asked_at)
        return Reply(
            Status.BUSY, seen.asked_at, holder_run=request.run, remaining=seen.mark_remaining
        )

    def _settle(self, request: AcquireRequest, seen: "_Seen") -> Reply | None:
        """Raise the fence, then write the token; None if the record was lost before that."""
        old = seen.record
        assert old is not None
        token = old.token or max(seen.last + 1, seen.time)
        new = _Record(request.owner, request.run, token)
        # As long as requested, and never shorter than what was granted before.
        again = bool(old.token) and old.owner == request.owner
        lease_ms = max(_ms(request.lease), _ms(seen.remaining) if again else 0)
        slot = slot_name(request.key)
        name, fence = self._record(slot), self._record(slot, "fence")
        raise_it = [
            command(fence, "ZADD", fence, "GT", token, "last"),
            command(fence, "PEXPIRE", fence, FENCE_MS),
        ]
        commands = self._commands(request.key)
        write = self._confirmed(commands.swap(name, old.text, new.text, lease_ms))
        asked = self._ask([raise_it, [write, command(name, "GET", name)]], request.key)
        *_, swapped, found = asked.answers
        if not _done(swapped) and found != new.text:
            return None
        self._remember(slot, new, asked.first_at + lease_ms / 1000)
        return Reply(Status.GRANTED, asked.first_at, token)

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        asked_at = clock.monotonic()
        if not holds:
            return []
        try:
            # One after another: on two connections a shorter one could overtake a longer one.
            if not self._renewing.acquire(timeout=max(0.0, timeout)):
                raise RedisError("another renewal is in progress")
            try:
                outcomes = self._renew(holds, asked_at + timeout)
            finally:
                self._renewing.release()
        except (RedisError, StoreError) as error:
            log(logger, logging.WARNING, "%s did not answer a renewal: %s", self.address, error)
            outcomes = [RenewOutcome.UNKNOWN] * len(holds)
        return [(outcome, asked_at) for outcome in outcomes]

    def _renew(self, holds: Sequence[Ownership], deadline: float) -> list[RenewOutcome]:
        """Renew by what is known of the records, then read those that were different."""
        known = [self._held.get((slot_name(hold.key), hold.owner)) for hold in holds]
        outcomes = self._push(holds, known, deadline)
        left = [number for number, outcome in enumerate(outcomes) if outcome is None]
        if left:
            others = [holds[number] for number in left]
            found = self._find_all(others, deadline)
            held = [each if isinstance(each, _Held) else None for each in found]
            pushed = self._push(others, held, deadline)
            for number, each, outcome in zip(left, found, pushed, strict=True):
                outcomes[number] = each if isinstance(each, RenewOutcome) else outcome
        return [outcome or RenewOutcome.UNKNOWN for outcome in outcomes]

    def _find_all(
        self, holds: Sequence[Ownership], deadline: float
    ) -> "list[_Held | RenewOutcome]":
        """Read the records of *holds*; a hold that cannot be renewed gets its outcome here."""
        looks = [call for hold in holds for call in self._look(slot_name(hold.key))]
        answers = self._exchange(looks, deadline)
        found: list[_Held | RenewOutcome] = []
        for hold, text, ttl_ms in zip(holds, answers[::2], answers[1::2], strict=True):
            try:
                known = not isinstance(text, Exception) and not isinstance(ttl_ms, Exception)
                record = self._parsed(text, hold.key) if known else None
            except StoreError as error:
                log(logger, logging.WARNING, "a renewal: %s", error)
                known, record = False, None
            if not known:
                found.append(RenewOutcome.UNKNOWN)
            elif record is None:
                found.append(RenewOutcome.LOST)
            elif record.owner != hold.owner:
                found.append(RenewOutcome.HELD)
            else:
                found.append(_Held(record, clock.monotonic() + time_left(ttl_ms)))
        return found

    def _push(
        self, holds: Sequence[Ownership], known: "Sequence[_Held | None]", deadline: float
    ) -> list[RenewOutcome | None]:
        """Renew where the record is known; None where it is not known, or has changed."""
        now, calls, asked = clock.monotonic(), [], []
        commands = self._commands(holds[0].key, max(0.01, deadline - now))
        for number, (hold, held) in enumerate(zip(holds, known, strict=True)):
            if held is not None:
                name = slot_name(hold.key)
                until = max(held.until, now + hold.lease)
                self._remember(name, held.record, until)
                text, key = held.record.text, self._record(name)
                left_ms = _ms(until - now)
                calls.append(self._confirmed(commands.swap(key, text, text, left_ms)))
                asked.append(number)
        outcomes: list[RenewOutcome | None] = [None] * len(holds)
        if calls:
            for number, answer in zip(asked, self._exchange(calls, deadline), strict=True):
                if _done(answer):
                    outcomes[number] = RenewOutcome.RENEWED
                elif isinstance(answer, Exception):
                    outcomes[number] = RenewOutcome.UNKNOWN
        return outcomes

    def _exchange(self, calls: Sequence[Command], deadline: float) -> list[Any]:
        left = deadline - clock.monotonic()
        if left <= 0:
            raise RedisError("no time was left")
        answers = self._servers.exchange(calls, left)
        failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if failure is not None:
            why = said(failure, self._prefix)
            log(logger, logging.WARNING, "%s did not answer a renewal: %s", self.address, why)
            self._notice([failure])
        return answers

    def release(self, request: ReleaseRequest) -> Release:
        key, owner, run, completion, _, keep_for, *_ = request
        name = slot_name(key)
        held = self._held.pop((name, owner), None)
        if held is None:
            held = self._find(name, key)
        if run and completion in (Completion.YES_AND_MAY_COME_AGAIN, Completion.UNSETTLED):
            # First: a process that finds the key free must find this, too.
            left = held.until - clock.monotonic() if held is not None else 0.0
            unsettled_ms = _ms(max(left, CLAIM)) if completion is Completion.UNSETTLED else 0
            self._ask([[self._mark(name, run, unsettled_ms)]], key)
        repeats = 0
        for _ in range(TURNS):
            if held is None or held.record.owner != owner:
                return Release(repeats > 0)
            gone, attempts = self._give_up(name, held.record, key, keep_for)
            repeats += attempts
            if gone:
                return Release(True)
            held = self._find(name, key)
        raise StoreUnavailableError(
            f"{self.address}: the record of {shown(key)!r} changes each time"
        )

    def _give_up(
        self, name: str, record: "_Record", key: str, keep_for: tuple[str, float] | None
    ) -> tuple[bool, int]:
        """Return whether *record* was there to be removed, and the attempts that failed before."""
        if keep_for is None:
            return self._remove(name, record, key)
        run, seconds = keep_for
        kept = _Record(f"parked:{run}", run, record.token)
        swap = self._commands(key).swap(self._record(name), record.text, kept.text, _ms(seconds))
        asked = self._ask([[self._confirmed(swap)]], key)
        return _done(asked.answers[0]), asked.repeats

    def _remove(self, name: str, record: "_Record", key: str) -> tuple[bool, int]:
        delete = self._commands(key).delete(self._record(name), record.text)
        asked = self._ask([[delete]], key)
        return _done(asked.answers[0]), asked.repeats

    def _mark(self, name: str, run: str, unsettled_ms: int = 0) -> Command:
        mark = self._record(name, f"ended:{run}")
        if unsettled_ms:
            return command(mark, "SET", mark, "unsettled", "PX", unsettled_ms)
        return command(mark, "SET", mark, "done", "PX", DONE_MS)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        held = self._find(wake.name, wake.name)
        reserved = held is not None and held.record.owner == f"parked:{wake.run}"
        note = self._record(wake.name, f"ended:{wake.run}")
        (found,) = self._ask([[command(note, "GET", note)]], wake.name).answers
        if not reserved and found != b"unsettled":
            return Release(False)
        settle = self._mark(wake.name, wake.run) if mark else command(note, "DEL", note)
        self._ask([[settle]], wake.name)
        if held is not None and reserved:
            self._remove(wake.name, held.record, wake.name)
        return Release(True)

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        return _state(self._find(slot_name(key), key, timeout))

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        def ask(scan: Command) -> Any:
            return self._ask([[scan]], "the list of keys").answers[0]

        yield from keys_of(
            names_at(
                self._servers,
                KeysWith(self._records.stem, pattern),
                ask,
                self._requests.reading,
            ),
            pattern,
        )

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        states = []
        for some in batches(keys, SWEEP_BATCH):
            looks = [call for key in some for call in self._look(slot_name(key))]
            answers = self._requests.attempt(looks).answers
            for key, text, ttl_ms in zip(some, answers[::2], answers[1::2], strict=True):
                states.append(_state(self._listed(key, text, ttl_ms)))
        return states

    def _listed(self, key: str, text: Any, ttl_ms: Any) -> "_Held | None":
        """Like `_seen`; log a record that other software has corrupted once, and return None."""
        failures = [each for each in (text, ttl_ms) if isinstance(each, Exception)]
        self._requests.require([each for each in failures if not is_of_other_type(each)], key)
        try:
            self._requests.require(failures, key)
            return self._seen(text, ttl_ms, key)
        except StoreError as error:
            self._complaints.report(key, "%s: it is not listed", error)
            return None

    def count(self, counts: Mapping[str, float]) -> None:
        on_counts = functools.partial(self._records.command, "counts")
        adding = [on_counts("HINCRBYFLOAT", "{}", *each) for each in counts.items()]
        self._ask([[*adding, on_counts("EXPIRE", "{}", COUNTS_S)]], "the counters", TIMEOUT)

    def counts(self) -> dict[str, float]:
        look = self._records.command("counts", "HGETALL", "{}")
        answer = self._ask([[look]], "the counters").answers[0]
        with self._requests.reading("HGETALL", answer) as found:
            return sum_counters(found)

    def _find(self, name: str, key: str, timeout: float | None = None) -> "_Held | None":
        """Read a record; in one attempt if *timeout* seconds are given."""
        asked = self._ask([self._look(name)], key, timeout)
        text, ttl_ms = asked.answers
        return self._seen(text, ttl_ms, key)

    def _seen(self, text: bytes | None, ttl_ms: int, key: str) -> "_Held | None":
        record = self._parsed(text, key)
        if record is None:
            return None
        with self._requests.reading("PTTL", ttl_ms):
            return _Held(record, clock.monotonic() + time_left(ttl_ms))

    def _look(self, name: str) -> list[Command]:
        record = self._record(name)
        return [command(record, "GET", record), command(record, "PTTL", record)]

    def _remember(self, name: str, record: "_Record", until: float) -> None:
        if len(self._held) >= REMEMBERED:
            self._held.clear()
        self._held[name, record.owner] = _Held(record, until)

    def _parsed(self, text: bytes | None, key: str) -> "_Record | None":
        if text is None:
            return None
        try:
            record = _Record(**json.loads(text))
            if record.is_ours:
                return record
            raise ValueError(f"{record} is no grant")
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{self.address}: the record of lock {shown(key)!r} is not ours: other software"
                f" writes under the prefix {self._prefix!r}, and its records there must be deleted"
            ) from error

    def check(self) -> list[Finding]:
        probe = f"{self._prefix}:probe:{uuid.uuid4().hex}"
        self._try_lock(probe)
        (info,) = self._requests.attempt([command(probe.encode(), "INFO")]).answers
        findings = list(memory_findings(parse_info(info))) if isinstance(info, bytes) else []
        return findings + self._servers.check()

    def describe(self) -> Iterator[Finding]:
        return describe_server(self._servers, self._requests.attempt)

    def close(self) -> None:
        self._servers.close()

    def _record(self, name: str, record: str = "lock") -> bytes:
        return f"{self._records.stem(name)}{record}".encode("utf-8", "surrogatepass")

    def _confirmed(self, call: Command) -> Command:
        return call._replace(replicas=self._replicas) if self._replicas else call

    def _commands(self, key: str, timeout: float | None = None) -> "_Commands":
        """
        Return the server's compare-and-set commands; looked up once.

        Raises:
            StoreError: It has no such commands.
        """
        if self._known is None:
            name = f"{self._prefix}:probe:{uuid.uuid4().hex}".encode()
            calls = [command(name, "SET", name, "1", "PX", PROBE_MS)]
            calls += [swap(name, b"1", b"1", PROBE_MS) for swap in _SWAPS.values()]
            calls += [delete(name, b"0") for delete in _DELETES.values()]
            calls += [command(name, "DEL", name)]
            made, *answers, _ = self._requests.attempt(calls, timeout).answers
            self._requests.require([made], key)
            swaps = dict(zip(_SWAPS, answers[: len(_SWAPS)], strict=True))
            deletes = dict(zip(_DELETES, answers[len(_SWAPS) :], strict=True))
            self._known = _Commands(
                _SWAPS[self._first(swaps, "compare and set")],
                _DELETES[self._first(deletes, "compare and delete")],
            )
        return self._known

    def _notice(self, failures: Sequence[Exception]) -> None:
        """Look up the commands again after a refusal: another server may have replaced this one."""
        if any(not (is_transient(each) or is_of_other_type(each)) for each in failures):
            self._known = None

    def _first(self, answers: dict[str, Any], what: str) -> str:
        for name, answer in answers.items():
            if not isinstance(answer, Exception):
                return name
        tried = "; ".join(f"{name}: {answer}" for name, answer in answers.items())
        raise StoreError(
            f"{self.address} has no command to {what} that this user may use, and scripts are off"
            f" ({tried})"
        )

    def _ask(
        self, steps: Sequence[Sequence[Command]], what: str, timeout: float | None = None
    ) -> "_Asked":
        """
        Send the calls of *steps* until they are answered, three times at most.

        Together, where they are executed in their order; otherwise one step after another.

        Raises:
            StoreUnavailableError: They were not answered, or the servers cannot serve now.
            StoreError: They were refused.
            QuorumError: Too few replicas have confirmed what was done.
        """
        if self._servers.in_order:
            steps = [[call for step in steps for call in step]]
        answers: list[Any] = []
        first_at, repeats = clock.monotonic(), 0
        for step in steps:
            asked = self._requests.attempt(step, timeout)
            self._notice(asked.failures)
            self._requests.require(asked.failures, what)
            answers += asked.answers
            repeats += asked.repeats
        return _Asked(answers, first_at, repeats)


class _Record(NamedTuple):
    """The content of a key's record; without a token it is not granted yet."""

    owner: str
    run: str
    token: int = 0

    @property
    def text(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @property
    def is_ours(self) -> bool:
        words = isinstance(self.owner, str) and isinstance(self.run, str)
        return words and type(self.token) is int and 0 <= self.token < EXACT

    def is_for(self, request: AcquireRequest) -> bool:
        kept_for = f"parked:{request.run}" if request.run else ""
        return self.owner in (request.owner, kept_for)


class _Held(NamedTuple):
    """A record as it was last read, and until when it lasts by the local clock."""

    record: _Record
    until: float


def _state(held: _Held | None) -> KeyState:
    if held is None or not held.record.token:  # without a token it is not granted yet
        return KeyState("", 0, "", 0.0, 0.0, 0)
    owner, run, token = held.record
    left = max(0.0, held.until - clock.monotonic())
    return KeyState(owner, token, run, token / 1e6, left, 0)


class _Seen(NamedTuple):
    """What a request for a key has found; the times are the server's, in microseconds."""

    asked_at: float
    record: _Record | None
    remaining: float
    time: int
    last: int  # token
    mark: bytes | None
    mark_remaining: float

    def busy(self) -> Reply:
        assert self.record is not None
        owner, run, token = self.record
        return Reply(Status.BUSY, self.asked_at, token, owner, run, self.remaining)


class _Asked(NamedTuple):
    """The answers to a request, the local clock before it, and how many attempts failed."""

    answers: list[Any]
    first_at: float
    repeats: int


class _Commands(NamedTuple):
    """A server's commands for compare and set, and for compare and delete."""

    swap: Callable[[bytes, bytes, bytes, int], Command]
    delete: Callable[[bytes, bytes], Command]


_SWAPS: dict[str, Callable[[bytes, bytes, bytes, int], Command]] = {
    "SET with IFEQ (Valkey 8.1, Redis 8.4)": lambda name, old, new, ms: command(
        name, "SET", name, new, "IFEQ", old, "PX", ms
    ),
    "CAS (Tair)": lambda name, old, new, ms: command(name, "CAS", name, old, new, "PX", ms),
}
_DELETES: dict[str, Callable[[bytes, bytes], Command]] = {
    "DELIFEQ (Valkey 9.0)": lambda name, old: command(name, "DELIFEQ", name, old),
    "DELEX (Redis 8.4)": lambda name, old: command(name, "DELEX", name, "IFEQ", old),
    "CAD (Tair)": lambda name, old: command(name, "CAD", name, old),
    # An end in the past: the key is gone immediately.
    "SET with IFEQ (Valkey 8.1)": lambda name, old: command(
        name, "SET", name, old, "IFEQ", old, "PXAT", 1
    ),
}


def _done(answer: Any) -> bool:
    """Whether a compare-and-set command has found the value that it expected."""
    return answer in (b"OK", 1)


def _ms(seconds: float) -> int:
    return milliseconds(min(seconds, LONGEST))
