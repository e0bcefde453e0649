"""What a worker needs of its own; `install` is the only thing that changes an app."""

from weakref import WeakSet

from celery import Celery

from celery_distlock import signals
from celery_distlock.observation import observe
from celery_distlock.runtime import Runtime

from . import remote
from .desk import DeskStep
from .lobby import LobbyStep
from .options import add_options
from .steps import LockStep, UndertakerStep

__all__ = ["install", "remote"]

_installed: "WeakSet[Celery]" = WeakSet()


def install(app: Celery) -> None:
    """
    Make *app*'s workers take care of locks: flags, checks at the start, the sweeper.

    Call it where the app is made, so that ``celery worker`` knows the flags. Declaring a
    `LockedTask` does it too, but later than the command line is read. Idempotent.
    """
    if app in _installed:
        return
    _installed.add(app)
    # Not before: a lock without an app needs no thread of ours.
    if observe not in signals.observers:
        signals.observers.append(observe)
    Runtime.of(app)
    add_options(app)
    app.steps["worker"].add(LockStep)
    app.steps["worker"].add(UndertakerStep)
    app.steps["consumer"].add(DeskStep)
    app.steps["consumer"].add(LobbyStep)
