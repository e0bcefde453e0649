"""
A shop that sells its stock in Celery tasks, with a lock and without.

Both tasks do the same: read how many units are left, charge the customer,
write what is left now. Two workers that do so at once for one product sell
the same units twice, unless the product is locked from the read to the write.

    celery -A shop worker
"""

import os
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from books import open_books
from celery import Celery
from celery.signals import heartbeat_sent

from celery_distlock import LockedTask, install

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "redis://localhost:6379/0"))
app.conf.distlock_url = os.environ.get("SHOP_LOCKS")  # None: where the broker is
install(app)


@heartbeat_sent.connect
def show_life(**_) -> None:
    """Show a liveness probe that this worker's main process is at work."""
    if heartbeat := os.environ.get("SHOP_HEARTBEAT"):
        Path(heartbeat).touch()


@app.task(ignore_result=True, acks_late=True, reject_on_worker_lost=True)
def reserve_naive(order_id: int, sku: str, quantity: int) -> None:
    decide(order_id, sku, quantity)


# Late acknowledgement brings an order back whose worker has died; the lock
# lets it in again only once the dead one is known to be out.
@app.task(
    base=LockedTask,
    lock_key="stock:{sku}",
    lock_lease=4.0,
    ignore_result=True,
    acks_late=True,
    reject_on_worker_lost=True,
)
def reserve(order_id: int, sku: str, quantity: int) -> None:
    decide(order_id, sku, quantity)


def decide(order_id: int, sku: str, quantity: int) -> None:
    """Sell the order if the stock suffices, refuse it if not; once."""
    with closing(open_books(os.environ["SHOP_DB"])) as db:
        if is_decided(db, order_id):
            return
        began_at = step_up(db, order_id, sku)

        left = units_left(db, sku)
        sold = left >= quantity
        if sold:
            charge_customer()

        with db:
            db.execute("BEGIN IMMEDIATE")
            if sold:
                db.execute(
                    "UPDATE stock SET units_left = ? WHERE sku = ?",
                    (left - quantity, sku),
                )
            db.execute(
                "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?)",
                (order_id, sku, quantity, sold, began_at, time.monotonic()),
            )
            db.execute("DELETE FROM at_the_till WHERE pid = ?", (os.getpid(),))


def is_decided(db: sqlite3.Connection, order_id: int) -> bool:
    query = "SELECT 1 FROM decisions WHERE order_id = ?"
    return db.execute(query, (order_id,)).fetchone() is not None


def units_left(db: sqlite3.Connection, sku: str) -> int:
    query = "SELECT units_left FROM stock WHERE sku = ?"
    return db.execute(query, (sku,)).fetchone()[0]


def charge_customer() -> None:
    """Take as long as a payment service in the same data centre."""
    time.sleep(random.uniform(0.002, 0.005))


def step_up(db: sqlite3.Connection, order_id: int, sku: str) -> float:
    """Note which process is at work on what; the demo kills one of them."""
    began_at = time.monotonic()
    db.execute(
        "INSERT OR REPLACE INTO at_the_till VALUES (?, ?, ?, ?)",
        (os.getpid(), order_id, sku, began_at),
    )
    return began_at
