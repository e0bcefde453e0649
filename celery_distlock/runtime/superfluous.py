"""Answers a message that is a second one of its kind, and was not sent by its task's own code."""

from typing import Any

from celery.exceptions import Ignore

from celery_distlock import policies
from celery_distlock.key import Key
from celery_distlock.policies import Decision
from celery_distlock.stores import QueueStore
from celery_distlock.stores.identities import task_id_of
from celery_distlock.unique import NOTHING

from .call_rules import is_over
from .invocation import Invocation

__all__ = ["answer_second_call"]


def answer_second_call(invocation: Invocation, key: Key) -> Decision | None:
    """
    Return what is answered instead of running a message while one like it is there; else None.

    What has gone through the store was judged when it was sent.

    Raises:
        Ignore: It is revoked, as the rule has no result for it.
        StoreUnavailableError: The store did not answer.
    """
    rule, identity, header = invocation.plan.unique, invocation.plan.identity, invocation.header
    request: Any = invocation.request
    before = header.woken or header.outages or header.attempts or header.requeues
    judged = before or request.retries  # what it retries was
    if rule is None or identity is None or judged or not invocation.has_message:
        return None
    if rule.duplicate == "update" or _is_waited_for(request):  # or it may be what is newest
        return None
    name = identity.of(request.args or (), request.kwargs or {}, invocation.receive)
    bearer = QueueStore.of(invocation.store).calls.peek(key.template, name)
    if bearer is None or task_id_of(bearer.run) == request.id or is_over(bearer, rule):
        return None
    why = f"superfluous: {task_id_of(bearer.run)} is {bearer.where.value}"
    invocation.report.info(why.replace("{", "{{").replace("}", "}}"))
    if rule.result is not NOTHING:
        return policies.Answer(rule.result)
    task = invocation.task
    ignored = request.ignore_result if request.ignore_result is not None else task.ignore_result
    backend: Any = task.backend
    backend.mark_as_revoked(request.id, why, request=request, store_result=not ignored)
    raise Ignore(why)


def _is_waited_for(request: Any) -> bool:
    """Whether canvas waits for just this one, which is never taken for another."""
    hangs_on_it = request.chord, request.group, request.chain, request.callbacks, request.errbacks
    return any(hangs_on_it)
