"""What becomes of a call while one like it is there: see :mod:`celery_distlock.unique`."""

import contextlib
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
from celery_distlock.unique import NOTHING, CallRule, Debounce

from .current import Task
from .invocation import Invocation
from .messages import seconds_left
from .store_producer import Call, ChangedError

__all__ = ["OBLIGING", "answer_second_call", "is_over", "send_once", "terms_of", "with_joined"]

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # to send a call once, while others do
OBLIGING = ("task_id", "link", "link_error")  # somebody waits for just this one
HANGING = ("link", "link_error", "chain", "chord", "group_id")  # ..., by canvas
SLACK = 0.01  # seconds: the store counts in milliseconds
ENDLESS = 1e11  # seconds, for who does not start at the latest after so many
LASTS_AS_LONG = 0.5  # so much of the time that another has until it expires


def send_once(call: Call, rule: CallRule, send: Callable[..., Any]) -> Any:
    """Send a call if none like it is there; else return the result of that one."""
    for _ in range(ATTEMPTS):
        bearer = call.store.calls.peek(call.key.template, call.terms.name)
        replaces = bearer.run if bearer is not None and _gives_way(bearer, rule, call) else ""
        if bearer is not None and not replaces:
            task_id = task_id_of(bearer.run)
            if rule.duplicate == "raise" and not call.must_go:
                raise DuplicateTaskError(task_id)
            _warn_of_itself(call, task_id)
            call.tell("task_joined", task_id)
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
            call.tell("task_updated", more["task_id"])
        return _said(result, joined=updates)
    logger.warning("%s is sent in any case, what is there changes all the time", call.task.name)
    return send(None)


def _warn_of_itself(call: Call, task_id: str) -> None:
    """Log that the task which makes *call* is the one that has its identity."""
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
    """Whether the run that is there is updated; or, as it is on its way, another one is sent."""
    if isinstance(rule, Debounce) or is_over(bearer, rule):
        return True
    waits, comes = bearer.where is Where.WAITING, bearer.where is Where.COMING
    if not (waits or comes):
        return False
    if rule.duplicate != "join":
        return rule.duplicate == "update"
    # It may expire, and this one would go with it; or it ignores the result that this one wants.
    expires_first = bearer.expires < LASTS_AS_LONG * call.terms.expires
    return expires_first or (bearer.silent and not call.terms.silent)


def is_over(bearer: Bearer, rule: CallRule) -> bool:
    """Whether by *rule* nobody has the identity: the call before had a longer one."""
    if bearer.where not in (Where.RUNNING, Where.ENDED):
        return False
    if isinstance(rule.until, str):
        return bearer.where is Where.ENDED or rule.until == "started"
    return bearer.lasts > rule.until + SLACK


def _is_updated(bearer: Bearer, rule: CallRule) -> bool:
    """Whether what waits gets the call's message; else the call is sent beside it."""
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
    """Return the result of another call; nobody waits for one that is not stored."""
    result: Any = task.AsyncResult(task_id)
    result.ignored = silent
    return _said(result, joined=True)


def with_joined(result: Any) -> Any:
    """Return the result of a call, which says whether it is that of another one, like it."""
    return result if hasattr(result, "joined") else _said(result, joined=False)


def _said(result: Any, *, joined: bool) -> Any:
    with contextlib.suppress(AttributeError):  # another `apply_async` may return anything
        result.joined = joined
    return result


def terms_of(task: Task, rule: CallRule, name: str, options: Mapping[str, Any]) -> Identity:
    """Return the identity of a call, with all that is to be known of its run besides."""
    expires = _option(task, "expires", options)
    left = math.inf
    if isinstance(expires, numbers.Real):
        left = float(expires)
    elif expires is not None:
        left = seconds_left(expires)
    # A retry brings an id, too; what it retries may have been a plain call.
    waited_for = HANGING if options.get("retries") else (*HANGING, *OBLIGING)
    return Identity(
        name,
        rule.until,
        expires=left,
        silent=bool(_option(task, "ignore_result", options)),
        fixed=any(options.get(option) for option in waited_for),
    )


def _option(task: Task, name: str, options: Mapping[str, Any]) -> Any:
    """Return an option of the call, or else the task's."""
    return options[name] if name in options else getattr(task, name, None)


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
