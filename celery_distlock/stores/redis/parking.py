"""The queues of a store over Redis: `Parking`."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.stores.base import batches
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.queue_parts import Parking
from celery_distlock.stores.requests import StandRequest
from celery_distlock.stores.values import (
    ALONE,
    Destinations,
    Lane,
    ParkRequest,
    Release,
    Reply,
    Route,
    Waiter,
    Want,
    WokenTask,
)

from . import scripts
from .answers import Answer, Fields, since_of, text, want_of
from .connections import TIMEOUT, Command, command, fields, milliseconds, script_call
from .delivery import RedisChannels
from .inspection import Inspection
from .mending import IndexMender
from .parts import SWEEP_BATCH, Part, Reach
from .records import Replies, wanted
from .scanning import SCAN_BATCH, literal

BACKLOG = 5.0  # seconds for which a broker's queue that has messages is not checked again
MOST_READ = 100  # waiters of one key whose destinations are read
MOST_LEFT = 10_000  # the number of executions known to be left to others
TURN = 0.9  # of the interval between sweeps: the length of a sweeper's turn
REST = 3.0  # times the duration of a sweep: the pause after it in which no process sweeps
# The most seconds that count for a round trip; a longer one is an outage, not work.
SLOW_BATCH = 1.0
NOT_ANSWERED = 1.0  # seconds until a key is checked again if its server has not answered
# Records of executions, with their prefixes.
_PLACES = (("queue", "p:"), ("woken", ""), ("later", ""))


class RedisParking(Part, Parking):
    """See the module."""

    def __init__(
        self, reach: Reach, replies: Replies, channels: RedisChannels, inspection: Inspection
    ) -> None:
        super().__init__(reach)
        self._replies = replies
        self._channels = channels
        self._inspection = inspection
        self._mender = IndexMender(reach)
        self._left: set[tuple[str, str]] = set()
        self._backlogs: dict[str, float] = {}
        self._gives_way = False  # whether this sweep has left something to another sweeper

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
        channel = self._channels.push_channel(name, park_request.channel)
        more = {"channel": channel, "task": park_request.task, "most": park_request.max_waiting}
        optional = fields(mode="line", **more, destination=park_request.destination)
        arguments = "", 1, run, arrival, wanted(want), optional, park_request.envelope
        call = self._records.call(_ACQUIRE, name, *arguments, confirmed=True)
        for calls in self._servers.requests(self.before(name, run, park_request), call):
            answers = self._requests.ask_once(calls, timeout)
        return self._replies.reply(_ACQUIRE, key, answers[-1], asked_at)

    def try_all(self, request: StandRequest, *, counts: bool) -> Reply | None:
        names = request.route.names
        if not self._servers.share([self._records.stem(name).encode() for name in names]):
            return None
        owners, givers = " ".join(each or "-" for each in request.owners), "\n".join(request.givers)
        how = int(counts), int(request.comes), request.arrival, owners, givers
        written = request.run, request.route.written(), *how, *self._kept(request)
        try:
            answer, asked_at = self._reserve_or_queue(
                names, self._records.call_at(_TRY_KEYS, names, *written), request
            )
        except StoreError as error:
            if "CROSSSLOT" in str(error):  # as in `acquire_all`
                return None
            raise
        with self._requests.reading(_TRY_KEYS, answer):
            data = Answer(answer)
            opens = {
                names[each.number("key") - 1]: each.seconds("ms") for each in data.each("opens")
            }
            self._replies.note_opens(opens)
            at = names[max(1, data.number("at")) - 1]
            return self._replies.read(key_of(at), data, names, asked_at)._replace(at=at)

    def try_one(
        self, request: StandRequest, number: int, arrival: int, *, counts: bool
    ) -> tuple[Reply, bool]:
        name = request.route.names[number]
        owner = request.owners[number] if request.owners else ""
        kept = self._kept(request) if number == 0 else ()
        how = number + 1, arrival, owner, int(counts), *kept
        written = request.run, request.route.written(), *how
        answer, asked_at = self._reserve_or_queue(
            [name],
            self._records.call_at(_TRY_KEY, [name], *written),
            request._replace(park_request=request.park_request if number == 0 else None),
        )
        with self._requests.reading(_TRY_KEY, answer):
            data = Answer(answer)
            reply = self._replies.read(key_of(name), data, [name], asked_at)
            return reply._replace(at=name if data.flag("waits") else ""), data.flag("aged")

    def _kept(self, request: StandRequest) -> tuple[Any, ...]:
        """Return what is stored of an execution: its envelope, and the channel of its pushes."""
        if request.park_request is None:
            return ()
        patience = TIMEOUT if request.timeout is None else 0.0
        first, channel = request.route.names[0], request.park_request.channel
        return request.park_request.envelope, self._channels.push_channel(first, channel, patience)

    def before(self, name: str, run: str, park_request: ParkRequest | None) -> list[Command]:
        """Return the commands that must be executed before *run* is parked at the key *name*."""
        index = self._records.index("add", name)
        if park_request is None or park_request.leaves is None:
            return [index]
        self._replies.note_opens({name: park_request.leaves})
        leaves_ms = milliseconds(park_request.leaves)
        return [index, self._records.call(_LEAVING, name, run, leaves_ms, confirmed=True)]

    def _reserve_or_queue(
        self, names: Sequence[str], call: Command, request: StandRequest
    ) -> tuple[Any, float]:
        run, park_request, timeout = request.run, request.park_request, request.timeout
        before = self.before(names[0], run, park_request)
        before += [self._records.index("add", name) for name in names[1:]]
        for calls in self._servers.requests(before, call):
            asked_at = clock.monotonic()
            if timeout is None:
                asked = self._requests.ask(calls, key_of(names[0]))
                answers, asked_at = asked.answers, asked.asked_at
            else:
                answers = self._requests.ask_once(calls, timeout)
        return answers[-1], asked_at

    def reserve_one(self, name: str, run: str, *, first: bool, comes: bool) -> Release:
        return self._move(_RESERVE_KEPT, name, run, 1 if first else 2, int(comes))

    def leave_one(
        self,
        name: str,
        run: str,
        *,
        first: bool,
        at: str,
        counts: bool = False,
        keeps: bool = False,
        owner: str = "",
    ) -> Release:
        how = at, int(counts), int(keeps), owner
        return self._move(_LEAVE_KEY, name, run, 1 if first else 2, *how)

    def _move(self, script: scripts.Script, name: str, *arguments: Any) -> Release:
        call = self._records.call(script, name, *arguments, confirmed=True)
        asked = self._requests.ask([call], key_of(name))
        return self._replies.released(name, script, asked._replace(unanswered=0))

    def cancel(self, key: str, run: str) -> Release:
        name = slot_name(key)
        asked = self._requests.ask([self._records.call(_CANCEL, name, run)], key)
        if isinstance(asked.answers[0], list):
            with self._requests.reading(_CANCEL, asked.answers[0]) as answer:
                elsewhere = Answer(answer).text("route")
            if elsewhere:
                return self.cancel(key_of(Route.read(elsewhere).names[0]), run)
        return self._replies.released(name, _CANCEL, asked)

    def mark_published(self, wake: WokenTask) -> None:
        self._requests.ask([self._records.call(_MARK_SENT, wake.name, wake.run, 0)], wake.name)

    def mark_awaited(self, wake: WokenTask, destination: str) -> None:
        self._backlogs[destination] = clock.monotonic() + BACKLOG
        self._requests.ask([self._records.call(_MARK_SENT, wake.name, wake.run, 3)], wake.name)

    def mark_left(self, wake: WokenTask) -> None:
        if (wake.name, wake.run) not in self._left:
            # Another sweeper may know its task; otherwise chance would decide which has the turn.
            if len(self._left) >= MOST_LEFT:
                self._left.clear()
            self._left.add((wake.name, wake.run))
            self._gives_way = True
        self._requests.ask([self._records.call(_MARK_SENT, wake.name, wake.run, 2)], wake.name)

    def mark_returned(self, wake: WokenTask) -> None:
        self._requests.ask([self._records.call(_MARK_SENT, wake.name, wake.run, 1)], wake.name)

    def sweep(self, interval: float) -> Iterator[WokenTask]:
        owner, begin, worked = uuid.uuid4().hex, clock.monotonic(), 0.0
        keep = self._turn(owner, interval * TURN)
        is_ours = self._takes_turn(owner, interval * TURN, keep)
        if not self._servers.in_order:
            self._mender.go_on(begins=is_ours)
        if not is_ours:
            return
        self._gives_way = False
        worked_at = begin
        for names in self._inspection.waiting_names():
            ours, due = self._due(names, keep)
            kept_at = clock.monotonic()
            # A single attempt: a script does not find again what it has already found, and the next
            # sweep covers a node of a cluster that is silent now.
            answers = self._requests.attempt_once(self._sweep_calls(due)) if due else ()
            worked += min(clock.monotonic() - worked_at, SLOW_BATCH)
            opens: dict[str, float | None] = {}
            for wake in self._swept(due, answers, opens):
                yield wake
                now = clock.monotonic()
                if now > kept_at + interval * TURN / 2:
                    (ours,), kept_at = self._requests.ask([keep], "the sweepers' turn").answers, now
            self._replies.note_opens(opens)
            if ours == 0:
                return  # this process was stopped for too long, and another one has begun
            worked_at = clock.monotonic()
        least = 0.0 if self._gives_way else interval * TURN - (clock.monotonic() - begin)
        rest = max(least, REST * worked)
        if rest > least:  # else its turn, as it is, lasts at least as long as this rest
            self._requests.ask([self._turn(owner, rest)], "the sweeper's turn")

    def _due(self, names: Sequence[str], keep: Command) -> tuple[Any, list[str]]:
        """Return the answer to *keep*, and those of *names* at which a sweep has work."""
        stems = [self._records.stem(name).encode("utf-8", "surrogateescape") for name in names]
        some = [names] if self._servers.share(stems) else [[name] for name in names]
        calls = [script_call(_DUE_KEYS, tuple(map(self._records.stem, each))) for each in some]
        ours, *answers = self._requests.attempt_once([keep, *calls])
        due: list[str] = []
        for each, answer in zip(some, answers, strict=True):
            if isinstance(answer, Exception):
                due += each  # the sweep reports which key is refused, and why
                continue
            with self._requests.reading(_DUE_KEYS, answer):
                due += [each[number - 1] for number in answer]
        return ours, due

    def wake_next(self, key: str) -> Iterator[WokenTask]:
        names = [slot_name(key)]
        opens: dict[str, float | None] = {}
        answers = self._requests.attempt_once(self._sweep_calls(names))
        yield from self._swept(names, answers, opens)
        self._replies.note_opens(opens)

    def wake_due(self, names: Sequence[str], again: dict[str, float | None]) -> Iterator[WokenTask]:
        again.update(dict.fromkeys(names, NOT_ANSWERED))
        answers = self._requests.attempt_once(self._sweep_calls(names))
        yield from self._swept(names, answers, again)

    def mark_all_published(self, wakes: Sequence[WokenTask]) -> None:
        for some in batches(wakes, SWEEP_BATCH):
            self._requests.attempt_once(self.published(some))

    def published(self, wakes: Sequence[WokenTask]) -> list[Command]:
        """Return the commands that mark executions as published."""
        return [self._records.call(_MARK_SENT, wake.name, wake.run, 0) for wake in wakes]

    def keep_reserved(self, wakes: Sequence[WokenTask], seconds: float) -> None:
        for_ms = milliseconds(seconds) if seconds else 0
        if wakes:
            self._requests.attempt(
                [self._records.call(_DELAY_RESEND, wake.name, wake.run, for_ms) for wake in wakes]
            )

    def lanes(self, key: str, limit: int = 100) -> list[Lane]:
        call = self._records.call(_LIST_LANES, slot_name(key), limit)
        with self._requests.reading(
            _LIST_LANES, self._requests.ask([call], key).answers[0]
        ) as all_:
            return [_lane_in(each) for each in Fields.read(all_).each("lanes")]

    def lane_waiters(
        self, key: str, lane: str, *, first: int = 0, limit: int = 100
    ) -> list[Waiter]:
        return self._inspection.waiters(key, slot_name(lane), first=first, limit=limit)

    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        mask = literal(f"{task_id}:") + "*"
        for names in self._inspection.waiting_names() if key is None else [[slot_name(key)]]:
            # In this order, in which an execution may advance between two looks.
            for place in _PLACES:
                for name, run in self._runs_like(mask, names, *place):
                    if task_id_of(run) == task_id:
                        yield key_of(name), run

    def _runs_like(
        self, mask: str, names: Sequence[str], record: str, kind: str
    ) -> Iterator[tuple[str, str]]:
        """Yield the executions that match *mask*, with key names; scans all keys together."""
        cursors = dict.fromkeys(names, b"0")
        while cursors:
            scans = [self._scan(name, record, kind + mask, at) for name, at in cursors.items()]
            answers = zip(list(cursors), self._requests.attempt(scans).answers, strict=True)
            for name, answer in answers:
                if isinstance(answer, Exception):
                    self._inspection.pass_over(name, answer)
                    del cursors[name]
                    continue
                with self._requests.reading("ZSCAN", answer) as (cursors[name], found):
                    runs = [text(member).removeprefix(kind) for member in found[::2]]
                yield from ((name, run) for run in runs)
            cursors = {name: at for name, at in cursors.items() if at != b"0"}

    def _scan(self, name: str, record: str, mask: str, cursor: bytes) -> Command:
        where = f"{self._records.stem(name)}{record}"
        words = ("MATCH", mask, "COUNT", SCAN_BATCH)
        return command(where.encode("utf-8", "surrogateescape"), "ZSCAN", where, cursor, *words)

    def parked(self, key: str, run: str) -> Waiter | None:
        stem = self._records.stem(slot_name(key))
        tasks, woken = f"{stem}tasks", f"{stem}woken"
        calls = [
            command(tasks.encode(), "HMGET", tasks, f"e:{run}", f"r:{run}"),
            command(woken.encode(), "ZSCORE", woken, run),
        ]
        found, due = self._requests.ask(calls, key).answers
        with self._requests.reading("HMGET", found) as (envelope, known):
            if known is None:
                return None
            data = Fields.read(known)
            keys, want = data.text("k"), want_of(data.raw("w"))
            route = Route.read(keys) if keys else None
            since, is_woken = since_of(data.raw("p")), due is not None
            found = Waiter("", run, since, envelope or b"", is_woken, data.text("t"), route, want)
            return found._replace(at=data.text("at"))

    def destinations(self, keys: Sequence[str]) -> list[Destinations]:
        found = []
        for some in batches(keys, SWEEP_BATCH):
            calls = [self._records.call(_QUEUES, slot_name(key), MOST_READ) for key in some]
            for answer in self._requests.attempt(calls).answers:
                if isinstance(answer, Exception):  # `inspect_many` reports it
                    found.append(Destinations())
                    continue
                with self._requests.reading(_QUEUES, answer):
                    data = json.loads(text(answer))
                    found.append(Destinations(*(dict(data[kind]) for kind in Destinations._fields)))
        return found

    def wake_again(self, key: str) -> Iterator[WokenTask]:
        name = slot_name(key)
        self._requests.ask([self._records.index("add", name)], key)  # in case it was lost
        calls = [self._records.call(script, name, SWEEP_BATCH) for script in (_RESEND_ALL, _SWEEP)]
        answer = self._requests.ask(calls, key).answers[-1]
        with self._requests.reading(_SWEEP, answer):
            wakes = Answer(answer).wakes(name)
        yield from wakes

    def _takes_turn(self, owner: str, seconds: float, keep: Command) -> bool:
        for_ms = milliseconds(seconds)
        take = self._records.command("sweeper", "SET", "{}", owner, "NX", "PX", for_ms)
        leader, left = self._leader(f"{self._records.prefix}:sweeper", [take])
        if left:
            return leader == owner
        return bool(self._requests.ask([keep], "the sweeper's turn").answers[0])

    def _turn(self, owner: str, seconds: float) -> Command:
        return self._records.call_without_key(_SWEEP_LEASE, owner, milliseconds(max(0.0, seconds)))

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
                self._inspection.pass_over(name, answer)
                continue
            with self._requests.reading(_SWEEP, answer):
                data = Answer(answer)
                opens[name], wakes = data.opens, data.wakes(name)
                waits = data.number("waiting")
            yield from wakes
            if not waits:
                quiet.append(self._records.index("remove", name))
        if quiet:
            self._requests.ask(quiet, "the sweep")


def _lane_in(fields: Fields) -> Lane:
    first, used = want_of(fields.raw("want")), fields.number("used")
    name, waiting = key_of(fields.text("name")), fields.number("waiting")
    return Lane(name, waiting, first.share / 1000, first.most, used)


_ACQUIRE, _TRY_KEYS, _TRY_KEY, _CANCEL, _MARK_SENT, _DELAY_RESEND = map(
    scripts.load, ("acquire", "try_keys", "try_key", "cancel", "mark_sent", "delay_resend")
)
_LEAVING, _QUEUES = map(scripts.load, ("leaving", "queues"))
_LIST_LANES = scripts.load("list_lanes")
_SWEEP, _DUE_KEYS, _RESEND_ALL, _SWEEP_LEASE, _RESERVE_KEPT, _LEAVE_KEY = map(
    scripts.load, ("sweep", "due_keys", "resend_all", "sweep_lease", "reserve_kept", "leave_key")
)
