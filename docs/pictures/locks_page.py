"""
Take the picture of ``celery locks web``: of real workers, at work on one server.

    python docs/pictures/locks_page.py        # writes locks_page.png next to this file

Needs Chromium and the extra ``dev``.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from celery import Celery
from playwright.sync_api import sync_playwright

from celery_distlock import LockedTask, install
from celery_distlock.ops.admin import Admin
from celery_distlock.testing import EmbeddedServer, die_with_parent

HERE = Path(__file__).parent
PICTURE = HERE / "locks_page.png"
LONG = 600.0  # seconds; every task is stopped before

socket.gethostname = lambda: os.environ.get("PICTURED_HOST", "web-1")  # not this machine's name

url = os.environ.get("PICTURED_STORE", "memory://")
app = Celery("shop", broker=url, backend=url)
install(app)


@app.task(base=LockedTask, lock_key="stock:{sku}", name="shop.reserve")
def reserve(sku: str, order: int) -> None:
    time.sleep(LONG)


@app.task(base=LockedTask, lock_key="import:{account}", name="catalog.import_prices")
def import_prices(account: str) -> None:
    time.sleep(LONG)


@app.task(base=LockedTask, lock_key="invoice:{number}", name="billing.send_invoice")
def send_invoice(number: int) -> None:
    time.sleep(LONG)


@app.task(base=LockedTask, lock_key="{task}", name="reports.nightly")
def nightly() -> None:
    time.sleep(LONG)


def main() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        os.environ["PICTURED_STORE"] = app.conf.broker_url = app.conf.result_backend = server.url
        for host in ("worker-1", "worker-2"):
            begin(stack, "worker", "--concurrency", "5", host=host, stdout=subprocess.DEVNULL)
        send()
        page = begin(stack, "locks", "web", "--port", "0", stdout=subprocess.PIPE)
        address = re.search(r"http://\S+", page.stdout.readline().decode())[0]
        take(address)
    print(PICTURE, PICTURE.stat().st_size, "bytes")


def begin(stack: ExitStack, *command: str, host: str = "web-1", **options) -> subprocess.Popen:
    """Start a command of Celery's on *host*, until the end of *stack*."""
    command = [sys.executable, "-m", "celery", "-A", "locks_page", *command]
    environment = os.environ | {"PICTURED_HOST": host, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        die_with_parent(command), cwd=HERE, env=environment, stderr=subprocess.DEVNULL, **options
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def send() -> None:
    """Send what the page shall show, the oldest first; return when it is held and parked."""
    nightly.delay()
    wait_seen(held=1)
    time.sleep(7)
    import_prices.delay("acme")
    import_prices.delay("acme")
    wait_seen(held=2)
    time.sleep(4)
    for order in range(4711, 4715):
        reserve.delay("RING-L", order)
    send_invoice.delay(20417)
    wait_seen(held=4, waiting=4)
    time.sleep(3)
    reserve.delay("TANK-S", 4715)
    wait_seen(held=5, waiting=4)


def wait_seen(held: int, waiting: int = 0) -> None:
    """Wait until *held* keys are held and *waiting* tasks are parked."""
    deadline = time.monotonic() + 60.0
    admin = Admin(app)
    while True:
        rows = list(admin.locks())
        if (len(rows), sum(row.waiting for row in rows)) >= (held, waiting):
            return
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)


def take(address: str) -> None:
    """Open the page with one key's queue, and take its picture."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1360, "height": 720})
        tab.goto(address)
        tab.get_by_text("stock:RING-L").first.click()
        tab.get_by_text("parked").nth(2).wait_for()
        tab.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
