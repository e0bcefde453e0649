"""The locks of the app under test, moved to another store during a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, _state

from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.engine.key_locks import key_wanted
from celery_distlock.engine.lease import Lease
from celery_distlock.key import Key
from celery_distlock.runtime.app import Runtime, spelt
from celery_distlock.stores import Store
from celery_distlock.stores.values import Status

from .assertions import assert_free, assert_locked, assert_parked, assert_units, held_by
from .fake_clock import FakeClock

__all__ = ["Locks", "moved", "tested_app"]


class Locks:
    """
    The locks of an app under test: hold keys, and assert what is held or parked.

    Attributes:
        app: The app.
        store: The store of its locks during the test.
    """

    def __init__(self, app: Celery, start_clock: Callable[[], FakeClock]) -> None:
        self.app = app
        self.store: Store = Runtime.of(app).store
        self._start_clock = start_clock

    @property
    def clock(self) -> FakeClock:
        """The clock of the fixture ``distlock_clock``; time stops at its first use."""
        return self._start_clock()

    @contextmanager
    def hold(
        self,
        key: str | Key,
        *,
        capacity: int | None = 1,
        units: int = 1,
        shared: bool = False,
        lease: float = 30.0,
        watchdog: bool = True,
    ) -> Iterator[Lease]:
        """
        Hold *key* until the end of the block, as a holder other than the code in this thread.

        Args:
            key: The key; or a :class:`~celery_distlock.Key`, which includes how much to hold.
            capacity: As for :class:`~celery_distlock.Key`; 1: exclusive.
            units: Number of units of that capacity, as the `weight` of a key.
            shared: Hold the key together with any number of other holders that share it.
            lease: Seconds.
            watchdog: False: the lease is not renewed, as for a holder that has died.

        Raises:
            AssertionError: The key is not free, or does not have that many units left.
        """
        __tracebackhide__ = True
        wanted = key_wanted("hold", key, capacity, units, shared, None)
        hold = Hold(self.store, wanted, Terms(lease, watchdog=watchdog), label="the-test")
        reply = acquire(hold)
        if reply.status is not Status.GRANTED:
            raise AssertionError(f"{wanted.template!r} is not free: {held_by(reply.holder)}")
        try:
            yield Lease((hold,))
        finally:
            release(hold)

    def assert_locked(self, key: str | Key, *, within: float = 0.0) -> None:
        """Fail unless *key* is held; see :func:`celery_distlock.testing.assert_locked`."""
        __tracebackhide__ = True
        assert_locked(key, self.store, within=within)

    def assert_free(self, key: str | Key, *, within: float = 0.0) -> None:
        """Fail if *key* is held; see :func:`celery_distlock.testing.assert_free`."""
        __tracebackhide__ = True
        assert_free(key, self.store, within=within)

    def assert_units(self, key: str | Key, units: int, *, within: float = 0.0) -> None:
        """Fail unless *units* are in use; see :func:`celery_distlock.testing.assert_units`."""
        __tracebackhide__ = True
        assert_units(key, units, self.store, within=within)

    def assert_parked(
        self, task: Any, key: str | Key | None = None, *, within: float = 0.0
    ) -> None:
        """Fail unless *task* is parked; see :func:`celery_distlock.testing.assert_parked`."""
        __tracebackhide__ = True
        assert_parked(task, key, self.store, within=within)


@contextmanager
def moved(app: Celery, **settings: Any) -> Iterator[None]:
    """
    Change settings of *app* (``url="memory://"`` for ``distlock_url``) until the end of the block.

    They are set in its configuration, so a worker that starts in this process uses them as well.
    """
    runtime = Runtime.of(app)
    app.conf.get("distlock_url")  # load the configuration first, as it may override changes
    changes: Any = app.conf.changes
    names = {f"distlock_{name}": value for name, value in settings.items()}
    before = {key: changes[key] for key in changes if _plain(app, key) in names}
    flags = dict(runtime._flags.values)
    for key in before:
        del changes[key]
    # Celery 5.5 prefers names with the namespace, in whichever place they are set.
    names.update({spelt(name, _namespace(app)): value for name, value in names.items()})
    changes.update(names)
    try:
        runtime.use_flags({name: value for name, value in flags.items() if name not in settings})
        yield
    finally:
        for name in names:
            changes.pop(name, None)
        changes.update(before)
        runtime.use_flags(flags)


def _plain(app: Celery, key: str) -> str:
    """Return the name of a setting without the app's namespace."""
    return str(key).lower().removeprefix(f"{_namespace(app).lower()}_")


def _namespace(app: Celery) -> str:
    return str(getattr(app, "namespace", None) or "")


def tested_app() -> Celery:
    """
    Return the current app if it declares locked tasks, else the only app that does.

    A task is shared with every app that is created later, unless it is declared with
    ``shared=False``. So an app that has only shared tasks of other apps counts only if there is no
    other app.

    Raises:
        LookupError: No app has locked tasks; or several apps have, and none of them is current.
    """
    current: Any = _state._tls.current_app  # type: ignore[attr-defined]  # current_app makes one up
    active: list[Any] = list(_state._get_active_apps())  # type: ignore[attr-defined]
    declaring = [app for app in active if app._pending or Runtime.of(app).plans]
    apps: list[Celery] = [app for app in declaring if _has_locked_tasks(app)]
    if not apps and current is not None and _has_locked_tasks(current):
        apps = [current]
    if current in apps:
        apps = [current]
    if len(apps) == 1:
        return apps[0]
    names = ", ".join(sorted(str(app.main) for app in apps))
    reason = (
        f"several apps have locked tasks ({names})"
        if apps
        else "no Celery app with locked tasks is known: import the module that declares them"
    )
    raise LookupError(f"{reason}, or let a fixture distlock_app return the app")


def _has_locked_tasks(app: Any) -> bool:
    if not (app.finalized or app.autofinalize):
        return False
    app.finalize(auto=True)  # tasks are declared no earlier
    return any(Runtime.of(app).plans.values())
