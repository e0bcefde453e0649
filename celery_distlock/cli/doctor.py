"""``celery locks doctor``: can this store be trusted with locks?"""

import enum
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
from celery_distlock.runtime import Runtime
from celery_distlock.stores import Ability, Store

from . import command
from .display import Screen, plain, write_json

__all__ = ["Finding", "Verdict", "doctor_", "examine"]

SLOW = 0.05  # seconds; a task asks at least twice
STALLS = 1.0  # seconds; a third of a short lease, which is when a renewal is due
CLOCKS_APART = 1.0  # seconds
NAMED = 3  # tasks that are told by name


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
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="How many looks at a key the latency is measured by.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON document.")
def doctor_(obj: CLIContext, samples: int, as_json: bool) -> None:
    """
    Examine whether the lock store can be trusted, and say what to do if not.

    It takes and gives back a lock of its own, and changes nothing else. The exit status is 0 if all
    is fine, 1 if there are doubts, and 2 if there can be no locks.
    """
    obj.app.loader.import_default_modules()  # the tasks tell what they need of the store
    obj.app.finalize()
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
                plain(each.found),
                plain(each.cure),
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
    if re.search("NOAUTH|WRONGPASS|NOPERM|username-password", str(error)):
        return "correct user and password in distlock_url, or the rights of that user"
    if isinstance(error, StoreUnavailableError):
        return "start the server, or correct distlock_url"
    return ""
