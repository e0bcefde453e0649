"""
Call rules: what happens to a call while an equal one is pending; for ``lock_unique``.

Calls are equal if they have the same key and, under that key, the same *identity*: by default,
calls of one task with equal arguments. An identity lives exactly as long as its execution: there is
nothing to release, and a process that dies can leave nothing behind.
"""

import enum
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from .errors import ConfigurationError
from .rate import LONGEST, SHORTEST, Rate
from .settings import MAX_LEASE, closest

__all__ = ["CallRule", "Debounce", "Latest", "Throttle", "Unique"]

Until = Literal["started", "finished"] | float

UNTIL = ("started", "finished")
RUNNING = ("finish", "tell", "stop")
DUPLICATE = ("join", "update", "raise")
ON_OUTAGE = ("send", "raise")

_SECONDS = f"seconds above 0 and up to {MAX_LEASE:.0f}"


class _Nothing(enum.Enum):  # a single one, in copies of a rule, too
    NOTHING = enum.auto()

    def __repr__(self) -> str:
        return "..."


NOTHING: Any = _Nothing.NOTHING


@dataclass(frozen=True, slots=True)
class Unique:
    """
    Do not send a call while an equal one is pending.

    Calls that canvas waits for are never treated as duplicates: those that bring their own task id,
    as members of chains, groups and chords do, or have a ``link`` or ``link_error``. They are sent,
    and no update changes their messages. A call is also sent if the pending one has not begun and
    has less than half the time until it expires, or if that one ignores a result that this call
    wants.

    Args:
        until: ``"started"``: the pending call waits; one that comes while it runs is a new one. So
            at most one runs and one waits, and no change is lost. ``"finished"``: it waits or runs,
            with its retries. A number: it was sent within that many seconds, whatever its state; or
            it still waits.
        duplicate: ``"join"``: the caller gets the result of the pending call. ``"update"``: as
            ``"join"``, and a pending call that waits gets this call's arguments, headers, expiry
            and delay, and keeps its id and its position; if it is already dispatched, or has been,
            this call is sent. A call that comes while it runs is judged by `until`. ``"raise"``:
            :exc:`~celery_distlock.errors.DuplicateTaskError`.
        by: What makes the task's calls for one key equal: a template over its parameters. None: all
            of them if `duplicate` is ``"update"``, else those with equal arguments.
        result: The result of a message that turns out to be a duplicate only in a worker, because
            the task's own code did not send it (``send_task``, a beat without it, another
            language). If it is not given, the message's state is ``REVOKED``. If `duplicate` is
            ``"update"``, such a message is executed.
        on_outage: What to do if the store does not answer a call: ``"send"`` it by the broker,
            without this rule; or ``"raise"`` :exc:`~celery_distlock.errors.StoreUnavailableError`.

    Raises:
        ConfigurationError: An argument is something else.
    """

    until: Until = "started"
    duplicate: Literal["join", "update", "raise"] = "join"
    by: str | None = None
    result: Any = NOTHING
    on_outage: Literal["send", "raise"] = "send"

    def __post_init__(self) -> None:
        until = self.until
        if isinstance(until, str) or not _is_duration(until):
            _check_choice("Unique(until)", until, UNTIL, f", or {_SECONDS}")
        _check_choice("Unique(duplicate)", self.duplicate, DUPLICATE)
        _check_choice("Unique(on_outage)", self.on_outage, ON_OUTAGE)
        _check_template("Unique(by)", self.by)

    @property
    def all_alike(self) -> bool:
        """Whether all calls of the task for one key are equal, unless `by` is given."""
        return self.duplicate == "update"


