"""Deduplicates calls that have the same identity: see :mod:`celery_distlock.unique`."""

import logging
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from celery._state import get_current_task
from celery.exceptions import Ignore

from celery_distlock import policies
from celery_distlock.errors import DuplicateTaskError
from celery_distlock.key import Key
from celery_distlock.policies import Decision
from celery_distlock.stores import QueueStore
from celery_distlock.stores.identities import ExecutionId, task_id_of
from celery_distlock.stores.queue_parts import Bearer, Where
from celery_distlock.stores.requests import Identity
from celery_distlock.unique import NOTHING, CallRule, Debounce, Latest

from .current import Task
from .invocation import Invocation
from .message_facts import is_waited_for
from .messages import seconds_left
from .store_producer import Call, ChangedError

__all__ = [
    "HANGING",
    "OBLIGING",
    "answer_instead",
    "answer_second_call",
    "is_over",
    "send_once",
    "terms_of",
    "with_joined",
]

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # to send a call while other processes change its identity
OBLIGING = ("task_id", "link", "link_error")  # the caller needs this very execution
HANGING = ("link", "link_error", "chain", "chord", "group_id")  # other tasks depend on it
SLACK = 0.01  # seconds: the store counts in milliseconds
ENDLESS = 1e11  # seconds, for a call without a latest start
LASTS_AS_LONG = 0.5  # part of a call's time to expiry that the other one must still have


def send_once(call: Call, rule: CallRule, send: Callable[..., Any]) -> Any:
    """Send a call unless one with its identity exists; else return the result of that one."""
    for _ in range(ATTEMPTS):
        bearer = call.store.calls.peek(call.key.template, call.terms.name)
        replaces = bearer.run if bearer is not None and _gives_way(bearer, rule, call) else ""
        if bearer is not None and not replaces:
            task_id = task_id_of(bearer.run)
            if rule.duplicate == "raise" and not call.must_go:
                raise DuplicateTaskError(task_id)
            _warn_of_itself(call, task_id)
            call.notify("task_joined", task_id)
            return _joined(call.task, task_id, silent=bearer.silent)
        waits = bearer is not None and bearer.where is Where.WAITING
        updates = bearer is not None and waits and _is_updated(bearer, rule)
        more: dict[str, Any] = _as_attempt(replaces) if updates else {}
        identity = call.terms._replace(replaces=replaces, beside=waits and not updates)
        if isinstance(rule, Debounce):
            leads = rule.leading and bearer is None and not call.delay
            more["delay"] = 0.0 if leads else call.delay or rule.delay
            until = rule.delay if leads else rule.until
            most = ENDLESS if call.delay else rule.most  # none starts before its own countdown
            identity = identity._replace(until=until, most=most)
        try:
            result = send(identity, **more)
        except ChangedError:
            continue
        if updates:
            call.notify("task_updated", more["task_id"])
        return _with_joined(result, joined=updates)
    logger.warning(
        "%s is sent without deduplication, its identity changed during each of %d attempts",
        call.task.name,
        ATTEMPTS,
    )
    return send(None)


def _warn_of_itself(call: Call, task_id: str) -> None:
    """Log a warning if the task that makes *call* has that call's identity itself."""
    caller = get_current_task()
    if caller is not None and caller.request.id == task_id:
        logger.warning(
            "Task %s[%s] called itself and is unique until it has finished, so the call is a"
            ' duplicate of this execution and is not sent; use lock_unique="started", or'
            " apply_async(..., lock_unique=None)",
            call.task.name,
            task_id,
        )


def _gives_way(bearer: Bearer, rule: CallRule, call: Call) -> bool:
    """Whether the call replaces the waiting run, or is sent although one was dispatched."""
    if isinstance(rule, Debounce) or is_over(bearer, rule):
        return True
    waits, comes = bearer.where is Where.WAITING, bearer.where is Where.COMING
    if not (waits or comes):
        return False
    if rule.duplicate != "join":
        return rule.duplicate == "update"
    # The other may expire first, or may ignore the result that this call needs.
    expires_first = bearer.expires < LASTS_AS_LONG * call.terms.expires
    return expires_first or (bearer.silent and not call.terms.silent)


