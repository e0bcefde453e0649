"""Which of a server's refusals are temporary, and the remedies for them."""

import re

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


_OTHER_USER = "correct user and password in distlock_url, or the rights of that user"
# Of an error text: a pattern, a hint for our message, and what an operator can do, if anything.
_DIAGNOSES: tuple[tuple[str, ...], ...] = (
    (
        r"(?i)['`]eval",
        "if scripts are forbidden, ?scripts=off at the URL's end selects the plain lock",
    ),
    (
        r"(?i)unknown command ['`](evalsha|select|set)\b",
        "a sentinel answers this, too: a URL with sentinel:// asks it for the master",
    ),
    (
        r"NOAUTH|Authentication required|unauthenticated",
        "a password is missing in the URL",
        "set a password in the URL, as in redis://user:password@host:6379/0",
    ),
    (
        r"without any password configured",
        "the URL has a password, and the server has none",
        "remove the password from distlock_url",
    ),
    (
        r"cluster support disabled",
        "a URL with redis:// finds a single server",
        "begin distlock_url with redis:// instead of redis+cluster://",
    ),
    (
        r"username-password|WRONGPASS|invalid password",
        "user and password in the URL are not the server's",
        _OTHER_USER,
    ),
    (
        r"DB index",
        "the server has no database of that number; its setting 'databases' is their number",
        "correct the number at the end of distlock_url, as in redis://host:6379/0",
    ),
    (
        r"SELECT is not allowed",
        "a cluster has the database 0 only, and a URL with redis+cluster:// finds all of it",
        "begin distlock_url with redis+cluster://",
    ),
    (
        r"is not an integer or out of range|is not a valid float|invalid expire time",
        "a number in its records is not ours: other software writes there",
        "delete the record with that number; that of a key's lock ends with its lease",
    ),
    (r"^MOVED ", "no node of the cluster reports that it has the key's slot"),
    (
        r"rehashing of slot",
        (
            "the cluster is moving the key's slot; if that was interrupted, redis-cli --cluster"
            " fix completes it"
        ),
    ),
    (r"invalid bulk length", "a message that was sent exceeds its setting 'proto-max-bulk-len'"),
    # A TLS alert, which hiredis reads before the server hangs up.
    (r'got "\\x15"', "it wants TLS: then its URL begins with rediss://"),
    (r"max number of clients", "its setting 'maxclients' limits the connections"),
)


_CODES: dict[type, str] = {AskError: "ASK ", MovedError: "MOVED "}  # redis-py removes them


def said(failure: Exception, prefix: str) -> str:
    """Return the server's error text, with a remedy."""
    words = f"{_CODES.get(type(failure), '')}{failure}"
    right = missing(words, prefix)
    hints = [f"this user lacks {right}"] if right else []
    hints += [hint for pattern, hint, *_ in _DIAGNOSES if re.search(pattern, words)]
    return " ".join([words, *(f"({hint})" for hint in hints)])


def remedy_for(failure: Exception) -> str:
    """Return what an operator can do about a server's refusal; "" if nothing special."""
    words = str(failure)
    if missing(words):
        return "give the user in the URL that right by ACL SETUSER, on every server"
    if isinstance(failure, NotRedisError):
        return "correct host and port in distlock_url"
    remedies = (
        remedy for pattern, _, *one in _DIAGNOSES for remedy in one if re.search(pattern, words)
    )
    other = _OTHER_USER if re.search("NOPERM|Authentication", words) else ""
    return next(remedies, other)
