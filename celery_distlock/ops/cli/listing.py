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
from .display import LOCK_COLUMNS, SORTERS, Screen, chosen, lock_cells, lock_record, write_json
from .ranges import COUNT, DAY, Duration
from .single import admin_of

__all__ = ["list_"]


@command("list")
@click.argument("pattern", default="*", shell_complete=complete_key)
@click.option("--task", help="Only keys that a task of this name holds.")
@click.option("--waiting", is_flag=True, help="Only keys that somebody waits for.")
@click.option("--limited", is_flag=True, help="Only keys that an operator has limited or paused.")
@click.option(
    "--older-than",
    type=Duration(0.0, 10_000 * DAY),
    default="0",
    metavar="TIME",
    help="Only keys that have been held for so long: 90s, 15m, 1h30m, 2d.",
)
@click.option("--limit", type=COUNT, metavar="N", help="N keys at most.")
@click.option(
    "--sort",
    type=click.Choice(list(SORTERS)),
    help="The oldest first, the shortest lease, the longest queue. Without it, as they are found.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON document a line.")
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

    PATTERN is one of the shell's, as in 'stock:*'; quote it. The keys are looked at in small
    batches, which no server minds, and not all at one moment.
    """
    admin = admin_of(obj, Ability.LIST)
    found = chosen(
        admin.locks(pattern),
        task=task,
        waiting=waiting,
        limited=limited,
        older_than=older_than,
        now=time.time(),
    )
    shown = _first(found, sort, limit)
    if as_json:
        for info in shown:
            write_json(lock_record(info, time.time()))
        return
    screen = Screen(obj)
    if not screen.table(LOCK_COLUMNS, (lock_cells(info, time.time()) for info in shown)):
        obj.error(
            f"There is no such key at {admin.where}: nobody holds one or waits for one."
            if pattern != "*" or task or waiting or limited or older_than
            else f"No key is held or waited for at {admin.where}."
        )


def _first(found: Iterator[KeyState], sort: str | None, limit: int | None) -> Iterator[KeyState]:
    if sort is None:
        return islice(found, limit)
    if limit is None:
        return iter(sorted(found, key=SORTERS[sort]))
    return iter(heapq.nsmallest(limit, found, key=SORTERS[sort]))
