"""``celery locks show``, ``queue``, ``recall``, ``release``, ...: one key or one task."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

import click
from celery.bin.base import CLIContext

from celery_distlock.errors import DistlockError, StoreError
from celery_distlock.naming import printable, shown
from celery_distlock.ops.acts import Act
from celery_distlock.ops.admin import Admin, Dropped, Released
from celery_distlock.ops.looks import holds_named
from celery_distlock.ops.similar import similar_keys
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import Ability, QueueStore
from celery_distlock.stores.holders import Holder, HoldInfo
from celery_distlock.stores.values import KeyState

from . import CommandError, command
from .completion import complete_key
from .display import (
    ACTION_COLUMNS,
    CALL_COLUMNS,
    HOLD_COLUMNS,
    LANE_COLUMNS,
    WAITER_COLUMNS,
    Screen,
    action_cells,
    action_record,
    asked_label,
    call_cells,
    duration,
    hold_cells,
    lane_cells,
    limit_label,
    limit_record,
    lock_record,
    opens_label,
    since,
    waiter_cells,
    waiter_record,
    waits_label,
    worker_label,
    write_json,
)
from .ranges import COUNT, PLACE

MOST_SHOWN = 10  # delayed calls, and identities, of one key

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def not_empty(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter(f"{param.name} must not be empty")
    return value


def _not_too_long(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        return Act("", "", value).reason
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


key_argument: Decorator = click.argument("key", callback=not_empty, shell_complete=complete_key)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON document."
)
reason_option: Decorator = click.option(
    "--reason",
    default="",
    callback=_not_too_long,
    metavar="TEXT",
    help="The reason, for other operators and for the error of a holder that loses the key.",
)
force_option: Decorator = click.option(
    "--force", "--yes", "-y", "force", is_flag=True, help="Do not ask for confirmation."
)


holder_option: Decorator = click.option(
    "--holder",
    callback=not_empty,
    default=None,
    metavar="PID|TASK_ID|OWNER|TOKEN",
    help="This one of several holders; a single holder only if it is this one.",
)


def admin_of(obj: CLIContext, *needs: Ability) -> Admin:
    """
    Return the operations on the app's store.

    Raises:
        StoreError: The store lacks one of the *needs*, or is private to each process.
    """
    store = Runtime.of(obj.app).store
    where = store.address
    if Ability.SHARE not in store.abilities:
        raise StoreError(
            f"{where} exists within one process, so the workers' locks cannot be seen from here"
        )
    for need in needs:
        if need not in store.abilities:
            raise StoreError(f"{where} cannot {need.value}; use show KEY and release KEY")
    return Admin(obj.app)


def suggest(obj: CLIContext, admin: Admin, key: str) -> None:
    """Print keys in use that are spelled like *key*, which is not in use."""
    similar = similar_keys(admin.store, key)
    if similar:
        obj.error(f"Similar keys: {', '.join(map(printable, similar))}.")


def exit_unused(
    obj: CLIContext, admin: Admin, key: str, info: KeyState | None = None, *, quiet: bool
) -> NoReturn:
    """Exit with status 1; unless *quiet*, print similar keys first if *key* is not in use."""
    if not (quiet or (info or admin.show(key)).is_in_use):
        suggest(obj, admin, key)
    click.get_current_context().exit(1)


@command("show")
@key_argument
@json_option
def show_(obj: CLIContext, key: str, as_json: bool) -> None:
    """
    Show the holders of KEY and the number of waiters.

    It also shows the units in use, the lanes that have the next turns, the first delayed calls, the
    calls that duplicates would join, and the recent actions of operators. The exit status is 1 if
    the key is free. A resting key is not free, though it has no holder.
    """
    admin = admin_of(obj)
    info, now = admin.show(key), time.time()
    delayed = admin.delayed(key, limit=MOST_SHOWN) if info.later else []
    lanes = admin.lanes(key, limit=MOST_SHOWN) if info.waiting else []
    calls = admin.calls(key, limit=MOST_SHOWN) if info.identities else []
    actions = admin.actions(key)
    if as_json:
        more = {
            "lanes": [lane._asdict() for lane in lanes],
            "delayed": [waiter_record(waiter) for waiter in delayed],
            "calls": [asdict(call) for call in calls],
            "actions": list(map(action_record, actions)),
        }
        write_json({**lock_record(info, now), **more})
    else:
        free = [("store", admin.where)] if info.state == "free" else []
        screen = Screen(obj)
        screen.facts(key_facts(info, now) + free)
        if info.mode == "shared":
            screen.table(
                HOLD_COLUMNS, (hold_cells(hold, now, brief=screen.terminal) for hold in info.holds)
            )
        screen.table(LANE_COLUMNS, (lane_cells(lane, info) for lane in lanes))
        screen.table(WAITER_COLUMNS, (waiter_cells(waiter, now) for waiter in delayed))
        screen.table(CALL_COLUMNS, map(call_cells, calls))
        screen.table(
            ACTION_COLUMNS, (action_cells(action, now, brief=screen.terminal) for action in actions)
        )
    if info.state == "free":
        exit_unused(obj, admin, key, info, quiet=as_json)


def key_facts(info: KeyState, now: float) -> list[tuple[str, str]]:
    """Return the names and values of what is known of a key; *now* in seconds since the epoch."""
    waits = {waits_label(hold) for hold in info.holds if hold.waits_for}
    state = _STATES["waiting" if waits and info.state == "waking" else info.state]
    facts = [("key", printable(info.key)), ("state", state)]
    facts += [("waits for", each) for each in sorted(waits)]
    if info.mode == "shared":
        facts.append(("mode", f"shared, {in_use(info)}"))
    elif info.state == "resting":
        facts += [("mode", "exclusive"), ("since", since(info.since, now))]
    elif (holder := info.holder) is not None:
        facts += [
            ("mode", "exclusive"),
            (_kind(holder), printable(holder.task)),
            ("id", printable(holder.task_id)),
            ("worker", worker_label(holder)),
            ("since", since(info.since, now)),
            ("lease", _lease(info.remaining)),
        ]
        if asked := asked_label(info.asked, now):
            facts.append(("asked", f"to leave, {asked}"))
    if info.holder is not None:
        facts.append(("token", str(info.token) if info.token > 0 else "-"))
    if info.limit is not None:
        facts.append(("limit", limit_label(info.limit, now)))
    facts += [
        ("limit", f"lane {printable(shown(lane))}: {limit_label(limit, now)}")
        for lane, limit in info.lane_limits
    ]
    is_shut = info.state == "resting" and info.mode == "exclusive"
    rest = max(info.rest, info.remaining if is_shut else 0.0)
    if rest > 0:
        facts.append(("rests", f"{duration(rest)} more, without new grants"))
    for starts in info.starts:
        counted = f"{starts.begun} of {starts.limit} starts in the last {duration(starts.per)}"
        facts.append(("rate", counted))
    waiting = str(info.waiting)
    if info.waiting:
        first = f", the first for {duration(now - info.oldest)}" if info.oldest else ""
        waiting += first
    facts += [("waiting", waiting), ("woken", str(info.woken))]
    if info.opens is not None:
        alone = "" if info.may_open_sooner else ", by time alone"
        facts.append(("next", f"{opens_label(info)}{alone}"))
    if info.later:
        facts.append(("later", f"{info.later}, the first in {duration(info.due)}"))
    if info.identities:
        facts.append(("calls", f"{info.identities} with an identity"))
    return facts


def in_use(info: KeyState) -> str:
    """Return the units of a key in use, in words."""
    if info.most is None:
        used = f"{info.units} units are in use, without a limit"
    else:
        used = f"{info.units} of {info.most} units are in use"
    known = sum(hold.units for hold in info.holds)
    more = f"; holders of {info.units - known} of them are not listed" if info.units > known else ""
    return used + more


def _kind(holder: Holder) -> str:
    if holder.task_id:
        return "task"
    return "thread" if holder.is_thread else "holder"


def _lease(remaining: float) -> str:
    if math.isinf(remaining):
        return "no end, unless it is renewed or released"
    return f"{duration(remaining)} left, unless it is renewed"


_STATES = {
    "held": "held",
    "waking": "reserved for a parked task that is in flight",
    "waiting": "reserved for a parked task that waits for another key",
    "resting": "resting: it has no holder, and its units stay in use for a while",
    "free": "free",
}


@command("queue")
@key_argument
@click.option("--first", type=PLACE, default=0, help="The first position to show.")
@click.option("--limit", type=COUNT, default=100, show_default=True)
@click.option("--lane", help="Only the waiters of this lane; '': of those without a lane.")
@json_option
def queue_(
    obj: CLIContext, key: str, *, first: int, limit: int, lane: str | None, as_json: bool
) -> None:
    """
    Show the waiters of KEY, in order.

    Waiters are parked tasks and blocked processes. Two kinds have no place: woken tasks, which are
    in flight to the key, come first; delayed calls, which join the queue later, come last, and
    WAITS shows in how long. With --lane, positions count in the lane, delayed calls are left out,
    and an operator's limit of the lane comes first. LEAVES shows when a task gives up. The exit
    status is 1 if there are no waiters.
    """
    admin = admin_of(obj, Ability.LIST, *([] if lane is None else [Ability.QUEUE]))
    waiters, now = admin.queue(key, first=first, limit=limit, lane=lane), time.time()
    its_limit = admin.lane_limit(key, lane) if lane else None
    if its_limit is not None and not as_json:
        Screen(obj).facts([("limit", limit_label(its_limit, now))])
    if as_json:
        record = {"key": key, "waiters": [waiter_record(waiter) for waiter in waiters]}
        write_json({**record, "limit": limit_record(its_limit)} if lane else record)
    elif not waiters:
        where = f" in the lane {printable(lane)!r}" if lane else " without a lane" * (lane == "")
        obj.echo(f"{printable(key)} has no waiters{where} at {admin.where}.")
    else:
        Screen(obj).table(WAITER_COLUMNS, (waiter_cells(waiter, now) for waiter in waiters))
    if not waiters:
        exit_unused(obj, admin, key, quiet=as_json)


@command("recall")
@key_argument
@holder_option
@reason_option
@json_option
def recall_(obj: CLIContext, key: str, holder: str | None, reason: str, as_json: bool) -> None:
    """
    Ask the holder of KEY to leave. It keeps the key until it does.

    It learns of that when it renews its lease, within a third of it. In a task RecalledError is
    raised then, unless the task declares otherwise, and its state becomes REVOKED; other code sees
    that its lock is recalled, and goes on. So no two tasks run, as they may after release. If its
    process is killed before it has left, the task runs again.

    The exit status is 1 if the key has no holder.
    """
    admin = admin_of(obj, Ability.RECALL)
    meant = holds_named(admin.show(key), holder or "")
    owners = [hold.who.owner for hold in meant]
    done = admin.recall(key, owners=owners, reason=reason) if meant else None
    asked = done.asked if done else ()
    if as_json:
        write_json({"key": key, "asked": [hold.who.owner for hold in asked]})
    elif asked:
        obj.echo(
            f"{_named(asked[0].who)} is asked to leave {printable(key)}, and has it until it does."
        )
    else:
        obj.echo(f"{printable(key)} has no holder to ask.")
    if not asked:
        exit_unused(obj, admin, key, quiet=as_json)


@command("release")
@key_argument
@holder_option
@reason_option
@force_option
@json_option
def release_(
    obj: CLIContext, key: str, holder: str | None, *, reason: str, force: bool, as_json: bool
) -> None:
    """
    Take KEY from its holder, and hand it to the next waiter.

    The holder is not asked. It notices when it renews its lease, within a third of it. Until then
    two tasks may run. Release what is stuck, not what is slow. If KEY has several holders, select
    one with --holder: its process (4711, or host:4711), its task id, or its owner, as in
    show --json. --force releases all holders that match, or all holders without --holder.

    The exit status is 1 if the key is free, or has changed hands since you were asked.
    """
    admin, now = admin_of(obj), time.time()
    before = admin.show(key)
    meant = holds_named(before, holder or "", many=force)
    if meant and not force:
        _ask(f"{_held_by(before, meant[0], now)}\nTake it away?")
    done = Released(False, before, before)
    if meant or force:
        seen = 0 if force else before.token
        owners = [hold.who.owner for hold in meant] if holder or not force else ()
        done = admin.release(key, token=seen, owners=owners, all_holders=force, reason=reason)
    if reason and Ability.QUEUE not in admin.store.abilities:
        where = admin.store.address
        obj.error(f"{where} does not record operators' actions: the reason was not recorded.")
    if as_json:
        now = time.time()
        record = {"released": done.done, "before": lock_record(done.before, now)}
        lost = [hold.who.owner for hold in done.lost]
        write_json({**record, "after": lock_record(done.after, now), "lost": lost})
    else:
        obj.echo(_outcome(done))
    if not done.done:
        exit_unused(obj, admin, key, done.before, quiet=as_json)


def _held_by(info: KeyState, hold: HoldInfo, now: float) -> str:
    held_for = f", for {duration(now - hold.since)}" if hold.since else ""
    others = len(info.holds) - 1
    of = f" The {others} other{'s' if others > 1 else ''} keep what they have." if others else ""
    runs = "more units may be in use than there are" if info.mode == "shared" else "two may run"
    holder = f"is held by {_named(hold.who)}" if str(hold.who) else "rests"
    return (
        f"{printable(info.key)} {holder}{held_for}.{of}"
        f" Until it notices, within a third of its lease, {runs} under this key."
    )


def _outcome(done: Released) -> str:
    key, now = printable(done.before.key), _having(done.after)
    if len(done.lost) > 1:
        return f"{key} was taken from {len(done.lost)} holders. {now}"
    if done.done:
        return f"{key} was taken from {_named(done.lost[0].who)}. {now}"
    if done.before.holder is not None:
        return f"{key} has changed hands since you were asked, and nothing was done. {now}"
    return f"{key} was not held, and nothing was done. {now}"


def _named(holder: Holder) -> str:
    return printable(str(holder) or "no holder: it rested")


def _having(info: KeyState) -> str:
    if info.mode == "shared":
        return f"{in_use(info)} now."
    if info.state == "resting":
        return "It rests now."
    return f"{_named(info.holder)} has it now." if info.holder else "It is free now."


@command("wake")
@key_argument
@reason_option
@json_option
def wake_(obj: CLIContext, key: str, reason: str, as_json: bool) -> None:
    """
    Send the tasks at KEY that should be in flight.

    Use this if the broker has lost messages. It sends the next task in the queue if the key is
    free, and tasks that were woken and have not arrived. It does no harm: a second delivery is
    recognised. The exit status is 1 if there was nothing to send.
    """
    admin = admin_of(obj, Ability.QUEUE)
    sent = admin.wake(key, reason=reason)
    if as_json:
        write_json({"key": key, "sent": sent})
    else:
        obj.echo(f"{sent} sent." if sent else f"Nothing to send at {printable(key)}.")
    if not sent:
        exit_unused(obj, admin, key, quiet=as_json)


@command("drop")
@click.argument("task_id", required=False)
@click.option(
    "--key", callback=not_empty, shell_complete=complete_key, help="The key of its queue."
)
@click.option("--all", "all_", is_flag=True, help="All tasks and delayed calls of --key.")
@reason_option
@force_option
@json_option
def drop_(
    obj: CLIContext,
    task_id: str | None,
    key: str | None,
    *,
    all_: bool,
    reason: str,
    force: bool,
    as_json: bool,
) -> None:
    """
    Remove a parked task from its queue for good.

    TASK_ID may also be a delayed call that has not joined the queue yet. --all removes all tasks
    and delayed calls of --key. Later calls with the same identity are no longer duplicates.

    The state of the task becomes REVOKED. A chord that waits for it fails. A running task is not
    affected: use `celery control revoke` for that. Without --key, all queues are searched. A task
    that is not a locked task of this app is dropped with --force only, and a chord that waits for
    it is not notified. The exit status is 1 if the task is not parked.
    """
    if all_ != (task_id is None):
        raise click.UsageError("give the id of a task, or --all and --key")
    if all_ and key is None:
        raise click.UsageError("--all needs --key: it drops the tasks of one key")
    admin = admin_of(obj, Ability.QUEUE)
    if not force:
        _ask_to_drop(admin, task_id, key)
    dropped = _dropped(admin, task_id, key, reason, force=force)
    if as_json:
        records = [{"key": d.key, "task": d.task, "task_id": d.task_id} for d in dropped]
        write_json({"dropped": records})
    for each in dropped if not as_json else ():
        name = printable(f"{each.task}[{each.task_id}]")
        obj.echo(f"{name} was taken out of the queue of {printable(each.key)}.")
    if not dropped:
        if not as_json:
            subject = "Nothing" if task_id is None else printable(task_id)
            verb = "waits" if task_id is None else "is not parked"
            obj.echo(f"{subject} {verb}{f' at {printable(key)}' if key else ''}.")
            if key and not admin.show(key).is_in_use:
                suggest(obj, admin, key)
        click.get_current_context().exit(1)


def _ask_to_drop(admin: Admin, task_id: str | None, key: str | None) -> None:
    if task_id is None:
        assert key is not None
        info = admin.show(key)
        counts = f"{info.waiting} waiting, {info.woken} in flight, {info.later} later"
        if info.has_waiters:
            _ask(f"{printable(key)} has {counts}. None of these tasks will run.\nDrop them?")
        return
    found = [at for at, _ in QueueStore.of(admin.store).parking.find_parked(task_id)]
    if key or found:
        where = ", ".join(map(printable, [key] if key else found))
        _ask(f"{printable(task_id)} is parked at {where}. It will never run.\nDrop it?")


def _dropped(
    admin: Admin, task_id: str | None, key: str | None, reason: str, *, force: bool
) -> list[Dropped]:
    try:
        if task_id is None:
            return admin.drop_all(str(key), force=force, reason=reason)
        return admin.drop(task_id, key, force=force, reason=reason)
    except DistlockError:
        raise
    except Exception as error:
        raise CommandError(
            f"{task_id or 'one of them'} will not run, but its result backend failed: {error}"
        ) from error


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError(
            "this needs a confirmation, and there is no terminal to ask at: use --force"
        )
    click.confirm(question, abort=True, err=True)
