"""Output of the commands: tables for terminals, lines for pipes, JSON for scripts."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import click
from celery.bin.base import CLIContext
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from celery_distlock.naming import printable, shown
from celery_distlock.ops.looks import CallInfo, WaiterInfo
from celery_distlock.stores.holders import Asked, Holder, HoldInfo
from celery_distlock.stores.values import Action, KeyState, Lane, Limit, Want

PAGE = 200  # rows per table; more rows start another table, so that few are kept in memory

LOCK_COLUMNS = (
    "key",
    "holder",
    "worker",
    "held",
    "age",
    "lease",
    "token",
    "waiting",
    "woken",
    "notes",
)
HOLD_COLUMNS = ("holder", "id", "worker", "units", "slot", "since", "lease", "asked")
WAITER_COLUMNS = ("place", "kind", "task", "id", "worker", "waits", "leaves", "wants")
ACTION_COLUMNS = ("action", "by", "when", "what", "reason")
CALL_COLUMNS = ("identity", "id", "where")
LANE_COLUMNS = ("lane", "waiting", "in use", "share")
NUMBERS = frozenset({"held", "units", "slot", "age", "lease", "token", "waiting", "woken", "place"})
OPTIONAL = frozenset({"held", "notes", "asked", "leaves", "wants"})  # omitted if empty in all rows
EXCLUSIVE = "exclusive"
MOST_NOTED = 3  # lanes with a limit
WHOLE = frozenset({"key", "id"})  # kept on one line: they are copied into the next command
SPARE = ("token", "worker", "woken", "slot", "lease")  # dropped for that, in this order
LAST = "age"  # dropped as well if keys and ids must be wrapped all the same
AT_LEAST = 2  # columns of `SPARE` to drop if keys and ids must be wrapped
GAP = 2  # screen columns between two table columns
NARROWEST = 12  # least width of a wrapped cell, in screen columns
READABLE = 1 / 3  # least width of a wrapped key, as a part of the screen

Cell = str | Text


class Screen:
    """The output of a command: a terminal with a width and colours, or a file or pipe."""

    def __init__(self, obj: CLIContext) -> None:
        self.terminal = sys.stdout.isatty()
        colorless: bool = obj.no_color  # type: ignore[attr-defined]  # celery-types lacks it
        self.console = Console(
            color_system=None if colorless else "auto", highlight=False, markup=False, emoji=False
        )

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> int:
        """
        Write *rows* as they arrive; return their number.

        In a terminal they are tables of `PAGE` rows; else one line per row, with tabs between the
        cells.
        """
        if not self.terminal:
            return self._lines(columns, rows)
        count, left = 0, iter(rows)
        while page := list(islice(left, PAGE)):
            self.console.print(filled(columns, page, self.console.width))
            count += len(page)
        return count

    def _lines(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> int:
        count = 0
        for count, row in enumerate(rows, 1):
            if count == 1:
                click.echo("\t".join(columns).upper())
            click.echo("\t".join(_text(cell) for cell in row))
        return count

    def facts(self, facts: Iterable[tuple[str, Cell]]) -> None:
        """Write *facts*, one name and value per line."""
        for name, value in facts:
            if self.terminal:
                line = Text.assemble((f"{name:<10}", "bold"), value or "-")
                self.console.print(line, overflow="fold")
            else:
                click.echo(f"{name}\t{_text(value)}")


def filled(columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> Table:
    """
    Return a table for a terminal of *width* columns.

    Empty columns that are `OPTIONAL` are omitted. Columns that are `SPARE` are dropped if keys and
    ids fit on one line then. Other long cells are wrapped.
    """
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold")
    kept, whole = _fitting(columns, rows, width)
    for name in kept:
        number = name in NUMBERS
        table.add_column(
            name.upper(),
            justify="right" if number else "left",
            overflow="fold",
            no_wrap=number or (whole and name in WHOLE),
            max_width=None if number or whole or name in WHOLE else NARROWEST,
        )
    places = [columns.index(name) for name in kept]
    for row in rows:
        cells = (row[place] for place in places)
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell or "-") for cell in cells))
    return table


def _fitting(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int
) -> tuple[list[str], bool]:
    """Return the *columns* to show, and whether keys and ids fit on one line with them."""
    needed = {
        name: max([cell_len(name), *(cell_len(str(row[place]) or "-") for row in rows)])
        for place, name in enumerate(columns)
    }
    filled_in = {
        name for name in columns if name not in OPTIONAL or _says(columns.index(name), rows)
    }
    columns = [name for name in columns if name in filled_in]
    spare = [name for name in SPARE if name in needed]

    def least(name: str) -> int:
        return needed[name] if name in NUMBERS | WHOLE else min(NARROWEST, needed[name])

    def some(name: str) -> int:
        narrowest = max(NARROWEST, int(width * READABLE)) if name == "key" else NARROWEST
        return needed[name] if name in NUMBERS else min(narrowest, needed[name])

    for dropped in range(len(spare) + 1):
        kept = [name for name in columns if name not in spare[:dropped]]
        wants = [needed.__getitem__]
        if spare[dropped:] in ([], ["lease"]):  # rather wrap other cells than drop more
            wants.append(least)
        if any(sum(wanted(name) + GAP for name in kept) <= width for wanted in wants):
            return kept, True
    spare.append(LAST)
    for dropped in range(AT_LEAST, len(spare) + 1):
        kept = [name for name in columns if name not in spare[:dropped]]
        if sum(some(name) + GAP for name in kept) <= width:
            break
    return kept, False


def _says(place: int, rows: Sequence[Sequence[Cell]]) -> bool:
    return any(str(row[place]) not in ("", EXCLUSIVE) for row in rows)


def _text(cell: Cell) -> str:
    return str(cell) or "-"


def duration(seconds: float) -> str:
    """Return *seconds* in short form: ``4.2s``, ``16m10s``, ``3h05m``; ``no end`` if infinite."""
    if math.isinf(seconds):
        return "no end"
    if seconds < 60:
        return f"{max(0.0, seconds):.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, rest = divmod(minutes, 60)
    return f"{hours}h{rest:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def moment(seconds: float) -> str:
    """Return a time since the epoch as ISO 8601, in UTC; empty for 0, an unknown time."""
    if not seconds:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def since(seconds: float, now: float) -> str:
    """Return a time since the epoch as ISO 8601, and how long ago that was."""
    return f"{moment(seconds)} ({duration(now - seconds)} ago)" if seconds else ""


def ago(seconds: float, now: float) -> str:
    """Return how long ago a time since the epoch was; empty for 0."""
    return f"{duration(now - seconds)} ago" if seconds else ""


def limit_label(limit: Limit, now: float) -> str:
    """Return an operator's limit in words: units, rates, author, start and end."""
    words = list(map(str, limit.rates))
    if limit.pauses:
        words = ["paused: no new grants", *words]
    elif limit.capacity:
        words = [f"{limit.capacity} unit{'s' if limit.capacity > 1 else ''}", *words]
    if limit.author:
        words.append(f"by {printable(limit.author)}")
    if limit.since:
        words.append(f"since {since(limit.since, now)}")
    if limit.until:
        words.append(f"until {moment(limit.until)} (in {duration(limit.until - now)})")
    return ", ".join(words)