def is_over(bearer: Bearer, rule: CallRule) -> bool:
    """Whether the identity is free by *rule*; the earlier call may have kept it for longer."""
    if bearer.where not in (Where.RUNNING, Where.ENDED):
        return False
    if isinstance(rule.until, str):
        return bearer.where is Where.ENDED or rule.until == "started"
    return bearer.lasts > rule.until + SLACK


def _is_updated(bearer: Bearer, rule: CallRule) -> bool:
    """Whether the waiting run gets the call's message; else both are sent."""
    return not bearer.fixed and rule.duplicate == "update"


def _as_attempt(run: str) -> dict[str, Any]:
    """Return the options by which a call is the same execution as *run*."""
    execution = ExecutionId.parse(run)
    options: dict[str, Any] = {"task_id": execution.task_id}
    if execution.retries:
        options["retries"] = execution.retries
    if execution.nesting:
        options["replaced_task_nesting"] = execution.nesting
    return {**options, "number": execution.requeues}


def _joined(task: Task, task_id: str, *, silent: bool) -> Any:
    """Return the result of another call, marked as ignored if it is not stored (*silent*)."""
    result: Any = task.AsyncResult(task_id)
    result.ignored = silent
    return _with_joined(result, joined=True)


def with_joined(result: Any) -> Any:
    """Return the result of a call with its attribute `joined` set: false, unless it has one."""
    return result if hasattr(result, "joined") else _with_joined(result, joined=False)


def _with_joined(result: Any, *, joined: bool) -> Any:
    try:  # noqa: SIM105  # faster than a context, and each call comes here
        result.joined = joined
    except AttributeError:  # another `apply_async` may return anything
        pass
    return result


def terms_of(task: Task, rule: CallRule, name: str, options: Mapping[str, Any]) -> Identity:
    """Return the identity of a call, with the facts that decide whether others may join it."""
    expires = _option(task, "expires", options)
    left = math.inf
    if isinstance(expires, numbers.Real):
        left = float(expires)
    elif expires is not None:
        left = seconds_left(expires)
    # A retry has a task id, too; the call that it retries may have been a plain one.
    waited_for = HANGING if options.get("retries") else (*HANGING, *OBLIGING)
    return Identity(
        name,
        rule.until,
        expires=left,
        silent=bool(_option(task, "ignore_result", options)),
        fixed=any(map(options.get, waited_for)),
        recalls=rule.recalls if isinstance(rule, Latest) else "",
    )


def _option(task: Task, name: str, options: Mapping[str, Any]) -> Any:
    """Return an option of the call; else the task's."""
    return options[name] if name in options else getattr(task, name, None)


def answer_second_call(invocation: Invocation, key: Key) -> Decision | None:
    """
    Return the answer to a duplicate message that must not run; None: run it.

    A message that was sent through the store was checked then.

    Raises:
        Ignore: The duplicate was revoked: its rule has no result for it.
        StoreUnavailableError: The store did not answer.
    """
    rule, identity, header = invocation.plan.unique, invocation.plan.identity, invocation.header
    request: Any = invocation.request
    before = header.woken or header.outages or header.attempts or header.requeues
    judged = before or request.retries  # the call that it retries was checked
    if rule is None or identity is None or judged or not invocation.has_message:
        return None
    if rule.duplicate == "update" or is_waited_for(request.__dict__):
        return None  # it may have the newest arguments
    name = identity.of(request.args or (), request.kwargs or {}, invocation.receive)
    bearer = QueueStore.of(invocation.store).calls.peek(key.template, name)
    if bearer is None or task_id_of(bearer.run) == request.id or is_over(bearer, rule):
        return None
    why = f"duplicate: {task_id_of(bearer.run)} is {bearer.where.value}"
    return answer_instead(invocation, why, rule.result)


def answer_instead(invocation: Invocation, why: str, result: Any) -> policies.Answer:
    """
    Return *result* as the answer to a run that must not run, or not go on.

    Raises:
        Ignore: There is no *result*, so it was revoked.
    """
    invocation.report.info("{why}", why=why)
    if result is not NOTHING:
        return policies.Answer(result)
    invocation.states.revoked(why)
    raise Ignore(why)
