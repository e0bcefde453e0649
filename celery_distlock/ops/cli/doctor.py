"""``celery locks doctor``: checks whether the store can be trusted with locks."""

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import click
from celery import Celery
from celery.bin.base import CLIContext
from rich.text import Text

from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.naming import NAMED, printable, some_of
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.trust import Reason, RefusedError
from celery_distlock.stores import Ability, QueueStore, Store
from celery_distlock.stores.findings import Finding, Severity
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.values import WokenTask

from . import command
from .display import Screen, write_json

SLOW = 0.05  # seconds; each task makes at least two requests
STALLS = 1.0  # seconds; renewals of a short lease are due about that often
MOST_PARKED = 200  # parked tasks to examine, with a round trip each
PARKED_AT_A_KEY = 10
LOOKS_FOR = 2.0  # time limit of each slow check in seconds, for the sake of probes
LONG = 60.0  # seconds in which a dispatched task begins, unless no worker consumes its queue
LATE = 5.0  # seconds; another worker replaces a dead ticker within four

_STATUS = {Severity.OK: 0, Severity.DOUBT: 1, Severity.BAD: 2}
_STYLE = {Severity.OK: "green", Severity.DOUBT: "yellow", Severity.BAD: "bold red"}


@command("doctor")
@click.option(
    "--samples",
    type=click.IntRange(1, 100_000),
    default=50,
    show_default=True,
    help="The number of requests to measure the latency.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON document.")
@click.option(
    "--allow-doubts",
    is_flag=True,
    help="Exit with 0 unless locks cannot work: for probes, which cannot distinguish a doubt from a"
    " crashed command, both of status 1.",
)
def doctor_(obj: CLIContext, samples: int, as_json: bool, allow_doubts: bool) -> None:
    """
    Check whether the lock store can be trusted with locks.

    It suggests remedies. It acquires and releases a lock of its own, writes and removes a test
    record, and changes nothing else. The exit status is 0 without problems, 1 if there are doubts,
    and 2 if locks cannot work.
    """
    Runtime.of(obj.app).import_tasks()  # their options say what the store must support
    findings = list(examine(obj.app, samples))
    worst = max(_STATUS[finding.severity] for finding in findings)
    status = 0 if allow_doubts and worst < _STATUS[Severity.BAD] else worst
    columns = ("verdict", "subject", "found", "cure")
    if as_json:
        records = [dict(zip(columns, _row(each), strict=True)) for each in findings]
        write_json({"status": status, "findings": records})
    else:
        rows = []
        for each in findings:
            verdict, subject, found, cure = _row(each)
            styled = Text(verdict, style=_STYLE[each.severity])
            rows.append((styled, subject, printable(found), printable(cure)))
        Screen(obj).table(columns, rows)
    click.get_current_context().exit(status)


def _row(finding: Finding) -> tuple[str, str, str, str]:
    return finding.severity.value, finding.subject, finding.message, finding.remedy


def examine(app: Celery, samples: int) -> Iterator[Finding]:
    """Examine everything that locks depend on, in the store of *app*."""
    runtime = Runtime.of(app)
    store = runtime.store
    where = store.address
    if Ability.SHARE not in store.abilities:
        found = f"{where} exists within one process: each worker has its own locks"
        yield Finding(
            Severity.BAD, "store", found, "set distlock_url to a store that all workers can reach"
        )
        return
    try:
        doubts = store.check()
        yield Finding(Severity.OK, "locks", f"{where} granted and released a lock")
        yield from _with_facts(store, doubts)
        yield _latency(store, f"{runtime.settings.prefix}:probe", samples)
        if Ability.QUEUE in store.abilities:
            yield from _seen(runtime)
    except StoreError as error:
        yield Finding(Severity.BAD, "locks", str(error), _remedy_of(error))
        return
    yield from _needs(runtime, app.tasks.values())


def _with_facts(store: Store, doubts: list[Finding]) -> Iterator[Finding]:
    """Yield the servers' reports, each with its first doubt; then the other *doubts*."""
    left = list(doubts)
    for fact in store.describe():
        doubt = next((each for each in left if each.subject == fact.subject), None)
        if doubt is not None:
            left.remove(doubt)
            yield replace(doubt, message=f"{fact.message}; {doubt.message}")
        else:
            yield fact
    if Ability.QUEUE in store.abilities and not any(doubt.subject == "publish" for doubt in left):
        yield Finding(Severity.OK, "publish", "this user may notify waiters")
    yield from left


