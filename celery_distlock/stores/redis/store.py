"""
The store over Redis or Valkey: one server, the master that sentinels name, or a cluster.

A request that got no answer is repeated here, with the same owner, and nowhere else.
"""

import logging
import math
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from redis.exceptions import (
    RedisError,
    ResponseError,
)

from celery_distlock import clock
from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.process.news import log
from celery_distlock.stores.base import Complaints, forget_after_fork
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.findings import Finding, Severity
from celery_distlock.stores.queue_parts import Parking
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest, StandRequest
from celery_distlock.stores.values import (
    ALONE,
    Ability,
    KeyState,
    Ownership,
    ParkRequest,
    Release,
    RenewOutcome,
    Reply,
    Route,
    Status,
    Want,
    WokenTask,
)

from . import scripts
from .actions import RedisActions
from .answers import Answer, micros_of, together, token_of, unreadable
from .capacity import RedisCapacity
from .connections import (
    TIMEOUT,
    Command,
    command,
    fields,
    milliseconds,
    script_call,
    time_left,
    trimmed,
)
from .delivery import RedisDelivery
from .inspection import SWEEP_BATCH, RedisInspection
from .mending import IndexMender
from .permissions import IN_A_CLUSTER, REHEARSAL, lacking, unknown
from .records import Records
from .request_runner import Answered, RequestRunner
from .sending import RedisSending
from .server_errors import said
from .server_reports import examine
from .silence import Silence
from .subscriptions import PubSubInbox, WaiterSubscriptions
from .topology import PushTarget
from .urls import Location, locate

__all__ = ["RedisStore"]

logger = logging.getLogger(__name__)

BACKLOG = 5.0  # seconds for which a broker's queue that has messages is not looked at again
MOST_LEFT = 10_000  # runs that are known to have been left to others
TURN = 0.9  # of the interval between sweeps: for so long the sweepers' turn is one's own
REST = 3.0  # times what a sweep took: for so long nobody sweeps after it
SLOW_BATCH = 1.0  # seconds that a round trip takes at most: what is more was no work, but an outage


