from __future__ import annotations

import logging
from contextvars import ContextVar
from threading import Thread

import pytest

from celery_distlock.errors import LockConflictError, LockLostError
from celery_distlock.keys import slot_name
from celery_distlock.lock import Lock
from celery_distlock.naming import SHOWN_LENGTH, holder_name, shown
from celery_distlock.runtime.reporting import Report
from celery_distlock.stores import Reply, Status, open_store
from celery_distlock.stores.holders import Holder
from celery_distlock.stores.identities import new_owner

LONG = "customer:" + "x" * 1_000_000


def test_a_short_name_is_shown_as_it_is():
    for name in ("", "stock:42", "ä€😀", "x" * SHOWN_LENGTH):
        assert shown(name) == name


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("vm|12|shop.reserve[4d65]|ab1", "shop.reserve[4d65] on vm, process 12"),
        ("web%7C1|7|MainThread|ab1", "thread MainThread on web|1, process 7"),
        ("parked:4d65:0:1:0", "task 4d65"),
        ("of another form", "of another form"),
        ("a|b", "a|b"),
    ],
)
def test_a_holder_is_named_by_its_task_or_thread_host_and_process(owner, name):
    assert holder_name(owner) == name


def test_a_holder_is_named_as_the_command_line_names_it():
    owner = new_owner("shop.reserve[4d65]")
    assert holder_name(owner) == str(Holder.of(owner))
    owner = new_owner("MainThread")
    assert holder_name(owner) == str(Holder.of(owner))


def test_a_long_name_is_cut_and_differs_from_others_by_its_digest():
    assert len(shown(LONG)) == SHOWN_LENGTH
    assert shown(LONG).startswith("customer:xxx")
    assert shown(LONG) != shown(LONG + "x")
    digest = shown(LONG).rpartition("#")[2]
    assert f"#{digest}" in slot_name(LONG)  # by which its records are found


def test_what_is_no_utf8_can_be_written_down():
    assert shown("\udcff").encode() == b"\\udcff"


def test_errors_are_short_and_have_the_whole_key():
    for error in (LockConflictError(LONG, LONG), LockLostError(LONG)):
        assert len(str(error)) < 600
        assert error.key == LONG


def test_a_lock_is_shown_short():
    assert len(repr(Lock(LONG, store="memory://"))) < 300


def test_a_log_line_of_a_long_key_is_short(caplog):
    class Task:
        name = "shop.reserve"

    caplog.set_level("DEBUG")
    report = Report(Task(), "id", open_store("memory://"))
    report.info("parked: {key!r} is held by {holder}", key=LONG, holder=LONG)

    (record,) = (record for record in caplog.records if hasattr(record, "lock_key"))
    assert len(record.getMessage()) < 600
    assert len(record.lock_key) == SHOWN_LENGTH


def test_a_loss_that_another_thread_reports_is_logged_in_the_context_of_the_task():
    class Task:
        name = "shop.reserve"

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((trace.get(), record.getMessage()))

    trace: ContextVar[str] = ContextVar("trace", default="of the thread")
    seen: list[tuple[str, str]] = []
    logger, handler = logging.getLogger("celery_distlock.tasks"), Seen()
    before = trace.set("of the task")
    report = Report(Task(), "id", open_store("memory://"))
    trace.reset(before)
    logger.addHandler(handler)
    try:
        facts = {"key": "k", "token": 7, "reason": "it is gone"}
        thread = Thread(target=report.event, args=("lock_lost",), kwargs=facts)
        thread.start()
        thread.join()
    finally:
        logger.removeHandler(handler)

    assert seen == [
        ("of the task", "Task shop.reserve[id] lost its lock 'k' (token 7): it is gone")
    ]


def test_a_task_that_is_parked_behind_one_without_the_key_yet_says_so(caplog):
    class Task:
        name = "shop.reserve"

    caplog.set_level("INFO")
    report = Report(Task(), "id", open_store("memory://"))
    report.parking("k", Reply(Status.PARKED, 0.0, holder="a"))
    report.parking("k", Reply(Status.PARKED, 0.0), behind="f[id] of this worker")
    report.parking("k", Reply(Status.PARKED, 0.0, holder="a"), begun=True)

    held, waited_for, begun = (record.getMessage() for record in caplog.records)
    assert held.endswith("parked: 'k' is held by a; first in line")
    assert waited_for.endswith("parked: 'k' goes first to f[id] of this worker; first in line")
    assert begun.endswith("; it runs when its turn comes, Celery ignores this attempt only")


def test_a_task_that_finds_a_paused_key_waits_for_no_holder(caplog):
    class Task:
        name = "shop.reserve"

    caplog.set_level("INFO")
    report = Report(Task(), "id", open_store("memory://"))
    report.parking("k", Reply(Status.PARKED, 0.0), begun=True)
    report.conflict_ended("skipped", "k", Reply(Status.BUSY, 0.0))

    parked, skipped = (record.getMessage() for record in caplog.records)
    assert "parked: 'k' admits no holder for now; first in line;" in parked
    assert skipped.endswith("skipped: 'k' admits no holder for now")


def test_a_task_that_waits_for_its_rate_waits_for_no_holder(caplog):
    class Task:
        name = "shop.call"

    caplog.set_level("INFO")
    report = Report(Task(), "id", open_store("memory://"))
    first = Reply(Status.PARKED, 0.0, holder="a", due=0.44)
    report.parking("k", first, rated=True)
    report.parking("k", first)
    report.parking("k", Reply(Status.PARKED, 0.0, holder="a", place=2), rated=True)
    report.parking("k", Reply(Status.PARKED, 0.0, place=2))
    report.conflict_ended("is sent again in {delay:.1f} s", "k", first, delay=1.0)
    report.conflict_ended("skipped", "k", Reply(Status.BUSY, 0.0, holder="a"))

    logged = [record.getMessage().removeprefix("Task shop.call[id] ") for record in caplog.records]
    assert logged == [
        "parked: 'k' opens by its rate in 0.4 s; first in line",
        "parked: 'k' opens in 0.4 s; first in line",
        "parked: 'k' has earlier waiters, and a rate; 2 ahead of it",
        "parked: 'k' has earlier waiters; 2 ahead of it",
        "is sent again in 1.0 s: 'k' opens in 0.4 s",
        "skipped: 'k' is held by a",
    ]
    assert caplog.records[4].lock_delay == 1.0
