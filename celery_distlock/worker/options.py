"""The flags of ``celery worker``."""

from celery import Celery
from celery.bin.base import CeleryOption
from click import Choice

from celery_distlock.policies import NAMES

__all__ = ["add_options", "flags"]

_GROUP = "Distlock Options"
_FLAGS = (
    ("--distlock-url", str, "The lock store's URL, without a password: others may list processes."),
    ("--distlock-prefix", str, "What the names of all lock records begin with."),
    ("--distlock-lease", float, "Seconds that a lock outlives its holder's last sign of life."),
    ("--distlock-on-conflict", Choice(list(NAMES)), "What becomes of a task whose key is taken."),
)


def add_options(app: Celery) -> None:
    """Let ``celery worker`` take the flags."""
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
    """Return the settings that the flags *given* to a worker stand for."""
    named = {name.removeprefix("distlock_"): value for name, value in given.items()}
    chosen = {name: value for name, value in named.items() if value is not None}
    if chosen.pop("disable", False):
        chosen["enabled"] = False
    return chosen
