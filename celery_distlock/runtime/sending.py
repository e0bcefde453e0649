"""
Sends a call through the store: into its key's queue, and to the broker when it may start.

What Celery is about to publish is taken from it by a producer of ours, so that it is the message
which it would have sent. Celery's own part of a call (routing, signals, the result) is as ever.
"""

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery_distlock.engine.wants import ensure_able
from celery_distlock.errors import ConfigurationError, LockKeyError, StoreUnavailableError
from celery_distlock.key import Key
from celery_distlock.settings import check_via
from celery_distlock.stores import Ability, QueueStore
from celery_distlock.stores.requests import Identity

from .app import Runtime
from .call_rules import OBLIGING, send_once, terms_of
from .current import Task
from .messages import seconds_left
from .plans import UNSET, Plan, take_call_options
from .received import receive_of_call
from .store_producer import Call, StoreProducer

__all__ = ["apply_async"]

logger = logging.getLogger(__name__)

KEEPS = "*"  # who has the identity keeps it, and this one goes without


def apply_async(
    task: Task,
    apply: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    producer: Any,
    options: dict[str, Any],
) -> Any:
    """
    Send one call of *task*, through the store where that is wanted; return what *apply* does.

    Where the task has a call rule, the result's `joined` says whether it is that of another call.

    Args:
        task: A locked task.
        apply: Celery's `apply_async` of the task.
        args: The call's.
        kwargs: Likewise.
        producer: As Celery takes it.
        options: All else that the call has; ``lock_via`` is ours.

    Raises:
        ConfigurationError: The task, or the store, is not for that.
        LockKeyError: No key can be made of the arguments.
        StoreUnavailableError: The store does not answer, and `lock_on_outage` is ``"fail"``.

    A link, a retry, and a call with ``lock_unique=None``, is sent by the broker instead of these.
    """
    via, unique = take_call_options(task, options, by_celery=_is_sent_by_celery(options))
    runtime = Runtime.of(task.app)
    plan = runtime.plan_of(task)
    if plan is None or not _is_for_the_store(task, runtime, plan, via, options):
        return apply(args, kwargs, producer=producer, **options)
    rule = None if unique is None else plan.unique
    must_go = _is_sent_by_celery(options) or (unique is None and via is UNSET)
    try:
        given = tuple(args or ()), dict(kwargs or {}), receive_of_call(task, options)
        keys = plan.rule.keys(*given)
        if len(keys) > 1 and plan.by_default and via is UNSET:
            keys = ()  # the app's way is for what can go it
        call = _call_of(task, runtime, plan, keys, options, must_go=must_go)
        if call is not None and rule is not None and plan.identity is not None:
            name = plan.identity.of(*given)
            call = replace(call, terms=terms_of(task, rule, name, options))
    except (LockKeyError, ConfigurationError):
        if not must_go:
            raise
        call = None  # its own run says so
    if call is None:
        return apply(args, kwargs, producer=producer, **options)
    connection, producer = (
        options.pop("connection", None),
        producer or options.pop("publisher", None),
    )

    def send(
        identity: Identity | None,
        delay: float | None = None,
        *,
        away: bool = False,
        number: int = 0,
        **more: Any,
    ) -> Any:
        ours = {**options, "countdown": None, "eta": None, **more}
        this = call if delay is None else replace(call, delay=delay)
        with StoreProducer(
            this, identity, producer, connection, store_is_away=away, number=number
        ) as through:
            return apply(args, kwargs, **ours, producer=through)

    if rule is None:
        return send(None)
    if any(options.get(option) for option in OBLIGING):
        return send(call.terms._replace(replaces=KEEPS))
    try:
        return send_once(call, rule, send)
    except StoreUnavailableError as error:
        if rule.on_outage == "raise" and not call.must_go:
            raise
        logger.warning("%s is sent in any case, the lock store is away: %s", task.name, error)
        return send(None, away=True)


def _call_of(
    task: Task,
    runtime: Runtime,
    plan: Plan,
    keys: tuple[Key, ...],
    options: Mapping[str, Any],
    *,
    must_go: bool,
) -> Call | None:
    """Return a call, which has no identity yet; None: it has no *keys* to wait at."""
    if not keys:
        return None
    if len(keys) > 1:
        other = "lock_unique=None" if plan.unique else "lock_via='broker'"
        raise ConfigurationError(
            f"task {task.name}: {plan.sent_by} waits at one key, and lock_key returned"
            f" {len(keys)}; have it return one, or send the call with {other}"
        )
    store = runtime.store
    ensure_able(store, keys, f"task {task.name}")
    if Ability.QUEUE not in store.abilities:
        raise ConfigurationError(
            f"task {task.name}: {plan.sent_by} needs a store that can {Ability.QUEUE.value};"
            f" {store.address} cannot"
        )
    return Call(task, runtime, plan, QueueStore.of(store), keys[0], _delay(options), must_go)


def _is_sent_by_celery(options: Mapping[str, Any]) -> bool:
    """
    Whether it is a link or a retry, sent as the task before it ends.

    An error here would be told as the end of that one, which may have done its work.
    """
    return bool(options.get("parent_id") or options.get("retries"))


def _is_for_the_store(
    task: Task, runtime: Runtime, plan: Plan, via: Any, options: Mapping[str, Any]
) -> bool:
    if via is not UNSET and check_via(via) == "store" and plan.why_not_sent:
        raise ConfigurationError(f"task {task.name}: {plan.why_not_sent}")
    wanted = plan.sends if via is UNSET else via == "store"
    if not wanted or not runtime.settings.enabled or task.app.conf.task_always_eager:
        return False
    # The key of such a retry stays locked for it, and nobody is woken before it.
    return not (plan.settings.hold_on_retry and options.get("retries"))


def _delay(options: Mapping[str, Any]) -> float:
    """Return the seconds before which the call is not to start; raise what Celery would."""
    if options.get("countdown"):
        now, countdown = datetime.datetime.now(datetime.UTC), options["countdown"]
        return max(0.0, (now + datetime.timedelta(seconds=countdown) - now).total_seconds())
    return max(0.0, seconds_left(options["eta"])) if options.get("eta") else 0.0
