"""Threads of our own."""

from __future__ import annotations

import contextvars
import threading

from celery_distlock.process.threads import DaemonThread

TRACE: contextvars.ContextVar[str] = contextvars.ContextVar("TRACE", default="none")


def test_a_thread_is_not_a_part_of_the_trace_in_which_it_starts(monkeypatch):
    seen, start = [], threading.Thread.start

    def traced(thread):
        """Hand on the caller's context, as instrumentation does."""
        run, thread.run = thread.run, lambda: context.run(run)
        context = contextvars.copy_context()
        start(thread)

    def note():
        seen.append(TRACE.get())

    monkeypatch.setattr(threading.Thread, "start", traced)
    TRACE.set("first task")
    for thread in (threading.Thread(target=note), DaemonThread("ours", note)):
        thread.start()
        thread.join()

    assert seen == ["first task", "none"]
