"""A task that is asked to leave hears of it in every pool, whatever it is at."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from celery.exceptions import TaskRevokedError

from tests.worker.conftest import staffed
from tests.worker.recalling import recall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site

APP = "tests.apps.recalls"
POOLS = {"prefork": 2, "solo": 1, "threads": 4, "gevent": 20, "eventlet": 20}
WAYS = ["sleep", "receive", "turn", "run_a_loop"]
# A thread that sleeps learns of it when it wakes. No loop runs in greenlets.
CANNOT = {
    "threads": {"sleep", "receive"},
    "gevent": {"run_a_loop"},
    "eventlet": {"run_a_loop"},
}
SECONDS = 10.0  # a renewal is due each second, and a busy machine takes its time


@pytest.fixture(scope="module", params=POOLS)
def pool(request) -> str:
    # Not imported here: eventlet warns of every fork from then on, in other tests, too.
    if request.param in ("gevent", "eventlet") and find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture(scope="module")
def site(pool, bare_site: Site, tmp_path_factory) -> Iterator[Site]:
    worker = {"pool": pool, "concurrency": POOLS[pool]}
    with staffed(bare_site, tmp_path_factory.mktemp("workers"), [worker]) as site:
        yield site


@pytest.mark.parametrize("way", WAYS)
def test_it_leaves_soon_and_except_exception_does_not_stop_it(site, pool, key, way):
    if way in CANNOT.get(pool, ()):
        pytest.skip("it hears of it when that is over")
    result = site.tasks.stay.delay(key, way)
    site.journal.wait(key)

    recall(site, key)
    asked_at = time.time()

    with pytest.raises(TaskRevokedError, match="recalled"):
        result.get(timeout=30)
    ((is_recalled, held, left),) = site.journal.read(f"{key}:left")
    assert is_recalled
    assert held
    assert left - asked_at < SECONDS
    assert site.journal.read(f"{key}:caught") == []
    assert site.tasks.follow.delay(key).get(timeout=30) >= left


def test_only_the_one_that_is_asked_leaves(site, pool, key):
    if POOLS[pool] == 1:
        pytest.skip("it runs one at a time")
    other = site.tasks.stay.delay(f"{key}:other", "turn")
    result = site.tasks.stay.delay(key, "turn")
    site.journal.wait(key)
    site.journal.wait(f"{key}:other")

    recall(site, key)

    with pytest.raises(TaskRevokedError):
        result.get(timeout=30)
    assert site.journal.read(f"{key}:other:left") == []
    recall(site, f"{key}:other")
    with pytest.raises(TaskRevokedError):
        other.get(timeout=30)


@pytest.mark.parametrize("name", ["catch", "call_itself"])
def test_it_is_notified_once(site, key, name):
    result = getattr(site.tasks, name).delay(key)
    site.journal.wait(key)

    recall(site, key)

    if name == "catch":
        assert result.get(timeout=30)[-1] == 500
    else:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
        assert site.journal.read(f"{key}:left") == [[0, True], [1, True]]
