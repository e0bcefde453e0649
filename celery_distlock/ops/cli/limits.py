"""``celery locks limit``, ``pause`` and ``resume``: limits on a key, or on one of its lanes."""

import time
from collections.abc import Sequence

import click
from celery.bin.base import CLIContext

from celery_distlock.errors import ConfigurationError
from celery_distlock.naming import printable, shown
from celery_distlock.ops.admin import Limited
from celery_distlock.rate import Rate
from celery_distlock.stores import Ability

from . import command
from .display import duration, limit_label, lock_record, write_json
from .ranges import DAY, UNITS, Duration, StartRate
from .single import (
    admin_of,
    exit_unused,
    in_use,
    json_option,
    key_argument,
    not_empty,
    reason_option,
    suggest,
)

LONGEST = 365 * DAY  # longest value of --for, in seconds

for_option = click.option(
    "--for",
    "seconds",
    type=Duration(1.0, LONGEST),
    metavar="TIME",
    help="End the limit after this time: 90s, 15m, 1h30m, 2d. Else it stays until it is removed.",
)


idle_option = click.option(
    "--idle", is_flag=True, help="Accept a key that has no holder, waiter or limit now."
)
lane_option = click.option(
    "--lane", callback=not_empty, metavar="NAME", help="Only this lane of KEY; other lanes go on."
)
UNUSED = 3  # exit status: done, at a key that nothing uses


@command("limit")
@key_argument
@click.argument("units", metavar="[N]", type=UNITS, required=False)
@click.option(
    "--rate",
    type=StartRate(),
    multiple=True,
    metavar="RATE",
    help="The rate of starts: 10/s, 100/m, 5/10s. May be repeated: all of them apply.",
)
@for_option
@click.option("--clear", is_flag=True, help="Remove the limit.")
@lane_option
@idle_option
@reason_option
@json_option
def limit_(
    obj: CLIContext,
    key: str,
    units: int | None,
    *,
    rate: tuple[Rate, ...],
    seconds: float | None,
    clear: bool,
    lane: str | None,
    idle: bool,
    reason: str,
    as_json: bool,
) -> None:
    """
    Limit the units of KEY in use, or the rate of its starts.

    The limit overrides the capacity and the rates of tasks, which may be lower or higher. It
    applies to this key only. Holders of more units than N are not affected, but there are no new
    grants until fewer units are in use. Waiters that fit into a higher limit are woken at once. For
    a key that is held exclusively, any N but 0 has no effect. 0 stops new grants, as pause does.
    The limit replaces an earlier one: to set both, give N and --rate together. With --lane it is
    that of one lane, and replaces the most that its tasks declare.

    With --clear, the exit status is 1 if there was no limit. It is 3 if the limit was set, but the
    key had no holder, waiter or limit, which may be a typo. --idle accepts such a key.
    """
    if clear and (units is not None or seconds is not None or rate):
        raise click.UsageError("--clear removes the limit: it takes no N, --rate or --for")
    if rate and lane:
        raise click.UsageError("--lane takes N: a lane has no rate of its own")
    if clear:
        _take_back(obj, key, lane, reason, as_json=as_json)
    elif units is None and not rate:
        raise click.UsageError(
            "give N, --rate or --clear: limit KEY N, limit KEY --rate 10/s, limit KEY --clear"
        )
    else:
        _set(obj, key, lane, units, seconds, reason, rate=rate, idle=idle, as_json=as_json)


@command("pause")
@key_argument
@for_option
@lane_option
@idle_option
@reason_option
@json_option
def pause_(
    obj: CLIContext,
    key: str,
    seconds: float | None,
    *,
    lane: str | None,
    idle: bool,
    reason: str,
    as_json: bool,
) -> None:
    """
    Stop new grants of KEY, or of one of its lanes.

    Holders are not affected. Each new task does what its policy says for a held key. A pause is a
    limit of 0. As for limit, the exit status is 3 if the key had no holder, waiter or limit.
    """
    _set(obj, key, lane, 0, seconds, reason, idle=idle, as_json=as_json)


@command("resume")
@key_argument
@lane_option
@reason_option
@json_option
def resume_(obj: CLIContext, key: str, *, lane: str | None, reason: str, as_json: bool) -> None:
    """
    Remove a limit or a pause of KEY, or of one of its lanes.

    Waiters that fit are woken at once. The exit status is 1 if there was no limit.
    """
    _take_back(obj, key, lane, reason, as_json=as_json)


def _set(
    obj: CLIContext,
    key: str,
    lane: str | None,
    units: int | None,
    seconds: float | None,
    reason: str,
    *,
    rate: tuple[Rate, ...] = (),
    idle: bool,
    as_json: bool,
) -> None:
    admin = admin_of(obj, Ability.QUEUE)
    try:
        done = admin.limit(
            key, units, lane=lane, rate=rate or None, seconds=seconds or 0.0, reason=reason
        )
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        _write(done)
    else:
        obj.echo(_said(done, units, rate, seconds))
    if done.unused and not idle:
        has, what = ("holder, waiter", "key") if lane is None else ("waiter", "lane")
        obj.error(
            f"{_place(done)} had no {has} or limit. If you meant another {what}, resume this one;"
            " if not, use --idle."
        )
        if not done.before.is_in_use:
            suggest(obj, admin, key)
        click.get_current_context().exit(UNUSED)


def _place(done: Limited) -> str:
    """Return the name of the key, or of its lane, that has the limit."""
    key = printable(done.after.key)
    return key if done.lane is None else f"{key}, lane {printable(shown(done.lane))},"


def _said(done: Limited, units: int | None, rate: Sequence[Rate], seconds: float | None) -> str:
    until = f" for {duration(seconds)}" if seconds else ""
    name = _place(done)
    often = " and ".join(map(str, sorted(rate, key=lambda each: each.per)))
    said = f"At most {units} of {name} may be in use" if units else f"{name} is paused"
    if units is None:
        said = f"{name} is limited to {often}"
    elif rate:
        said += f", and it is limited to {often}"
    return f"{said}{until}.{_going_on(done)}"


def _take_back(obj: CLIContext, key: str, lane: str | None, reason: str, *, as_json: bool) -> None:
    admin = admin_of(obj, Ability.QUEUE)
    done = admin.limit(key, None, lane=lane, reason=reason)
    before = done.replaced
    if as_json:
        _write(done)
    elif before is None:
        obj.echo(f"{_place(done)} had no limit.")
    else:
        limit = limit_label(before, time.time())
        obj.echo(f"{_place(done)} no longer has a limit (it was: {limit}).{_going_on(done)}")
    if before is None:
        exit_unused(obj, admin, key, done.before, quiet=as_json)


def _going_on(done: Limited) -> str:
    """Return a sentence about the current holders of the key, which no limit affects."""
    info = done.after
    if done.lane is not None:
        return ""
    if info.mode == "shared":
        return f" {in_use(info)}."
    holder = printable(str(info.holder))
    return f" {holder} holds it exclusively and keeps it." if info.state == "held" else ""


def _write(done: Limited) -> None:
    now = time.time()
    write_json({"before": lock_record(done.before, now), "after": lock_record(done.after, now)})
