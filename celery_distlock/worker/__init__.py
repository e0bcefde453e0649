"""The worker's part of the package; `install` is the only function that changes an app."""

from weakref import WeakSet

from celery import Celery

from celery_distlock import signals
from celery_distlock.errors import ConfigurationError
from celery_distlock.runtime.app import Runtime
from celery_distlock.telemetry.observer import observe

from . import control
from .delivery import DeliveryStep
from .parking import ParkingStep
from .reaper import ReaperStep
from .start import LockStep, add_options

__all__ = ["control", "install"]

_installed: "WeakSet[Celery]" = WeakSet()


def install(app: Celery) -> None:
    """
    Make *app*'s workers take care of locks: flags, checks at the start, the sweeper.

    Call it where the app is made, so that ``celery worker`` knows the flags. Declaring a
    `LockedTask` does it too, but later than the command line is read. Idempotent.

    Raises:
        ConfigurationError: It is no app.
    """
    if not isinstance(app, Celery):
        raise ConfigurationError(f"install(app) takes the Celery app of the tasks, not {app!r}")
    if app in _installed:
        return
    _installed.add(app)
    # Not before: a lock without an app needs no thread of ours.
    if observe not in signals.observers:
        signals.observers.append(observe)
    Runtime.of(app)
    add_options(app)
    app.steps["worker"].add(LockStep)
    app.steps["worker"].add(ReaperStep)
    app.steps["consumer"].add(DeliveryStep)
    app.steps["consumer"].add(ParkingStep)