def worker_label(holder: Holder | None) -> str:
    """Return ``host:pid``, or an empty string for a holder without a host."""
    return printable(f"{holder.host}:{holder.pid}") if holder and holder.host else ""


def lock_cells(info: KeyState, now: float) -> list[str]:
    """Return a row under `LOCK_COLUMNS`; *now* in seconds since the epoch."""
    holder = info.holder
    more = f" +{len(info.holds) - 1}" if len(info.holds) > 1 else ""
    worker = _WITHOUT_WORKER.get(info.state) or worker_label(holder)
    return [
        printable(info.key),
        printable(holder.name or holder.task_id) + more if holder else "",
        worker + more if holder else "",
        units_label(info),
        duration(now - info.since) if info.since else "",
        duration(info.remaining) if holder else "",
        str(info.token) if info.token > 0 else "",
        str(info.waiting),
        str(info.woken),
        ", ".join(_notes(info)),
    ]


_WITHOUT_WORKER = {"waking": "(in flight)", "resting": "(rests)"}


def units_label(info: KeyState) -> str:
    """Return the units in use, as ``3/5``, or ``exclusive``; empty if the key is free."""
    if info.mode != "shared":
        return EXCLUSIVE if info.mode else ""
    return f"{info.units}/{'any' if info.most is None else info.most}"


