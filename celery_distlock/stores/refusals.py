"""Which of a server's refusals pass by themselves, and what its own report says against it."""

import re
from collections.abc import Iterator

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)

from .wires import ANSWERLESS

__all__ = ["facts_of", "memory_doubts", "passes"]

# The server starts, fails over, is full, or its operator has locked us out. redis-py takes the code
# away from some of them and makes it their class.
_PASSING_KINDS = (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)
_PASSING = re.compile(
    r"LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|MOVED|ASK |BUSY |OOM|MISCONF|NOREPLICAS"
    r"|UNBLOCKED|NOAUTH|WRONGPASS|NOPERM|ACL failure|max number of clients"
)


def passes(failure: Exception) -> bool:
    """Whether it may be otherwise in a moment: there was no answer, or a refusal that passes."""
    return isinstance(failure, (*ANSWERLESS, *_PASSING_KINDS)) or bool(
        _PASSING.search(str(failure))
    )


def facts_of(info: bytes) -> dict[str, str]:
    """Return what a server answers to INFO, by name."""
    return dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)


def memory_doubts(facts: dict[str, str]) -> Iterator[str]:
    """Say why a server may not keep the locks that it is given."""
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield (
            f"maxmemory-policy is {policy}: the server may evict locks and parked tasks when it is"
            " full; noeviction keeps them"
        )
    if facts.get("role") == "slave":
        yield "this is a replica: locks cannot be taken here"