@dataclass(frozen=True, slots=True)
class Debounce:
    """
    Combine calls that come in quick succession into one execution, with the last arguments.

    It starts *delay* seconds after the last call, and *max_delay* seconds after the first one at
    the latest, as soon as its key is then free. A call that comes while it runs begins another one.
    Calls that canvas waits for are sent immediately, as for `Unique`. A call's own countdown takes
    precedence over all times of the rule. The calls of one task for one key are equal.

    Args:
        delay: Seconds.
        max_delay: Seconds; None: ten times *delay*.
        leading: True: the first call after a quiet time of *delay* seconds starts immediately, and
            only calls after it are delayed.

    Raises:
        ConfigurationError: An argument is something else.
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
        """Seconds from the first call to the latest start."""
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
    Start one of frequent calls in each *period*, immediately or at its end.

    A call starts immediately, as soon as its key is free, if none has in the last *period* seconds.
    A call that comes sooner starts at the end of the period, with the arguments of the last call
    until then: all of these are one execution. Without *trailing* it is a duplicate of the earlier
    call. The calls of one task for one key are equal, or without *trailing* those with equal
    arguments.

    The period is a rate of the key, ``Rate(1, per=period)``. It counts from when a task has claimed
    its key, however long its message was in flight, and a start that does not happen does not
    count. As any rate it counts all tasks that have a rate at that key, so a throttled task needs a
    key of its own; and a retry is a start. Calls that canvas waits for are never treated as
    duplicates, as for `Unique`: all of them run, a period apart.

    Args:
        period: Seconds.
        trailing: False: a call that comes within *period* of an equal one, or while that waits, is
            a duplicate: its caller gets the result of the other one, and nothing starts later.

    Raises:
        ConfigurationError: An argument is something else.
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
        """Whether all calls of the task for one key are equal."""
        return self.trailing

    @property
    def until(self) -> Until:
        """How long another call is a duplicate, as in `Unique`."""
        return "started" if self.trailing else self.period

    @property
    def duplicate(self) -> str:
        """What happens to a duplicate, as in `Unique`."""
        return "update" if self.trailing else "join"

    result = NOTHING
    on_outage = "send"


@dataclass(frozen=True, slots=True)
class Latest:
    """
    Run the newest call: it replaces one that waits, and may ask the one that runs to leave.

    At most one runs and one waits: the newest, with its arguments, as with
    ``Unique(duplicate="update")``. It starts when the one before it has left its key. That one is
    only asked: no two run at the same time, whatever it does.

    A task that a newer call has asked to leave does not start again: if its process is killed then,
    a second delivery of its message ends it, and a retry that it asks for is not sent.

    Calls are asked that the task's own code has sent, with the same identity: never a `Lock`, nor
    another task of the key. With ``"tell"`` and ``"stop"`` the key must be held exclusively and its
    lease be renewed, and the store must be able to ask holders. One that is dispatched when the
    newer call is made is asked when it starts.

    Args:
        running: What becomes of the task that runs. ``"finish"``: it goes on. ``"tell"``: it goes
            on, and ``self.lock.recalled`` is true within about a second. ``"stop"``:
            :exc:`~celery_distlock.errors.RecalledError` is raised in it then, once. It still has
            its key, to clean up. If it ends by that error, its state is ``REVOKED``.
        by: What makes the task's calls for one key equal: a template over its parameters. None: all
            of them.
        result: The result of a task that was asked to leave and ends by that: it succeeds with this
            value. Then tasks that canvas waits for are asked, too: members of chords and chains,
            and those with a link. Otherwise these are never asked.
        on_outage: As in `Unique`.

    Raises:
        ConfigurationError: An argument is something else, or has no effect.
    """

    running: Literal["finish", "tell", "stop"] = "finish"
    _: KW_ONLY
    by: str | None = None
    result: Any = NOTHING
    on_outage: Literal["send", "raise"] = "send"

    def __post_init__(self) -> None:
        _check_choice("Latest(running)", self.running, RUNNING)
        _check_choice("Latest(on_outage)", self.on_outage, ON_OUTAGE)
        _check_template("Latest(by)", self.by)
        if self.result is not NOTHING and not self.recalls:
            raise ConfigurationError(
                f"Latest(result={self.result!r}) has no effect with running='finish', which asks no"
                " task to leave; write running='tell' or 'stop', or leave result out"
            )

    @property
    def recalls(self) -> str:
        """Which earlier calls are asked to leave, as in a request to the store; empty: none."""
        if self.running == "finish":
            return ""
        return "free" if self.result is NOTHING else "all"

    all_alike = True
    until = "started"
    duplicate = "update"


CallRule = Unique | Debounce | Throttle | Latest


def rule_of(name: str, value: Any) -> CallRule | None:
    """
    Return *value*, a task's ``lock_unique``, as a rule; None: there is none.

    Raises:
        ConfigurationError: It is not a rule; *name* is the option's name.
    """
    if value is None or isinstance(value, CallRule):
        return value
    if isinstance(value, str) and value in UNTIL:
        return Unique(until=value)  # type: ignore[arg-type]  # it is one of them
    if isinstance(value, str) and value == "latest":
        return Latest()
    if _is_duration(value):
        return Unique(until=float(value))
    hint = closest(value, (*UNTIL, "latest")) if isinstance(value, str) else ""
    raise ConfigurationError(
        f"{name} must be 'started', 'finished', 'latest', seconds, an object of"
        f" celery_distlock.unique or None, not {value!r}{f'; {hint}' if hint else ''}"
    )


def _is_duration(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= MAX_LEASE


def _check_choice(name: str, value: Any, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ConfigurationError(f"{name} must be one of {known}{more}, not {value!r}")


def _check_template(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigurationError(f"{name} must be a template or None, not {value!r}")
