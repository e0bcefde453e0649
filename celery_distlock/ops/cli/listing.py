"""``celery locks list``."""

import heapq
import time
from collections.abc import Iterator
from itertools import islice

import click
from celery.bin.base import CLIContext

from celery_distlock.stores import Ability
from celery_distlock.stores.values import KeyState

from . import command
from .completion import complete_key
from .display import LOCK_COLUMNS, SORTERS, Screen, lock_cells, lock_record, write_json
from .ranges import COUNT, DAY, Duration
from .single import admin_of


@command("list")
@click.argument("pattern", default="*", shell_complete=complete_key)
@click.option("--task", help="Only keys held by a task of this name.")
@click.option("--waiting", is_flag=True, help="Only keys with waiters or delayed calls.")
@click.option("--limited", is_flag=True, help="Only keys with a limit or pause, of a lane too.")
@click.option(
    "--older-than",
    type=Duration(0.0, 10_000 * DAY),
    default="0",
    metavar="TIME",
    help="Only keys held for at least this time: 90s, 15m, 1h30m, 2d.",
)
@click.option("--limit", type=COUNT, metavar="N", help="At most N keys.")
@click.option(
    "--sort",
    type=click.Choice(list(SORTERS)),
    help="The oldest hold, the shortest lease or the longest queue first. Default: unsorted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per line.")
def list_(
    obj: CLIContext,
    pattern: str,
    *,
    task: str | None,
    waiting: bool,
    limited: bool,
    older_than: float,
    limit: int | None,
    sort: str | None,
    as_json: bool,
) -> None:
    """
    List the keys that are held, waited for or limited.

    PATTERN is a shell pattern such as 'stock:*'; quote it. The keys are read in small batches that
    do not block the server, so the list is not a snapshot of one moment.
    """
    admin = admin_of(obj, Ability.LIST)
    since = time.time() - older_than

    def is_wanted(info: KeyState) -> bool:
        return (
            (task is None or any(hold.who.task == task for hold in info.holds))
            and bool(not waiting or info.has_waiters)
            and (not limited or info.is_limited)
            and (not older_than or 0 < info.since <= since)
        )

    shown = _first(filter(is_wanted, admin.locks(pattern)), sort, limit)
    if as_json:
        for info in shown:
            write_json(lock_record(info, time.time()))
        return
    screen = Screen(obj)
    if not screen.table(LOCK_COLUMNS, (lock_cells(info, time.time()) for info in shown)):
        obj.error(
            f"No matching key is held or waited for at {admin.where}."
            if pattern != "*" or task or waiting or limited or older_than
            else f"No key is held or waited for at {admin.where}."
        )


def _first(found: Iterator[KeyState], sort: str | None, limit: int | None) -> Iterator[KeyState]:
    if sort is None:
        return islice(found, limit)
    if limit is None:
        return iter(sorted(found, key=SORTERS[sort]))
    return iter(heapq.nsmallest(limit, found, key=SORTERS[sort]))
