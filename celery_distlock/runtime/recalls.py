"""What a recalled run ends with."""

import contextlib

from celery_distlock import policies
from celery_distlock.engine.hold import SUPERSEDED
from celery_distlock.errors import LockKeyError, StoreError
from celery_distlock.stores import QueueStore
from celery_distlock.stores.identities import task_id_of

from .call_rules import answer_instead
from .invocation import Invocation
from .messages import arguments_that_came

__all__ = ["answer_recalled"]


def answer_recalled(invocation: Invocation, key: str, by: str = SUPERSEDED) -> policies.Answer:
    """
    Return the answer to a run that was recalled from *key*, *by* what is in words.

    Raises:
        Ignore: Its rule has no result for it, so it was revoked.
    """
    newer = _newer_call(invocation, key) if by == SUPERSEDED else ""
    why = f"recalled: {by}{newer and f', {newer}'}"
    return answer_instead(invocation, why, invocation.plan.recall_result)


def _newer_call(invocation: Invocation, key: str) -> str:
    """Return the id of the call that has superseded it, while that is pending."""
    identity, request = invocation.plan.identity, invocation.request
    if identity is not None:
        with contextlib.suppress(StoreError, LockKeyError, TypeError):  # only for display
            name = identity.of(*arguments_that_came(request), invocation.receive)
            bearer = QueueStore.of(invocation.store).calls.peek(key, name)
            if bearer is not None and task_id_of(bearer.run) != request.id:
                return task_id_of(bearer.run)
    return ""