def _latency(store: Store, key: str, samples: int) -> Finding:
    took: list[float] = []
    until = time.perf_counter() + LOOKS_FOR
    for _ in range(samples):
        began = time.perf_counter()
        if took and began > until:
            break
        store.inspect(key)
        took.append(time.perf_counter() - began)
    median, worst = statistics.median(took), max(took)
    found = f"median {median * 1000:.1f} ms, worst {worst * 1000:.1f} ms of {len(took)} requests"
    if median <= SLOW and worst < STALLS:
        return Finding(Severity.OK, "latency", found)
    return Finding(Severity.DOUBT, "latency", found, _SLOW_REMEDY)


def _seen(runtime: Runtime) -> list[Finding]:
    """Examine the keys; if they cannot be listed, that is a doubt: locks work all the same."""
    store = QueueStore.of(runtime.store)
    try:
        keys = Keys.of(store)
        found = [*_left(runtime, keys.parked), *_paused(keys.paused), *_stopped(keys.stopped)]
        if keys.seen is not None:
            words = f"{keys.seen} were examined within the time limit; there may be more"
            found.append(Finding(Severity.OK, "keys", words))
        return [*found, _ticker(store)]
    except StoreError as error:
        found_no = f"parked tasks cannot be examined: {error}"
        return [Finding(Severity.DOUBT, "parked", found_no, _remedy_of(error))]


@dataclass(frozen=True, slots=True)
class Keys:
    """
    The result of one pass over the keys.

    Attributes:
        parked: The first parked tasks of each key, `MOST_PARKED` at most in all.
        paused: Keys that an operator paused.
        stopped: Keys that have waited for long for a task that is not passed.
        seen: The number of keys examined if the time limit ended the pass; else None.
    """

    parked: list[WokenTask]
    paused: list[str]
    stopped: list[str]
    seen: int | None = None

    @classmethod
    def of(cls, store: QueueStore) -> Self:
        """Examine the keys of *store*."""
        keys, seen = cls([], [], []), 0
        until = time.monotonic() + LOOKS_FOR
        for names in store.find_keys():
            for key, state in zip(names, store.inspect_many(names), strict=True):
                if state.limit and state.limit.pauses:
                    keys.paused.append(key)
                keys.paused.extend(
                    f"{key} (lane {lane})" for lane, limit in state.lane_limits if limit.pauses
                )
                left = MOST_PARKED - len(keys.parked)
                if not (state.waiting or state.woken) or time.monotonic() > until:
                    continue
                if left > 0:
                    keys.parked.extend(itertools.islice(_parked(store, key), left))
                if state.woken and state.token and time.time() - state.since > LONG:
                    waiters = store.waiters(key, limit=PARKED_AT_A_KEY)
                    keys.stopped.extend([key] * any(w.woken and w.want.strict for w in waiters))
            seen += len(names)
            if time.monotonic() > until:
                return replace(keys, seen=seen)
        return keys


def _parked(store: QueueStore, key: str) -> Iterator[WokenTask]:
    for waiter in store.waiters(key, limit=PARKED_AT_A_KEY):
        found = store.parking.parked(key, waiter.run) if waiter.run else None
        if found is not None and not (found.route and found.route.names[0] != slot_name(key)):
            yield WokenTask(slot_name(key), found.run, found.envelope)


def _left(runtime: Runtime, parked: list[WokenTask]) -> Iterator[Finding]:
    """Yield the reasons why a process like this one would not send some *parked* tasks."""
    seen = len(parked)
    refused: dict[Reason, list[str]] = {}
    for wake in parked:
        try:
            runtime.trust.check(wake)
        except RefusedError as refusal:
            refused.setdefault(refusal.reason, []).append(
                f"{refusal.detail} ({task_id_of(wake.run)})"
            )
    for reason, details in refused.items():
        are = "is" if len(details) == 1 else "are"
        why = f"because {reason.value}: {some_of(details)}"
        found = f"{len(details)} of {seen} {are} left to other workers, {why}"
        # This process need not know all queues that the workers consume.
        severity = Severity.OK if reason is Reason.ROUTE else Severity.DOUBT
        yield Finding(severity, "parked", found, _LEFT_REMEDIES[reason])
    if not refused:
        tasks = "task that was" if seen == 1 else "tasks that were"
        yield Finding(Severity.OK, "parked", f"{seen} {tasks} examined would be sent")


def _paused(paused: list[str]) -> Iterator[Finding]:
    """Report paused keys, which are not a problem: their tasks wait on purpose."""
    if paused:
        are = "is" if len(paused) == 1 else "are"
        found = f"{_some(paused)} {are} paused by an operator: no new grants"
        yield Finding(Severity.OK, "limits", found, "celery locks resume KEY ends a pause")


def _stopped(keys: list[str]) -> Iterator[Finding]:
    """Report keys at which nothing goes on, as a task that is not passed has not begun."""
    if keys:
        found = f"{_some(keys)}: a strict task was dispatched over a minute ago and has not begun"
        yield Finding(Severity.DOUBT, "order", found, _STOPPED_REMEDY)


