"""
A lock that a majority of independent Redis masters has to grant: Redlock.

Exclusion: a node votes for one owner at a time, and two majorities have a node in common.

Tokens: a grant counts when a majority has voted for it and recorded one and the same token. Each
node records a token only if it is above every token that the node knew when it voted. A majority of
any later grant has a node in common with that one, which voted for the later owner after it had
recorded the earlier token. So the later token is above the earlier one, whatever the clocks show,
and whichever process asks.

The proposed token goes along with the request for the votes: the time of the fastest node, as far
as this process knows it. Usually it is above all earlier tokens, and one round trip is enough; if a
majority does not accept it, a second round settles one that it does. Clocks matter only where a
record is lost: a token that all nodes of a majority have lost (it is kept for an hour, and not by a
node that restarts empty) is exceeded as long as their clocks differ by less than the time since.

``docs/reference/redlock.md`` describes what a majority survives and what it does not.
"""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import ResponseError

from celery_distlock import clock
from celery_distlock.errors import (
    ConfigurationError,
    QuorumError,
    StoreError,
    StoreUnavailableError,
)
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.process.notifications import log
from celery_distlock.stores.base import Complaints, batches, forget_after_fork
from celery_distlock.stores.findings import CLOCKS_APART, Finding, Severity
from celery_distlock.stores.listing import CountingStore, ListingStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import (
    Ability,
    KeyState,
    Ownership,
    ParkRequest,
    Release,
    RenewOutcome,
    Reply,
    Status,
    WokenTask,
)

from . import scripts
from .answers import Fields, seconds_of, sum_counters, text
from .connections import (
    Command,
    NodeSettings,
    command,
    milliseconds,
    time_left,
)
from .parts import SWEEP_BATCH
from .quorum import ANSWER, Answers, QuorumClient
from .reading import Reading
from .records import Records, token_of
from .scanning import KeysWith, keys_of
from .server_errors import said
from .server_reports import QUESTIONS, describe_answers, memory_findings, parse_info
from .urls import explained, node_settings, split

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST = 3  # nodes: two would both have to answer always, which tolerates less than one alone
ROUNDS = 3  # for one token: the second round settles it, unless nodes went or came in between
# Seconds, at most, before each attempt to get a majority where several clients split the votes.
SPLITS = (0.0, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)


