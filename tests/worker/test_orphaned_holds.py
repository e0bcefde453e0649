"""What the main process does for its children's keys while the lock store takes its time."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from celery_distlock import signals
from celery_distlock.engine.shared_holds import OrphanedHold, StalledHolds
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.identities import new_owner
from celery_distlock.worker.reaper import Reaper
from tests.apps import make_app
from tests.waiting import wait_until

LEASE = 30.0


class TwoChildren:
    """A ledger with one child that is gone, and one that is busy."""

    def __init__(self, gone: list[OrphanedHold], busy: OrphanedHold) -> None:
        self._gone = gone
        self._busy = busy
        self.kept = 0

    def reap(self):
        gone, self._gone = self._gone, []
        return iter(gone)

    def stalled(self):
        yield StalledHolds(0, 1, {0: self._busy})

    def extend(self, stalled, indexes, asked_at):
        self.kept += 1


@pytest.fixture
def app(celery_env):
    app = make_app("undertaken")
    yield app
    Runtime.of(app).store.close()
    app.close()


@pytest.fixture
def store(app):
    return Runtime.of(app).store


@pytest.fixture
def hold(store):
    """Takes a key as a child would, and returns what it has noted."""

    def hold(key: str) -> OrphanedHold:
        owner = new_owner("child")
        assert store.acquire(AcquireRequest(key, owner, LEASE)).token
        return OrphanedHold(store.identity, key, owner, LEASE)

    return hold


@pytest.fixture
def freed():
    """The keys that `lock_freed` has reported."""
    keys: list[str] = []

    def note(key, **_):
        keys.append(key)

    signals.lock_freed.connect(note)
    yield keys
    signals.lock_freed.disconnect(note)


@contextmanager
def at_work(app, ledger):
    reaper = Reaper(ledger, app)
    reaper.start()
    try:
        yield
    finally:
        reaper.stop()


def test_a_release_that_hangs_keeps_no_busy_child_from_being_renewed(
    app, store, hold, freed, monkeypatch, caplog
):
    asked, answers, release = threading.Event(), threading.Event(), store.release

    def hang(*args, **options):
        asked.set()
        answers.wait(60.0)
        return release(*args, **options)

    monkeypatch.setattr(store, "release", hang)
    ledger = TwoChildren([hold("left")], hold("busy"))
    try:
        with at_work(app, ledger):
            assert asked.wait(30.0)
            before = ledger.kept
            wait_until(lambda: ledger.kept > before + 2, timeout=30.0, what="renewals in between")
            assert freed == []

            answers.set()
            wait_until(lambda: freed == ["left"], timeout=30.0, what="the release")
    finally:
        answers.set()

    assert not store.inspect("left").token
    assert store.inspect("busy").token
    assert "freed 'left', whose holder " in caplog.text


def test_a_failed_release_is_tried_again_and_others_are_not_kept_waiting(
    app, store, hold, freed, monkeypatch
):
    silent, release = True, store.release

    def fail(request):
        if request.key == "first" and silent:
            raise StoreUnavailableError("no answer")
        return release(request)

    monkeypatch.setattr(store, "release", fail)
    with at_work(app, TwoChildren([hold("first"), hold("second")], hold("busy"))):
        wait_until(lambda: freed == ["second"], timeout=30.0, what="the second")
        silent = False
        wait_until(lambda: freed == ["second", "first"], timeout=30.0, what="the first")


def test_what_is_left_at_the_end_is_released(app, store, hold):
    ledger = TwoChildren([hold(str(number)) for number in range(20)], hold("busy"))

    with at_work(app, ledger):
        pass

    assert not any(store.inspect(str(number)).token for number in range(20))
