from __future__ import annotations

import logging
import threading

from celery_distlock.process.background import Background


def test_a_signal_s_handler_may_submit_while_its_thread_starts_the_background_one(monkeypatch):
    background, done = Background("test-background", "failed"), []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "test-background":
            monkeypatch.undo()
            background.submit(lambda: done.append("handler"))  # where Python calls the handler

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    submitter = threading.Thread(
        target=background.submit, args=(lambda: done.append("thread"),), daemon=True
    )
    submitter.start()
    submitter.join(30)

    assert not submitter.is_alive()
    background.finish(30)
    assert done == ["handler", "thread"]


def test_what_a_log_s_handler_raises_ends_no_background_thread(monkeypatch):
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log's server is unreachable")

    logger, done = logging.getLogger("celery_distlock.process.background"), []
    monkeypatch.setattr(logger, "handlers", [Broken()])
    background = Background("test-background", "failed")

    background.submit(lambda: 1 / 0)
    background.submit(lambda: done.append("next"))

    background.finish(30)
    assert done == ["next"]
