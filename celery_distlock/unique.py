"""
Call rules: what becomes of a call while one like it is on its way; for ``lock_unique``.

Alike are calls of one key, and of one *identity* there: by default, calls of one task with equal
arguments. An identity lives exactly as long as its run: there is nothing to give back, and nothing
that could be left behind by a process that dies.
"""

import enum
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ConfigurationError
from .rate import LONGEST, SHORTEST, Rate
from .settings import MAX_LEASE, closest

__all__ = ["CallRule", "Debounce", "Throttle", "Unique"]

Until = Literal["started", "finished"] | float

UNTIL = ("started", "finished")
DUPLICATE = ("join", "update", "raise")
ON_OUTAGE = ("send", "raise")

_SECONDS = f"seconds above 0 and up to {MAX_LEASE:.0f}"


class _Nothing(enum.Enum):  # of which there is one, in copies of a rule, too
    NOTHING = enum.auto()

    def __repr__(self) -> str:
        return "..."


NOTHING: Any = _Nothing.NOTHING


@dataclass(frozen=True, slots=True)
class Unique:
    """
    A call is not sent while one like it is there.

    What canvas waits for is never taken for a second one: a call that brings its own task id, as
    members of chains, groups and chords do, or has a ``link`` or ``link_error``. It is sent, and no
    update changes its message. A call is sent, too, if the one that is there has not begun, and has
    less than half the time until it expires, or ignores a result that this one wants.

    Args:
        until: ``"started"``: one like it waits, and one that comes while it runs is another one. So
            at most one runs and one waits, and no change is lost. ``"finished"``: it waits or runs,
            with its retries. A number: it was sent within so many seconds, whatever has become of
            it; or it still waits.
        duplicate: ``"join"``: the caller gets the result of the one that is there. ``"update"``:
            likewise, and if that waits it gets this call's arguments, headers, expiry and delay,
            and keeps its id and its place; if it is on its way already, or has been, this one is
            sent. What comes while it runs is judged by `until`.
            ``"raise"``: :exc:`~celery_distlock.errors.DuplicateTaskError`.
        by: What is alike among the task's calls for one key: a template over its parameters. None:
            where calls are updated, all of them; else those with equal arguments.
        result: The result of a message that turns out to be a second one only when it comes to a
            worker, as it was not sent by the task's own code (``send_task``, a beat without it,
            another language). If it is not given, its state is ``REVOKED``. Where calls are
            updated, such a message runs.
        on_outage: The store does not answer a call: ``"send"`` it by the broker, without this rule;
            or ``"raise"`` :exc:`~celery_distlock.errors.StoreUnavailableError`.

    Raises:
        ConfigurationError: One of them is something else.
    """

    until: Until = "started"
    duplicate: Literal["join", "update", "raise"] = "join"
    by: str | None = None
    result: Any = NOTHING
    on_outage: Literal["send", "raise"] = "send"

    def __post_init__(self) -> None:
        until = self.until
        if isinstance(until, str) or not _is_duration(until):
            _check_choice("until", until, UNTIL, f", or {_SECONDS}")
        _check_choice("duplicate", self.duplicate, DUPLICATE)
        _check_choice("on_outage", self.on_outage, ON_OUTAGE)
        if self.by is not None and not (isinstance(self.by, str) and self.by):
            raise ConfigurationError(f"Unique(by) must be a template or None, not {self.by!r}")

    @property
    def all_alike(self) -> bool:
        """Whether all calls of the task for one key are alike, if `by` does not say."""
        return self.duplicate == "update"


