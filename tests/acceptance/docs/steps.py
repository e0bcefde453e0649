"""
Runs one locked task in a real worker, and prints which of our functions it calls, in their order.

``python -m tests.acceptance.docs.steps redis://... free`` prints a JSON list of functions, as
``file:function``, and of scripts, each where it was called first. With ``held`` another task holds
the key: so the task is parked, and is woken when that one ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

import celery_distlock
from celery_distlock import LockedTask, install, signals

ROOT = Path(celery_distlock.__file__).parent
PATIENCE = 60.0  # seconds for each step
UNTIL_IT_ENDS: dict[str, Any] = {"timeout": PATIENCE, "disable_sync_subtasks": False}


class Recorder:
    """What this process calls of our code while it is `on`, each where it is called first."""

    def __init__(self) -> None:
        self.on = False
        self.steps: list[str] = []

    def __call__(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if not self.on or event != "call" or not code.co_filename.startswith(f"{ROOT}{os.sep}"):
            return
        self._note(f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{code.co_qualname}")
        if code.co_name == "script_call":
            self._note(f"stores/redis/scripts/{frame.f_locals['script'].name}.lua")

    def _note(self, step: str) -> None:
        if step not in self.steps:
            self.steps.append(step)


recorder = Recorder()
app = Celery("steps")
begun, may_end = threading.Event(), threading.Event()


@app.task(base=LockedTask, lock_key="{name}")
def work(name: str, *, waits: bool = False) -> None:
    if waits:
        begun.set()
        assert may_end.wait(PATIENCE)


def drive(key: str, *, held: bool) -> None:
    """Run what is recorded; then end the worker."""
    parked = threading.Event()

    def note_parked(**_: object) -> None:
        parked.set()

    signals.task_parked.connect(note_parked)
    work.delay(f"{key}-before").get(**UNTIL_IT_ENDS)  # connections are made, scripts are known
    if held:
        first = work.delay(key, waits=True)
        assert begun.wait(PATIENCE)
    recorder.on = True
    result = work.delay(key)
    if held:
        assert parked.wait(PATIENCE)
        may_end.set()
        first.get(**UNTIL_IT_ENDS)
    result.get(**UNTIL_IT_ENDS)
    recorder.on = False
    sys.stdout.write(f"{json.dumps(recorder.steps)}\n")
    sys.stdout.flush()


def main(url: str, kind: str) -> None:
    key = uuid.uuid4().hex
    app.conf.update(
        broker_url=url,
        result_backend=url,
        distlock_url=url,
        distlock_prefix=f"steps-{key}",
        task_default_queue=f"steps-{key}",
        distlock_sweep_interval=3600,  # for its lock is acquired like any other
        worker_redirect_stdouts=False,
    )
    install(app)

    def run(**_: object) -> None:
        def drive_and_end() -> None:
            try:
                drive(key, held=kind == "held")
            finally:
                may_end.set()
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=drive_and_end, name="driver").start()

    worker_ready.connect(run, weak=False)
    sys.setprofile(recorder)
    threading.setprofile(recorder)
    app.worker_main(["worker", "--pool", "threads", "-c", "2", "--without-mingle", "-l", "WARNING"])


if __name__ == "__main__":
    main(*sys.argv[1:])
