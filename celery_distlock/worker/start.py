"""
The start of a worker: its flags, the checks of settings, store and tasks, the sweeper, the ticker.

Commands of Celery show a traceback of most errors, and a `StartError` in one line.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from celery import Celery, bootsteps
from celery.bin.base import CeleryOption, CLIContext
from celery.exceptions import WorkerShutdown
from celery.platforms import EX_FAILURE

from celery_distlock.engine.sweeper import Sweeper
from celery_distlock.errors import (
    ConfigurationError,
    QuorumError,
    StoreError,
    StoreUnavailableError,
)
from celery_distlock.policies import NAMES
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import Ability, QueueStore
from celery_distlock.telemetry.observer import observe

from .reaper import forks
from .ticker import Ticker

__all__ = ["LockStep", "StartError", "add_options", "as_start_error", "flags"]

logger = logging.getLogger(__name__)


_GROUP = "Distlock Options"
_FLAGS = (
    ("--distlock-url", str, "URL of the lock store, without a password: process lists show it."),
    ("--distlock-prefix", str, "Prefix of the names of all lock records."),
    ("--distlock-lease", float, "Seconds that a lock outlives its holder's last renewal."),
    (
        "--distlock-on-conflict",
        click.Choice(list(NAMES)),
        "What to do with a task when its key is taken.",
    ),
)


def add_options(app: Celery) -> None:
    """Add the flags to ``celery worker``."""
    options = app.user_options["worker"]
    for flag, kind, words in _FLAGS:
        options.add(CeleryOption((flag,), type=kind, help=words, help_group=_GROUP))
    options.add(
        CeleryOption(
            ("--distlock-disable",),
            is_flag=True,
            help="Run every task without its lock.",
            help_group=_GROUP,
        )
    )


def flags(given: dict[str, object]) -> dict[str, object]:
    """Return the settings that the flags *given* to a worker set."""
    named = {name.removeprefix("distlock_"): value for name, value in given.items()}
    chosen = {name: value for name, value in named.items() if value is not None}
    if chosen.pop("disable", False):
        chosen["enabled"] = False
    return chosen


class StartError(ConfigurationError, click.ClickException):
    """A wrong setting that a command of Celery shows in one line, as the error of an option."""


@contextmanager
def as_start_error() -> Iterator[None]:
    """Raise a `StartError` for a wrong setting, if this thread runs a command of Celery."""
    try:
        yield
    except ConfigurationError as error:
        context = click.get_current_context(silent=True)
        if context is None or not isinstance(context.find_root().obj, CLIContext):
            raise
        raise StartError(str(error)) from error


class LockStep(bootsteps.StartStopStep):
    """
    Reads the flags, checks store, pool and tasks for compatibility, runs sweeper and ticker.

    Starts after the pool, so that no child inherits the threads, and stops before the last tasks
    of a warm shutdown end: these dispatch the runs that they wake themselves.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        given = {k: v for k, v in options.items() if k.startswith("distlock_")}
        self._runtime = Runtime.of(parent.app)
        self._sweeper: Sweeper | None = None
        self._ticker: Ticker | None = None
        try:
            chosen = flags(given)
            self._runtime.use_flags(chosen)
            # For spawned pool processes, which get the app's configuration.
            parent.app.conf.update({f"distlock_{name}": value for name, value in chosen.items()})
            self.enabled = self._runtime.settings.enabled and any(self._runtime.plans.values())
            if self.enabled:
                self._check_abilities(parent)
        except ConfigurationError as error:
            raise StartError(str(error)) from error
        self._warn(parent.app)

    def start(self, parent: Any) -> None:
        """Log the store and what its check finds; start the sweeper and the ticker."""
        runtime = self._runtime
        store, settings = runtime.store, runtime.settings
        logger.info(
            "locks: %s, prefix %r, lease %g s, on conflict %s",
            store.address,
            settings.prefix,
            settings.lease,
            settings.on_conflict,
        )
        unreachable = not self._check_store()
        if Ability.QUEUE in store.abilities:
            queues = QueueStore.of(store)
            count = functools.partial(observe, "swept", parent.app, store, {})
            self._sweeper = Sweeper(queues, settings.sweep_interval, on_swept=count)
            self._sweeper.start(unreachable=unreachable)
            self._ticker = Ticker(queues)
            self._ticker.start()

    def _check_store(self) -> bool:
        """
        Log what the store's check finds; return whether the store can serve.

        Raises:
            WorkerShutdown: The store refuses this worker until settings change.
        """
        settings = self._runtime.settings
        try:
            for finding in self._runtime.store.check():
                logger.warning("locks: %s", finding.message)
        except StoreError as error:
            if _is_refusal(error) and not settings.start_without_store:
                remedy = f"; {error.remedy}" if error.remedy else ""
                words = "; to start nevertheless, set distlock_start_without_store"
                logger.critical("locks: %s%s%s", error, remedy, words)
                raise WorkerShutdown(EX_FAILURE) from error
            unreachable = isinstance(error, StoreUnavailableError)
            become = _ON_OUTAGE[settings.on_outage] if unreachable else "fail"
            own = ", except those with a lock_on_outage of their own" if unreachable else ""
            logger.warning("locks: %s; until it can serve, tasks %s%s", error, become, own)
            return False
        return True

    def info(self, parent: Any) -> Any:
        """Return what ``celery inspect stats`` shows."""
        if not self.enabled:
            return {"locks": {"enabled": False}}
        settings, store = self._runtime.settings, self._runtime.store
        return {
            "locks": {
                "store": store.address,
                "prefix": settings.prefix,
                "lease": settings.lease,
                "on_conflict": str(settings.on_conflict),
                "tasks": sum(plan is not None for plan in self._runtime.plans.values()),
                "delivery_channel": self._runtime.delivery_address,
            }
        }

    def stop(self, parent: Any) -> None:
        """Stop the sweeper and the ticker."""
        for part in (self._sweeper, self._ticker):
            if part is not None:
                part.stop()
        self._sweeper = self._ticker = None

    terminate = stop

    def _warn(self, app: Any) -> None:
        """Warn about settings that are valid but probably a mistake."""
        if not self._runtime.settings.enabled:
            logger.warning("locks: they are disabled, every task runs WITHOUT its lock")
        for name in self._runtime.without_base(app.tasks.values()):
            logger.warning(
                "locks: task %s has lock options but is no LockedTask, so it runs WITHOUT a lock:"
                " declare it with base=LockedTask",
                name,
            )
        for name in self._runtime.without_results(app.tasks.values()):
            logger.warning(
                "locks: task %s has lock_unique, and with rpc:// a call that is joined to another"
                " one gets no result: its get() waits for ever; use another result"
                " backend, or ignore_result=True",
                name,
            )

    def _check_abilities(self, parent: Any) -> None:
        store = self._runtime.store
        where = store.address
        if Ability.SHARE not in store.abilities and forks(parent):
            raise ConfigurationError(
                f"{where} cannot lock between the processes of a prefork pool: use a Redis, or"
                " --pool threads"
            )
        for name, plan in self._runtime.plans.items():
            if plan is None:
                continue
            for what, ability in plan.needs(store):
                other = "; lock_on_conflict='retry' needs none" if ability is Ability.QUEUE else ""
                raise ConfigurationError(
                    f"task {name}: {what} needs a store that can {ability.value}; {where} cannot"
                    f"{other}"
                )


_ON_OUTAGE = {
    "retry": "are sent again every few seconds",
    "fail": "fail",
    "run": "run WITHOUT their locks",
}


def _is_refusal(error: StoreError) -> bool:
    """Whether the store has refused this worker, and will until settings change."""
    if isinstance(error, StoreUnavailableError):
        return bool(error.remedy) and not isinstance(error, QuorumError)
    return True
