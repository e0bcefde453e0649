"""The context for parsing a server's answer: an unreadable answer counts as an outage."""

import logging
from types import TracebackType
from typing import Any

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.naming import shown

from .scripts import Script

logger = logging.getLogger(__name__)

# Python's errors for a value of another type, form or length than a reader expects.
NOT_READ = (
    *(ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError),
    RecursionError,  # of lists in lists
)
REMEDY = (
    "check what answers at that address: a proxy, or a product that speaks Redis' protocol,"
    " must answer as Redis and Valkey do"
)


class Reading:
    """
    A context in which the *answer* to a script or command is parsed.

    Raises:
        StoreUnavailableError: It cannot be parsed: the request may have been executed, or not.
    """

    __slots__ = ("_address", "_answer", "_asked")

    def __init__(self, address: str, asked: Script | str, answer: Any) -> None:
        self._address = address
        self._asked = asked
        self._answer = answer

    def __enter__(self) -> Any:
        return self._answer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, NOT_READ):
            logger.debug("an answer cannot be read", exc_info=error)
            asked = (
                self._asked if isinstance(self._asked, str) else f"the script {self._asked.name}"
            )
            raise StoreUnavailableError(
                f"{self._address}: its answer to {asked} cannot be read:"
                f" {shown(repr(self._answer))}",
                remedy=REMEDY,
            ) from error