def _notes(info: KeyState) -> Iterator[str]:
    if info.limit is not None:
        much = [str(info.limit.capacity)] if info.limit.capacity else []
        words = ["limit", *much, *map(str, info.limit.rates)]
        yield "paused" if info.paused else " ".join(words)
    for lane, limit in info.lane_limits[:MOST_NOTED]:
        its = "paused" if limit.pauses else f"limit {limit.capacity}"
        yield f"lane {printable(shown(lane))} {its}"
    if len(info.lane_limits) > MOST_NOTED:
        yield f"{len(info.lane_limits) - MOST_NOTED} lanes more"
    if info.rest > 0:
        yield f"rests {duration(info.rest)}"
    elif info.opens is not None and info.state != "resting":
        yield f"next {opens_label(info)}"
    if info.later:
        yield f"{info.later} later, in {duration(info.due)}"


def opens_label(info: KeyState) -> str:
    """Return when time alone admits the first waiter; empty if it does not."""
    if info.opens is None:
        return ""
    return f"in {duration(info.opens)}{' at the latest' if info.may_open_sooner else ''}"


def wants_label(want: Want) -> str:
    """Return the units that are requested, as ``2 of 5``, and the order; empty for neither."""
    units = "" if want.alone else f"{want.units} of {want.capacity or 'any'}"
    lane = f"lane {printable(shown(want.lane))}" if want.lane else ""
    ahead = f"{duration(want.ahead / 1000)} ahead" if want.ahead else ""
    return ", ".join(filter(None, (units, lane, ahead, "strict" * want.strict)))


def hold_cells(hold: HoldInfo, now: float, *, brief: bool = False) -> list[str]:
    """Return a row under `HOLD_COLUMNS`; *now* in seconds since the epoch; *brief*: only ages."""
    holder = hold.who
    return [
        printable(holder.name),
        printable(holder.task_id),
        "(waits)" if hold.waits_for else _WITHOUT_WORKER.get(hold.state) or worker_label(holder),
        str(hold.units),
        str(hold.slot) if hold.slot >= 0 else "",
        ago(hold.since, now) if brief else since(hold.since, now),
        duration(hold.remaining),
        asked_label(hold.asked, now, brief=brief),
    ]


def asked_label(asked: Asked, now: float, *, brief: bool = False) -> str:
    """Return when a holder was asked to leave, and by what; empty if it was not."""
    when = ago(asked.at, now) if brief else since(asked.at, now)
    return f"{when} by {asked.by}" if asked.at else ""


def waits_label(hold: HoldInfo) -> str:
    """Return the key that the task of *hold* waits for, and the holder of that key."""
    other = hold.waits_for
    assert other is not None
    holder = f", held by {printable(str(other.holder))}" if other.holder else ""
    return f"{printable(other.key)}{holder}"


def lock_record(info: KeyState, now: float) -> dict[str, Any]:
    """Return the JSON form of a key; *now* in seconds since the epoch."""
    return {
        "key": info.key,
        "state": info.state,
        "mode": info.mode or None,
        "holder": info.holder._asdict() if info.holder else None,
        **_lasting(info, now),
        "token": info.token if info.token >= 0 else None,  # None: its record is malformed
        "units": info.units,
        "capacity": info.capacity if info.mode and info.capacity else None,
        "holders": [_hold_record(hold, now) for hold in info.holds],
        "limit": limit_record(info.limit),
        "lane_limits": {lane: limit_record(each) for lane, each in info.lane_limits},
        "rest_seconds": round(info.rest, 3),
        "starts": [starts._asdict() for starts in info.starts],
        "waiting": info.waiting,
        **_time("oldest", info.oldest),
        "woken": info.woken,
        "opens_in_seconds": None if info.opens is None else round(info.opens, 3),
        "later": info.later,
        "due_in_seconds": round(info.due, 3) if info.later else None,
        "identities": info.identities,
    }


