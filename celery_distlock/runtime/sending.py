"""
Sends a call through the store: into its key's queue, and to the broker when it may start.

Celery publishes to a producer of ours, which gets exactly the message that Celery would have sent.
Celery's own part of a call (routing, signals, the result) does not change.
"""

import datetime
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery_distlock.engine.hold import ensure_able
from celery_distlock.errors import ConfigurationError, LockKeyError, StoreUnavailableError
from celery_distlock.key import Key
from celery_distlock.keys import Receive
from celery_distlock.policies import Park, bounds
from celery_distlock.settings import checked
from celery_distlock.stores import QueueStore
from celery_distlock.stores.requests import Identity
from celery_distlock.unique import CallRule

from .app import Runtime
from .call_rules import HANGING, OBLIGING, send_once, terms_of
from .current import Task
from .message_facts import receive_of_call
from .messages import seconds_left
from .plans import UNSET, Plan, ensure_recallable, take_call_options
from .store_producer import Call, StoreProducer

__all__ = ["apply_async"]

logger = logging.getLogger(__name__)

KEEPS = "*"  # the run that has the identity keeps it, and this one is sent without one


def apply_async(
    task: Task,
    apply: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    producer: Any,
    options: dict[str, Any],
) -> Any:
    """
    Send one call of *task*, through the store if that is requested; return what *apply* returns.

    If the task has a call rule, the result's `joined` is whether it is that of another call. A
    link, a retry, and a call with ``lock_unique=None``, is sent by the broker where another call
    would raise an error.

    Args:
        task: A locked task.
        apply: Celery's `apply_async` of the task.
        args: The call's positional arguments.
        kwargs: The call's keyword arguments.
        producer: As Celery takes it.
        options: All other options of the call, and ``lock_via`` and ``lock_unique``.

    Raises:
        ConfigurationError: The task, or the store, cannot do that.
        QueueFullError: As many wait as the policy allows.
        LockKeyError: No key can be made of the arguments.
        StoreUnavailableError: The store does not answer, and `lock_on_outage` is ``"fail"``.
    """
    by_celery = _is_sent_by_celery(options)
    via, unique = take_call_options(task, options, by_celery=by_celery)
    runtime = Runtime.of(task.app)
    plan, call = runtime.plan_of(task), None
    if plan is not None and _is_for_the_store(task, runtime, plan, via, options):
        must_go = by_celery or (unique is None and via is UNSET)
        rule = None if unique is None else plan.unique
        try:
            given = tuple(args or ()), dict(kwargs or {}), receive_of_call(task, options)
            call = _call_of(
                task, runtime, plan, rule, given, options=options, via=via, must_go=must_go
            )
        except (LockKeyError, ConfigurationError):
            if not must_go:
                raise  # otherwise its own execution reports it
    if call is None:
        return apply(args, kwargs, producer=producer, **options)
    connection = options.pop("connection", None)
    producer = producer or options.pop("publisher", None)
    apply = functools.partial(apply, args, kwargs)
    opened = functools.partial(StoreProducer, producer=producer, connection=connection)
    send = functools.partial(_send, call, apply, options, opened)
    return send(None) if rule is None else _send_by_rule(call, rule, options, send)


def _send(
    call: Call,
    apply: Callable[..., Any],
    options: Mapping[str, Any],
    opened: Callable[..., StoreProducer],
    identity: Identity | None,
    delay: float | None = None,
    *,
    unreachable: bool = False,
    number: int = 0,
    **more: Any,
) -> Any:
    """Let Celery publish *call* to a producer that hands the message to the store."""
    ours = {**options, "countdown": None, "eta": None, **more}
    this = call if delay is None else call._replace(delay=delay)
    with opened(this, identity, store_is_unreachable=unreachable, number=number) as through:
        return apply(**ours, producer=through)


def _send_by_rule(
    call: Call, rule: CallRule, options: Mapping[str, Any], send: Callable[..., Any]
) -> Any:
    if any(map(options.get, OBLIGING)):
        return send(call.terms._replace(replaces=KEEPS))
    try:
        return send_once(call, rule, send)
    except StoreUnavailableError as error:
        if rule.on_outage == "raise" and not call.must_go:
            raise
        text = "%s is sent without deduplication, the lock store is unavailable: %s"
        logger.warning(text, call.task.name, error)
        return send(None, unreachable=True)


def _call_of(
    task: Task,
    runtime: Runtime,
    plan: Plan,
    rule: CallRule | None,
    given: tuple[tuple[Any, ...], dict[str, Any], Receive],
    *,
    options: Mapping[str, Any],
    via: Any,
    must_go: bool,
) -> Call | None:
    """Return a call with the arguments that are *given*; None: it has no key to wait at."""
    keys = plan.rule.keys(*given)
    if not keys or (len(keys) > 1 and plan.by_default and via is UNSET):
        return None  # the app's default is for calls that can go through the store
    if len(keys) > 1:
        other = "lock_unique=None" if plan.unique else "lock_via='broker'"
        raise ConfigurationError(
            f"task {task.name}: {plan.sent_by} waits at one key, and lock_key returned"
            f" {len(keys)}; have it return one, or send the call with {other}"
        )
    store = _able_store(task, plan, runtime, keys[0])
    ensure_recallable(f"task {task.name}", rule, keys[0])
    call = task, runtime, plan, store, keys[0], _delay(options), must_go, _bounds(plan, options)
    if rule is None or plan.identity is None:
        return Call(*call)
    return Call(*call, terms_of(task, rule, plan.identity.of(*given), options))


def _bounds(plan: Plan, options: Mapping[str, Any]) -> Park:
    terms = bounds(plan.policy)
    if terms.max_waiting and (_is_sent_by_celery(options) or any(map(options.get, HANGING))):
        return replace(terms, max_waiting=None)
    return terms


def _able_store(task: Task, plan: Plan, runtime: Runtime, key: Key) -> QueueStore:
    store = runtime.store
    ensure_able(store, (key,), f"task {task.name}")
    for option, ability in plan.needs_of_calls:
        if ability not in store.abilities:
            raise ConfigurationError(
                f"task {task.name}: {option} needs a store that can {ability.value};"
                f" {store.address} cannot"
            )
    return QueueStore.of(store)


def _is_sent_by_celery(options: Mapping[str, Any]) -> bool:
    """
    Whether the call is a link or a retry, sent while the previous task ends.

    Celery would report an error here as the failure of that task, which may have succeeded.
    """
    return bool(options.get("parent_id") or options.get("retries"))


def _is_for_the_store(
    task: Task, runtime: Runtime, plan: Plan, via: Any, options: Mapping[str, Any]
) -> bool:
    if via is not UNSET and checked("via", via, "lock_via") == "store" and plan.why_not_sent:
        raise ConfigurationError(f"task {task.name}: {plan.why_not_sent}")
    wanted = plan.sends if via is UNSET else via == "store"
    if not wanted or not runtime.settings.enabled or task.app.conf.task_always_eager:
        return False
    # The key of such a retry stays locked for it, so no other run is admitted before it.
    return not (plan.settings.hold_on_retry and options.get("retries"))


def _delay(options: Mapping[str, Any]) -> float:
    """Return the delay of the call in seconds; raise the same errors as Celery."""
    if options.get("countdown"):
        now, countdown = datetime.datetime.now(datetime.UTC), options["countdown"]
        return max(0.0, (now + datetime.timedelta(seconds=countdown) - now).total_seconds())
    return max(0.0, seconds_left(options["eta"])) if options.get("eta") else 0.0
