"""
The settings, their defaults, and the error texts for wrong values.

Values come in layers (a task's options, worker flags, the app's configuration); the first layer
that names one wins. This module does not depend on Celery: a layer is a mapping with a description.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from .errors import ConfigurationError
from .keys import DEFAULT_TEMPLATE

__all__ = [
    "APP_ONLY",
    "MAX_LEASE",
    "MIN_LEASE",
    "TASK_ONLY",
    "TASK_OPTIONS",
    "Layer",
    "Settings",
    "closest",
]

MIN_LEASE = 0.1  # seconds; with less, a scheduling pause of a busy machine would lose every lock
MAX_LEASE = 30 * 86400.0  # seconds; far below where milliseconds overflow in the store
MAX_REQUEUES = 1_000_000
MAX_REPLICAS = 100  # more than any server has, so that a grant would wait for them without effect
SHORTEST_SECRET = 16  # characters; a shorter one can be guessed from one signature

DEFAULT_PREFIX = "distlock"

# What redis-py, celery-once, celery-singleton, Redisson and others call it.
_ELSEWHERE_CALLED = {
    "blocking_timeout": "wait",
    "wait_timeout": "wait",
    "timeout": "lease",
    "ttl": "lease",
    "expire": "lease",
    "expires": "lease",
    "expiry": "lease",
    "lease_time": "lease",
    "duration": "lease",
    "id": "key",
    "name": "key",
    "policy": "on_conflict",
    "auto_renewal": "watchdog",
}

ON_LOST = ("abort", "requeue", "warn")
ON_FAILURE = ("release", "requeue")
ON_OUTAGE = ("retry", "fail", "run")
VIA = ("broker", "store")


class Layer(NamedTuple):
    """One source of values; *named* is its form in messages, with ``*`` for the value's name."""

    named: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    All settings, checked. Durations are in seconds.

    The fields up to `via` can be set for a task (``lock_…``) and for the app (``distlock_…``); the
    others belong to the app alone.

    Attributes:
        url: Where the locks are. None: at the broker, or else at the result backend, if that is a
            Redis or its sentinels.
        prefix: What the names of all lock records begin with. Projects that share a server need
            different ones.
        enabled: False: every task runs without its lock.
        replicas: The number of replicas that must confirm a grant, a renewal and a parked task; up
            to 100.
        sweep_interval: Seconds between sweeps for what a crash has left in the queues. A shorter
            interval finds it sooner; only one of all workers sweeps in each interval.
        start_without_store: True: a worker starts even if the store rejects it, as for a wrong
            password. A store that does not answer never keeps a worker from starting.
        warn_held: Seconds after which a worker warns that a task still holds its keys. None: never.
        secret: Signs parked messages; only signed ones are then sent or executed. All processes
            that park tasks or release locks need the same secret. A list during rotation: the first
            one signs, all are accepted, and with a None at its end unsigned messages are, too.
    """

    key: Any = DEFAULT_TEMPLATE
    on_conflict: Any = "requeue"
    wait: float = 10.0
    lease: float = 30.0
    watchdog: bool = True
    max_hold: float | None = None
    on_lost: str = "abort"
    on_failure: str = "release"
    max_requeues: int = 3
    on_outage: str = "retry"
    hold_on_retry: bool = False
    via: str = "broker"

    url: str | None = None
    prefix: str = DEFAULT_PREFIX
    enabled: bool = True
    replicas: int = 0
    sweep_interval: float = 2.0
    start_without_store: bool = False
    warn_held: float | None = None
    secret: Any = field(default=(), repr=False)

    @classmethod
    def from_layers(cls, *layers: Layer) -> "Settings":
        """
        Build the settings from *layers*, the strongest first.

        Raises:
            ConfigurationError: A value is of the wrong type or out of range; the message names the
                value, its source and what is allowed.
        """
        chosen = {}
        for name, check in _CHECKS.items():
            for layer in layers:
                if name in layer.values:
                    chosen[name] = check(name.join(layer.named.rsplit("*", 1)), layer.values[name])
                    break
        return cls(**chosen)


def closest(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown *name*: the nearest known one, or all."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"


def meant(name: str, known: Collection[str]) -> str:
    """Like `closest`, for settings: also considers the names that other libraries use."""
    lowered = name.lower()
    for other, ours in _ELSEWHERE_CALLED.items():
        begin = lowered.removesuffix(other)
        if begin != lowered and begin.endswith("_"):
            right = [each for each in known if each.lower() == begin + ours]
            if right:
                return f"did you mean {right[0]!r}?"
    return closest(name, known)


def _wrong(name: str, wanted: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"{name} must be {wanted}, not {value!r}")


def _seconds(low: float, high: float) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        wanted = f"a number of seconds from {low:g} to {high:.0f}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, wanted, value)
        if not low <= value <= high:
            raise _wrong(name, wanted, value)
        return float(value)

    return check


def _seconds_or_none(low: float, high: float) -> Callable[[str, Any], float | None]:
    seconds = _seconds(low, high)
    return lambda name, value: None if value is None else seconds(name, value)


def check_flag(name: str, value: Any) -> bool:
    """Return *value*; raise :exc:`ConfigurationError` unless it is True or False."""
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    return value


def _count(most: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise _wrong(name, f"a whole number from 0 to {most}", value)
        return value

    return check


def _one_of(names: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if isinstance(value, str) and value in names:
            return value
        hint = closest(value, names) if isinstance(value, str) else f"one of {', '.join(names)}"
        raise ConfigurationError(f"{name} cannot be {value!r}: {hint}")

    return check


def _text(name: str, value: Any) -> str:
    wanted = "a text without braces, blanks and control characters"
    if not isinstance(value, str) or not value:
        raise _wrong(name, wanted, value)
    unfit = sorted({c for c in value if c in "{} " or not c.isprintable()})
    if unfit:
        found = ", ".join(map(repr, unfit))
        raise ConfigurationError(f"{name} must be {wanted}, and {value!r} has {found}")
    return value


def _url(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or "://" not in value):
        # Not shown: it may hold a password.
        given = "one without a scheme" if isinstance(value, str) else f"a {type(value).__name__}"
        url = "a URL such as redis://localhost:6379/0"
        raise ConfigurationError(f"{name} must be {url}, not {given}")
    return value


def _secrets(name: str, value: Any) -> tuple[str | None, ...]:
    """Return the signing secret, then the others that are accepted; messages never show them."""
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    *before, last = given or (None,)
    secrets = [*before, last] if last is not None else before
    if not secrets or any(not isinstance(each, str) for each in secrets):
        kinds = ", ".join(type(each).__name__ for each in given) or "nothing"
        raise ConfigurationError(
            f"{name} must be a text, or a list of texts with perhaps a None at its end, not {kinds}"
        )
    if any(len(each) < SHORTEST_SECRET for each in secrets):
        raise ConfigurationError(
            f"{name} must be a text of {SHORTEST_SECRET} characters or more, as"
            " secrets.token_urlsafe() makes them, not a shorter one"
        )
    return given


def _elsewhere(_name: str, value: Any) -> Any:
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "key": _elsewhere,  # keys.KeyRule checks it, with the task's signature
    "on_conflict": _elsewhere,  # policies.resolve checks it
    "wait": _seconds(0.0, MAX_LEASE),
    "lease": _seconds(MIN_LEASE, MAX_LEASE),
    "watchdog": check_flag,
    "max_hold": _seconds_or_none(MIN_LEASE, MAX_LEASE),
    "on_lost": _one_of(ON_LOST),
    "on_failure": _one_of(ON_FAILURE),
    "max_requeues": _count(MAX_REQUEUES),
    "on_outage": _one_of(ON_OUTAGE),
    "hold_on_retry": check_flag,
    "via": _one_of(VIA),
    "url": _url,
    "prefix": _text,
    "enabled": check_flag,
    "replicas": _count(MAX_REPLICAS),
    "sweep_interval": _seconds(0.05, 3600.0),
    "start_without_store": check_flag,
    "warn_held": _seconds_or_none(MIN_LEASE, MAX_LEASE),
    "secret": _secrets,
}
assert list(_CHECKS) == [each.name for each in fields(Settings)]

APP_ONLY = frozenset(
    {
        "url",
        "prefix",
        "enabled",
        "replicas",
        "sweep_interval",
        "start_without_store",
        "warn_held",
        "secret",
    }
)
TASK_OPTIONS = tuple(name for name in _CHECKS if name not in APP_ONLY)
TASK_ONLY = ("unique",)  # without a default for the whole app


def checked(option: str, value: Any, name: str = "") -> Any:
    """
    Return *value* as that of an *option*, such as ``"lease"``.

    Raises:
        ConfigurationError: It is not valid; the message has *name*, or the option's.
    """
    return _CHECKS[option](name or option, value)
