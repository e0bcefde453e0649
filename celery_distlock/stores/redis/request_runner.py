"""Send requests to Redis servers until they are answered, and report failures."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import AskError, RedisError, ResponseError, TryAgainError

from celery_distlock import clock
from celery_distlock.errors import QuorumError, StoreError, StoreUnavailableError
from celery_distlock.naming import shown

from . import scripts
from .connections import ANSWERLESS, TIMEOUT, BrokenOffError, Command, TooFewReplicasError
from .reading import Reading
from .server_errors import is_of_other_type, is_transient, remedy_for, said
from .topology import Topology

PAUSES = (0.0, 0.05, 0.25)  # seconds before the first, second and third attempt at a request
PAUSES_FOR_A_SLOT = (0.5, 1.0)  # further ones while a cluster moves the key's slot
BRIEF = 1.0  # seconds for an optional answer, in a cluster
_is_failure = Exception.__instancecheck__  # a C function, as every request calls it
UNCERTAIN = (*ANSWERLESS, BrokenOffError)  # after these, the request may have been executed

LONE_NODE = "one node of a cluster; a URL with redis+cluster:// finds the others"


class Answered(NamedTuple):
    """
    The outcome of a request.

    Attributes:
        answers: To the last attempt, one for each call; the error of a failed call is its answer.
        first_at: The local clock before the first attempt.
        asked_at: The local clock before the last one.
        repeats: The attempts before the last one.
        unanswered: Those of them that may have been executed.
        failures: The errors of the last attempt.
    """

    answers: list[Any]
    first_at: float
    asked_at: float
    repeats: int
    unanswered: int
    failures: list[Exception]


class RequestRunner:
    """
    See the module. Every request may be repeated, since an owner names one acquisition.

    Args:
        servers: The servers to ask.
        prefix: That of the records, for messages.
        on_other_type: The end of the error text for records of another type than ours.
    """

    def __init__(self, servers: Topology, prefix: str, on_other_type: str) -> None:
        self._servers = servers
        self._prefix = prefix
        self._on_other_type = on_other_type

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        """Return the answers to one attempt; as :meth:`Topology.exchange`."""
        return self._servers.exchange(calls, timeout)

    def ask(
        self, calls: Sequence[Command], what: str | None, timeout: float | None = None
    ) -> Answered:
        """
        Send *calls* together until they are answered, three times at most.

        Args:
            calls: What to send.
            what: The key, or another subject, for messages; None: do not raise the error of a
                failed call, which is its answer.
            timeout: If given, there is one attempt of this many seconds.

        Raises:
            StoreUnavailableError: They were not answered, or the servers cannot serve now.
            StoreError: They were refused.
            QuorumError: Too few replicas have confirmed what was done.
        """
        number = unanswered = 0
        first_at = asked_at = clock.monotonic()
        while True:
            try:
                answers = self._servers.exchange(calls, TIMEOUT if timeout is None else timeout)
            except ResponseError as error:  # refused while the connection was made
                answers = [error] * len(calls)
            except RedisError as error:
                raise StoreUnavailableError(
                    f"{self._servers.address} was not asked: {error}", remedy=remedy_for(error)
                ) from error
            failures = list(filter(_is_failure, answers))
            if not failures or timeout is not None or not _goes_on(number, failures):
                break
            unanswered += any(isinstance(failure, UNCERTAIN) for failure in failures)
            number += 1
            time.sleep((*PAUSES, *PAUSES_FOR_A_SLOT)[number] * clock.jitter(0.5, 1.0))
            asked_at = clock.monotonic()
        if failures and what is not None:
            self._fail(failures[0], what)
        return Answered(answers, first_at, asked_at, number, unanswered, failures)

    def attempt(self, calls: Sequence[Command], timeout: float | None = None) -> Answered:
        """Like :meth:`ask`, but the error of a failed call is its answer."""
        return self.ask(calls, None, timeout)

    def attempt_once(self, calls: Sequence[Command]) -> list[Any]:
        """Return the answers to one attempt; the error of a failed call is its answer."""
        return self._attempt_for(calls, TIMEOUT)

    def attempt_briefly(self, calls: Sequence[Command]) -> list[Any]:
        """
        Like :meth:`attempt_once`, for optional requests, with a short wait.

        In a cluster it may go to another node than the key's, which may be unreachable while the
        key's node answers.
        """
        timeout = TIMEOUT if self._servers.in_order else BRIEF
        return self._attempt_for([call._replace(brief=True) for call in calls], timeout)

    def _attempt_for(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        try:
            return self.exchange(calls, timeout)
        except RedisError as error:  # refused while the connection was made
            return [error] * len(calls)

    def ask_once(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        """
        Return the answers to one attempt.

        Raises:
            StoreUnavailableError: There is none, or a refusal.
        """
        try:
            answers = self.exchange(calls, timeout)
        except RedisError as error:
            answers = [error]
        failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if failure is not None:
            raise StoreUnavailableError(
                f"{self._servers.address} did not answer: {said(failure, self._prefix)}",
                remedy=remedy_for(failure),
            ) from failure
        return answers

    def reading(self, asked: scripts.Script | str, answer: Any) -> Reading:
        """Return the context in which the *answer* to a script or command is parsed."""
        return Reading(self._servers.address, asked, answer)

    def require(self, answers: Sequence[Any], what: str) -> None:
        """Raise, as :meth:`ask` does, if one of *answers* is a failure."""
        for answer in answers:
            if isinstance(answer, Exception):
                self._fail(answer, what)

    def _fail(self, failure: Exception, what: str) -> None:
        where = self._servers.address
        if isinstance(failure, TooFewReplicasError):
            raise QuorumError(
                f"{shown(what)!r} at {where}: {failure}",
                votes=failure.confirmed,
                nodes=failure.wanted,
            ) from failure
        if isinstance(failure, AskError) and self._servers.in_order:  # or its subclass, MovedError
            raise StoreError(f"{where} is {LONE_NODE}") from failure
        if isinstance(failure, ResponseError) and not is_transient(failure):
            raise self.refusal(failure, what) from failure
        raise self.outage(failure) from failure

    def outage(self, failure: Exception) -> StoreUnavailableError:
        """Return the error for servers that cannot serve now."""
        return StoreUnavailableError(
            f"{self._servers.address} cannot serve: {said(failure, self._prefix)}",
            remedy=remedy_for(failure),
        )

    def refusal(self, failure: ResponseError, what: str) -> StoreError:
        """Return the error for a refusal by the servers."""
        if is_of_other_type(failure):
            return StoreError(
                f"{self._servers.address}: the records of lock {shown(what)!r} are of another type:"
                f" other software writes under the prefix {self._prefix!r}, {self._on_other_type}"
                f" ({failure})"
            )
        return StoreError(
            f"{self._servers.address} refused {shown(what)!r}: {said(failure, self._prefix)}",
            remedy=remedy_for(failure),
        )


def _goes_on(number: int, failures: Sequence[Exception]) -> bool:
    """Whether there is another attempt after attempt *number*."""
    if number + 1 < len(PAUSES):
        return any(map(is_transient, failures))
    goes_on = number + 1 < len(PAUSES) + len(PAUSES_FOR_A_SLOT)
    return goes_on and any(isinstance(failure, TryAgainError) for failure in failures)
