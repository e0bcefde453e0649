"""Under gevent the nodes' threads are greenlets, and a node that hangs stops none of the others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.history.store_actor import ROOT

SOURCE = """
from gevent import monkey; monkey.patch_all()
import sys, threading, time
from celery_distlock import Lock
from celery_distlock.stores.redis.redlock import RedlockStore

store = RedlockStore(sys.argv[1], "gevent")
inside, passed = [], []

def work():
    for _ in range(5):
        with Lock("k", store=store) as lease:
            inside.append(lease.token)
            time.sleep(0.002)
            passed.append(len(inside))
            inside.remove(lease.token)

threads = [threading.Thread(target=work) for _ in range(5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert passed == [1] * 25, passed
store.close()
print("well")
"""


@pytest.mark.parametrize("hanging", [0, 2])
def test_greenlets_are_let_in_one_at_a_time(masters, hanging):
    for node in masters.servers[:hanging]:
        node.pause()

    done = subprocess.run(
        [sys.executable, "-c", SOURCE, masters.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )

    assert done.stdout == "well\n", done.stderr
