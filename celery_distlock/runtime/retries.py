"""The keys that an attempt keeps for the next one, with `lock_hold_on_retry`."""

from typing import Any

from celery.exceptions import Retry
from kombu.serialization import dumps, loads

from celery_distlock.settings import MAX_LEASE

from .invocation import Invocation
from .message_facts import execution_id, receive_of_call
from .messages import seconds_until

__all__ = ["kept_for_retry"]


def kept_for_retry(invocation: Invocation, retry: Retry) -> dict[str, tuple[str, float]]:
    """
    Return what is kept for the attempt that *retry* has sent.

    By each of its keys: the execution id of that attempt, and for how many seconds.
    """
    settings = invocation.plan.settings
    if not (settings.hold_on_retry and invocation.has_message):
        return {}
    seconds = min(MAX_LEASE, seconds_until(retry.when) + settings.lease)
    kept = _next_attempt(invocation, retry), seconds
    return dict.fromkeys(_wanted_again(invocation, retry), kept)


def _next_attempt(invocation: Invocation, retry: Retry) -> str:
    """Return the execution id of the retry that was sent; Celery does not copy all headers."""
    request, signature = invocation.request, getattr(retry, "sig", None)
    headers = {} if signature is None else signature.options.get("headers") or {}
    nesting = request.replaced_task_nesting
    facts = {"id": request.id, "replaced_task_nesting": nesting}
    return execution_id({**headers, **facts, "retries": (request.retries or 0) + 1})


def _wanted_again(invocation: Invocation, retry: Retry) -> set[str]:
    """Return the keys that the next attempt, perhaps with other arguments, wants again."""
    held = {hold.key for hold in invocation.taken}
    plan, signature = invocation.plan, getattr(retry, "sig", None)
    if signature is None:  # raised by a nested call without a message: nothing was sent
        return set()
    if not plan.rule.runs_no_code:
        return held
    try:
        task, given = invocation.task, (signature.args or (), signature.kwargs or {})
        _ensure_readable(given, signature.options.get("serializer") or task.serializer)
        keys = plan.rule.keys(*given, receive_of_call(task, signature.options))
        wanted = {key.template for key in keys}
    except Exception:  # noqa: BLE001  # the retry will fail as well, and claim no key
        return set()
    return held & wanted


def _ensure_readable(given: Any, serializer: str) -> None:
    """Raise an error if *given* cannot be serialized, or not deserialized by its receiver."""
    kind, encoding, body = dumps(given, serializer=serializer)
    loads(body, kind, encoding, accept=[kind])
