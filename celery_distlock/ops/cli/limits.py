"""``celery locks limit``, ``pause`` and ``resume``: how much of one key may be in use."""

import time
from collections.abc import Sequence

import click
from celery.bin.base import CLIContext

from celery_distlock.errors import ConfigurationError
from celery_distlock.ops.admin import Limited
from celery_distlock.rate import Rate
from celery_distlock.stores import Ability
from celery_distlock.stores.values import KeyState

from . import command
from .display import duration, limit_label, lock_record, printable, write_json
from .ranges import DAY, UNITS, Duration, StartRate
from .single import (
    admin_of,
    in_use,
    json_option,
    key_argument,
    reason_option,
    suggest,
    warn_unrecorded,
)

__all__ = ["limit_", "pause_", "resume_"]

LONGEST = 365 * DAY  # seconds that a limit lasts, if it is to end by itself

for_option = click.option(
    "--for",
    "seconds",
    type=Duration(1.0, LONGEST),
    metavar="TIME",
    help="It ends by itself after so long: 90s, 15m, 1h30m, 2d. Without it, when it is taken back.",
)


idle_option = click.option(
    "--idle", is_flag=True, help="It is meant that the key has no holder or waiter now."
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
    help="How often it may be taken: 10/s, 100/m, 5/10s. More than once: all of them count.",
)
@for_option
@click.option("--clear", is_flag=True, help="Take the limit back.")
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
    idle: bool,
    reason: str,
    as_json: bool,
) -> None:
    """
    Limit how much of KEY is in use, or how often it is taken.

    At most N units of it are, and at most so many starts a time begin, whatever tasks ask with.
    Those who have more of it go on; nobody is let in until less is in use. Who fits into a higher
    limit is woken at once. It is for this key alone, and goes before the capacity and the rates of
    its tasks, which may be lower or higher. Of a key that is held alone, any N but 0 changes
    nothing. 0 lets nobody in, as pause. It takes the place of the limit before: say N and --rate at
    once for both.

    With --clear, the exit status is 1 if there was no limit. It is 3 if the limit is set, and the
    key had no holder, waiter or limit: another one may be meant. --idle says that it is this one.
    """
    if clear and (units is not None or seconds is not None or rate):
        raise click.UsageError("--clear takes the limit back: it takes no N, --rate or --for")
    if clear:
        _take_back(obj, key, reason, as_json=as_json)
    elif units is None and not rate:
        raise click.UsageError(
            "say how many, or how often: limit KEY N, limit KEY --rate 10/s; or limit KEY --clear"
        )
    else:
        _set(obj, key, units, seconds, reason, rate=rate, idle=idle, as_json=as_json)


@command("pause")
@key_argument
@for_option
@idle_option
@reason_option
@json_option
def pause_(
    obj: CLIContext, key: str, seconds: float | None, *, idle: bool, reason: str, as_json: bool
) -> None:
    """
    Let nobody have KEY any more; those who have it go on.

    Tasks that come wait as for a key that is held, each as its policy says. It is a limit of 0. The
    exit status is 3 if the key had no holder, waiter or limit, as with limit.
    """
    _set(obj, key, 0, seconds, reason, idle=idle, as_json=as_json)


@command("resume")
@key_argument
@reason_option
@json_option
def resume_(obj: CLIContext, key: str, reason: str, as_json: bool) -> None:
    """
    Take back what limit or pause has set for KEY.

    Who fits is woken at once. The exit status is 1 if there was no limit.
    """
    _take_back(obj, key, reason, as_json=as_json)


def _set(
    obj: CLIContext,
    key: str,
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
        done = admin.limit(key, units, rate=rate or None, seconds=seconds or 0.0, reason=reason)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    warn_unrecorded(obj, admin, reason)
    if as_json:
        _write(done)
    else:
        obj.echo(_said(done, units, rate, seconds))
    if not (idle or done.before.is_in_use):
        name = printable(done.after.key)
        obj.error(
            f"{name} had no holder, waiter or limit. If another key is meant, resume this one; if"
            " not, --idle says so."
        )
        suggest(obj, admin, key)
        click.get_current_context().exit(UNUSED)


def _said(done: Limited, units: int | None, rate: Sequence[Rate], seconds: float | None) -> str:
    until = f" for {duration(seconds)}" if seconds else ""
    name = printable(done.after.key)
    often = " and ".join(map(str, sorted(rate, key=lambda each: each.per)))
    said = f"At most {units} of {name} may be in use" if units else f"{name} is paused"
    if units is None:
        said = f"{name} is taken {often} at most"
    elif rate:
        said += f", and it is taken {often} at most"
    return f"{said}{until}.{_going_on(done.after)}"


def _take_back(obj: CLIContext, key: str, reason: str, *, as_json: bool) -> None:
    admin = admin_of(obj, Ability.QUEUE)
    done = admin.limit(key, None, reason=reason)
    warn_unrecorded(obj, admin, reason)
    before = done.before.limit
    if as_json:
        _write(done)
    elif before is None:
        obj.echo(f"{printable(done.before.key)} had no limit.")
    else:
        was = f"{printable(done.before.key)} has no limit any more"
        obj.echo(f"{was} (it had: {limit_label(before, time.time())}).{_going_on(done.after)}")
    if before is None:
        if not (as_json or done.before.is_in_use):
            suggest(obj, admin, key)
        click.get_current_context().exit(1)


def _going_on(info: KeyState) -> str:
    """Return a sentence on those who have the key, whatever is set."""
    if info.mode == "shared":
        return f" {in_use(info)}."
    who = printable(str(info.holder))
    return f" {who} has it alone, and goes on." if info.state == "held" else ""


def _write(done: Limited) -> None:
    now = time.time()
    write_json({"before": lock_record(done.before, now), "after": lock_record(done.after, now)})
