"""The page about stores shows the example's files, and the example keeps what it promises."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from celery_distlock.testing import die_with_parent

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "howto" / "write_a_store.md").read_text()
SHOWN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

sys.path.append(str(EXAMPLES))
from test_sqlite_store import TestSQLiteStore  # noqa: E402, F401  # runs here too

sys.path.remove(str(EXAMPLES))

ACTOR = """
import sys, time
from pathlib import Path
from celery_distlock import Lock
from sqlite_store import SQLiteStore

folder, lease, rounds, pause = Path(sys.argv[1]), *map(float, sys.argv[2:])
lock = Lock("counter", lease=lease, store=SQLiteStore(f"sqlite://{folder}/locks"))
counter = folder / "counter"
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(rounds)):
    with lock as held:
        count, last = map(int, counter.read_text().split())
        assert held.token > last
        print("holds", flush=True)
        time.sleep(pause)  # the other one would read the same count now
        counter.write_text(f"{count + 1} {held.token}")
"""


@pytest.fixture
def actor(tmp_path):
    """Starts processes that add to a counter under the lock, on request."""
    (tmp_path / "counter").write_text("0 0")
    started = []

    def start(lease=30.0, rounds=1, pause=0.0):
        arguments = [str(tmp_path), str(lease), str(rounds), str(pause)]
        process = subprocess.Popen(
            die_with_parent([sys.executable, "-c", ACTOR, *arguments]),
            cwd=EXAMPLES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_never_hold_the_lock_at_once(actor, tmp_path):
    both = [actor(rounds=20, pause=0.005) for _ in range(2)]
    for process in both:
        go(process)

    for process in both:
        process.communicate(timeout=60)

    assert [process.returncode for process in both] == [0, 0]
    assert (tmp_path / "counter").read_text().split()[0] == "40"


def test_the_lock_of_a_process_that_was_killed_is_free_after_its_lease(actor, tmp_path):
    dead, heir = actor(lease=1.0, pause=60.0), actor()
    go(dead)
    assert dead.stdout.readline() == "holds\n"
    go(heir)

    dead.send_signal(signal.SIGKILL)

    heir.communicate(timeout=60)
    assert heir.returncode == 0
    assert (tmp_path / "counter").read_text().split()[0] == "1"


@pytest.mark.parametrize("name", ["sqlite_store.py", "test_sqlite_store.py"])
def test_the_page_shows_the_file(name):
    assert (EXAMPLES / name).read_text() in SHOWN


def test_the_page_shows_how_to_use_it(tmp_path, monkeypatch):
    (usage,) = (code for code in SHOWN if "with Lock" in code and "class " not in code)
    monkeypatch.syspath_prepend(EXAMPLES)
    names: dict = {}

    exec(usage.replace("/var/lib/shop", str(tmp_path)), names)

    assert (tmp_path / "locks").exists()
    assert not names["lease"].held


def test_the_page_names_every_ability_and_every_method():
    from celery_distlock.stores import Ability, CountingStore, ListingStore, QueueStore, Store

    interfaces = {Store, ListingStore, CountingStore, QueueStore}
    names = {name for each in interfaces for name in vars(each) if not name.startswith("_")}
    names |= {each.__name__ for each in interfaces} | {ability.name for ability in Ability}

    assert {name for name in names if f"`{name}" not in PAGE} == set()
