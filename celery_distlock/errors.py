"""
Every error that this package raises.

::

    DistlockError
    ├── ConfigurationError        a task, a setting or a URL is declared wrongly
    ├── LockError
    │   ├── LockConflictError     the key has another holder           .key .holder .remaining .wait
    │   │   └── QueueFullError    its queue is full                    .max_waiting
    │   ├── LockKeyError          this call's key could not be made    .task
    │   ├── LockLostError         we held the key and no longer do     .key .token
    │   └── LockNotOwnedError     released by a non-holder (also a RuntimeError)
    └── StoreError                the store refuses
        └── StoreUnavailableError the store cannot serve now: the outcome is unknown
            └── QuorumError       too few of several servers have confirmed it   .votes .nodes

    RecalledError                 we hold the key and are asked to leave   .key .token .by
                                  (a BaseException)

A driver's exception never leaves the package: it is the ``__cause__`` of one of these. All of them
survive pickling, so they can be the result of a Celery task.
"""

import math

from .naming import is_resting, shown, taken_by

__all__ = [
    "ConfigurationError",
    "DistlockError",
    "DuplicateTaskError",
    "LockConflictError",
    "LockError",
    "LockKeyError",
    "LockLostError",
    "LockNotOwnedError",
    "QueueFullError",
    "QuorumError",
    "RecalledError",
    "StoreError",
    "StoreUnavailableError",
]


class DistlockError(Exception):
    """
    The base of all errors of this package.

    The data of an error is in its `args`, in the order of its constructor: a result backend with a
    JSON serializer keeps only these.
    """


class ConfigurationError(DistlockError):
    """A declaration is wrong; raised when the task is declared or the worker starts."""


class LockError(DistlockError):
    """The base of the errors of a single lock."""


class LockConflictError(LockError):
    """
    The key has another holder, it rests, or its rate is exhausted.

    Attributes:
        key: The key, as the task or the caller named it.
        holder: The name of the holder, or an empty string if the store does not know it.
        remaining: Seconds that the holder's lease had left at the time of the request; the holder
            may renew it.
        wait: Seconds until time alone admits this caller, by a rate or at the end of a rest, unless
            another comes first; None: the key must be released first, or the time is not known.
    """

    def __init__(
        self,
        key: str = "",
        holder: str = "",
        remaining: float = 0.0,
        wait: float | None = None,
    ) -> None:
        # Without `wait`, older versions can unpickle the error.
        super().__init__(key, holder, remaining, *(() if wait is None else (wait,)))
        self.key = key
        self.holder = holder
        self.remaining = remaining
        self.wait = wait

    def __str__(self) -> str:
        lock = f"lock {shown(self.key)!r}"
        if is_resting(self.holder):
            return f"{lock} rests, for {self.remaining:.1f} s more"
        if self.wait is not None:
            return f"{lock} admits no holder for {self.wait:.1f} s more"
        return f"{lock} {taken_by(self.holder)}, for {self.remaining:.1f} s more unless renewed"

    @property
    def retry_after(self) -> int:
        """
        Seconds for the HTTP header `Retry-After`, at least 1.

        The time until the key opens, if time alone opens it. A key that is held can be released at
        any moment: 1.
        """
        rest = self.remaining if is_resting(self.holder) else None
        return max(1, math.ceil(self.wait or rest or 1))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # which is in Celery's log lines


class QueueFullError(LockConflictError):
    """
    As many requests wait for the key as ``policies.Requeue(max_waiting=…)`` allows.

    Attributes:
        max_waiting: That number.
    """

    def __init__(
        self, key: str = "", holder: str = "", remaining: float = 0.0, max_waiting: int = 0
    ) -> None:
        super().__init__(key, holder, remaining)
        self.args = (key, holder, remaining, max_waiting)
        self.max_waiting = max_waiting

    def __str__(self) -> str:
        held = f"; it {taken_by(self.holder)}" if self.holder else ""
        return f"the queue of lock {shown(self.key)!r} is full, {self.max_waiting} wait{held}"


class DuplicateTaskError(LockError):
    """
    A task was called while an equal call is pending, and its ``lock_unique`` raises then.

    Attributes:
        task_id: The id of the pending task.
    """

    def __init__(self, task_id: str = "") -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return f"an equal task is already pending: {shown(self.task_id)}"


class LockKeyError(LockError, ValueError):
    """
    The key of one call could not be made from its arguments; the cause is chained.

    Attributes:
        task: The task's name, or an empty string.
    """

    def __init__(self, message: str = "", task: str = "") -> None:
        super().__init__(message, task)
        self.task = task

    def __str__(self) -> str:
        return str(self.args[0])


class Interruption(BaseException):
    """The base of the errors that are raised in running code from outside."""


class LockLostError(LockError, Interruption):
    """
    A held lock was lost while the code under it was still running.

    Attributes:
        key: The lost key.
        token: The fencing token of the lost grant: a resource that compares tokens refuses writes
            made under it as soon as it has seen a later one.
        reason: How the loss was noticed; if an operator took the key: the operator, the time, and
            the reason given.
    """

    def __init__(self, key: str = "", token: int = 0, reason: str = "") -> None:
        super().__init__(key, token, reason)
        self.key = key
        self.token = token
        self.reason = reason

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"lock {shown(self.key)!r} (token {self.token}) was lost{why}"


class RecalledError(Interruption):
    """
    A task is asked to leave its key: a newer call has superseded it, or an operator asks.

    It is raised once in the code that runs under the key, which holds the key until it has cleaned
    up and left. It is not an :exc:`Exception`, so ``except Exception`` and ``autoretry_for`` do not
    catch it. A task that it ends is revoked, or has the result that its rule says; it is neither
    retried nor requeued. If the task catches it and returns, its result counts.

    Attributes:
        key: The key, which is held while the code cleans up.
        token: The fencing token of the grant.
        by: Why, in words: a newer call; or the operator, the time, and the reason given.
    """

    def __init__(self, key: str = "", token: int = 0, by: str = "") -> None:
        super().__init__(key, token, by)
        self.key = key
        self.token = token
        self.by = by

    def __str__(self) -> str:
        by = f": {self.by}" if self.by else ""
        return f"the holder of lock {shown(self.key)!r} (token {self.token}) is recalled{by}"


class LockNotOwnedError(LockError, RuntimeError):
    """A lock was released by a thread, or an asyncio task, that does not hold it."""


class StoreError(DistlockError):
    """
    The lock store refused a request.

    Attributes:
        remedy: What an operator can do about it, or an empty string.
    """

    def __init__(self, *args: object, remedy: str = "") -> None:
        super().__init__(*args)
        self.remedy = remedy


class StoreUnavailableError(StoreError):
    """The lock store gave no answer, or cannot serve now; whether it acted is unknown."""


class QuorumError(StoreUnavailableError):
    """
    Too few of several servers have confirmed the request; it is being undone.

    Attributes:
        votes: The number of servers that confirmed it.
        nodes: The number that was required.
    """

    def __init__(self, message: str = "", votes: int = 0, nodes: int = 0) -> None:
        remedy = "start the servers that are missing, or ask for fewer"
        super().__init__(message, votes, nodes, remedy=remedy)
        self.votes = votes
        self.nodes = nodes

    def __str__(self) -> str:
        return str(self.args[0])
