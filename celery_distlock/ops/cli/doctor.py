"""``celery locks doctor``: can this store be trusted with locks?"""

import enum
import itertools
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
from celery import Celery
from celery.bin.base import CLIContext
from rich.text import Text

from celery_distlock.errors import QuorumError, StoreError, StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.trust import Reason, RefusedError
from celery_distlock.stores import Ability, Store
from celery_distlock.stores.base import WokenTask
from celery_distlock.stores.identities import task_id_of

from . import command
from .display import Screen, printable, write_json

__all__ = ["Finding", "Verdict", "doctor_", "examine"]

SLOW = 0.05  # seconds; a task asks at least twice
STALLS = 1.0  # seconds; a third of a short lease, which is when a renewal is due
CLOCKS_APART = 1.0  # seconds
NAMED = 3  # tasks that are told by name
MOST_PARKED = 200  # tasks whose messages are looked at: a round trip each
PARKED_AT_A_KEY = 10


class Verdict(enum.Enum):
    """What a finding means for the locks."""

    OK = "ok"
    DOUBT = "doubt"
    BAD = "bad"


_STATUS = {Verdict.OK: 0, Verdict.DOUBT: 1, Verdict.BAD: 2}
_STYLE = {Verdict.OK: "green", Verdict.DOUBT: "yellow", Verdict.BAD: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing that was looked at.

    Attributes:
        verdict: What it means.
        subject: What was looked at, in a word.
        found: What there is to say of it.
        cure: What to do about it; empty where there is nothing to do.
    """

    verdict: Verdict
    subject: str
    found: str
    cure: str = ""


@command("doctor")
@click.option(
    "--samples",
    type=click.IntRange(1, 100_000),
    default=50,
    show_default=True,
    help="How many looks at a key the latency is measured by.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON document.")
def doctor_(obj: CLIContext, samples: int, as_json: bool) -> None:
    """
    Examine whether the lock store can be trusted, and say what to do if not.

    It takes and gives back a lock and a record of its own, and changes nothing else. The exit
    status is 0 if all is fine, 1 if there are doubts, and 2 if there can be no locks.
    """
    Runtime.of(obj.app).import_tasks()  # they tell what they need of the store
    findings = list(examine(obj.app, samples))
    status = max(_STATUS[finding.verdict] for finding in findings)
    if as_json:
        records = [{**asdict(each), "verdict": each.verdict.value} for each in findings]
        write_json({"status": status, "findings": records})
    else:
        rows = (
            (
                Text(each.verdict.value, style=_STYLE[each.verdict]),
                each.subject,
                printable(each.found),
                printable(each.cure),
            )
            for each in findings
        )
        Screen(obj).table(("verdict", "subject", "found", "cure"), rows)
    click.get_current_context().exit(status)


def examine(app: Celery, samples: int) -> Iterator[Finding]:
    """Look at everything that locks depend on, in the store of *app*."""
    runtime = Runtime.of(app)
    store = runtime.store
    where = store.identity.rpartition("#")[0]
    if Ability.SHARE not in store.abilities:
        found = f"{where} is within one process: each worker has locks of its own"
        yield Finding(Verdict.BAD, "store", found, "set distlock_url to a store that all can reach")
        return
    try:
        doubts = store.check()
        yield Finding(Verdict.OK, "locks", f"{where} gave a lock and took it back")
        yield from _facts(store, doubts)
        yield from map(_doubted, doubts)
        yield _latency(store, f"{runtime.settings.prefix}:probe", samples)
        if {Ability.PARK, Ability.LIST} <= store.abilities:
            yield from _seen(runtime)
    except StoreError as error:
        yield Finding(Verdict.BAD, "locks", str(error), _cure_of(error))
        return
    yield from _needs(runtime)


def _facts(store: Store, doubts: list[str]) -> Iterator[Finding]:
    """Yield what the servers tell; a doubt about it goes with it, and is taken from *doubts*."""
    for subject, found in store.facts():
        doubt = next((doubt for doubt in doubts if _Doubt.of(doubt).subject == subject), None)
        if doubt is not None:
            doubts.remove(doubt)
            yield Finding(Verdict.DOUBT, subject, f"{found}; {doubt}", _Doubt.of(doubt).cure)
        else:
            yield _judged(subject, found)
    publishes = Ability.PARK in store.abilities
    if publishes and not any(_Doubt.of(doubt).subject == "publish" for doubt in doubts):
        yield Finding(Verdict.OK, "publish", "this user may tell waiters that it is their turn")


def _judged(subject: str, found: str) -> Finding:
    if subject == "clock" and (match := re.match(r"([\d.]+) ms", found)):
        if float(match[1]) / 1000 > CLOCKS_APART:
            return Finding(Verdict.DOUBT, subject, found, _CLOCK_CURE)
    elif subject == "persistence" and "(err" in found:
        return Finding(Verdict.DOUBT, subject, found, _WRITE_CURE)
    return Finding(Verdict.OK, subject, found)


def _doubted(doubt: str) -> Finding:
    kind = _Doubt.of(doubt)
    return Finding(Verdict.DOUBT, kind.subject, doubt, kind.cure)


def _latency(store: Store, key: str, samples: int) -> Finding:
    took = []
    for _ in range(samples):
        began = time.perf_counter()
        store.inspect(key)
        took.append(time.perf_counter() - began)
    median, worst = statistics.median(took), max(took)
    found = f"median {median * 1000:.1f} ms, worst {worst * 1000:.1f} ms of {samples} looks"
    if median <= SLOW and worst < STALLS:
        return Finding(Verdict.OK, "latency", found)
    return Finding(Verdict.DOUBT, "latency", found, _SLOW_CURE)


def _seen(runtime: Runtime) -> list[Finding]:
    """Look through what is parked; that it may not be looked at is no reason to have no locks."""
    try:
        return list(_left(runtime))
    except StoreError as error:
        found = f"what is parked cannot be looked at: {error}"
        return [Finding(Verdict.DOUBT, "parked", found, _cure_of(error))]


def _left(runtime: Runtime) -> Iterator[Finding]:
    """Yield why what is parked would not be sent by a process such as this; of a sample."""
    seen = 0
    refused: dict[Reason, list[str]] = {}
    for wake in itertools.islice(_parked(runtime.store), MOST_PARKED):
        seen += 1
        try:
            runtime.trust.check(wake)
        except RefusedError as refusal:
            refused.setdefault(refusal.reason, []).append(
                f"{refusal.detail} ({task_id_of(wake.run)})"
            )
    for reason, details in refused.items():
        shown = ", ".join(details[:NAMED]) + (", …" if len(details) > NAMED else "")
        found = f"{len(details)} of {seen} are left to others, because {reason.value}: {shown}"
        # It was not given the queues that the workers consume.
        verdict = Verdict.OK if reason is Reason.ROUTE else Verdict.DOUBT
        yield Finding(verdict, "parked", found, _LEFT_CURES[reason])
    if not refused:
        yield Finding(Verdict.OK, "parked", f"{seen} tasks that were looked at would be sent")


def _parked(store: Store) -> Iterator[WokenTask]:
    """Find what is parked at some keys, the first ones of each."""
    for keys in store.find_keys():
        states = zip(keys, store.look(keys), strict=True)
        for key in [key for key, state in states if state.waiting or state.woken]:
            for waiter in store.waiters(key, limit=PARKED_AT_A_KEY):
                found = store.parked(key, waiter.run) if waiter.run else None
                if found is not None and not (
                    found.route and found.route.names[0] != slot_name(key)
                ):
                    yield WokenTask(slot_name(key), found.run, found.envelope)


def _needs(runtime: Runtime) -> Iterator[Finding]:
    """Yield which tasks cannot have what they need; a worker refuses to start with one of them."""
    abilities, satisfied = runtime.store.abilities, 0
    lacking: dict[str, list[str]] = {}
    for name, plan in sorted(runtime.plans.items()):
        if plan is None:
            continue
        missing = plan.policy.needs - abilities
        satisfied += not missing
        for ability in missing:
            need = f"{plan.policy!r} needs a store that can {ability.value}"
            lacking.setdefault(need, []).append(name)
    for need, names in lacking.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        found = f"{', '.join(names[:NAMED])}{more}: {need}"
        cure = "another lock_on_conflict, or another distlock_url"
        yield Finding(Verdict.BAD, "tasks", found, cure)
    if satisfied or not lacking:
        found = f"{satisfied} locked tasks have what their policies need"
        yield Finding(Verdict.OK, "tasks", found)


_LEFT_CURES = {
    Reason.SIGNATURE: "distlock_secret must be the same for all that park and send; what was parked"
    " without one is sent while there is a None at the end of its list; celery locks drop TASK_ID"
    " takes out what is nobody's",
    Reason.MALFORMED: "somebody else writes under this prefix; celery locks drop TASK_ID takes it"
    " out",
    Reason.TASK: "a worker that has such a locked task sends it; if none is to come, celery locks"
    " drop TASK_ID --force takes it out",
    Reason.CONTENT: "a worker that accepts it sends it; else celery locks drop TASK_ID",
    Reason.ROUTE: "a worker that consumes the queue sends it; name the queue in task_queues for"
    " others to do so, too",
}
_CLOCK_CURE = (
    "let both hosts keep time by NTP; locks do not depend on it, but the ages that are shown do"
)
_WRITE_CURE = (
    "the server's last write to its disk failed: see its log; it may refuse to take any lock until"
    " one succeeds"
)
_SLOW_CURE = (
    "see SLOWLOG and what else this server does, or move nearer; a lease must be many times longer"
    " than the slowest answer"
)


@dataclass(frozen=True, slots=True)
class _Doubt:
    """What `Store.check` may say, by its words: what it is about, and what to do."""

    words: str
    subject: str
    cure: str

    @classmethod
    def of(cls, doubt: str) -> "_Doubt":
        return next(kind for kind in _DOUBTS if re.search(kind.words, doubt))


_DOUBTS = (
    _Doubt(
        "maxmemory-policy",
        "memory",
        "CONFIG SET maxmemory-policy noeviction, there and in its configuration file; caches go to"
        " another server",
    ),
    _Doubt(
        "nothing is persisted",
        "persistence",
        "CONFIG SET appendonly yes, there and in its configuration file; or lock_on_conflict ="
        ' "retry", which keeps nothing there',
    ),
    _Doubt("without appendonly", "persistence", "CONFIG SET appendonly yes on each of them"),
    _Doubt("replica", "server", "name its master, or the sentinels that know who that is"),
    _Doubt("older than", "server", "use Redis 6.2 or later, or Valkey 7.2 or later"),
    _Doubt(
        "lacks the rights",
        "rights",
        "give them to the user in the URL by ACL SETUSER, on every server",
    ),
    _Doubt("may not publish", "publish", "give that right to the user in the URL"),
    _Doubt("one node of a cluster", "server", "begin the URL with redis+cluster://"),
    _Doubt("slots have no node", "server", "mend the cluster: keys of those slots cannot be taken"),
    _Doubt("sentinel", "sentinels", "start it: without a majority of them there is no failover"),
    _Doubt("clocks", "clock", "let the nodes keep time by NTP"),
    _Doubt("does not answer", "server", "start it: the next that fails may cost the majority"),
    _Doubt("one server", "server", "use servers that fail independently of one another"),
    _Doubt("", "store", ""),
)


def _cure_of(error: StoreError) -> str:
    if isinstance(error, QuorumError):
        return "start the servers that are missing, or ask for fewer"
    if "lacks" in str(error):
        return "give the user in the URL that right by ACL SETUSER, on every server"
    if "password is missing" in str(error):
        return "set a password in the URL, as in redis://user:password@host:6379/0"
    if "no database of that number" in str(error):
        return "correct the number at the end of distlock_url, as in redis://host:6379/0"
    if "there is no Redis" in str(error):
        return "correct host and port in distlock_url"
    if re.search("NOAUTH|WRONGPASS|NOPERM|username-password|Authentication", str(error)):
        return "correct user and password in distlock_url, or the rights of that user"
    if isinstance(error, StoreUnavailableError):
        return "start the server, or correct distlock_url"
    return ""
