"""The names in requests to stores: owners of keys, and executions of tasks."""

import functools
import itertools
import os
import secrets
import socket
from typing import NamedTuple, Self

from celery_distlock.keys import key_of, slot_name
from celery_distlock.process.forks import ForkStage, PerProcess

__all__ = ["ExecutionId", "Owner", "is_own", "new_owner", "task_id_of"]


class ExecutionId(NamedTuple):
    """
    The id of one execution of a task, the same for every delivery of one message.

    Records contain its text. ``task.replace()`` sends another task under the same id, with
    `nesting` one higher.
    """

    task_id: str
    retries: int = 0
    requeues: int = 0
    nesting: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of an id; take text of any other form as the task's id."""
        task_id, *numbers = text.rsplit(":", 3)
        if len(numbers) == 3 and all(map(_is_count, numbers)):
            return cls(task_id, *map(int, numbers))
        return cls(task_id)

    def is_after(self, other: Self) -> bool:
        """Whether *other* is an earlier attempt of the same task, or a task that this replaces."""
        earlier = (self.nesting, self.retries) > (other.nesting, other.retries)
        return self.task_id == other.task_id and earlier

    def __str__(self) -> str:
        return f"{self.task_id}:{self.retries}:{self.requeues}:{self.nesting}"


def is_own(run: str, execution_id: str) -> bool:
    """Whether *run* is the execution, or an earlier one of the same task."""
    execution = ExecutionId.parse(execution_id)
    return run == execution_id or execution.is_after(ExecutionId.parse(run))


def task_id_of(execution_id: str) -> str:
    """Return the id of the task to which an execution belongs."""
    return ExecutionId.parse(execution_id).task_id


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


class Owner(NamedTuple):
    """
    The owner of one acquisition, as named by :func:`new_owner`.

    Attributes:
        host: The host.
        pid: The process. In a prefork pool, the child.
        label: ``task[id]``, or the name of a thread.
        nonce: Makes the acquisitions of one process distinct.
    """

    host: str
    pid: int
    label: str
    nonce: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the text of an owner; None if it has another form."""
        parts = text.split("|")
        if len(parts) != 4 or not _is_count(parts[1]):
            return None
        host, pid, label, nonce = parts
        return cls(key_of(host), int(pid), key_of(label), nonce)

    @property
    def task(self) -> str:
        """The name of the task, or of the thread."""
        return self._task_and_id[0]

    @property
    def task_id(self) -> str:
        """The id of the task; empty for a thread."""
        return self._task_and_id[1]

    @property
    def _task_and_id(self) -> tuple[str, str]:
        task, bracket, task_id = self.label.removesuffix("]").rpartition("[")
        return (task, task_id) if bracket and self.label.endswith("]") else (self.label, "")

    def __str__(self) -> str:
        return f"{_word(self.host)}|{self.pid}|{_word(self.label)}|{self.nonce}"


class _Origin:
    """The process's part of owners' names; re-created after a fork."""

    def __init__(self) -> None:
        self.prefix = f"{_word(socket.gethostname())}|{os.getpid()}|"
        self.nonce = secrets.token_hex(8)
        self.count = itertools.count(1)


@functools.lru_cache(maxsize=64)  # for names of threads and of the host
def _word(text: str) -> str:
    return slot_name(text).replace("|", "%7C")


def new_owner(label: str) -> str:
    """
    Return a unique name for one acquisition: ``host|pid|label|nonce``.

    It is also the request's id, by which the store can distinguish a repeated request from a second
    one.
    """
    origin = _origin.value  # one f-string and no `Owner`, since every acquisition calls this
    return f"{origin.prefix}{_word(label)}|{origin.nonce}{next(origin.count):x}"


# A forked child is another process, so it needs other names.
_origin = PerProcess(_Origin, ForkStage.IDENTITY)
