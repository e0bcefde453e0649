"""Runs the body of a locked task, and says how it has ended."""

from collections.abc import Callable
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from kombu.serialization import dumps, loads

from celery_distlock.engine.abort import Guard
from celery_distlock.engine.lease import PostponeRequest
from celery_distlock.errors import LockLostError
from celery_distlock.settings import MAX_LEASE
from celery_distlock.stores.values import Completion

from .acquiring import KeyAcquisition
from .app import Runtime
from .invocation import Invocation
from .lock_header import execution_id
from .messages import seconds_until
from .received import receive_of_call
from .requeueing import Requeueing
from .task_function import is_pending

__all__ = ["Body"]


class Body:
    """
    Runs once, by :meth:`run`, after the keys are acquired.

    Attributes:
        completion: Whether the execution is over, as the store is to be told at the release.
        keep_for: By the keys that are kept for the next attempt, its execution id and for how many
            seconds.
        succeeded: Whether the body has returned; None: it has not begun.
    """

    def __init__(
        self, invocation: Invocation, keys: KeyAcquisition, requeueing: Requeueing
    ) -> None:
        self._invocation = invocation
        self._settings = invocation.plan.settings
        self._keys = keys
        self._requeueing = requeueing
        self.completion = Completion.NO
        self.keep_for: dict[str, tuple[str, float]] = {}
        self.succeeded: bool | None = None

    def run(self, body: Callable[[], Any]) -> Any:
        """
        Run *body*, aborted if a key is lost; return its result.

        Raises:
            Exception: What the body raises, :exc:`LockLostError` above all.
            Postponed: It has failed and is requeued.
        """
        sealed = None
        if self._goes_back(lost=True):
            sealed = self._requeueing.seal_for_failure(self._keys.taken)
        late = self._invocation.has_message and bool(self._invocation.task.acks_late)
        may_come_again = self._invocation.redelivered or late
        ended = Completion.YES_AND_MAY_COME_AGAIN if may_come_again else Completion.YES
        with_result = Completion.UNSETTLED if late else ended
        self.succeeded = False
        try:
            holds = self._keys.holds if self._settings.on_lost != "warn" else ()
            result = Guard(holds).run(body)
        except Retry as retry:
            self.completion = ended
            self._keep_keys(retry)
            raise
        except PostponeRequest as asked:
            self.completion = ended
            self._requeueing.postpone(self._keys.taken, asked.seconds)
        except Reject as reject:
            self.completion = Completion.NO if getattr(reject, "requeue", False) else ended
            raise
        except (Ignore, MemoryError) as error:
            self.completion = ended if isinstance(error, Ignore) else Completion.NO
            raise
        except Exception as error:
            self.completion = ended
            lost = isinstance(error, LockLostError) and error.key in self._keys.lease.keys
            if sealed is not None and self._goes_back(lost=lost):
                self._requeueing.requeue(sealed, self._keys.taken, error)
            # A run that lost its lock has not ended: a second delivery of it that waits may run.
            self.completion = Completion.NO if lost else with_result
            raise
        self.completion = with_result
        self.succeeded = True
        if is_pending(result):
            self._report_pending(result)
        return result

    def _report_pending(self, result: Any) -> None:
        """Log, once for each task, that its key is released before its work is done."""
        task = self._invocation.task
        reported = Runtime.of(task.app).pending
        if task.name not in reported:
            reported.add(str(task.name))
            words = (
                "has returned a {kind}, which has not ended, and its key is released now: whatever"
                " it still does runs WITHOUT the lock; have the body end it, by asyncio.run(...) or"
                " list(...), and return what comes out"
            )
            self._invocation.report.error(words, kind=type(result).__qualname__)

    def _keep_keys(self, retry: Retry) -> None:
        if not (self._settings.hold_on_retry and self._invocation.has_message):
            return
        seconds = min(MAX_LEASE, seconds_until(retry.when) + self._settings.lease)
        kept = self._next_attempt(retry), seconds
        self.keep_for = dict.fromkeys(self._wanted_again(retry), kept)

    def _next_attempt(self, retry: Retry) -> str:
        """Return the id of the execution whose message was sent; Celery copies not every header."""
        request, signature = self._invocation.request, getattr(retry, "sig", None)
        headers = {} if signature is None else signature.options.get("headers") or {}
        nesting = request.replaced_task_nesting
        facts = {"id": request.id, "replaced_task_nesting": nesting}
        return execution_id({**headers, **facts, "retries": (request.retries or 0) + 1})

    def _wanted_again(self, retry: Retry) -> set[str]:
        """Return those of the keys that the next attempt wants, which may have other arguments."""
        held = {hold.key for hold in self._keys.taken}
        plan, signature = self._invocation.plan, getattr(retry, "sig", None)
        if signature is None:  # of a call without a message, inside this one: nothing was sent
            return set()
        if not plan.rule.runs_no_code:
            return held
        try:
            task, given = self._invocation.task, (signature.args or (), signature.kwargs or {})
            _ensure_readable(given, signature.options.get("serializer") or task.serializer)
            keys = plan.rule.keys(*given, receive_of_call(task, signature.options))
            wanted = {key.template for key in keys}
        except Exception:  # noqa: BLE001  # it is sent, and will fail, and come for no key
            return set()
        return held & wanted

    def _goes_back(self, *, lost: bool) -> bool:
        """Whether a task that has failed, or has *lost* its lock, is requeued."""
        settings = self._settings
        return settings.on_failure == "requeue" or (lost and settings.on_lost == "requeue")


def _ensure_readable(given: Any, serializer: str) -> None:
    """Raise what its receiver would for arguments that cannot be written, or not read again."""
    kind, encoding, body = dumps(given, serializer=serializer)
    loads(body, kind, encoding, accept=[kind])
