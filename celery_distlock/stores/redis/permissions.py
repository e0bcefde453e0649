"""The rights that a user of the servers needs, and which of them are missing."""

import re
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoPermissionError

# Every command that a store and its scripts use on records, each on a record that is removed in the
# end. Scripts run with the rights of their user, so what is refused here is refused in them.
REHEARSAL = tuple(
    words.split()
    for words in (
        *("HSET {} a 1", "HINCRBYFLOAT {} a 1", "HGET {} a", "HMGET {} a"),
        *("HEXISTS {} a", "HLEN {}", "HGETALL {}", "HSCAN {} 0", "HDEL {} a"),
        *("ZADD {} 1 a", "ZCARD {}", "ZSCORE {} a", "ZRANK {} a", "ZRANGE {} 0 0", "ZSCAN {} 0"),
        *("ZCOUNT {} 1 1", "ZLEXCOUNT {} [a [a"),
        *("ZMSCORE {} a", "ZRANGEBYSCORE {} 1 1", "ZREMRANGEBYSCORE {} 2 2", "ZREM {} a"),
        *("SET {} 1 PX 1000", "GET {}", "EXISTS {}", "PTTL {}", "EXPIRE {} 1", "PEXPIRE {} 1000"),
        *("DEL {}", "SCAN 0 COUNT 1", "TIME", "PING"),
    )
)

# The additional commands of a store over a cluster; a server without them does not need them.
IN_A_CLUSTER = (["COMMAND", "INFO", "SPUBLISH"], ["SPUBLISH", "{}", ""])


def lacking(answers: Sequence[Any], prefix: str) -> list[str]:
    """Return the missing rights for which these commands were refused, each once."""
    refusals = [answer for answer in answers if isinstance(answer, NoPermissionError)]
    rights = [missing(str(refusal), prefix) for refusal in refusals]
    return list(dict.fromkeys(right for right in rights if right))


def unknown(answers: Sequence[Any]) -> list[str]:
    """Return the commands that are missing by *answers*, as where a server hides some."""
    refusals = [str(answer) for answer in answers if isinstance(answer, Exception)]
    found = (re.search(r"unknown command ['`]([\w|-]+)", refusal) for refusal in refusals)
    return [command[1] for command in found if command]


def missing(refusal: str, prefix: str = "<prefix>") -> str:
    """Return the right whose lack caused *refusal*, as for ``ACL SETUSER``; "" for other causes."""
    if not re.search("(?i)no permission|the user executing the script can't", refusal):
        return ""
    if command := re.search(r"run the '([\w|-]+)' command", refusal):
        return f"+{command[1]}"
    if "channel" in refusal:
        return f"&{prefix}:*"
    return f"~{prefix}:*" if re.search(r"\bkeys?\b", refusal) else ""
