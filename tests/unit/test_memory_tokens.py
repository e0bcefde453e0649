"""The fencing tokens of locks in memory."""

from __future__ import annotations

import threading
import time

from celery_distlock.stores import memory_key


def test_a_signal_s_handler_may_have_one_while_its_thread_makes_one(monkeypatch):
    now, made = time.time_ns(), []

    def interrupted() -> int:
        monkeypatch.setattr(memory_key.time, "time_ns", lambda: now)
        made.append(memory_key._next_token())
        return now

    def make() -> None:
        made.append(memory_key._next_token())

    monkeypatch.setattr(memory_key.time, "time_ns", interrupted)
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(30)

    assert not thread.is_alive()
    assert made == sorted(set(made))
    assert len(made) == 2