class RedisStore(
    RedisInspection, RedisSending, RedisCapacity, RedisDelivery, RedisActions, Parking, QueueStore
):
    """See the module; *url* as :func:`~celery_distlock.stores.redis.urls.locate` takes it."""

    abilities = frozenset({Ability.SHARE, Ability.RECOGNISE, Ability.SEVERAL})

    def __init__(self, url: str, prefix: str, **options: str) -> None:
        super().__init__()
        self.parking = self.channels = self.calls = self.timetable = self.units = self
        self._servers, self._replicas = self._locate(url, options)
        self._prefix = prefix
        self.address = self._servers.address
        self.identity = f"{self.address}#{prefix}"
        self._records = Records(prefix, self._replicas)
        self._requests = RequestRunner(
            self._servers, prefix, "and what it wrote there is to be deleted"
        )
        self._delivery = None
        self._complaints = Complaints()
        self._left: set[tuple[str, str]] = set()
        self._causes: dict[str, str] = {}
        self._backlogs: dict[str, float] = {}
        self._gives_way = False  # what this sweep has left is for another one to look at
        self.forget_connections(forked=False)
        forget_after_fork(self)

    def _locate(self, url: str, options: Mapping[str, str]) -> Location:
        return locate(url, options)

    def forget_connections(self, *, forked: bool = True) -> None:
        """Drop what a fork inherited, without a word to the server: it is the parent's."""
        self._inbox_channel = f"{self._prefix}:inbox:{uuid.uuid4().hex}"
        self._subscriptions: dict[Hashable, WaiterSubscriptions] = {}
        self._silence = Silence()
        self._mender = IndexMender(self._servers, self._requests, self._records)
        if forked:
            self._delivery = None
            self._servers.after_fork()

    def acquire(self, request: AcquireRequest) -> Reply:
        key, owner, lease, queue, run, redelivered, retain, arrival, want = request
        name, envelope = slot_name(key), b""
        more: dict[str, Any] = {}
        if isinstance(queue, ParkRequest):
            channel = self._push_channel(name, queue.channel, patience=TIMEOUT)
            more, envelope = (
                {"mode": "park", "channel": channel, "task": queue.task},
                queue.envelope,
            )
            self._requests.ask([self._records.index("add", name)], key)
        elif queue is not None:
            more = {"mode": "wait", "inbox": queue.address}
        optional = fields(repeated=redelivered, keep=retain, **more)
        arguments = trimmed(
            owner, milliseconds(lease), run, arrival, _wanted(want), optional, envelope
        )
        call = self._records.call(_ACQUIRE, name, *arguments, confirmed=True)
        asked = self._requests.ask([call], key)
        with self._requests.reading(_ACQUIRE, asked.answers[0]) as answer:
            return self._reply(key, answer, asked.asked_at, parks=isinstance(queue, ParkRequest))

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
        stems = tuple(self._records.stem(slot_name(key)) for key in keys)
        if not self._servers.share([stem.encode() for stem in stems]):
            return None
        arguments: list[Any] = [run, milliseconds(lease), " ".join(owners)]
        if redelivered or wants:
            arguments += [int(redelivered), int(retain)]
        if wants:
            arguments.append(" ".join(want.written() for want in wants))
        call = script_call(_ACQUIRE_ALL, stems, *arguments)
        try:
            asked = self._requests.ask([call._replace(replicas=self._replicas)], ", ".join(keys))
        except StoreError as error:
            if "CROSSSLOT" in str(error):  # a lone node of a cluster: `check` says so
                return None
            raise
        with self._requests.reading(_ACQUIRE_ALL, asked.answers[0]) as answer:
            replies = [
                Reply(Status.GRANTED, asked.asked_at, self._token(key, token), slot=slot)
                for key, token, slot in zip(keys, answer[::2], answer[1::2], strict=bool(answer))
            ]
        if not replies and asked.unanswered:
            # The request before, whose answer was lost, may have taken what is left of them.
            for key, owner in zip(keys, owners, strict=True):
                give_back = ReleaseRequest(key, owner, started=False)
                self.dispatch(self.release(give_back).wake)
        return replies or None

    def _token(self, key: str, value: bytes | None) -> int:
        token = token_of(value)
        if token <= 0:
            raise StoreError(unreadable(self.address, key, value))
        return token

    def _reply(self, key: str, answer: Any, asked_at: float, *, parks: bool = True) -> Reply:
        if not isinstance(answer, list):
            return Reply(Status.GRANTED, asked_at, self._token(key, answer))
        if answer[0] == b"granted":
            _, token, slot = answer
            return Reply(Status.GRANTED, asked_at, self._token(key, token), slot=slot)
        return self._read_reply(key, Answer(answer), [slot_name(key)], asked_at, parks=parks)

    def _read_reply(
        self, key: str, answer: Answer, names: Sequence[str], asked_at: float, *, parks: bool = True
    ) -> Reply:
        """Return what the *answer* says of a request for *key*, which wakes at those of *names*."""
        status, place = Status(answer.text("status")), answer.number("place")
        wake = together(answer.wakes(*names))
        if status is Status.GRANTED:
            self._note_opening(slot_name(key), answer)
            token, slot = self._token(key, answer.raw("token")), answer.number("slot")
            return Reply(status, asked_at, token, wake=wake, slot=slot)
        due = 0.0 if place else answer.opens or 0.0
        if parks or not due:  # else the caller looks again
            self._note_opening(slot_name(key), answer)
        since = answer.raw("since")
        return Reply(
            status,
            asked_at,
            max(0, token_of(answer.raw("token"))),
            answer.text("holder"),
            answer.text("run"),
            time_left(answer.number("ttl_ms")),
            max(0, place),
            wake,
            int(since) if since.isdigit() else 0,
            due=due,
        )

    def park_if_held(
        self,
        key: str,
        run: str,
        park_request: ParkRequest,
        timeout: float,
        arrival: int = 0,
        want: Want = ALONE,
    ) -> Reply:
        name, asked_at = slot_name(key), clock.monotonic()
        channel = self._push_channel(name, park_request.channel)
        optional = fields(mode="line", channel=channel, task=park_request.task)
        arguments = "", 1, run, arrival, _wanted(want), optional, park_request.envelope
        call = self._records.call(_ACQUIRE, name, *arguments, confirmed=True)
        for calls in self._servers.requests([self._records.index("add", name)], call):
            answers = self._requests.ask_once(calls, timeout)
        with self._requests.reading(_ACQUIRE, answers[-1]) as answer:
            return self._reply(key, answer, asked_at)

    def stand(self, request: StandRequest) -> Reply:
        name, route = request.name, request.route
        arguments = int(name == route.names[0]), request.arrival, request.owner, 0
        return self._stand(
            [name],
            request.run,
            route,
            *arguments,
            park_request=request.park_request,
            timeout=request.timeout,
        )

    def stand_at_all(self, run: str, route: Route) -> Reply | None:
        if not self._servers.share([self._records.stem(name).encode() for name in route.names]):
            return None
        try:
            return self._stand(route.names, run, route, 1, 0, "", 1)
        except StoreError as error:
            if "CROSSSLOT" in str(error):  # as in `acquire_all`
                return None
            raise

    def _stand(
        self,
        names: Sequence[str],
        run: str,
        route: Route,
        *arguments: Any,
        park_request: ParkRequest | None = None,
        timeout: float | None = None,
    ) -> Reply:
        first, key = names[0], key_of(names[0])
        if park_request is not None:
            patience = TIMEOUT if timeout is None else 0.0
            arguments += (
                park_request.envelope,
                self._push_channel(first, park_request.channel, patience),
            )
        stems = tuple(self._records.stem(name) for name in names)
        stand = script_call(_STAND, stems, run, route.written(), *arguments)
        stand = stand._replace(replicas=self._replicas)
        index = [self._records.index("add", name) for name in names]
        for calls in self._servers.requests(index, stand):
            asked_at = clock.monotonic()
            if timeout is None:
                asked = self._requests.ask(calls, key)
                answers, asked_at = asked.answers, asked.asked_at
            else:
                answers = self._requests.ask_once(calls, timeout)
        with self._requests.reading(_STAND, answers[-1]) as answer:
            told = Answer(answer)
            last = key_of(names[told.number("at") - 1])
            return self._read_reply(last, told, names, asked_at)

    def depart(self, name: str, run: str, *, first: bool) -> Release:
        depart = self._records.call(_DEPART, name, run, int(first), confirmed=True)
        asked = self._requests.ask([depart], key_of(name))
        return self._released(name, _DEPART, asked._replace(unanswered=0))

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
        outcomes = [_RENEWALS.get(_plain(answer), RenewOutcome.UNKNOWN) for answer in answers]
        lost = [hold for hold, outcome in zip(holds, outcomes, strict=True) if outcome in _LOSSES]
        self._note_causes(lost, asked_at + timeout)
        return [(outcome, asked_at) for outcome in outcomes]

    def release(self, request: ReleaseRequest) -> Release:
        key, owner, run, completion, inbox, keep_for, started, own_channel = request
        name = slot_name(key)
        channel: tuple[str, str] = ("", "")
        # In a cluster a worker hears only of the slots at which it has parked something.
        if own_channel is not None and own_channel.destination and self._servers.in_order:
            channel = own_channel
        keep_run, keep_s = keep_for or ("", 0.0)
        optional = fields(
            inbox=inbox.address if inbox is not None else "",
            keep_run=keep_run,
            keep_ms=milliseconds(keep_s) if keep_for else 0,
            unstarted=started is False,
        )
        arguments = trimmed(owner, run, completion.value, *channel, optional)
        call = self._records.call(_RELEASE, name, *arguments)
        return self._released(name, _RELEASE, self._requests.ask([call], key))

    def _released(self, name: str, script: scripts.Script, asked: Answered) -> Release:
        with self._requests.reading(script, asked.answers[0]) as answer:
            if isinstance(answer, list):
                return Release(True, self._noting(name, Answer(answer)))
            # A repeated release finds the key gone if the first was executed and its answer lost.
            return Release(answer > 0 or asked.unanswered > 0)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        drop = self._records.call(_DROP, wake.name, wake.run, int(mark))
        return self._released(wake.name, _DROP, self._requests.ask([drop], wake.name))

    def cancel(self, key: str, run: str) -> Release:
        name = slot_name(key)
        call = self._records.call(_CANCEL, name, run)
        return self._released(name, _CANCEL, self._requests.ask([call], key))

    def subscribed(self, key: str) -> bool:
        if not self._subscriptions:
            return False
        place = self._place(slot_name(key), self._inbox_channel)
        here = self._subscriptions.get(place.node)
        return here is not None and here.hears(place.channel)

    def inbox(self, key: str, owner: str) -> Inbox:
        return self._inbox_at(self._records.stem(slot_name(key)), owner)

    def _inbox_at(self, stem: str, owner: str) -> Inbox:
        def find() -> tuple[WaiterSubscriptions, PushTarget]:
            place = self._place_of(stem, self._inbox_channel)
            return self._subscribed_at(place.node), place

        return PubSubInbox(owner, find)

    def _subscribed_at(self, node: Hashable) -> WaiterSubscriptions:
        here = self._subscriptions.get(node)
        if here is None:  # no mutex: a signal's handler may wait while its thread is here
            for gone in [each for each in list(self._subscriptions) if not self._servers.has(each)]:
                self._subscriptions.pop(gone, None)  # who waits there looks for another by himself
            made = WaiterSubscriptions(self._servers.connect(node))
            here = self._subscriptions.setdefault(node, made)
        return here

    def mark_published(self, wake: WokenTask) -> None:
        self._requests.ask([self._records.call(_SENT, wake.name, wake.run, 0)], wake.name)

    def mark_awaited(self, wake: WokenTask, destination: str) -> None:
        self._backlogs[destination] = clock.monotonic() + BACKLOG
        self._requests.ask([self._records.call(_SENT, wake.name, wake.run, 3)], wake.name)

    def mark_left(self, wake: WokenTask) -> None:
        if (wake.name, wake.run) not in self._left:
            # Whoever looks next may know it; else it would be up to chance who gets the turn.
            if len(self._left) >= MOST_LEFT:
                self._left.clear()
            self._left.add((wake.name, wake.run))
            self._gives_way = True
        self._requests.ask([self._records.call(_SENT, wake.name, wake.run, 2)], wake.name)

    def mark_returned(self, wake: WokenTask) -> None:
        self._requests.ask([self._records.call(_SENT, wake.name, wake.run, 1)], wake.name)

    def sweep(self, interval: float) -> Iterator[WokenTask]:
        who, begin, worked = uuid.uuid4().hex, clock.monotonic(), 0.0
        keep = self._turn(who, interval * TURN)
        is_ours = bool(self._requests.ask([keep], "the sweeper's turn").answers[0])
        if not self._servers.in_order:
            self._mender.go_on(begins=is_ours)
        if not is_ours:
            return
        self._gives_way = False
        worked_at = begin
        for names in self._waiting_names():
            # One attempt: what a script has found it finds no second time, and a node of a cluster
            # that is silent now is looked at by the next sweep.
            ours, *answers = self._requests.attempt_once([keep, *self._sweep_calls(names)])
            kept_at = clock.monotonic()
            worked += min(kept_at - worked_at, SLOW_BATCH)
            opens: dict[str, float | None] = {}
            for wake in self._swept(names, answers, opens):
                yield wake
                now = clock.monotonic()
                if now > kept_at + interval * TURN / 2:
                    (ours,), kept_at = self._requests.ask([keep], "the sweepers' turn").answers, now
            self._note_opens(opens)
            if ours == 0:
                return  # we stood still for too long, and another one has begun
            worked_at = clock.monotonic()
        least = 0.0 if self._gives_way else interval * TURN - (clock.monotonic() - begin)
        rest = max(least, REST * worked)
        self._requests.ask([self._turn(who, rest)], "the sweeper's turn")

    def wake_next(self, key: str) -> Iterator[WokenTask]:
        names = [slot_name(key)]
        opens: dict[str, float | None] = {}
        answers = self._requests.attempt_once(self._sweep_calls(names))
        yield from self._swept(names, answers, opens)
        self._note_opens(opens)

    def _note_opens(self, opens: Mapping[str, float | None]) -> None:
        dues = {name: seconds for name, seconds in opens.items() if seconds is not None}
        if dues:
            self.note_due(dues)

    def time(self, timeout: float) -> int:
        (answer,) = self._requests.ask_once([command(b"", "TIME")], timeout)
        with self._requests.reading("TIME", answer):
            return micros_of(answer)

    def _turn(self, who: str, seconds: float) -> Command:
        return self._records.call_without_key(_TURN, who, milliseconds(max(0.0, seconds)))

    def _sweep_calls(self, names: Sequence[str]) -> list[Command]:
        now = clock.monotonic()
        self._backlogs = {each: ends for each, ends in self._backlogs.items() if ends > now}
        more = ["\n".join(self._backlogs)] if self._backlogs else []
        return [self._records.call(_SWEEP, name, SWEEP_BATCH, *more) for name in names]

    def _swept(
        self, names: Sequence[str], answers: Sequence[Any], opens: dict[str, float | None]
    ) -> Iterator[WokenTask]:
        quiet = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, Exception):
                self._pass_over(name, answer)
                continue
            with self._requests.reading(_SWEEP, answer):
                told = Answer(answer)
                opens[name], wakes = told.opens, told.wakes(name)
                waits = told.number("waiting")
            yield from wakes
            if not waits:
                quiet.append(self._records.index("strike", name))
        if quiet:
            self._requests.ask(quiet, "the sweep")

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        look = [self._records.call(_INSPECT, slot_name(key))]
        answers = (
            self._requests.ask(look, key).answers
            if timeout is None
            else self._requests.ask_once(look, timeout)
        )
        with self._requests.reading(_INSPECT, answers[0]) as answer:
            return self._state(key, answer)

    def check(self) -> list[Finding]:
        probe = f"{self._prefix}:probe:{uuid.uuid4().hex}"
        rights = self._missing_rights()
        try:
            reply = self.acquire(AcquireRequest(probe, "probe", 1.0))
            self.release(ReleaseRequest(probe, "probe"))
        except StoreError as error:
            if rights:
                passes = isinstance(error, StoreUnavailableError)
                told, remedy = f"{error}; {rights.message}", error.remedy or rights.remedy
                raise (StoreUnavailableError if passes else StoreError)(
                    told, remedy=remedy
                ) from error
            raise
        if reply.status is not Status.GRANTED:
            raise StoreError(f"{self.address}: the test lock was not granted but {reply.status}")
        findings = list(examine(self._servers, self._requests))
        if rights:
            findings.append(rights)
        tell = self._records.command("probe", "PUBLISH", "{}", "")
        (heard,) = self._requests.attempt([tell]).answers
        if isinstance(heard, ResponseError):
            message = (
                f"this user may not publish to {self._prefix}:*, so waiters and parked tasks are"
                f" served late (ACL SETUSER ... &{self._prefix}:*)"
            )
            remedy = "give that right to the user in the URL"
            findings.append(Finding(Severity.DOUBT, "publish", message, remedy))
        return findings + self._servers.check()

    def _missing_rights(self) -> Finding | None:
        """Return which rights are missing; None if none are, or nothing can be learnt."""
        calls = [self._records.command("rights", *words) for words in REHEARSAL]
        if not self._servers.in_order:
            calls += [self._records.command("rights", *words) for words in IN_A_CLUSTER]
        try:
            answers = self._requests.exchange(calls, TIMEOUT)
        except RedisError:
            return None
        hidden, rights = unknown(answers[: len(REHEARSAL)]), lacking(answers, self._prefix)
        if hidden:
            message = f"this server has no {' '.join(hidden)}"
            message += f", and this user lacks the rights {' '.join(rights)}" if rights else ""
            remedy = "see its configuration, which may have given them other names (rename-command)"
            return Finding(Severity.DOUBT, "rights", message, remedy)
        if not rights:
            return None
        message = f"this user lacks the rights {' '.join(rights)}"
        remedy = "give them to the user in the URL by ACL SETUSER, on every server"
        return Finding(Severity.DOUBT, "rights", message, remedy)

    def close(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, {}
        self._servers.close()
        for each in list(subscriptions.values()):
            each.close()


def _wanted(want: Want) -> str:
    return "" if want == ALONE else want.written()


def _plain(value: Any) -> int | None:
    return value if isinstance(value, int) else None


_ACQUIRE, _ACQUIRE_ALL, _RENEW, _RELEASE, _DROP, _STAND, _DEPART = map(
    scripts.load, ("acquire", "acquire_all", "renew", "release", "drop", "stand", "depart")
)
_SENT, _SWEEP, _INSPECT, _CANCEL, _TURN, _RETURN = map(
    scripts.load, ("sent", "sweep", "inspect", "cancel", "turn", "return")
)
_LOSSES = (RenewOutcome.HELD, RenewOutcome.LOST)
_RENEWALS = {
    1: RenewOutcome.RENEWED,
    0: RenewOutcome.HELD,
    -1: RenewOutcome.LOST,
    None: RenewOutcome.UNKNOWN,
}
