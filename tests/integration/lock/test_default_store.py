"""A lock without a store is in the current app's."""

from __future__ import annotations

import pytest

from tests.integration.lock.processes import run_program

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
assert "import the module" not in held[1], held

def there():
    first.set_current()
    elsewhere()
thread = threading.Thread(target=there)
thread.start()
thread.join()
assert held[2:] == [True]
"""


NO_APP = """
from celery_distlock import Lock
from celery_distlock.errors import ConfigurationError

try:
    Lock("k").acquire()
except ConfigurationError as error:
    assert "import the module" in str(error), error
else:
    raise AssertionError("there is no store")
"""


URLS = """
import sys
from celery import Celery
from celery_distlock import Lock, install
from celery_distlock.errors import ConfigurationError
from celery_distlock.stores import open_store
from celery_distlock.testing import assert_free, assert_locked

url, prefix = sys.argv[1:]

def app(name):
    made = Celery(name)
    made.conf.update(distlock_url=url, distlock_prefix=f"{prefix}-{name}")
    install(made)
    return made

first = app("first")
with Lock("k", store=url):
    assert Lock("k").locked()
    assert not Lock("k", store=url, prefix=f"{prefix}-other").locked()
    assert Lock("k", store=url, prefix=f"{prefix}-first").locked()
    assert_locked("k", url)
assert_free("k", url)

elsewhere = url.removesuffix("/0") + "/1"
assert Lock("k", store=elsewhere)._store is open_store(elsewhere)

second = app("second")
first.set_current()
assert Lock("k", store=url)._store.identity.endswith("-first")
from celery import _state
_state._tls.current_app = None
try:
    Lock("k", store=url).locked()
except ConfigurationError as error:
    assert f"{prefix}-first, {prefix}-second" in str(error), error
    assert "prefix=" in str(error), error
else:
    raise AssertionError("one of two prefixes was taken")
"""


GONE = """
import gc, sys
from weakref import ref
from celery import Celery
from celery_distlock import Lock, LockedTask
from celery_distlock.stores import open_store

url, prefix = sys.argv[1:]

def app(name):
    made = Celery(name, broker=url, backend=url, set_as_current=False)
    made.conf.update(distlock_url=url, distlock_prefix=prefix)

    @made.task(base=LockedTask, lock_key="k:{number}", lock_via="store")
    def book(number):
        pass

    book.delay(1)
    return made

dropped, kept = ref(app("dropped")), app("kept")
store = open_store(url, prefix)
assert len(store.publishers.known) == 2
gc.collect()
assert dropped() is None
assert len(store.publishers.known) == 1  # no more is asked for it

with Lock("other"):  # the only app's
    assert store.inspect("other").owner
"""


HELD = """
import os, sys
from celery import Celery, _state
from celery_distlock import Lock, install
from celery_distlock.lock import held_here
from celery_distlock.stores import open_store

url, prefix = sys.argv[1:]

def app(name):
    made = Celery(name, set_as_current=False)
    made.conf.update(distlock_url=url, distlock_prefix=f"{prefix}-{name}")
    install(made)
    return made

def use(app):
    _state._tls.current_app = app

def free(name, key):
    return not open_store(url, f"{prefix}-{name}").inspect(key).token

deploy = Lock(f"{prefix}-deploy", store=url)
with deploy as lease:
    first = app("first")
    assert deploy.lease.held and deploy.locked()
    with deploy as again:  # reentrant, wherever apps are now
        assert again.token == lease.token
    second = app("second")  # two prefixes at this URL from now on
    assert deploy.lease.held and "left" in repr(deploy)
    if not (child := os.fork()):
        os._exit(bool(held_here()))
    assert os.waitpid(child, 0)[1] == 0
assert not held_here()
assert not open_store(url).inspect(deploy.key).token

# The current app's: what was acquired is released, whichever is current then.
use(first)
lock, other = Lock("k"), Lock("k")
with lock:
    use(second)
    assert not free("first", "k") and free("second", "k")
    with other:  # another lock, in another store
        assert not free("second", "k")
    use(first)
    other.acquire()  # two objects, one lock
    use(second)
assert not free("first", "k")
other.release()
assert free("first", "k") and not held_here()

# One object finds its store again when it was released, though the first app's key is held here.
use(first)
with Lock("k"):
    with lock:
        pass
    use(second)
    with lock:
        assert not free("second", "k")
    assert free("second", "k") and not free("first", "k")
    use(first)
assert not held_here()
"""


THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from celery import Celery
from celery_distlock import Lock, LockedTask, install

url, prefix = sys.argv[1:]

def app(name, **settings):
    made = Celery(name, set_as_current=False)
    made.conf.update(settings)
    return made

def place():
    with Lock("k"):
        return Lock("k")._store.identity.rpartition("#")[2]

def in_thread(call):
    with ThreadPoolExecutor() as threads:
        return threads.submit(call).result()

first = app("first", distlock_url=url, distlock_prefix=f"{prefix}-first")
@first.task(base=LockedTask)
def work(): ...
first.finalize()

without = app("without")  # it gets what others share
without.finalize()
assert in_thread(place) == f"{prefix}-first"

neighbour = app("neighbour", distlock_url=url, distlock_prefix=f"{prefix}-first")
install(neighbour)
assert in_thread(place) == f"{prefix}-first"

second = app("second", distlock_url=url, distlock_prefix=f"{prefix}-second")
install(second)
second.set_default()  # as a worker's is
assert in_thread(place) == f"{prefix}-second"
assert in_thread(lambda: Lock("k", store=url)._store.identity).endswith("-second")
without.set_default()
try:
    in_thread(place)
except Exception as error:
    assert "no current app" in str(error), error
else:
    raise AssertionError("one of two places was taken")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(HELD, id="a lock is released where it was acquired, whatever comes then"),
        pytest.param(URLS, id="an app's URL means the app's prefix"),
        pytest.param(GONE, id="an app that is not referenced does not count"),
        pytest.param(NO_APP, id="without an app, the error says to import it"),
        pytest.param(PROGRAM, id="every thread finds the only app and gets an error about several"),
        pytest.param(THREADS, id="a worker's threads find its app, and the only place of several"),
    ],
)
def test_which_store_a_lock_is_in(redis_url, prefix, program):
    run_program(program, redis_url, prefix)
