"""The examples do what they report, say so by their exit status, and clean up."""

from __future__ import annotations

import re
import signal

import pytest

from tests.acceptance.examples.scripts import EXAMPLES, TIMEOUT, left_running, run, start
from tests.waiting import wait_until

STORIES = ["at_once.py", "flood.py", "tenants.py", "long_import.py", "web.py", "web_async.py"]

AUDIT_TENANTS = """
from tenants import IMPORTS, TENANTS, Run, report

def runs(number=lambda n: n, begin=lambda t, n: n, length=1.0):
    return [
        Run(tenant, number(n), begin(t, n), begin(t, n) + length)
        for n in range(1, IMPORTS + 1)
        for t, tenant in enumerate(TENANTS)
    ]

assert report(runs())
assert not report(runs(length=1.1)), "two of one tenant at once"
assert not report(runs(number=lambda n: IMPORTS + 1 - n)), "in another order"
assert not report(runs(begin=lambda t, n: 10 * t + n)), "one after the other"
"""

AUDIT_AT_ONCE = """
from at_once import AT_ONCE, report
from calls import Call

def calls(tenant, number, begin=0.0):
    return [Call("api", tenant, begin + 0.1 * n, begin + 1.0) for n in range(number)]

assert report(calls("acme", AT_ONCE) + calls("bolt", 3))
assert not report(calls("acme", AT_ONCE + 1) + calls("bolt", 3)), "a sixth"
assert not report(calls("acme", 3) + calls("bolt", AT_ONCE + 1)), "a sixth of the other"
assert not report(calls("acme", AT_ONCE) + calls("bolt", 3, begin=1.0)), "one after the other"
"""

AUDIT_FLOOD = """
from calls import Call
from flood import AT_ONCE, CALLS, report

def starts(*tenants):
    queues = ("by arrival", "in lanes")
    return [Call(queue, each, at, at + 1) for queue in queues for at, each in enumerate(tenants)]

acme, bolt = (CALLS[tenant] * [tenant] for tenant in ("acme", "bolt"))
assert report(starts(*bolt, *acme), 0.0)
assert report(starts(*acme[: AT_ONCE], *bolt, *acme), 0.0)
assert not report(starts(*bolt[1:], *acme, *bolt[:1]), 0.0), "one call waits for the flood"
"""

AUDIT_IMPORT = """
from stage import make_database
from long_import import ROWS, SCHEMA, is_whole, last_row, StaleWriterError, write

db = make_database(SCHEMA)
for row in range(1, ROWS + 1):
    write(db, "prices", row, token=7 if row < 9 else 8)
assert is_whole(db, "prices")

try:
    write(db, "prices", ROWS + 1, token=7)
except StaleWriterError:
    assert last_row(db, "prices") == ROWS
    assert db.execute("SELECT * FROM refusals").fetchall() == [("prices", ROWS + 1, 7, 8)]
else:
    raise AssertionError("a stale token was accepted")
assert is_whole(db, "prices")

write(db, "prices", ROWS, token=8)
assert not is_whole(db, "prices"), "a row twice"
"""


def play(name, folder):
    """Run an example that has to be right and to leave nothing behind; return what it prints."""
    story = run(folder, EXAMPLES / name)
    assert story.returncode == 0, story.stdout + story.stderr
    assert story.stderr == ""
    assert list(folder.iterdir()) == []
    assert left_running(folder) == []
    return story.stdout


@pytest.mark.faults
def test_tenants_import_one_at_a_time_in_order_and_side_by_side(tmp_path):
    output = play("tenants.py", tmp_path)

    assert "6 tenants are locked: 30 imports are parked." in output
    assert re.findall(r"^(\w+) +1 2 3 4 5 +1$", output, re.MULTILINE) == [
        *("acme", "bolt", "cobalt", "dune", "elm", "fjord")
    ]
    assert output.endswith(
        "one at a time for each tenant: yes\n"
        "in the order they came: yes\n"
        "tenants side by side: yes\n"
    )