@dataclass(frozen=True, slots=True)
class Debounce:
    """
    Calls that come shortly one after the other are one run, with the arguments of the last one.

    It starts *delay* seconds after the last call, and *max_delay* seconds after the first one at
    the latest, as soon as its key is free then. A call that comes while it runs begins another one.
    What canvas waits for is sent at once, as for `Unique`; a call's own countdown goes before all
    that the rule says of times. The calls of one task for one key are alike.

    Args:
        delay: Seconds.
        max_delay: Seconds; None: ten times *delay*.
        leading: True: the first call after a quiet time, of *delay* seconds, starts at once, and
            only what comes then is put off.

    Raises:
        ConfigurationError: One of them is something else.
    """

    delay: float
    max_delay: float | None = None
    leading: bool = False

    def __post_init__(self) -> None:
        if not _is_duration(self.delay):
            raise ConfigurationError(f"Debounce(delay) must be {_SECONDS}, not {self.delay!r}")
        longest = self.max_delay
        if longest is not None and not (_is_duration(longest) and longest >= self.delay):
            raise ConfigurationError(
                f"Debounce(max_delay) must be seconds from its delay on, or None, not {longest!r}"
            )
        if not isinstance(self.leading, bool):
            raise ConfigurationError(f"Debounce(leading) must be a bool, not {self.leading!r}")

    @property
    def most(self) -> float:
        """How long after the first call it starts at the latest."""
        return 10 * self.delay if self.max_delay is None else self.max_delay

    by = None
    all_alike = True
    until = "started"
    duplicate = "update"
    result = NOTHING
    on_outage = "send"


@dataclass(frozen=True, slots=True)
class Throttle:
    """
    Of calls that come often, one is started in each *period*, at once or when it is over.

    A call starts at once if none has in the last *period* seconds, as soon as its key is free. One
    that comes sooner starts when they are over, with the arguments of the last call until then,
    which are all one run; or it is that earlier one, see *trailing*. The calls of one task for one
    key are alike, or without *trailing* those with equal arguments.

    The period is a rate of the key, ``Rate(1, per=period)``: it is counted from when a task has
    come for its key, however long its message travelled, and a start that comes to nothing is none.
    As any rate it counts all tasks that have a rate at that key, so a task that is throttled is to
    have a key of its own; and a retry is a start. What canvas waits for is never taken for a second
    call, as for `Unique`: all of them run, a period apart.

    Args:
        period: Seconds.
        trailing: False: a call that comes within *period* of one like it, or while that waits, is
            that one: its caller gets the result of it, and nothing starts later.

    Raises:
        ConfigurationError: One of them is something else.
    """

    period: float
    trailing: bool = True

    def __post_init__(self) -> None:
        if not _is_duration(self.period) or not SHORTEST <= self.period <= LONGEST:
            raise ConfigurationError(
                f"Throttle(period) must be seconds from {SHORTEST:g} to {LONGEST:.0f}, not"
                f" {self.period!r}"
            )
        if not isinstance(self.trailing, bool):
            raise ConfigurationError(f"Throttle(trailing) must be a bool, not {self.trailing!r}")

    @property
    def rate(self) -> Rate:
        """How often the key is taken."""
        return Rate(1, per=self.period)

    by = None

    @property
    def all_alike(self) -> bool:
        """Whether all calls of the task for one key are alike."""
        return self.trailing

    @property
    def until(self) -> Until:
        """How long another call is a second one, as `Unique` has it."""
        return "started" if self.trailing else self.period

    @property
    def duplicate(self) -> str:
        """What becomes of that, likewise."""
        return "update" if self.trailing else "join"

    result = NOTHING
    on_outage = "send"


CallRule = Unique | Debounce | Throttle


def rule_of(name: str, value: Any) -> CallRule | None:
    """
    Return *value*, a task's ``lock_unique``, as a rule; None: there is none.

    Raises:
        ConfigurationError: It is none; *name* says where.
    """
    if value is None or isinstance(value, CallRule):
        return value
    if isinstance(value, str) and value in UNTIL:
        return Unique(until=value)  # type: ignore[arg-type]  # it is one of them
    if _is_duration(value):
        return Unique(until=float(value))
    hint = closest(value, UNTIL) if isinstance(value, str) else ""
    raise ConfigurationError(
        f"{name} must be 'started', 'finished', seconds, an object of celery_distlock.unique or"
        f" None, not {value!r}{f'; {hint}' if hint else ''}"
    )


def _is_duration(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= MAX_LEASE


def _check_choice(name: str, value: Any, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ConfigurationError(f"Unique({name}) must be one of {known}{more}, not {value!r}")
