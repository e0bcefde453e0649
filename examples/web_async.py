"""
A FastAPI application and tasks change one stock under one lock: the request waits for the
task without a thread, and answers 503 if that takes too long.

    python examples/web_async.py

The exit status is 1 if a request or a task overwrote what another had written.
"""

import asyncio
import sys
import threading
import time
from contextlib import closing, contextmanager

import httpx
import uvicorn
from celery import Celery
from fastapi import FastAPI, HTTPException
from stage import make_database, open_database, perform, show, wait_until, workers

from celery_distlock import AsyncLock, LockedTask, install
from celery_distlock.errors import LockConflictError

PATIENCE = 0.5  # seconds that a request waits for the lock
LONG = 60.0  # seconds that a restocking of everything does
REQUESTS = 200  # at once
CHANGES = 20  # by tasks

SCHEMA = """
CREATE TABLE stock (sku TEXT PRIMARY KEY, units INTEGER, changes INTEGER);
CREATE TABLE counts (sku TEXT PRIMARY KEY, finished INTEGER);
INSERT INTO stock VALUES ('TEE', 100, 0), ('MUG', 100, 0);
"""

app = Celery("web_async")
install(app)

web = FastAPI()


@app.task(base=LockedTask, lock_key="stock:{sku}", ignore_result=True)
def sell(sku: str, quantity: int) -> None:
    change_stock(sku, -quantity)


@app.task(base=LockedTask, lock_key="stock:{sku}", ignore_result=True)
def take_stock(sku: str) -> None:
    """Count what is on the shelf, which takes until it is ended from outside."""
    with closing(open_database()) as db:
        db.execute("INSERT INTO counts VALUES (?, 0)", (sku,))
        wait_until(lambda: scalar(db, "SELECT finished FROM counts"), "the end of the count")


@web.post("/restock/{sku}/{quantity}")
async def restock(sku: str, quantity: int, patience: float = PATIENCE) -> int:
    try:
        async with AsyncLock(sell.key_for(sku), timeout=patience):
            return await asyncio.to_thread(change_stock, sku, quantity)
    except LockConflictError:
        raise HTTPException(503, "busy", {"Retry-After": "1"}) from None


def change_stock(sku: str, difference: int) -> int:
    """Read the stock, think, and write it: two that do so at once lose a change."""
    with closing(open_database()) as db:
        units = units_of(db, sku) + difference
        time.sleep(0.005)
        db.execute("UPDATE stock SET units = ?, changes = changes + 1 WHERE sku = ?", (units, sku))
    return units


@contextmanager
def serving():
    """Serve `web` on a free port of this machine; return its URL."""
    server = uvicorn.Server(uvicorn.Config(web, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the web server")
        (listener,) = server.servers
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def story(folder) -> bool:
    with (
        closing(make_database(SCHEMA)) as db,
        workers("web_async", ("till",), folder, processes=2),
        serving() as url,
    ):
        return all([task_holds_the_lock(db, url), asyncio.run(all_at_once(db, url))])


def task_holds_the_lock(db, url: str) -> bool:
    take_stock.delay("TEE")
    wait_until(lambda: scalar(db, "SELECT count(*) FROM counts"), "the count to begin")
    show("A task counts the TEEs, and holds stock:TEE.")
    busy, other = post(url, "TEE", 10), post(url, "MUG", 10)
    db.execute("UPDATE counts SET finished = 1")
    show("The count is finished.")
    free = post(url, "TEE", 10, patience=LONG)
    return (busy, other, free) == (503, 200, 200)


def post(url: str, sku: str, quantity: int, patience: float = PATIENCE) -> int:
    """Post a request, and return the status of its answer."""
    asked_at = time.monotonic()
    path = f"/restock/{sku}/{quantity}"
    answer = httpx.post(url + path, params={"patience": patience}, timeout=LONG)
    show(f"  POST {path}: {answer.status_code}, after {time.monotonic() - asked_at:.2f} s")
    return answer.status_code


async def all_at_once(db, url: str) -> bool:
    units, changes = units_of(db, "TEE"), count_changes(db)
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=LONG, limits=limits) as browser:
        path = f"/restock/TEE/5?patience={LONG}"
        answers = [asyncio.create_task(browser.post(path)) for _ in range(REQUESTS)]
        for _ in range(CHANGES):
            await asyncio.to_thread(sell.delay, "TEE", 3)
        threads = 0
        while not all(each.done() for each in answers):
            threads = max(threads, waiting_threads())
            await asyncio.sleep(0.02)
        refused = sum(each.result().status_code != 200 for each in answers)
    await asyncio.to_thread(
        wait_until, lambda: count_changes_now() == changes + REQUESTS + CHANGES, "all changes"
    )
    right = units + 5 * REQUESTS - 3 * CHANGES
    show(f"{REQUESTS} requests add 5 TEEs each, {CHANGES} tasks sell 3, all at once.")
    show(f"  {refused} requests were refused; {threads} threads asked for the lock")
    show(f"  {units} TEEs before, {units_of(db, 'TEE')} after; {right} is right")
    return units_of(db, "TEE") == right and not refused


def waiting_threads() -> int:
    """Count the threads that work for locks."""
    return sum(thread.name.startswith("distlock-requests") for thread in threading.enumerate())


def units_of(db, sku: str) -> int:
    return scalar(db, "SELECT units FROM stock WHERE sku = ?", sku)


def count_changes(db) -> int:
    return scalar(db, "SELECT changes FROM stock WHERE sku = 'TEE'")


def count_changes_now() -> int:
    with closing(open_database()) as db:
        return count_changes(db)


def scalar(db, query: str, *values):
    return db.execute(query, values).fetchone()[0]


if __name__ == "__main__":
    sys.exit(perform(story))
