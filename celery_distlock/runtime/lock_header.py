"""The message header ``distlock``: the history of a message that waited for its lock."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery_distlock.stores.identities import ExecutionId, task_id_of

__all__ = ["ADDRESSEE", "HEADER", "LockHeader", "addressee_of", "execution_id", "without_ours"]

HEADER = "distlock"  # our only header
# An extra field of that header, for one sending: the only queue whose copy of the message counts.
ADDRESSEE = "addressee"


class LockHeader(NamedTuple):
    """
    The history of a message that waited for its lock; sent as the header ``distlock``.

    Attributes:
        woken: It was parked, and its key is reserved for it now.
        run: The execution id under which it was parked.
        parked_at: The slot name of the key at which it was parked.
        names: The slot names of all keys that are reserved for it, if it needs several.
        attempts: Number of times that it was sent again by countdown because its key was taken.
        outages: Number of times that it was sent again since the store last answered.
        requeues: Number of times that it was requeued because the task failed.
        postponed: Number of times that the task postponed itself, or continued at other keys than
            those at which it was parked.
        returned: It held its key before and came back without an end; or its broker reports an
            earlier delivery.
        since: When it first found its key taken, in seconds since the epoch; 0: never.
        sent: It was sent through the store, and has not found its key taken since.
        deaths: Number of times that a consumer rejected it to a RabbitMQ dead letter exchange from
            which it came back. RabbitMQ has a header for that, but from version 4.0.1 on it ignores
            the value that a publisher sends: its count restarts when the message is sent again.
    """

    woken: bool = False
    run: str = ""
    parked_at: str = ""
    names: tuple[str, ...] = ()
    attempts: int = 0
    outages: int = 0
    requeues: int = 0
    since: float = 0.0
    sent: bool = False
    postponed: int = 0
    returned: bool = False
    deaths: int = 0

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> "LockHeader":
        """Read it from a message's headers; the header of another message is ignored."""
        if HEADER not in headers and "x-death" not in headers:  # most messages
            return _NOTHING
        values, deaths = _values_of(headers), _deaths(headers.get("x-death"))
        if values is None:
            return cls(deaths=deaths) if deaths else _NOTHING
        return cls(
            woken=bool(values.get("woken")),
            run=str(values.get("run") or ""),
            parked_at=str(values.get("parked_at") or ""),
            names=_texts(values.get("names")),
            attempts=_whole(values.get("attempts")),
            outages=_whole(values.get("outages")),
            requeues=_whole(values.get("requeues")),
            since=_number(values.get("since")),
            sent=bool(values.get("sent")),
            postponed=_whole(values.get("postponed")),
            returned=bool(values.get("returned")),
            deaths=deaths + _whole(values.get("deaths")),
        )

    def of_next(self, **changes: Any) -> "LockHeader":
        """Return the header for the next execution, which keeps the number of requeues."""
        kept = LockHeader(requeues=self.requeues, postponed=self.postponed, deaths=self.deaths)
        return kept._replace(**changes)

    def parked(self, names: Sequence[str], run: str, **changes: Any) -> "LockHeader":
        """Return the header of the message once it is woken, if parked as *run* at these keys."""
        all_names = tuple(names) if len(names) > 1 else ()
        changes = {"run": run, "parked_at": names[0], "names": all_names, **changes}
        return self._replace(woken=True, **changes)

    @property
    def number(self) -> int:
        """Number of requeues and returns, which is part of its execution's id."""
        return self.requeues + self.postponed + self.deaths

    @property
    def places(self) -> tuple[str, ...]:
        """The slot names of all keys that may be reserved for it."""
        return self.names or (self.parked_at,)

    def to_header(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header's value, which names its message by these other *headers*."""
        message = {"id": headers.get("id"), "retries": headers.get("retries") or 0}
        return {**self._asdict(), **message}


_NOTHING = LockHeader()


def _values_of(headers: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """
    Return the header's fields; None: there is no header, or it is another message's.

    A task may pass all headers of its message on to another call. A header that was written by code
    before 0.1.0 names its message by its run only.
    """
    values = headers.get(HEADER)
    if not isinstance(values, Mapping) or values.get("retries") != (headers.get("retries") or 0):
        return None
    named = str(values.get("id") or ""), task_id_of(str(values.get("run") or ""))
    return values if {*named, ""} <= {str(headers.get("id")), ""} else None


def _deaths(given: Any) -> int:
    """Return how often a message was rejected, by RabbitMQ's entries per queue and reason."""
    known = given if isinstance(given, list) else []
    entries = [each for each in known if isinstance(each, Mapping)]
    return sum(_whole(each.get("count")) for each in entries if each.get("reason") == "rejected")


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and abs(value) < 2**53  # not what overflows a float
    return float(value) if known else 0.0


def without_ours(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return *headers* without ours."""
    return {name: value for name, value in headers.items() if name != HEADER}


def addressee_of(headers: Mapping[str, Any]) -> str:
    """Return the only queue whose copy of a message counts; empty: each copy counts."""
    values = _values_of(headers)
    # A dead-lettered message has left that queue.
    return "" if values is None or "x-death" in headers else str(values.get(ADDRESSEE) or "")


def execution_id(headers: Mapping[str, Any], lock_header: LockHeader | None = None) -> str:
    """
    Return the execution id of a message with these *headers*.

    Pass *lock_header* if the header ``distlock`` is not among them.
    """
    header = LockHeader.of(headers) if lock_header is None else lock_header
    retries, nesting = headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0
    return str(ExecutionId(headers["id"], retries, header.number, nesting))
