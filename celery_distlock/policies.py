"""
What happens to a task that finds its key held.

A policy is a plain object that decides about a conflict; the task's execution carries the decision
out. To write your own, subclass :class:`Policy`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from . import clock
from .errors import ConfigurationError
from .settings import MAX_LEASE, check_flag, closest
from .stores import Ability

__all__ = [
    "Answer",
    "Conflict",
    "Decision",
    "Fail",
    "Park",
    "Policy",
    "Refuse",
    "Requeue",
    "Resend",
    "Retry",
    "Skip",
    "Wait",
]


MAX_FACTOR = 1000.0
MOST_WAITING = 10**9
SHORTEST_TIMEOUT = 0.001
FIRST_SHARE = 0.05  # of `Retry.delay`: the first delay for a holder that is late


@dataclass(frozen=True, slots=True)
class Conflict:
    """
    A conflict over a key, as a policy gets it.

    Attributes:
        key: The key that is held.
        holder: The name of its holder.
        remaining: Seconds that the holder's lease has left unless it is renewed.
        attempts: How often this task has been sent again by countdown because of a conflict, not
            because of an outage of the store.
        full: It was not parked, because as many wait for the key as `Park.max_waiting` allows.
        waited: Seconds since it first found its key taken; 0: it finds that now. Each retry
            begins at 0.
    """

    key: str
    holder: str
    remaining: float
    attempts: int
    full: bool = False
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Park:
    """
    Keep the task in the key's queue; it is sent when the key is free.

    Attributes:
        max_waiting: If as many wait for the key, the policy decides again, with `Conflict.full`; if
            it decides to park then, the task is parked. It has no effect on a task that needs
            several keys. None: any number may wait.
        timeout: Seconds after which, counted as `Conflict.waited`, the task leaves the queue
            without its key, and the policy decides again. None: when it gets its key.
    """

    max_waiting: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        _check_bounds(self)


@dataclass(frozen=True, slots=True)
class Resend:
    """
    Send the task again.

    Attributes:
        delay: Seconds until then.
        within: The least and the most seconds, between which the store may choose the time when the
            key is likely to be free. The least applies if the holder has had the key for longer
            than usual. A store that cannot estimate this uses *delay*.
    """

    delay: float
    within: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _check_number("Resend(delay)", self.delay, 0, MAX_LEASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """Do not run the task; *result* is its result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail the task with :exc:`~celery_distlock.errors.LockConflictError`."""


Decision = Park | Resend | Answer | Refuse


class Policy(ABC):
    """The base of all policies."""

    #: What the store must be able to do; checked when the worker starts.
    needs: frozenset[Ability] = frozenset()

    def patience(self, lock_wait: float) -> float:
        """Return the seconds to block for the key before there is a conflict."""
        return 0.0

    @abstractmethod
    def decide(self, conflict: Conflict) -> Decision:
        """Decide what happens to the task."""


@dataclass(frozen=True, slots=True, repr=False)
class Requeue(Policy):
    """
    Park the task; it is sent again, first come first served, when the key is free.

    Args:
        max_waiting: How many may wait for the key, counting parked tasks and blocked callers. A
            call beyond that raises :exc:`~celery_distlock.errors.QueueFullError`, if it goes
            through the store and *then* is ``"fail"``; otherwise *then* applies where the task
            runs. Tasks that a chord, a group, a chain or a link waits for are let in, and so are
            retries. Only for tasks of one key. None: any number.
        timeout: Seconds after which a task that has not got its key leaves the queue. They count
            from when it first found its key taken, or joined the queue; again for each retry. None:
            it waits for as long as it takes.
        then: What happens to a task that is not let in, or has waited for that long: a policy or
            its name; neither ``"requeue"`` nor ``"wait"``.
    """

    max_waiting: int | None = None
    timeout: float | None = None
    then: "Policy | str" = "fail"

    needs = frozenset({Ability.QUEUE})

    def __post_init__(self) -> None:
        then = resolve("Requeue(then)", self.then)
        if isinstance(then, Requeue | Wait):
            raise ConfigurationError(
                f"Requeue(then) cannot be {self.then!r}: the task would wait again; write 'fail',"
                " 'skip' or 'retry'"
            )
        object.__setattr__(self, "then", then)
        if self.max_waiting is self.timeout is None and then != Fail():
            raise ConfigurationError(
                f"Requeue(then={self.then!r}) has no effect without max_waiting or timeout"
            )
        _check_bounds(self)

    def __repr__(self) -> str:
        then = None if self.then == Fail() else self.then
        given = {"max_waiting": self.max_waiting, "timeout": self.timeout, "then": then}
        terms = (f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"Requeue({', '.join(terms)})"

    def decide(self, conflict: Conflict) -> Decision:
        has_waited = self.timeout is not None and conflict.waited >= self.timeout
        if conflict.full or has_waited:
            return resolve("Requeue(then)", self.then).decide(conflict)
        return bounds(self)


@dataclass(frozen=True, slots=True)
class Retry(Policy):
    """
    Send the task again by countdown; the order of arrival is lost.

    For a store that may lose its data: the task is always with the broker. It is sent again when
    its turn is expected, estimated from how long the key has been held now and recently, from the
    waiters, and from the number of tasks sent away before. A store that cannot estimate this (all
    but Redis with scripts) uses fixed delays: *delay*, and longer each time, but not much longer
    than the holder's lease lasts.

    Args:
        delay: Seconds before the first new attempt by fixed delays. If the store estimates the
            turn, and the holder takes longer than usual, the task comes again after a twentieth of
            it, doubled each time up to all of it, or after three quarters of the holder's time so
            far, if that is more.
        factor: What each further fixed delay is multiplied by.
        max_delay: Seconds that no delay exceeds. Keep it well below the broker's visibility
            timeout: Redis delivers a message a second time if it waits longer.
        jitter: Choose each fixed delay at random between half and all of it, so that tasks that
            collided do not meet again.
        turns: False: always use fixed delays.
    """

    delay: float = 1.0
    factor: float = 2.0
    max_delay: float = 60.0
    jitter: bool = True
    turns: bool = True

    def __post_init__(self) -> None:
        _check_number("Retry(delay)", self.delay, 0, MAX_LEASE)
        _check_number("Retry(factor)", self.factor, 1, MAX_FACTOR)
        _check_number("Retry(max_delay)", self.max_delay, 0, MAX_LEASE)
        if self.delay > self.max_delay:
            raise ConfigurationError(
                f"Retry(delay) is {self.delay:g} s, more than Retry(max_delay),"
                f" {self.max_delay:g} s"
            )
        check_flag("Retry(jitter)", self.jitter)
        check_flag("Retry(turns)", self.turns)

    def decide(self, conflict: Conflict) -> Decision:
        exponent = min(conflict.attempts, 64)  # more than any delay needs, and a float can hold it
        delay = min(self.max_delay, self.delay * self.factor**exponent)
        if conflict.remaining > 0:
            # By then the key is free, or its holder has renewed the lease.
            delay = min(delay, conflict.remaining + self.delay)
        spread = clock.jitter(0.5, 1.0) if self.jitter else 1.0
        # In the first few attempts a task is as likely to be early as its holder is late.
        least = min(self.delay, self.max_delay) * min(1.0, FIRST_SHARE * 2**exponent)
        within = (least * spread, self.max_delay) if self.turns else None
        return Resend(delay * spread, within)


@dataclass(frozen=True, slots=True)
class Wait(Policy):
    """
    Block in the worker until the key is free; this occupies a pool slot.

    Args:
        timeout: Seconds, or None for the task's `lock_wait`.
        then: What happens after that time: a policy or its name.
    """

    timeout: float | None = None
    then: "Policy | str" = "requeue"

    def __post_init__(self) -> None:
        if self.timeout is not None:
            _check_number("Wait(timeout)", self.timeout, 0, MAX_LEASE)
        then = resolve("Wait(then)", self.then)
        if isinstance(then, Wait):
            raise ConfigurationError("Wait(then) cannot be another Wait: raise the timeout instead")
        object.__setattr__(self, "then", then)

    @property
    def needs(self) -> frozenset[Ability]:  # type: ignore[override]  # depends on `then`
        return resolve("Wait(then)", self.then).needs

    def patience(self, lock_wait: float) -> float:
        return lock_wait if self.timeout is None else self.timeout

    def decide(self, conflict: Conflict) -> Decision:
        return resolve("Wait(then)", self.then).decide(conflict)


@dataclass(frozen=True, slots=True)
class Skip(Policy):
    """
    Do not run the task.

    Args:
        result: Its result, with the state ``SUCCESS``, so that chords and chains go on.
    """

    result: Any = None

    def decide(self, conflict: Conflict) -> Decision:
        return Answer(self.result)


@dataclass(frozen=True, slots=True)
class Fail(Policy):
    """Fail the task with :exc:`~celery_distlock.errors.LockConflictError`."""

    def decide(self, conflict: Conflict) -> Decision:
        return Refuse()


NAMES: dict[str, type[Policy]] = {  # the policies that strings name
    "requeue": Requeue,
    "retry": Retry,
    "wait": Wait,
    "skip": Skip,
    "fail": Fail,
}


def resolve(where: str, value: Any) -> Policy:
    """
    Return the policy that *value* names or is.

    Raises:
        ConfigurationError: *value* is neither; *where* names the declaration.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        if value in NAMES:
            return NAMES[value]()
        raise ConfigurationError(f"{where}: no policy {value!r}; {closest(value, NAMES)}")
    if isinstance(value, type) and issubclass(value, Policy):
        raise ConfigurationError(f"{where}: give an object, {value.__name__}(), not the class")
    raise ConfigurationError(
        f"{where} must be one of {', '.join(NAMES)}, or an object of celery_distlock.policies,"
        f" not {value!r}"
    )