class RedlockStore(ListingStore, CountingStore):
    """See the module; *url* is like ``redlock://host1,host2,host3/0``, ``redlocks://`` for TLS."""

    abilities = frozenset({Ability.RECOGNISE, Ability.SHARE})

    def __init__(self, url: str, prefix: str, **options: str) -> None:
        self.address, self._settings = _locate(url, options)
        self.identity = f"{self.address}#{prefix}"
        self._prefix = prefix
        self._records = Records(prefix)
        self._complaints = Complaints()
        self.forget_connections()
        forget_after_fork(self)

    def forget_connections(self) -> None:
        """Drop the parent's connections after a fork, without sending anything over them."""
        self._nodes = QuorumClient(self._settings)
        self._majority = self._nodes.majority
        self._ahead: list[float | None] = [None] * len(self._nodes)  # clocks, µs before ours

    def acquire(self, request: AcquireRequest) -> Reply:
        if isinstance(request.queue, ParkRequest):
            raise StoreError(f"{self.address}: no task can be parked at several masters")
        self.check_want(request.key, request.want)
        for pause in SPLITS:
            time.sleep(clock.jitter(0.0, pause))
            election = self._elect(request)
            if election.reply is not None and election.reply.status is Status.GRANTED:
                return election.reply
            self._undo(request, election)
            if election.reply is None:
                raise self._too_few(election.answers, request.key)
            reply = election.reply
            if not election.split:
                break
        return reply

    def _elect(self, request: AcquireRequest) -> "_Election":
        """Request the votes, and settle the token; does not undo the votes of a failed attempt."""
        name, known = slot_name(request.key), int(request.may_have_ended)
        own = request.owner, milliseconds(request.lease), request.run, known
        wish, asked_at = self._time(), None
        votes: list[_Vote | None] = []
        sent = [False] * len(self._nodes)
        for number in range(ROUNDS):
            call = self._records.call(_VOTE, name, *own, wish, int(number > 0))
            answers = self._nodes.ask([call], enough=self._decides)
            votes = self._votes(answers)
            asked_at = answers.asked_at if asked_at is None else asked_at
            sent = answers.sent[:] = [a or b for a, b in zip(sent, answers.sent, strict=True)]
            granted = [vote for vote in votes if vote and vote.status == "granted"]
            token, agreed = _most_common(vote.token for vote in granted if vote.token)
            if agreed >= self._majority:
                reply = Reply(Status.GRANTED, asked_at, token)
                return _Election(answers, votes, reply)
            if len(granted) < self._majority:
                return self._defeat(answers, votes, asked_at)
            wish = max(max(vote.token, vote.floor + 1, vote.time) for vote in granted)
        return _Election(answers, votes, None)

    def _defeat(
        self, answers: Answers, votes: "list[_Vote | None]", asked_at: float
    ) -> "_Election":
        cast = [vote for vote in votes if vote]
        if len(cast) < self._majority:
            return _Election(answers, votes, None)
        # A mark is written to a majority, so each majority that answers has it: one is enough.
        for status in ("done", "unsettled"):
            known = [vote for vote in cast if vote.status == status]
            if known:
                left = max(vote.remaining for vote in known)
                done = Status.DONE if status == "done" else Status.BUSY
                reply = Reply(done, asked_at, holder_run=known[0].run, remaining=left)
                return _Election(answers, votes, reply)
        holder, count = _most_common(vote.holder for vote in cast if vote.status == "busy")
        of_holder = [vote for vote in cast if vote.holder == holder and vote.status == "busy"]
        reply = Reply(
            Status.BUSY,
            asked_at,
            max(vote.token for vote in of_holder),
            holder,
            of_holder[0].run,
            self._lasts(of_holder),
        )
        silent = len(votes) - len(cast)
        return _Election(answers, votes, reply, split=count + silent < self._majority)

    def _lasts(self, votes: "Sequence[_Vote | _Look]") -> float:
        """Return how long the owner of these votes keeps a majority, or any if that is unknown."""
        left = sorted((vote.remaining for vote in votes), reverse=True)
        return left[min(self._majority, len(left)) - 1]

    def _decides(self, answers: Answers) -> bool:
        """Whether a majority has answered the same, so that the others need not be awaited."""
        votes = filter(None, self._read(answers, 0, _VOTE, _vote))
        return _most_common((vote.status, vote.holder) for vote in votes)[1] >= self._majority

    def _votes(self, answers: Answers) -> "list[_Vote | None]":
        votes = self._read(answers, 0, _VOTE, _vote)
        for number, vote in enumerate(votes):
            if vote is not None:
                self._ahead[number] = vote.time - answers.answered_at[number] * 1e6
        return votes

    def _time(self) -> int:
        """Return the fastest node's time (µs) by its last answer; 0 before that."""
        ahead = [each for each in self._ahead if each is not None]
        return int(clock.monotonic() * 1e6 + max(ahead)) if ahead else 0

    def _undo(self, request: AcquireRequest, election: "_Election") -> None:
        """Release what was or may have been granted, on all nodes, without waiting for answers."""
        kept = [
            number
            for number, vote in enumerate(election.votes)
            if not election.answers.sent[number] or (vote and vote.status != "granted")
        ]
        release = self._records.release(ReleaseRequest(request.key, request.owner))
        self._nodes.ask([release], timeout=0.0, owed=True, but=kept)

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        if not holds:
            return []
        calls = [
            self._records.call(_RENEW, slot_name(hold.key), hold.owner, milliseconds(hold.lease))
            for hold in holds
        ]

        def renewed(answers: Answers) -> bool:
            return all(answers.to(n).count(1) >= self._majority for n in range(len(holds)))

        answers = self._nodes.ask(calls, timeout=timeout, enough=renewed)
        outcomes = [self._outcome(answers.to(number)) for number in range(len(holds))]
        if RenewOutcome.UNKNOWN in outcomes:
            log(
                logger,
                logging.WARNING,
                "%s did not confirm a renewal: %s",
                self.address,
                self._reasons(answers),
            )
        return [(outcome, answers.asked_at) for outcome in outcomes]

    def _outcome(self, answers: Sequence[int | None]) -> RenewOutcome:
        # A node that restarted empty has no lock to renew, and gets none: -1 is a vote lost.
        if answers.count(1) >= self._majority:
            return RenewOutcome.RENEWED
        if answers.count(1) + answers.count(None) >= self._majority:
            return RenewOutcome.UNKNOWN
        return RenewOutcome.HELD if answers.count(0) >= self._majority else RenewOutcome.LOST

    def release(self, request: ReleaseRequest) -> Release:
        answers = self._ask(self._records.release(request), request.key, owed=True)
        # A repeated release finds nothing if the first one was executed and its answer lost.
        given = [
            answer == 1 or (answer == 0 and repeated)
            for answer, repeated in zip(answers.to(0), answers.repeated, strict=True)
        ]
        silent = answers.to(0).count(None)
        return Release(any(given) and given.count(True) + silent >= self._majority)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        answers = self._ask(
            self._records.call(_DROP, wake.name, wake.run, int(mark)), wake.name, owed=True
        )
        return Release(1 in answers.to(0))

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        look = self._records.call(_INSPECT, slot_name(key))
        timeout = ANSWER if timeout is None else timeout
        answers = self._ask(look, key, timeout=timeout, enough=self._looks_are_decided)
        return self._state(answers, key)

    def _looks_are_decided(self, answers: Answers) -> bool:
        """Like :meth:`Answers.are_decided`; an answer that cannot be parsed is a refusal."""
        if answers.are_decided():
            for number in range(max(len(calls or ()) for calls in answers.of)):
                self._read(answers, number, _INSPECT, _look)
        return answers.are_decided()

    def _state(self, answers: Answers, key: str, number: int = 0) -> KeyState:
        """Return the state that follows from the nodes' answers; raise as `_ask` does."""
        looks = [look for look in self._read(answers, number, _INSPECT, _look) if look]
        self._silent(answers, key, number)
        owner, count = _most_common(look.owner for look in looks if look.owner)
        if count + len(self._nodes) - len(looks) < self._majority or not owner:
            return KeyState("", 0, "", 0.0, 0.0, 0)
        own = [look for look in looks if look.owner == owner]
        token = max(look.token for look in own)
        return KeyState(owner, token, own[0].run, max(0, token) / 1e6, self._lasts(own), 0)

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        """
        Find keys as :meth:`Store.find_keys` does: a majority of the nodes has votes for each key.

        A node that does not answer counts as one that has them, as for :meth:`inspect`. The nodes
        are read one after another, and keys are returned once all have been.
        """
        holds, votes = KeysWith(self._records.stem, pattern), Counter[str]()
        answers = self._ask(holds.scan(b"0"), "the list of keys", enough=_all_have_answered)
        for number in range(len(self._nodes)):
            names: set[str] = set()  # each node has one vote, even for a key that it reports twice
            while (found := self._read_at(number, answers, 0, "SCAN", holds.found)) is not None:
                cursor, some = found
                names.update(some)
                if cursor == b"0":
                    votes.update(names)
                    break
                self._ask_again(number, holds.scan(cursor), answers)
        needed = self._majority - self._silent(answers, "the list of keys")
        names_held = [name for name, count in votes.items() if count >= needed]
        yield from keys_of(batches(names_held, SWEEP_BATCH), pattern)

    def _ask_again(self, number: int, call: Command, answers: Answers) -> None:
        """Ask one node, and replace its previous answer."""
        others = [each for each in range(len(self._nodes)) if each != number]
        answers.of[number] = self._nodes.ask([call], but=others).of[number]

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        states = []
        for some in batches(keys, SWEEP_BATCH):
            looks = [self._records.call(_INSPECT, slot_name(key)) for key in some]
            answers = self._nodes.ask(looks, enough=self._looks_are_decided)
            for number, key in enumerate(some):
                states.append(self._looked(answers, key, number))
        return states

    def _looked(self, answers: Answers, key: str, number: int) -> KeyState:
        try:
            return self._state(answers, key, number)
        except StoreUnavailableError:
            raise
        except StoreError as error:  # of this key alone
            self._complaints.report(key, "%s: it is not listed", error)
            return KeyState("", 0, "", 0.0, 0.0, 0)

    def count(self, counts: Mapping[str, float]) -> None:
        """Count as :meth:`Store.count` does, at each node; twice if its connection breaks first."""
        add = self._records.call_without_key(_COUNT, json.dumps(counts))
        self._ask(add, "the counters")

    def counts(self) -> dict[str, float]:
        """
        Return the counters as :meth:`Store.counts` does: of each, the highest of all nodes.

        A node misses what is counted while it is unreachable; the result is complete if one node
        never was.
        """
        look = self._records.command("counts", "HGETALL", "{}")
        answers = self._ask(look, "the counters", enough=_all_have_answered)
        most: dict[str, float] = {}
        for found in filter(None, self._read(answers, 0, "HGETALL", sum_counters)):
            for what, by in found.items():
                most[what] = max(by, most.get(what, by))
        return most

    def describe(self) -> Iterator[Finding]:
        answers = self._nodes.ask(QUESTIONS, enough=_all_have_answered)
        wall = time.time() - clock.monotonic()
        for address, found, answered_at in zip(
            self._nodes.addresses, answers.of, answers.answered_at, strict=True
        ):
            if found is None:
                yield Finding(Severity.OK, "server", f"does not answer ({address})")
            else:
                at = wall + (answers.asked_at + answered_at) / 2
                for finding in describe_answers(found, at):
                    yield replace(finding, message=f"{finding.message} ({address})")

    def check(self) -> list[Finding]:
        self._try_lock(f"{self._prefix}:probe:{os.urandom(8).hex()}")
        look = [command(b"", "INFO"), command(b"", "TIME")]
        answers = self._nodes.ask(look, enough=_all_have_answered)
        return [*self._of_all_nodes(answers), *self._of_each_node(answers)]

    def _of_all_nodes(self, answers: Answers) -> Iterator[Finding]:
        count = len(self._nodes)
        if count % 2 == 0:
            yield Finding(
                Severity.DOUBT,
                "store",
                f"{count} nodes tolerate as many failures as {count - 1}: an odd number is better",
            )
        times = [time for time in self._read(answers, 1, "TIME", seconds_of) if time is not None]
        apart = max(times) - min(times) if times else 0.0
        if apart > CLOCKS_APART:
            yield Finding(
                Severity.DOUBT,
                "clock",
                f"the nodes' clocks are {apart:.1f} s apart: after the loss of records, tokens"
                " keep rising only if the clocks agree",
                "synchronise the nodes' clocks by NTP",
                {"spread": apart},
            )

    def _of_each_node(self, answers: Answers) -> Iterator[Finding]:
        reasons = dict(self._nodes.failures())
        servers: dict[str, str] = {}
        forgetful = []
        infos = self._read(answers, 0, "INFO", parse_info)
        for number, address in enumerate(self._nodes.addresses):
            if answers.of[number] is None:
                yield Finding(
                    Severity.DOUBT,
                    "server",
                    f"{address} does not answer: {reasons.get(address) or 'no answer in time'}",
                    "start it: the next that fails may cost the majority",
                )
            if (facts := infos[number]) is None:
                continue
            for finding in memory_findings(facts):
                yield replace(finding, message=f"{address}: {finding.message}")
            if facts.get("aof_enabled") == "0":
                forgetful.append(address)
            same = servers.setdefault(facts.get("run_id", address), address)
            if same != address:
                yield Finding(
                    Severity.DOUBT,
                    "server",
                    f"{address} and {same} are one server, which has two votes",
                    "use servers that fail independently of one another",
                )
        if forgetful:
            yield Finding(
                Severity.DOUBT,
                "persistence",
                f"without appendonly, {', '.join(forgetful)} will lose their votes when they"
                " restart: keep such a node offline then for as long as the longest lease",
                "CONFIG SET appendonly yes on each of them",
            )

    def close(self) -> None:
        self._nodes.close()

    def _ask(
        self,
        call: Command,
        what: str,
        *,
        timeout: float = ANSWER,
        owed: bool = False,
        enough: Callable[[Answers], bool] = Answers.are_decided,
    ) -> Answers:
        """
        Ask all nodes.

        Raises:
            QuorumError: No majority has answered.
            StoreError: A majority cannot answer, because too many have refused.
        """
        answers = self._nodes.ask([call], timeout=timeout, owed=owed, enough=enough)
        self._silent(answers, what)
        return answers

    def _read(
        self,
        answers: Answers,
        number: int,
        asked: scripts.Script | str,
        read: Callable[[Any], T],
    ) -> list[T | None]:
        """Parse the nodes' answers to a call; one that cannot be parsed counts as a refusal."""
        nodes = range(len(self._nodes))
        return [self._read_at(node, answers, number, asked, read) for node in nodes]

    def _read_at(
        self,
        node: int,
        answers: Answers,
        number: int,
        asked: scripts.Script | str,
        read: Callable[[Any], T],
    ) -> T | None:
        answer = answers.at(node, number)
        try:
            with Reading(self._nodes.addresses[node], asked, answer):
                return None if answer is None else read(answer)
        except StoreUnavailableError as error:
            answers.refuse(node, number, ResponseError(str(error)))
            return None

    def _silent(self, answers: Answers, what: str, number: int = 0) -> int:
        """Return how many nodes have no answer to a call; raise as `_ask` does."""
        silent = sum(answer is None for answer in answers.to(number))
        if len(self._nodes) - silent < self._majority:
            raise self._too_few(answers, what, number)
        return silent

    def _too_few(self, answers: Answers, what: str, number: int = 0) -> StoreError:
        nodes, refusals = len(self._nodes), answers.refusals
        votes = nodes - sum(answer is None for answer in answers.to(number))
        foreign = [refusal for refusal in refusals if "WRONGTYPE" in str(refusal)]
        if nodes - len(foreign) < self._majority:
            error = StoreError(
                f"{self.address}: the records of lock {shown(what)!r} are of another type:"
                f" other software writes under the prefix {self._prefix!r}, and its records there"
                f" must be deleted ({foreign[0]})"
            )
            error.__cause__ = foreign[0]
            return error
        quorum = QuorumError(
            f"{shown(what)!r} at {self.address}: {votes} of {nodes} nodes have answered, and"
            f" {self._majority} are needed ({self._reasons(answers)})",
            votes=votes,
            nodes=nodes,
        )
        causes = [*refusals, *(why for _, why in self._nodes.failures() if why)]
        quorum.__cause__ = causes[0] if causes else None
        return quorum

    def _reasons(self, answers: Answers) -> str:
        failed = [
            f"{address}: {said(why, self._prefix)}"
            for address, why in self._nodes.failures()
            if why
        ]
        refused = [said(refusal, self._prefix) for refusal in answers.refusals]
        return "; ".join([*refused, *failed]) or "no answer in time"


