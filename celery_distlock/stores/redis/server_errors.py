"""Which of a server's refusals pass by themselves, and what its own report says of it."""

import re
from collections.abc import Iterator, Mapping

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

from .connections import ANSWERLESS, TurnedAwayError
from .permissions import missing

__all__ = ["describe_info", "is_transient", "memory_doubts", "parse_info", "said"]

# The server starts, fails over, is full, or has no place for us. redis-py takes the code away from
# some of them and makes it their class. Redis 7.0 has none for a right that a script lacks, and
# finds a call too long before it asks for a password.
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
    TurnedAwayError,
)
_PASSING = re.compile(
    r"LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|MOVED|ASK |BUSY |OOM|MISCONF|NOREPLICAS"
    r"|UNBLOCKED|NOAUTH|WRONGPASS|NOPERM|ACL failure|max number of clients"
    r"|The user executing the script|unauthenticated"
)


def is_transient(failure: Exception) -> bool:
    """Whether it may be otherwise in a moment: there was no answer, or a refusal that passes."""
    return isinstance(failure, (*ANSWERLESS, *_PASSING_KINDS)) or bool(
        _PASSING.search(str(failure))
    )


# What to set, by what the server says.
_CURES = (
    (
        re.compile(r"['`]eval", re.IGNORECASE),
        "if scripts are forbidden, ?scripts=off at the URL's end takes the plain lock",
    ),
    (
        re.compile(r"NOAUTH|Authentication required|unauthenticated"),
        "a password is missing in the URL",
    ),
    (re.compile(r"without any password configured"), "the URL has a password too many"),
    (
        re.compile(r"username-password|WRONGPASS|invalid password"),
        "user and password in the URL are not the server's",
    ),
    (
        re.compile(r"DB index"),
        "the server has no database of that number; its setting 'databases' says how many it has",
    ),
    (
        re.compile(r"SELECT is not allowed"),
        "a cluster has the database 0 only, and a URL with redis+cluster:// finds all of it",
    ),
    (re.compile(r"max number of clients"), "its setting 'maxclients' says how many it serves"),
)


def said(failure: Exception, prefix: str) -> str:
    """Return what a server has answered, and what to set against it."""
    words = str(failure)
    right = missing(words, prefix)
    hints = [f"this user lacks {right}"] if right else []
    hints += [cure for words_like, cure in _CURES if words_like.search(words)]
    return " ".join([words, *(f"({hint})" for hint in hints)])


def parse_info(info: bytes, save: object = None) -> dict[str, str]:
    """Return what a server answers to INFO, by name; and to CONFIG GET save, if it may be asked."""
    facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    if isinstance(save, list) and len(save) == 2:
        facts["save"] = save[1].decode()
    return facts


def memory_doubts(facts: Mapping[str, str]) -> Iterator[str]:
    """Say why a server may not keep the locks that it is given."""
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield (
            f"maxmemory-policy is {policy}: the server may evict locks and parked tasks when it is"
            " full; noeviction keeps them"
        )
    if facts.get("role") == "slave":
        yield "this is a replica: locks cannot be taken here"


def describe_info(facts: Mapping[str, str], ahead: float) -> Iterator[tuple[str, str]]:
    """
    Describe a server for people: a subject and what there is to say of it.

    Args:
        facts: Its answer to INFO.
        ahead: Seconds by which its clock is before ours.
    """
    name = "Valkey" if "valkey_version" in facts else "Redis"
    version = facts.get("valkey_version") or facts.get("redis_version", "?")
    role = "master" if facts.get("role") == "master" else "replica"
    yield "server", f"{name} {version}, {role}, port {facts.get('tcp_port', '?')}"
    limit = facts.get("maxmemory", "0")
    limit = "no limit" if limit == "0" else f"of {facts.get('maxmemory_human', limit)}"
    yield (
        "memory",
        f"{facts.get('used_memory_human', '?')} {limit}, {facts.get('maxmemory_policy', '?')}",
    )
    yield "persistence", _persistence(facts)
    yield "replicas", facts.get("connected_slaves", "?")
    yield "clock", f"{abs(ahead) * 1000:.1f} ms {'ahead of' if ahead > 0 else 'behind'} this host's"


def _persistence(facts: Mapping[str, str]) -> str:
    ways = []
    if facts.get("aof_enabled") == "1":
        ways.append(f"append-only file ({facts.get('aof_last_write_status', '?')})")
    if facts.get("save"):
        ways.append(f"snapshots ({facts.get('rdb_last_bgsave_status', '?')})")
    if not ways and "save" not in facts:
        return "no append-only file; whether there are snapshots, it does not tell"
    return " and ".join(ways) or "none"
