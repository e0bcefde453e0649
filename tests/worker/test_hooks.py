"""The page that says which hooks and signals run under the lock, row by row, with a worker."""

from __future__ import annotations

import re

import pytest

from tests.workers import ROOT

APP = "tests.apps.hooks"
WORKERS = [{"concurrency": 3}]
PAGE = (ROOT / "docs/explanation/under_the_lock.md").read_text()

COLUMNS = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
ROWS = {
    head.replace('"', "").replace("`", ""): [re.findall(r"`(.+?)`", cell) for cell in cells]
    for head, *cells in COLUMNS
    if "---" not in head
}
WAITS = {  # the hook after which the holder goes, or None: the task waits in its process then
    "requeue, parked on arrival": "task_parked",
    "requeue, parked in the pool": "task_postrun",
    "retry": "task_postrun",
    "wait": None,
    "skip": "task_postrun",
    "fail": "task_postrun",
}
TASKS = {
    "requeue, parked on arrival": "requeue",
    "requeue, parked in the pool": "requeue in the pool",
}


def noted(site, result, expected):
    """Wait for as many notes of hooks and signals as are *expected*, and return them in order."""
    return site.journal.wait(f"noted:{result.id}", sum(map(len, expected)), timeout=60)


def split(notes):
    """Return what came before the key, under it, and after it."""
    names = [what for what, _ in notes]
    held = [number for number, (_, state) in enumerate(notes) if state == "held"]
    if not held:
        return [names, [], []]
    first, last = held[0], held[-1] + 1
    assert len(held) == last - first
    return [names[:first], names[first:last], names[last:]]


@pytest.mark.parametrize("end", ["returns", "fails", "retries"])
def test_a_task_whose_key_is_free(site, key, end):
    expected = ROWS[end]
    link = site.tasks.linked.si().set(queue="links")

    result = site.tasks.TASKS["requeue"].apply_async((key, end), link=link)

    assert split(noted(site, result, expected)) == expected


@pytest.mark.parametrize("policy", WAITS)
def test_a_task_whose_key_is_taken(site, key, policy):
    expected = ROWS[policy]
    site.tasks.stay.delay(key)
    site.journal.wait(f"begun:{key}")
    result = site.tasks.TASKS[TASKS.get(policy, policy)].delay(key)
    if WAITS[policy] is None:
        site.wait_queued(key)
    else:
        wait_for(site, result, WAITS[policy])
    received_early = site.journal.read(f"received:{result.id}")
    site.journal.open(key)

    notes = noted(site, result, expected)

    assert split(notes) == expected
    attempts = sum(row.count("before_start") for row in expected)
    ends = site.journal.read(f"ends:{result.id}")
    assert ends == ["IGNORED"] * (attempts - 1) + ["FAILURE" if policy == "fail" else "SUCCESS"]
    assert bool(received_early) == (policy != "requeue, parked on arrival")
    if "task_woken" in expected[1]:
        assert notes[len(expected[0]) - 1] == ["before_start", "reserved"]


def wait_for(site, result, what):
    count = 1
    while what not in [each for each, _ in site.journal.wait(f"noted:{result.id}", count)]:
        count += 1


def test_every_row_is_tried():
    heads = {"end of the task", "policy"}
    assert set(ROWS) - heads == {"returns", "fails", "retries", *WAITS}
