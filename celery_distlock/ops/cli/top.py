"""``celery locks top``: the keys with the longest queues, live."""

import contextlib
import heapq
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import click
from celery.bin.base import CLIContext
from rich.console import Group
from rich.live import Live
from rich.text import Text

from celery_distlock.errors import StoreError
from celery_distlock.naming import printable
from celery_distlock.ops.admin import Admin
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import Ability
from celery_distlock.stores.values import KeyState

from . import command
from .display import LOCK_COLUMNS, SORTERS, Screen, filled, lock_cells
from .ranges import DAY, Duration
from .single import admin_of

FRAME = 5  # lines around the rows
GLANCE = 100  # locks that are read between two checks of the keyboard


@command("top")
@click.option(
    "--interval",
    type=Duration(0.1, DAY),
    default="2s",
    show_default=True,
    metavar="TIME",
    help="The time between two updates: 0.5s, 10s, 1m.",
)
@click.option("--sort", type=click.Choice(list(SORTERS)), default="waiting", show_default=True)
def top_(obj: CLIContext, interval: float, sort: str) -> None:
    """
    Watch the keys with the longest queues; q or Ctrl-C ends it.

    Without a terminal, or in a dumb one, they are printed once.
    """
    admin, screen = admin_of(obj, Ability.LIST), Screen(obj)
    where = Runtime.of(obj.app).store.identity.replace("#", ", prefix ", 1)
    if not screen.terminal or screen.console.is_dumb_terminal:
        view = _look(admin, 50, sort, Keyboard(None))
        click.echo(f"{where}: {view.totals}")
        screen.table(LOCK_COLUMNS, view.cells())
        return
    with contextlib.suppress(KeyboardInterrupt), _keyboard() as keyboard:
        _watch(admin, screen, keyboard, where, interval, sort)


def _watch(
    admin: Admin, screen: Screen, keyboard: "Keyboard", where: str, interval: float, sort: str
) -> None:
    view = View()
    with Live(console=screen.console, screen=True, auto_refresh=False) as live:
        while not keyboard.quits(0.0):
            try:
                view = _look(admin, max(1, screen.console.height - FRAME), sort, keyboard)
                trouble = ""
            except StoreError as error:
                trouble = printable(str(error))
            live.update(_frame(view, where, trouble, screen.console.width), refresh=True)
            if keyboard.quits(interval):
                return


@dataclass
class View:
    """The result of one look at the store: the first rows, and the totals over all keys."""

    rows: list[KeyState] = field(default_factory=list)
    held: int = 0
    waiting: int = 0
    woken: int = 0
    later: int = 0

    def count(self, info: KeyState) -> None:
        self.held += info.state == "held"
        self.waiting += info.waiting
        self.woken += info.woken
        self.later += info.later

    @property
    def totals(self) -> str:
        later = f", {self.later} later" if self.later else ""
        return f"{self.held} held, {self.waiting} waiting, {self.woken} in flight{later}"

    def cells(self) -> list[list[str]]:
        now = time.time()
        return [lock_cells(info, now) for info in self.rows]


def _look(admin: Admin, most: int, sort: str, keyboard: "Keyboard") -> View:
    view = View()

    def counted() -> Iterator[KeyState]:
        for number, info in enumerate(admin.locks(), 1):
            view.count(info)
            yield info
            if not number % GLANCE and keyboard.quits(0.0):
                return

    rank = SORTERS[sort]
    view.rows = heapq.nsmallest(
        most, counted(), key=lambda info: (rank(info), info.since or float("inf"), info.key)
    )
    return view


def _frame(view: View, where: str, trouble: str, width: int) -> Group:
    clock = time.strftime("%H:%M:%S")
    head = Text.assemble((clock, "bold"), f"  {where}\n", view.totals, ("   q quits", "dim"))
    table = filled(LOCK_COLUMNS, view.cells(), width)
    return Group(Text(trouble, style="red"), head, table) if trouble else Group(head, table)


class Keyboard:
    """Reads single key presses; without a file descriptor, it reads none."""

    def __init__(self, source: int | None) -> None:
        self._source = source  # a file descriptor
        self._quits = False

    def quits(self, timeout: float) -> bool:
        """Wait up to *timeout* seconds; return whether q has been pressed by then."""
        until = time.monotonic() + timeout
        while not self._quits:
            left = max(0.0, until - time.monotonic())
            if self._source is None:
                time.sleep(left)
                return False
            if not select.select([self._source], [], [], left)[0]:
                return False
            self._quits = os.read(self._source, 1) in {b"q", b"Q", b""}
        return True


@contextlib.contextmanager
def _keyboard() -> Iterator[Keyboard]:
    """Read keys as they are pressed, and restore the terminal afterwards."""
    if not sys.stdin.isatty():
        yield Keyboard(None)
        return
    import termios  # does not exist on every platform
    import tty

    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        yield Keyboard(source)
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
