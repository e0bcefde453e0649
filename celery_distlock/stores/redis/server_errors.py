"""Which of a server's refusals are temporary, and the remedies for them."""

import re
from typing import NamedTuple

from redis.exceptions import (
    AskError,
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

from .connections import ANSWERLESS, NotRedisError, TurnedAwayError
from .permissions import missing

__all__ = [
    "is_of_other_type",
    "is_transient",
    "remedy_for",
    "said",
]

# The server starts, fails over, is full, or has no place for this client or for so large a message,
# whose task needs none when its key is free. redis-py removes the code of some errors, and uses it
# as their class. Redis 7.0 has no code for a right that a script lacks, and finds a call too long
# before it asks for a password.
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
    r"|The user executing the script|unauthenticated|invalid bulk length"
)


def is_transient(failure: Exception) -> bool:
    """Whether it may succeed in a moment: there was no answer, or a temporary refusal."""
    return isinstance(failure, (*ANSWERLESS, *_PASSING_KINDS)) or bool(
        _PASSING.search(str(failure))
    )


def is_of_other_type(failure: Exception) -> bool:
    """Whether a record was refused because other software has given it another type."""
    return "WRONGTYPE" in str(failure)


class _Diagnosis(NamedTuple):
    """
    The meaning of a server's error text.

    Attributes:
        words: The error text.
        hint: Added to the message of the error.
        remedy: What an operator can do.
    """

    words: re.Pattern[str]
    hint: str
    remedy: str = ""


_OTHER_USER = "correct user and password in distlock_url, or the rights of that user"
_DIAGNOSES = (
    _Diagnosis(
        re.compile(r"['`]eval", re.IGNORECASE),
        "if scripts are forbidden, ?scripts=off at the URL's end selects the plain lock",
    ),
    _Diagnosis(
        re.compile(r"unknown command ['`](evalsha|select|set)\b", re.IGNORECASE),
        "a sentinel answers this, too: a URL with sentinel:// asks it for the master",
    ),
    _Diagnosis(
        re.compile(r"NOAUTH|Authentication required|unauthenticated"),
        "a password is missing in the URL",
        "set a password in the URL, as in redis://user:password@host:6379/0",
    ),
    _Diagnosis(
        re.compile(r"without any password configured"),
        "the URL has a password, and the server has none",
        "remove the password from distlock_url",
    ),
    _Diagnosis(
        re.compile(r"cluster support disabled"),
        "a URL with redis:// finds a single server",
        "begin distlock_url with redis:// instead of redis+cluster://",
    ),
    _Diagnosis(
        re.compile(r"username-password|WRONGPASS|invalid password"),
        "user and password in the URL are not the server's",
        _OTHER_USER,
    ),
    _Diagnosis(
        re.compile(r"DB index"),
        "the server has no database of that number; its setting 'databases' is their number",
        "correct the number at the end of distlock_url, as in redis://host:6379/0",
    ),
    _Diagnosis(
        re.compile(r"SELECT is not allowed"),
        "a cluster has the database 0 only, and a URL with redis+cluster:// finds all of it",
        "begin distlock_url with redis+cluster://",
    ),
    _Diagnosis(
        re.compile(r"is not an integer or out of range|is not a valid float|invalid expire time"),
        "a number in its records is not ours: other software writes there",
        "delete the record with that number; that of a key's lock ends with its lease",
    ),
    _Diagnosis(re.compile(r"^MOVED "), "no node of the cluster reports that it has the key's slot"),
    _Diagnosis(
        re.compile(r"rehashing of slot"),
        "the cluster is moving the key's slot; if that was interrupted, redis-cli --cluster fix"
        " completes it",
    ),
    _Diagnosis(
        re.compile(r"invalid bulk length"),
        "a message that was sent is larger than its setting 'proto-max-bulk-len'",
    ),
    _Diagnosis(
        re.compile(r"max number of clients"),
        "its setting 'maxclients' limits the connections",
    ),
)


_CODES: dict[type, str] = {AskError: "ASK ", MovedError: "MOVED "}  # redis-py removes them


def said(failure: Exception, prefix: str) -> str:
    """Return the server's error text, with a remedy."""
    words = f"{_CODES.get(type(failure), '')}{failure}"
    right = missing(words, prefix)
    hints = [f"this user lacks {right}"] if right else []
    hints += [each.hint for each in _DIAGNOSES if each.words.search(words)]
    return " ".join([words, *(f"({hint})" for hint in hints)])


def remedy_for(failure: Exception) -> str:
    """Return what an operator can do about a server's refusal; "" if nothing special."""
    words = str(failure)
    if missing(words):
        return "give the user in the URL that right by ACL SETUSER, on every server"
    if isinstance(failure, NotRedisError):
        return "correct host and port in distlock_url"
    remedies = (each.remedy for each in _DIAGNOSES if each.words.search(words))
    other = _OTHER_USER if re.search("NOPERM|Authentication", words) else ""
    return next(filter(None, remedies), other)