def _hold_record(hold: HoldInfo, now: float) -> dict[str, Any]:
    return {
        **hold.who._asdict(),
        "state": hold.state,
        "units": hold.units,
        "slot": hold.slot if hold.slot >= 0 else None,
        **_lasting(hold, now),
        **_time("asked", hold.asked.at),
        "asked_by": hold.asked.by or None,
        **({"waits_for": lock_record(hold.waits_for, now)} if hold.waits_for else {}),
    }


def limit_record(limit: Limit | None) -> dict[str, Any] | None:
    """Return the JSON form of an operator's limit."""
    if limit is None:
        return None
    times = {**_time("since", limit.since), **_time("until", limit.until)}
    much = {"capacity": limit.capacity, "rates": list(map(asdict, limit.rates))}
    return {**much, "author": limit.author, **times}


def _lasting(hold: KeyState | HoldInfo, now: float) -> dict[str, Any]:
    return {
        **_time("since", hold.since),
        "age_seconds": round(max(0.0, now - hold.since), 3) if hold.since else None,
        "remaining_seconds": round(hold.remaining, 3) if math.isfinite(hold.remaining) else None,
    }


def waiter_record(waiter: WaiterInfo) -> dict[str, Any]:
    """Return the JSON form of a waiter."""
    return {
        "place": waiter.place,
        "kind": waiter.kind,
        **waiter.who._asdict(),
        **_time("since", waiter.since),
        "units": waiter.want.units,
        "capacity": waiter.want.capacity or None,
        "lane": waiter.want.lane,
        "due_in_seconds": None if waiter.due is None else round(waiter.due, 3),
        "leaves_in_seconds": None if waiter.leaves is None else round(waiter.leaves, 3),
    }


def waiter_cells(waiter: WaiterInfo, now: float) -> list[str]:
    """Return a row under `WAITER_COLUMNS`; *now* in seconds since the epoch."""
    waits = duration(now - waiter.since) if waiter.since else ""
    return [
        "" if waiter.place is None else str(waiter.place),
        waiter.kind,
        printable(waiter.who.name),
        printable(waiter.who.task_id),
        worker_label(waiter.who),
        waits if waiter.due is None else f"in {duration(waiter.due)}",
        "" if waiter.leaves is None else f"in {duration(waiter.leaves)}",
        wants_label(waiter.want),
    ]


def lane_cells(lane: Lane, info: KeyState) -> list[str]:
    """Return a row under `LANE_COLUMNS`, of a lane of the key *info*."""
    name = printable(shown(lane.name)) if lane.name else "(none)"
    limit = info.limit_of(lane.name)
    most = lane.most if limit is None else limit.capacity
    used = f"{lane.used} of {most}" if most else str(lane.used or "")
    if limit is not None and limit.pauses:
        used = f"{lane.used}, paused"
    return [name, str(lane.waiting), used, f"{lane.share:g}"]


def call_cells(call: CallInfo) -> list[str]:
    """Return a row under `CALL_COLUMNS`."""
    return [printable(shown(call.identity)), printable(call.task_id), call.where]


def action_cells(action: Action, now: float, *, brief: bool = False) -> list[str]:
    """Return a row under `ACTION_COLUMNS`; *now* and *brief* as in `hold_cells`."""
    when = ago(action.at, now) if brief else since(action.at, now)
    return [action.name, action.author, when, action.about, action.reason]


def action_record(action: Action) -> dict[str, Any]:
    """Return the JSON form of an operator's action."""
    name, author, reason, about, owners, at = action
    words = {"action": name, "author": author, "reason": reason, "about": about}
    return {**words, "owners": owners, **_time("at", at)}


def _time(name: str, seconds: float) -> dict[str, Any]:
    return {name: moment(seconds) or None, f"{name}_seconds": seconds or None}


def write_json(record: Any) -> None:
    """Write a JSON document on one line, in ASCII, without control characters."""
    click.echo(json.dumps(record))


SORTERS: dict[str, Callable[[KeyState], Any]] = {
    "key": lambda info: info.key,
    "task": lambda info: info.holder.task if info.holder else "",
    "age": lambda info: info.since or float("inf"),
    "lease": lambda info: info.remaining,
    "waiting": lambda info: -info.waiting,
}
