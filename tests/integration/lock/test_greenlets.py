"""Locks in a process that gevent or eventlet has patched after it had imported, and used, them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import redis
from redis.utils import HIREDIS_AVAILABLE

from tests.integration.lock.processes import run_program

# As a server does that loads its application before it forks.
PROGRAM = """
import faulthandler, sys, warnings
warnings.simplefilter("ignore")
faulthandler.dump_traceback_later(30, exit=True)
from celery import Celery
from celery_distlock import Lock, LockedTask, install

url, prefix, library, same_key = sys.argv[1:]
app = Celery("shop", broker="memory://")
app.conf.update(distlock_url=url, distlock_prefix=prefix)
install(app)

@app.task(base=LockedTask, lock_key="{key}", bind=True)
def work(self, key):
    counted.append(key)
    here = counted.count(key)
    time.sleep(0.01)
    counted.remove(key)
    return here, self.lock.keys

assert not Lock("k").locked()

if library == "gevent":
    from gevent import monkey
    monkey.patch_all()
else:
    import eventlet
    eventlet.monkey_patch()

import os, threading, time

counted, seen = [], []
threads = [
    threading.Thread(target=lambda key: seen.append((key, work(key))), args=(key,))
    for key in ("kkkkk" if same_key else "abcde")
]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(seen) == 5, seen
assert all(found == (1, (key,)) for key, found in seen), seen
os._exit(0)  # without what eventlet cannot end
"""


@pytest.mark.parametrize("same_key", ["same key", ""])
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_greenlets_are_owners_each_however_late_the_process_was_patched(
    redis_url, prefix, library, same_key
):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "eventlet" and HIREDIS_AVAILABLE and redis.VERSION >= (8,):
        pytest.skip("redis-py has found select.poll, which eventlet then removes")
    run_program(PROGRAM, redis_url, prefix, library, same_key)
