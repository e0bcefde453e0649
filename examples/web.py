"""
Web requests and tasks change one stock under one lock: the request waits for the
task, and answers 503 if that takes too long.

    python examples/web.py

The exit status is 1 if a request or a task overwrote what another had written.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from celery import Celery
from stage import make_database, open_database, perform, show, wait_until, workers

from celery_distlock import Lock, LockedTask, install

PATIENCE = 0.5  # seconds that a request waits for the lock
TRIES = 60  # of one request, at most
CHANGES = 20  # by requests, and as many by tasks

SCHEMA = """
CREATE TABLE stock (sku TEXT PRIMARY KEY, units INTEGER, changes INTEGER);
CREATE TABLE counts (sku TEXT PRIMARY KEY, finished INTEGER);
INSERT INTO stock VALUES ('TEE', 100, 0), ('MUG', 100, 0);
"""

app = Celery("web")
install(app)


@app.task(base=LockedTask, lock_key="stock:{sku}", ignore_result=True)
def sell(sku: str, quantity: int) -> None:
    change_stock(sku, -quantity)


@app.task(base=LockedTask, lock_key="stock:{sku}", ignore_result=True)
def take_stock(sku: str) -> None:
    """Count what is on the shelf, which takes until it is ended from outside."""
    with closing(open_database()) as db:
        db.execute("INSERT INTO counts VALUES (?, 0)", (sku,))
        wait_until(lambda: scalar(db, "SELECT finished FROM counts"), "the end of the count")


def change_stock(sku: str, difference: int) -> int:
    """Read the stock, think, and write it: two that do so at once lose a change."""
    with closing(open_database()) as db:
        units = units_of(db, sku) + difference
        time.sleep(0.005)
        db.execute("UPDATE stock SET units = ?, changes = changes + 1 WHERE sku = ?", (units, sku))
    return units


def web(environ, start_response):
    """Answer ``/restock/SKU/QUANTITY``."""
    _, _, sku, quantity = environ["PATH_INFO"].split("/")
    headers = [("Content-Type", "text/plain")]
    lock = Lock(sell.key_for(sku))
    if not lock.acquire(timeout=PATIENCE):
        start_response("503 Service Unavailable", [*headers, ("Retry-After", "1")])
        return [b"busy"]
    try:
        units = change_stock(sku, int(quantity))
    finally:
        lock.release()
    start_response("200 OK", headers)
    return [str(units).encode()]


class ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class QuietHandler(WSGIRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def serving():
    """Serve `web` on a free port of this machine."""
    with make_server("127.0.0.1", 0, web, ThreadingServer, QuietHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def story(folder) -> bool:
    with (
        closing(make_database(SCHEMA)) as db,
        workers("web", ("till",), folder, processes=2),
        serving() as port,
    ):
        return all([task_holds_the_lock(db, port), all_at_once(db, port)])


def task_holds_the_lock(db, port: int) -> bool:
    take_stock.delay("TEE")
    wait_until(lambda: scalar(db, "SELECT count(*) FROM counts"), "the count to begin")
    show("A task counts the TEEs, and holds stock:TEE.")
    busy, other = restock(port, "TEE", 10), restock(port, "MUG", 10)
    db.execute("UPDATE counts SET finished = 1")
    show("The count is finished.")
    free = until_served(port, "TEE", 10)
    return (busy, other, free[-1]) == (503, 200, 200)


def all_at_once(db, port: int) -> bool:
    units, changes = units_of(db, "TEE"), count_changes(db)
    with ThreadPoolExecutor(CHANGES) as browsers:
        answers = [
            browsers.submit(until_served, port, "TEE", 5, quiet=True) for _ in range(CHANGES)
        ]
        for _ in range(CHANGES):
            sell.delay("TEE", 3)
        refused = sum(answer.result().count(503) for answer in answers)
    wait_until(lambda: count_changes(db) == changes + 2 * CHANGES, "all changes")
    right = units + 5 * CHANGES - 3 * CHANGES
    show(f"{CHANGES} requests add 5 TEEs each, {CHANGES} tasks sell 3, all at once.")
    show(f"  {refused} requests had to come again")
    show(f"  {units} TEEs before, {units_of(db, 'TEE')} after; {right} is right")
    return units_of(db, "TEE") == right


def until_served(port: int, sku: str, quantity: int, *, quiet: bool = False) -> list[int]:
    """Restock, and come again as long as the answer is 503; return all the answers."""
    answers = [restock(port, sku, quantity, quiet=quiet)]
    while answers[-1] == 503 and len(answers) < TRIES:
        answers.append(restock(port, sku, quantity, quiet=quiet))
    return answers


def restock(port: int, sku: str, quantity: int, *, quiet: bool = False) -> int:
    """Post a request, and return the status of its answer."""
    asked_at = time.monotonic()
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as browser:
        browser.request("POST", f"/restock/{sku}/{quantity}")
        response = browser.getresponse()
        body = response.read().decode()
    if not quiet:
        seconds = time.monotonic() - asked_at
        show(f"  POST /restock/{sku}/{quantity}: {response.status} {body}, after {seconds:.2f} s")
    return response.status


def units_of(db, sku: str) -> int:
    return scalar(db, "SELECT units FROM stock WHERE sku = ?", sku)


def count_changes(db) -> int:
    return scalar(db, "SELECT changes FROM stock WHERE sku = 'TEE'")


def scalar(db, query: str, *values):
    return db.execute(query, values).fetchone()[0]


if __name__ == "__main__":
    sys.exit(perform(story))