class _Vote(NamedTuple):
    """One node's answer; see vote.lua."""

    status: str
    time: int
    token: int
    floor: int
    holder: str
    run: str
    remaining: float


class _Look(NamedTuple):
    """One node's answer; see inspect.lua."""

    owner: str
    token: int
    run: str
    remaining: float


class _Election(NamedTuple):
    """
    The outcome of a request for votes.

    Attributes:
        answers: The last answers of the nodes.
        votes: The same, parsed.
        reply: The resulting reply; None if too few have answered.
        split: Whether no owner can have a majority, so that another attempt is worthwhile.
    """

    answers: Answers
    votes: list[_Vote | None]
    reply: Reply | None
    split: bool = False


def _vote(answer: Any) -> _Vote:
    status, time_us, token, floor, holder, run, ttl_ms = answer
    return _Vote(
        status.decode(),
        int(time_us),
        max(0, token_of(token)),
        max(0, token_of(floor)),
        text(holder),
        text(run),
        time_left(int(ttl_ms)),
    )


def _look(answer: Any) -> _Look:
    fields = Fields.read(answer)
    token, left = token_of(fields.raw("token")), time_left(fields.number("ttl_ms"))
    return _Look(fields.text("owner"), token, fields.text("run"), left)


def _all_have_answered(answers: Answers) -> bool:
    return None not in answers.of


def _most_common(found: Any) -> tuple[Any, int]:
    """Return the most frequent item, and how often it occurs; 0 if there is none."""
    common = Counter(found).most_common(1)
    return common[0] if common else (None, 0)


def _locate(url: str, options: Mapping[str, str]) -> tuple[str, list[NodeSettings]]:
    """Return the nodes' common address, for people, and how to connect to each of them."""
    with explained(url):
        address = split(url, options)
        if len(set(address.hosts)) < len(address.hosts):
            raise ConfigurationError("it names a node twice, which would have two votes")
        if len(address.hosts) < LEAST:
            raise ConfigurationError(
                f"a majority that tolerates the loss of a node takes at least {LEAST} independent"
                " masters; for one server there is redis://, for one with replicas sentinel://"
            )
        return address.name, [node_settings(address, where) for where in address.hosts]


_VOTE, _RENEW, _DROP, _INSPECT, _COUNT = (
    scripts.load(name) for name in ("vote", "renew", "drop", "inspect", "count")
)
