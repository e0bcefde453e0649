"""A lock without a store is in the current app's."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
from celery import Celery
from celery_distlock import Lock, install
from celery_distlock.errors import ConfigurationError

def app(name):
    made = Celery(name)
    made.conf.update(distlock_url=sys.argv[1], distlock_prefix=sys.argv[2] + name)
    install(made)
    return made

def elsewhere():
    with Lock("k") as lease:
        held.append(lease.held)

held, first = [], app("first")
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
assert held == [True]

second = app("second")
def nowhere():
    try:
        Lock("k").acquire()
    except ConfigurationError as error:
        held.append(str(error))
thread = threading.Thread(target=nowhere)
thread.start()
thread.join()
assert "no current app" in held[1], held

def there():
    first.set_current()
    elsewhere()
thread = threading.Thread(target=there)
thread.start()
thread.join()
assert held[2:] == [True]
"""


def test_every_thread_finds_the_only_app_and_is_told_of_several(redis_url, prefix):
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, redis_url, prefix],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert program.returncode == 0, program.stderr