@pytest.mark.faults
def test_five_calls_of_a_tenant_run_at_once_and_those_of_another_at_the_same_time(tmp_path):
    output = play("at_once.py", tmp_path)

    counts = dict(re.findall(r"^(acme|bolt) +([0-9.]+)$", output, re.MULTILINE))
    assert max(counts["acme"]) == "5"
    assert max(counts["bolt"]) in "12345"
    assert output.endswith(
        "never a sixth call of one tenant: yes\nthe other tenant's go on meanwhile: yes\n"
    )


@pytest.mark.faults
def test_a_flood_of_one_tenant_delays_another_by_arrival_and_not_in_lanes(tmp_path):
    output = play("flood.py", tmp_path)

    (by_arrival, in_lanes) = (
        float(each) for each in re.findall(r" ([0-9.]+) s$", output, re.MULTILINE)
    )
    assert in_lanes < by_arrival
    assert output.endswith("the small tenant does not wait for the flood: yes\n")


@pytest.mark.faults
def test_an_import_that_loses_its_lock_is_taken_over(tmp_path):
    output = play("long_import.py", tmp_path)

    assert "LockLostError: lock 'import:prices'" in output
    assert output.count("each of the 60 rows was imported once, in order: yes") == 2
    (stood, taken_over, refused) = re.search(
        r"stands still at row (\d+).*went on at row (\d+).*refused row (\d+) from east",
        output,
        re.DOTALL,
    ).groups()
    assert int(stood) + 1 == int(taken_over) == int(refused)
    stale, highest = map(int, re.search(r"token (\d+) after (\d+)", output).groups())
    assert stale < highest


@pytest.mark.faults
def test_web_requests_wait_for_tasks_and_overwrite_nothing(tmp_path):
    output = play("web.py", tmp_path)

    answers = re.findall(r"POST /restock/(\w+)/10: (\d+)", output)
    assert answers[:2] == [("TEE", "503"), ("MUG", "200")]
    assert answers[-1] == ("TEE", "200")
    assert "110 TEEs before, 150 after; 150 is right" in output


@pytest.mark.faults
def test_a_fastapi_application_waits_for_tasks_without_threads_and_overwrites_nothing(tmp_path):
    output = play("web_async.py", tmp_path)

    answers = re.findall(r"POST /restock/(\w+)/10: (\d+)", output)
    assert answers == [("TEE", "503"), ("MUG", "200"), ("TEE", "200")]
    assert "110 TEEs before, 1050 after; 1050 is right" in output
    assert "0 requests were refused" in output
    (threads,) = re.findall(r"(\d+) threads asked", output)
    assert 0 < int(threads) <= 8


# Python drops an exception that is raised in a callback of its import system or a finalizer, and
# the story goes on; one that is raised while a class is made, it wraps until 3.12.
IGNORED_BY_PYTHON = "Exception ignored in", "Error calling __set_name__"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
@pytest.mark.parametrize("name", STORIES)
def test_a_story_that_is_stopped_leaves_nothing_behind(tmp_path, name, signum, status):
    for _ in range(3):
        with start(tmp_path, EXAMPLES / name) as story:
            assert story.stdout.readline() != ""  # its workers are at work
            story.send_signal(signum)
            output, errors = story.communicate(timeout=TIMEOUT)
        if not any(words in errors for words in IGNORED_BY_PYTHON):
            break

    assert (story.returncode, errors) == (status, ""), output
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not left_running(tmp_path), what=f"the end of all that {name} started")


@pytest.mark.parametrize(
    "audit",
    [AUDIT_AT_ONCE, AUDIT_FLOOD, AUDIT_TENANTS, AUDIT_IMPORT],
    ids=["at once", "flood", "tenants", "long import"],
)
def test_the_audit_finds_a_fault(tmp_path, audit):
    env = {"PYTHONPATH": str(EXAMPLES), "EXAMPLE_DB": str(tmp_path / "example.sqlite")}

    checked = run(tmp_path, "-c", audit, env=env)

    assert checked.returncode == 0, checked.stderr
