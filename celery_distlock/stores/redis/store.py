"""
The store over Redis or Valkey: one server, the master that sentinels name, or a cluster.

A request that got no answer is repeated only here, with the same owner.
"""

import json
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from celery_distlock import clock
from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.process.notifications import log
from celery_distlock.stores.base import Complaints, forget_after_fork
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.findings import Finding, Severity
from celery_distlock.stores.listing import CountingStore
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import (
    ALONE,
    Ability,
    KeyState,
    Ownership,
    ParkRequest,
    Release,
    RenewOutcome,
    Reply,
    Status,
    Waiter,
    Want,
    WokenTask,
)

from . import scripts
from .actions import RedisAudit
from .answers import micros_of, sum_counters
from .capacity import RedisUnits
from .connections import TIMEOUT, command, fields, milliseconds, trimmed
from .delivery import RedisChannels
from .inboxes import Inboxes
from .inspection import Inspection
from .parking import RedisParking
from .parts import Reach
from .records import RELEASE, Records, Replies, wanted
from .request_runner import RequestRunner
from .sending import RedisCalls
from .server_errors import said
from .server_reports import describe_server, examine, missing_rights
from .timing import RedisTimetable
from .urls import Location, locate

logger = logging.getLogger(__name__)


class RedisStore(QueueStore, CountingStore):
    """See the module; *url* as :func:`~celery_distlock.stores.redis.urls.locate` takes it."""

    abilities = frozenset({Ability.SHARE, Ability.RECOGNISE, Ability.SEVERAL, Ability.RECALL})
    _inboxes_class, _channels_class = Inboxes, RedisChannels
    channels: RedisChannels
    audit: RedisAudit
    parking: RedisParking

    def __init__(self, url: str, prefix: str, **options: str) -> None:
        super().__init__()
        self._servers, replicas = self._locate(url, options)
        self._prefix = prefix
        self.address = self._servers.address
        self.identity = f"{self.address}#{prefix}"
        self._records = Records(prefix, replicas)
        self._requests = RequestRunner(
            self._servers, prefix, "and its records there must be deleted"
        )
        self._compose()
        forget_after_fork(self)

    def _locate(self, url: str, options: Mapping[str, str]) -> Location:
        return locate(url, options)

    def _compose(self) -> None:
        """Create the parts, which have no state yet."""
        reach = Reach(self._servers, self._records, self._requests, Complaints())
        self._inspection = inspection = Inspection(reach)
        self.audit = RedisAudit(reach)
        self._inboxes = self._inboxes_class(reach)
        self.timetable = RedisTimetable(reach, self._inboxes)
        self._replies = replies = Replies(reach, self.timetable)
        self.channels = self._channels_class(reach)
        self.parking = parking = RedisParking(reach, replies, self.channels, inspection)
        self.calls = RedisCalls(reach, replies, parking)
        self.units = RedisUnits(reach, replies)

    def forget_connections(self) -> None:
        """Drop the parent's connections after a fork, without sending anything over them."""
        self._servers.after_fork()
        self._compose()

    def acquire(self, request: AcquireRequest) -> Reply:
        key, owner, lease, queue, run, redelivered, retain, arrival, want = request
        optional: tuple[Any, ...] = ()
        if queue is not None or redelivered or retain or want is not ALONE:
            optional = self._optional(request)
        arguments = owner, milliseconds(lease), run, arrival, *optional
        call = self._records.call(_ACQUIRE, slot_name(key), *arguments, confirmed=True)
        asked = self._requests.ask([call], key)
        parks = isinstance(queue, ParkRequest)
        return self._replies.reply(_ACQUIRE, key, asked.answers[0], asked.asked_at, parks=parks)

    def _optional(self, request: AcquireRequest) -> tuple[Any, ...]:
        """Return the optional arguments of *request*. Before it parks, index its key."""
        queue, envelope = request.queue, b""
        more: dict[str, Any] = {}
        if isinstance(queue, ParkRequest):
            name = slot_name(request.key)
            channel = self.channels.push_channel(name, queue.channel, patience=TIMEOUT)
            more = {"mode": "park", "channel": channel, "task": queue.task}
            more.update(most=queue.max_waiting, destination=queue.destination)
            envelope = queue.envelope
            self._requests.ask(self.parking.before(name, request.run, queue), request.key)
        elif queue is not None:
            more = {"mode": "wait", "inbox": queue.address}
        more.update(repeated=request.redelivered, keep=request.retain)
        return trimmed(wanted(request.want), fields(**more), envelope)

    def acquire_all(
        self,
        keys: Sequence[str],
        owners: Sequence[str],
        lease: float,
        *,
        run: str = "",
        redelivered: bool = False,
        retain: bool = False,
        wants: Sequence[Want] = (),
    ) -> list[Reply] | None:
        names = list(map(slot_name, keys))
        if not self._servers.share([self._records.stem(name).encode() for name in names]):
            return None
        arguments: list[Any] = [run, milliseconds(lease), " ".join(owners)]
        if redelivered or wants:
            arguments += [int(redelivered), int(retain)]
        if wants:
            arguments.append(" ".join(want.written() for want in wants))
        call = self._records.call_at(_ACQUIRE_ALL, names, *arguments)
        try:
            asked = self._requests.ask([call], ", ".join(keys))
        except StoreError as error:
            if "CROSSSLOT" in str(error):  # a lone node of a cluster: `check` reports it
                return None
            raise
        with self._requests.reading(_ACQUIRE_ALL, asked.answers[0]) as answer:
            replies = [
                Reply(Status.GRANTED, asked.asked_at, self._replies.token(key, token), slot=slot)
                for key, token, slot in zip(keys, answer[::2], answer[1::2], strict=bool(answer))
            ]
        if not replies and asked.unanswered:
            # The previous request, whose answer was lost, may have taken what is left of them.
            for key, owner in zip(keys, owners, strict=True):
                give_back = ReleaseRequest(key, owner, started=False)
                self.dispatch(self.release(give_back).wake)
        return replies or None

    def retry_delay(
        self, key: str, usual: float, within: tuple[float, float], timeout: float
    ) -> float:
        usual_ms = milliseconds(usual) if usual else 0
        call = self._records.call(_RETURN, slot_name(key), usual_ms, *map(milliseconds, within))
        (answer,) = self._requests.ask_once([call], timeout)
        with self._requests.reading(_RETURN, answer) as turn_ms:
            return math.inf if turn_ms < 0 else turn_ms / 1000

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        calls = [
            self._records.call(
                _RENEW, slot_name(hold.key), hold.owner, milliseconds(hold.lease), confirmed=True
            )
            for hold in holds
        ]
        asked_at = clock.monotonic()
        try:
            answers = self._servers.exchange(calls, timeout)
        except RedisError as error:
            answers = [error] * len(holds)
        failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if failure is not None:
            why = said(failure, self._prefix)
            log(logger, logging.WARNING, "%s did not answer a renewal: %s", self.address, why)
        outcomes = [
            _RENEWALS.get(answer if isinstance(answer, int) else None, RenewOutcome.UNKNOWN)
            for answer in answers
        ]
        caused = [each for each in zip(holds, outcomes, strict=True) if each[1] in _CAUSED]
        self.audit.note_causes(caused, asked_at + timeout)
        return [(outcome, asked_at) for outcome in outcomes]

    def recall(self, key: str, owner: str) -> bool:
        call = self._records.call(_RECALL, slot_name(key), owner, confirmed=True)
        return bool(self._requests.ask([call], key).answers[0])

    def release(self, request: ReleaseRequest) -> Release:
        inbox, own_channel = request.inbox, request.own_channel
        channel: tuple[str, str] = ("", "")
        # In a cluster a worker is notified only in the slots at which it has parked something.
        if own_channel is not None and own_channel.destination and self._servers.in_order:
            channel = own_channel
        address = inbox.address if inbox is not None else ""
        call = self._records.release(
            request, channel, inbox=address, unstarted=request.started is False
        )
        answers = self._requests.ask([call], request.key)
        return self._replies.released(slot_name(request.key), RELEASE, answers)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        drop = self._records.call(_DROP, wake.name, wake.run, int(mark))
        return self._replies.released(wake.name, _DROP, self._requests.ask([drop], wake.name))

    def subscribed(self, key: str) -> bool:
        if not self._inboxes.subscriptions:
            return False
        return self._inboxes.subscribed(self._records.stem(slot_name(key)))

    def inbox(self, key: str, owner: str) -> Inbox:
        return self._inboxes.inbox(self._records.stem(slot_name(key)), owner)

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        return self._inspection.inspect(key, timeout)

    def inspect_for(
        self, key: str, want: Want, timeout: float | None = None
    ) -> tuple[KeyState, bool]:
        return self._inspection.inspect_for(key, want, timeout)

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        return self._inspection.inspect_many(keys)

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        return self._inspection.find_keys(pattern)

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        return self._inspection.waiters(key, first=first, limit=limit)

    @property
    def left_out(self) -> int:  # type: ignore[override]  # only read
        return self._inspection.left_out

    def count(self, counts: Mapping[str, float]) -> None:
        add = self._records.call_without_key(_COUNT, json.dumps(counts))
        self._requests.ask_once([add], TIMEOUT)

    def counts(self) -> dict[str, float]:
        look = self._records.command("counts", "HGETALL", "{}")
        asked = self._requests.ask([look], "the counters")
        with self._requests.reading("HGETALL", asked.answers[0]) as found:
            return sum_counters(found)

    def describe(self) -> Iterator[Finding]:
        return describe_server(self._servers, self._requests.attempt)

    def time(self, timeout: float) -> int:
        (answer,) = self._requests.ask_once([command(b"", "TIME")], timeout)
        with self._requests.reading("TIME", answer):
            return micros_of(answer)

    def check(self) -> list[Finding]:
        rights = missing_rights(self._servers, self._requests, self._records)
        try:
            self._try_lock(f"{self._prefix}:probe:{uuid.uuid4().hex}")
        except StoreError as error:
            if rights:
                passes = isinstance(error, StoreUnavailableError)
                details, remedy = f"{error}; {rights.message}", error.remedy or rights.remedy
                raise (StoreUnavailableError if passes else StoreError)(
                    details, remedy=remedy
                ) from error
            raise
        findings = list(examine(self._servers, self._requests))
        if rights:
            findings.append(rights)
        publish = self._records.command("probe", "PUBLISH", "{}", "")
        (answer,) = self._requests.attempt([publish]).answers
        if isinstance(answer, ResponseError):
            message = (
                f"this user may not publish to {self._prefix}:*, so waiters and parked tasks are"
                f" served late (ACL SETUSER ... &{self._prefix}:*)"
            )
            remedy = "give that right to the user in the URL"
            findings.append(Finding(Severity.DOUBT, "publish", message, remedy))
        return findings + self._servers.check()

    def close(self) -> None:
        self._servers.close()
        self._inboxes.close()


_ACQUIRE, _ACQUIRE_ALL, _RENEW = map(scripts.load, ("acquire", "acquire_all", "renew"))
_DROP, _RETURN, _COUNT, _RECALL = map(scripts.load, ("drop", "return", "count", "recall"))
# By an operator, perhaps.
_CAUSED = (RenewOutcome.HELD, RenewOutcome.LOST, RenewOutcome.RECALLED)
_RENEWALS: dict[int | None, RenewOutcome] = {
    1: RenewOutcome.RENEWED,
    2: RenewOutcome.RECALLED,
    0: RenewOutcome.HELD,
    -1: RenewOutcome.LOST,
}