def _ticker(store: QueueStore) -> Finding:
    """Report the ticker, the worker that wakes waiters of due keys, and whether it is late."""
    dues = store.timetable.dues()
    keys = f"{dues.many} scheduled key{'' if dues.many == 1 else 's'}"
    late = -dues.first
    if late <= LATE:
        ticker = f"{dues.ticker} is the ticker" if dues.ticker else "no worker is the ticker"
        return Finding(Severity.OK, "ticker", f"{ticker}; {keys}")
    overdue = f"{keys}, the first of them due {late:.0f} s ago"
    if not dues.ticker:
        return Finding(Severity.DOUBT, "ticker", f"no worker is the ticker; {overdue}", _NO_TICKER)
    return Finding(Severity.DOUBT, "ticker", f"{dues.ticker} is late; {overdue}", _LATE_TICKER)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _needs(runtime: Runtime, tasks: Iterable[Any]) -> Iterator[Finding]:
    """Yield tasks without a lock, and needs that the store does not meet: no worker starts."""
    satisfied = 0
    lacking: dict[str, list[str]] = {}
    plans = sorted(runtime.plans.items())
    for name, plan in plans:
        if plan is None:
            continue
        missing = plan.needs(runtime.store)
        satisfied += not missing
        for what, ability in missing:
            need = f"{what} needs a store that can {ability.value}"
            lacking.setdefault(need, []).append(name)
    for need, names in lacking.items():
        found = f"{_some(names)}: {need}"
        remedy = "another lock_on_conflict or lock_key, or another distlock_url"
        yield Finding(Severity.BAD, "tasks", found, remedy)
    if baseless := sorted(runtime.without_base(tasks)):
        found = f"{_some(baseless)}: lock options, but not a LockedTask, so WITHOUT a lock"
        yield Finding(Severity.DOUBT, "tasks", found, "declare it with base=LockedTask")
    if detoured := sorted(name for name, detour in runtime.detours.items() if detour):
        classes = ", ".join(sorted({runtime.detours[name] for name in detoured}))
        found = f"{_some(detoured)}: the __call__ of {classes} seems not to call LockedTask's"
        remedy = "make it return super().__call__(*args, **kwargs): else there is no lock"
        yield Finding(Severity.DOUBT, "tasks", found, remedy)
    if pending := sorted(name for name, plan in plans if plan and plan.seems_pending):
        found = f"{_some(pending)}: a decorator seems to return its coroutine, which has not run"
        remedy = "make it return asyncio.run(...): else the body runs WITHOUT its lock"
        yield Finding(Severity.DOUBT, "tasks", found, remedy)
    if waiting := sorted(runtime.without_results(tasks)):
        found = f"{_some(waiting)}: lock_unique, and with rpc:// get() of a joined call never ends"
        remedy = "another result backend, or ignore_result=True"
        yield Finding(Severity.DOUBT, "tasks", found, remedy)
    if satisfied or not (lacking or baseless or detoured or pending):
        what = "tasks have what they need"
        if satisfied == 1:
            what = "task has what it needs"
        yield Finding(Severity.OK, "tasks", f"{satisfied} locked {what}")


_LEFT_REMEDIES = {
    Reason.SIGNATURE: "distlock_secret must be the same wherever tasks are parked and sent; tasks"
    " parked without one are sent while its list ends with None; celery locks drop TASK_ID removes"
    " foreign tasks",
    Reason.MALFORMED: "another program writes under this prefix; celery locks drop TASK_ID removes"
    " such a record",
    Reason.TASK: "a worker that has such a locked task sends it; else celery locks drop TASK_ID"
    " --force removes it",
    Reason.CONTENT: "a worker that accepts it sends it; else use celery locks drop TASK_ID",
    Reason.ROUTE: "a worker that consumes the queue sends it; for others to send it, too, add the"
    " queue to task_queues",
}
_SLOW_REMEDY = (
    "check SLOWLOG and the other load of this server, or use a nearer one; a lease must be many"
    " times longer than the slowest answer"
)


_STOPPED_REMEDY = (
    "start a worker that consumes its queue; celery locks queue KEY shows it, and celery locks drop"
    " TASK_ID removes it"
)
_NO_TICKER = "start a worker of an app that calls install(app): one of them becomes the ticker"
_LATE_TICKER = "check the load of that worker's machine and of the store; kill a stopped worker"


def _remedy_of(error: StoreError) -> str:
    if error.remedy or not isinstance(error, StoreUnavailableError):
        return error.remedy
    return "start the server, or correct distlock_url"