def may_refuse(policy: Policy) -> bool:
    """Whether a conflict may fail the task under *policy*; assumed true of custom policies."""
    if isinstance(policy, Wait):
        return may_refuse(resolve("Wait(then)", policy.then))
    if isinstance(policy, Requeue) and (policy.max_waiting or policy.timeout):
        return may_refuse(resolve("Requeue(then)", policy.then))
    return not isinstance(policy, Requeue | Retry | Skip)


def bounds(policy: Policy) -> Park:
    """Return how *policy* parks a task, if it does: how many may wait, and for how long."""
    if isinstance(policy, Wait):
        return bounds(resolve("Wait(then)", policy.then))
    if isinstance(policy, Requeue) and (policy.max_waiting or policy.timeout):
        return Park(policy.max_waiting, policy.timeout)
    return UNBOUNDED


def _check_bounds(given: Park | Requeue) -> None:
    name = type(given).__name__
    if given.timeout is not None:
        _check_number(f"{name}(timeout)", given.timeout, SHORTEST_TIMEOUT, MAX_LEASE)
    most = given.max_waiting
    if most is not None and (type(most) is not int or not 1 <= most <= MOST_WAITING):
        raise ConfigurationError(
            f"{name}(max_waiting) must be a whole number from 1 to {MOST_WAITING}, not {most!r}"
        )


def _check_number(where: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        wanted = f"a number from {low:g} to {high:.0f}"
        raise ConfigurationError(f"{where} must be {wanted}, not {value!r}")


UNBOUNDED = Park()
