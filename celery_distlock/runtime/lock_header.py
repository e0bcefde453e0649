"""What a message says of its way so far because of its lock: the header ``distlock``."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery_distlock.stores.identities import ExecutionId, task_id_of

__all__ = ["ADDRESSEE", "HEADER", "LockHeader", "addressee_of", "execution_id", "without_ours"]

HEADER = "distlock"  # the one header of ours
# Beside them in the header, of one sending alone: the queue whose copy is the only one to count.
ADDRESSEE = "addressee"


class LockHeader(NamedTuple):
    """
    What has happened to a message because of its lock; its header ``distlock``.

    Attributes:
        woken: It was parked, and now it is its turn.
        run: The execution id under which it was parked.
        parked_at: The slot name of the key at which it was parked.
        names: The slot names of all keys that are reserved for it, if it needs several.
        attempts: How often it was sent again by countdown because its key was taken.
        outages: How often it was sent again since the store last answered.
        requeues: How often it was requeued because the task failed.
        postponed: How often the task has postponed itself, or gone on at other keys than those at
            which it was parked.
        returned: It had its key before and came back without an end; or its broker says that it was
            delivered before.
        since: When it first found its key taken, in seconds since the epoch; 0: it has not.
        sent: It has gone through the store as it was sent, and has not found its key taken since.
        deaths: How often a consumer has rejected it to a dead letter exchange of RabbitMQ's, from
            which it came back. The broker says that in a header of its own, which it takes from
            nobody else from version 4.0.1 on: it begins anew when the message is sent again.
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
        """Read it from a message's headers; that of another message counts for nothing."""
        if HEADER not in headers and "x-death" not in headers:  # as most messages
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
        """Return what counts for the next execution, too: how often it was put back."""
        kept = LockHeader(requeues=self.requeues, postponed=self.postponed, deaths=self.deaths)
        return kept._replace(**changes)

    def parked(self, names: Sequence[str], run: str, **changes: Any) -> "LockHeader":
        """Return what the message says when it is woken that is parked as *run* at these keys."""
        all_names = tuple(names) if len(names) > 1 else ()
        changes = {"run": run, "parked_at": names[0], "names": all_names, **changes}
        return self._replace(woken=True, **changes)

    @property
    def number(self) -> int:
        """How often it was put back, or has come back, as its execution's id tells."""
        return self.requeues + self.postponed + self.deaths

    @property
    def places(self) -> tuple[str, ...]:
        """The slot names of all keys that may be reserved for it."""
        return self.names or (self.parked_at,)

    def to_header(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of the message with these other *headers*, which it names."""
        message = {"id": headers.get("id"), "retries": headers.get("retries") or 0}
        return {**self._asdict(), **message}


_NOTHING = LockHeader()


def _values_of(headers: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """
    Return what the header says; None: there is none, or it is not for this message.

    A task may hand all the headers of its message on to another call. One that was parked by code
    before 0.1.0 names its message by its run alone.
    """
    values = headers.get(HEADER)
    if not isinstance(values, Mapping) or values.get("retries") != (headers.get("retries") or 0):
        return None
    named = str(values.get("id") or ""), task_id_of(str(values.get("run") or ""))
    return values if {*named, ""} <= {str(headers.get("id")), ""} else None


def _deaths(told: Any) -> int:
    """Return how often a message was rejected, as RabbitMQ tells of each queue and reason."""
    entries = [each for each in told if isinstance(each, Mapping)] if isinstance(told, list) else []
    return sum(_whole(each.get("count")) for each in entries if each.get("reason") == "rejected")


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and abs(value) < 2**53  # not what overflows a float
    return float(value) if known else 0.0


def without_ours(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return *headers* as their sender knows them."""
    return {name: value for name, value in headers.items() if name != HEADER}


def addressee_of(headers: Mapping[str, Any]) -> str:
    """Return the queue that a message is for, of all that get a copy of it; empty: for each."""
    values = _values_of(headers)
    # One that is dead has left that queue.
    return "" if values is None or "x-death" in headers else str(values.get(ADDRESSEE) or "")


def execution_id(headers: Mapping[str, Any], lock_header: LockHeader | None = None) -> str:
    """
    Return the id of the execution that a message with these *headers* is for.

    *lock_header*: that of the message, if it is not among them.
    """
    header = LockHeader.of(headers) if lock_header is None else lock_header
    retries, nesting = headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0
    return str(ExecutionId(headers["id"], retries, header.number, nesting))
