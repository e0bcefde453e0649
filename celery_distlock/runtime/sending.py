"""
Sends a call through the store: into its key's queue, and to the broker when it may start.

What Celery is about to publish is taken from it by a producer of ours, so that it is the message
which it would have sent. Celery's own part of a call (routing, signals, the result) is as ever.
"""

import contextlib
import datetime
import logging
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.serialization import dumps, loads

from celery_distlock import signals
from celery_distlock.engine.wants import ensure_able, want_of
from celery_distlock.errors import (
    ConfigurationError,
    DuplicateTaskError,
    LockKeyError,
    StoreUnavailableError,
)
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
from celery_distlock.settings import check_via
from celery_distlock.stores import Ability, ParkRequest, SendingStore, SendRequest, Sent, WokenTask
from celery_distlock.stores.identities import ExecutionId, task_id_of
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.sending import Bearer, Where
from celery_distlock.unique import CallRule, Debounce, Throttle

from .app import UNSET, Plan, Runtime
from .current import Task
from .messages import (
    Content,
    LockHeader,
    broker_errors,
    broker_reason,
    destination_of,
    execution_id,
    seal_call,
    when,
)
from .received import HEADER

__all__ = ["StoreProducer", "apply_async", "as_they_arrive", "with_joined"]

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # to send a call once, while others do
OBLIGING = ("task_id", "link", "link_error")  # somebody waits for just this one
HANGING = ("link", "link_error", "chain", "chord", "group_id")  # ..., by canvas
NONE = Identity("")
LASTS_AS_LONG = 0.5  # so much of the time that another has until it expires
KEEPS = "*"  # who has the identity keeps it, and this one goes without

_SCALARS = frozenset({str, int, float, bool, type(None)})  # arrive as they were sent


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

    A link, and a retry, is sent by the broker instead of these, see `_is_sent_by_celery`.
    """
    via, unique = options.pop("lock_via", UNSET), options.pop("lock_unique", UNSET)
    runtime = Runtime.of(task.app)
    plan = runtime.plan_of(task)
    if plan is None or not _is_for_the_store(task, runtime, plan, via, options):
        return apply(args, kwargs, producer=producer, **options)
    if unique is not UNSET and unique is not None:
        raise ConfigurationError(
            f"task {task.name}: of one call lock_unique can only be None, not {unique!r}; say the"
            " rule where the task is declared"
        )
    rule = None if unique is None else plan.unique
    try:
        arguments = as_they_arrive(task, plan, args, kwargs, options)
        call = _call_of(task, runtime, plan, arguments, options)
        if call is not None and rule is not None and plan.identity is not None:
            name = plan.identity.of(*arguments)
            call = replace(call, terms=_terms(task, rule, name, options))
    except (LockKeyError, ConfigurationError):
        if not _is_sent_by_celery(options):
            raise
        call = None  # its own run says so
    if call is None:
        return apply(args, kwargs, producer=producer, **options)
    connection, producer = (
        options.pop("connection", None),
        producer or options.pop("publisher", None),
    )

    def send(
        identity: Identity | None, delay: float | None = None, *, away: bool = False, **more: Any
    ) -> Any:
        ours = {**options, "countdown": None, "eta": None, **more}
        if "headers" in more:
            ours["headers"] = {**(options.get("headers") or {}), **more["headers"]}
        this = call if delay is None else replace(call, delay=delay)
        with StoreProducer(this, identity, producer, connection, store_is_away=away) as through:
            return apply(args, kwargs, **ours, producer=through)

    if rule is None:
        return send(None)
    if any(options.get(option) for option in OBLIGING):
        return send(call.terms._replace(replaces=KEEPS))
    try:
        return _send_once(call, rule, send)
    except StoreUnavailableError as error:
        if rule.on_outage == "raise" and not call.by_celery:
            raise
        logger.warning("%s is sent in any case, the lock store is away: %s", task.name, error)
        return send(None, away=True)


def _call_of(
    task: Task,
    runtime: Runtime,
    plan: Plan,
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    options: Mapping[str, Any],
) -> "_Call | None":
    """Return a call, which has no identity yet; None: it needs no key."""
    keys = plan.rule.keys(*arguments)
    if not keys:
        return None
    if len(keys) > 1:
        raise ConfigurationError(
            f"task {task.name}: lock_via='store' waits at one key, and lock_key returned"
            f" {len(keys)}; have it return one, or send the task by lock_via='broker'"
        )
    store = runtime.store
    ensure_able(store, keys, f"task {task.name}")
    if not isinstance(store, SendingStore) or Ability.SEND not in store.abilities:
        raise ConfigurationError(
            f"task {task.name}: lock_via='store' needs a store that can {Ability.SEND.value};"
            f" {store.address} cannot"
        )
    delay, by_celery = _delay(task, options), _is_sent_by_celery(options)
    return _Call(task, runtime, plan, store, keys[0], delay, by_celery)


def _is_sent_by_celery(options: Mapping[str, Any]) -> bool:
    """
    Whether it is a link or a retry, sent as the task before it ends.

    An error here would be told as the end of that one, which may have done its work.
    """
    return bool(options.get("parent_id") or options.get("retries"))


def _send_once(call: "_Call", rule: CallRule, send: Callable[..., Any]) -> Any:
    """Send a call if none like it is there; else return the result of that one."""
    for _ in range(ATTEMPTS):
        bearer = call.store.peek(call.key.template, call.terms.name)
        replaces = bearer.run if bearer is not None and _gives_way(bearer, rule, call) else ""
        if bearer is not None and not replaces:
            task_id = task_id_of(bearer.run)
            if rule.duplicate == "raise" and not call.by_celery:
                raise DuplicateTaskError(task_id)
            call.tell("task_joined", task_id)
            return _joined(call.task, task_id, silent=bearer.silent)
        waits = bearer is not None and bearer.where is Where.WAITING
        updates = bearer is not None and waits and _is_updated(bearer, rule)
        more: dict[str, Any] = _as_attempt(replaces) if updates else {}
        identity = call.terms._replace(replaces=replaces, beside=waits and not updates)
        if isinstance(rule, Debounce):
            more["delay"] = call.delay or rule.delay
            identity = identity._replace(most=rule.most)
            if rule.leading and bearer is None:
                more["delay"], identity = 0.0, identity._replace(until=rule.delay)
        try:
            result = send(identity, **more)
        except _ChangedError:
            continue
        if updates:
            call.tell("task_updated", str(result.id))
        return _said(result, joined=updates)
    logger.warning("%s is sent in any case, what is there changes all the time", call.task.name)
    return send(None)


def _gives_way(bearer: Bearer, rule: CallRule, call: "_Call") -> bool:
    """Whether the run that is there is updated; or, as it is on its way, another one is sent."""
    if isinstance(rule, Debounce):
        return True
    waits, comes = bearer.where is Where.WAITING, bearer.where is Where.COMING
    if rule.duplicate == "update" and (waits or (comes and rule.until != "finished")):
        return True
    if rule.duplicate == "raise" or not (waits or comes):
        return False
    # It may expire, and this one would go with it; or it ignores the result that this one wants.
    expires_first = bearer.expires < LASTS_AS_LONG * call.terms.expires
    return expires_first or (bearer.silent and not call.terms.silent)


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
    if execution.requeues:
        header = LockHeader(postponed=execution.requeues)
        options["headers"] = {HEADER: header.to_header(execution.retries)}
    return options


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


def as_they_arrive(
    task: Task,
    plan: Plan,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments as the worker gets them, of which it makes the key."""
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    if plan.rule.validates or all(type(each) in _SCALARS for each in (*args, *kwargs.values())):
        return args, kwargs
    serializer = options.get("serializer") or task.serializer
    try:
        kind, encoding, body = dumps((args, kwargs), serializer=serializer)
    except Exception:  # noqa: BLE001  # Celery says what is wrong with them
        return args, kwargs
    arrived: tuple[Sequence[Any], Mapping[str, Any]] = loads(body, kind, encoding, accept=[kind])
    return arrived


def _delay(task: Task, options: Mapping[str, Any]) -> float:
    """Return the seconds before which the call is not to start; raise what Celery would."""
    if options.get("countdown"):
        now, countdown = datetime.datetime.now(datetime.UTC), options["countdown"]
        return max(0.0, (now + datetime.timedelta(seconds=countdown) - now).total_seconds())
    return max(0.0, _left(task, options["eta"])) if options.get("eta") else 0.0


def _terms(task: Task, rule: CallRule, name: str, options: Mapping[str, Any]) -> Identity:
    """Return the identity of a call, with all that is to be known of its run besides."""
    expires = _option(task, "expires", options)
    seconds = isinstance(expires, numbers.Real)
    left = math.inf if expires is None else float(expires) if seconds else _left(task, expires)
    # A retry brings an id, too; what it retries may have been a plain call.
    waited_for = HANGING if options.get("retries") else (*HANGING, *OBLIGING)
    return Identity(
        name,
        rule.until,
        expires=left,
        silent=bool(_option(task, "ignore_result", options)),
        fixed=any(options.get(option) for option in waited_for),
    )


def _left(task: Task, when: Any) -> float:
    """Return the seconds until a time, as Celery takes it."""
    at: Any = maybe_make_aware(maybe_iso8601(when), task.app.timezone)  # type: ignore[arg-type]
    left: datetime.timedelta = at - datetime.datetime.now(datetime.UTC)
    return left.total_seconds()


def _option(task: Task, name: str, options: Mapping[str, Any]) -> Any:
    """Return an option of the call, or else the task's."""
    return options[name] if name in options else getattr(task, name, None)


class _ChangedError(Exception):
    """Another run has the identity than was thought."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, and where it goes."""

    task: Task
    runtime: Runtime
    plan: Plan
    store: SendingStore
    key: Key
    delay: float
    by_celery: bool  # see `_is_sent_by_celery`
    terms: Identity = NONE  # which it is to have

    @property
    def name(self) -> str:
        return slot_name(self.key.template)

    def tell(self, signal: str, task_id: str) -> None:
        """Tell receivers what has become of it."""
        facts = {"key": self.key.template, "task_id": task_id}
        signals.send(signal, self.task, self.store, **facts)

    def send(
        self,
        run: str,
        header: LockHeader,
        content: Content,
        how: Mapping[str, Any],
        identity: Identity | None,
        destination: str,
    ) -> Sent:
        """Give the message to the store, and let in whom that lets in besides."""
        envelope = seal_call(content, how, header)
        signed = self.runtime.trust.sign(self.name, run, envelope)
        park_request = ParkRequest(signed, task=str(self.task.name), destination=destination)
        request = SendRequest(
            self.key.template,
            run,
            park_request,
            want_of(self.key),
            self.delay,
            self.runtime.published.take(),
            identity,
            paced=isinstance(self.plan.unique, Throttle),
        )
        reply = self.store.send(request)
        self.store.dispatch(reply.wake)
        return reply.sent


class StoreProducer:
    """
    Gives the first message, a call's, to the store; in all else it is the *real* producer.

    That one is acquired when it is needed: a call that waits in the store needs none, and no
    connection of the app's pool.

    Args:
        call: What is sent.
        identity: That of the call, if it has one.
        producer: The real one, if the caller has given it.
        connection: Whose producer it is, likewise.
        store_is_away: The call goes to the broker.
    """

    def __init__(
        self,
        call: _Call,
        identity: Identity | None,
        producer: Any,
        connection: Any,
        *,
        store_is_away: bool,
    ) -> None:
        self._call = call
        self._identity = identity
        self._store_is_away = store_is_away
        self._is_sent = False
        self._acquired = contextlib.ExitStack()
        self._producer: Any = None
        self._given = producer
        if connection is not None:
            self._given = call.task.app.amqp.Producer(connection, auto_declare=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._acquired.__exit__(*exc_info)  # type: ignore[arg-type]

    @property
    def _real(self) -> Any:
        # No cached property: before Python 3.12 all of them share a mutex, and who has that would
        # wait for the pool, whose producers may be held by who waits for the mutex.
        if self._producer is None:
            found = self._call.task.app.producer_or_acquire(self._given)
            self._producer = self._acquired.enter_context(found)
        return self._producer

    @property
    def connection(self) -> Any:
        """The real one's; before that is acquired, what stands for it."""
        if self._given is None and self._producer is None:
            return self._original
        return self._real.connection

    @property
    def _original(self) -> Any:
        """What the pool makes its connections of, which is never opened."""
        return self._call.task.app.amqp.producer_pool.connections.connection

    def revive(self, channel: Any) -> None:
        """Have the real one begin anew; on its own connection if *channel* stands for it."""
        own = channel is self._original
        self._real.revive(self._real.connection if own else channel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def publish(self, body: Any, **how: Any) -> Any:
        """Send the call, or publish what comes after it, as an event about it."""
        if self._is_sent:
            return self._real.publish(body, **how)
        headers = how["headers"]
        if "id" not in headers:
            raise ConfigurationError(
                f"task {self._call.task.name}: lock_via='store' needs Celery's task_protocol 2"
            )
        run = execution_id(headers)
        serializer = how.pop("serializer", None) or self._real.serializer
        content = Content.of(dumps(body, serializer=serializer))
        result = self._send(run, headers, content, how)
        self._is_sent = True
        if self._call.task.app.conf.task_send_sent_event:
            self._acquire_for_event()
        return result

    def _acquire_for_event(self) -> None:
        """
        Acquire the real one before Celery takes its mutex for events, as it does itself.

        Those who have all the pool's producers may wait for that mutex.
        """
        with contextlib.suppress(*broker_errors(self.connection)):  # the call is accepted
            self._real  # noqa: B018

    def _send(
        self, run: str, headers: Mapping[str, Any], content: Content, how: Mapping[str, Any]
    ) -> Any:
        call, before = self._call, LockHeader.of(headers)
        kept = LockHeader(
            requeues=before.requeues, postponed=before.postponed, since=time.time() + call.delay
        )
        header = replace(kept, woken=True, run=run, parked_at=call.name, sent=True)
        exchange, routing_key = how.get("exchange") or "", how.get("routing_key") or ""
        exchange = str(getattr(exchange, "name", exchange))
        where, declared = (exchange, routing_key), how.get("declare") or ()
        if not call.runtime.trust.knows_route(str(call.task.name), *where, declared=declared):
            return self._publish(content, how, self._in_time(headers))  # nobody would wake it
        by_broker = replace(kept, outages=1)  # so that nobody takes it for a second call
        if self._store_is_away:
            return self._publish(content, how, self._in_time(headers), by_broker)
        try:
            destination = destination_of(*where)
            sent = call.send(run, header, content, how, self._identity, destination)
        except StoreUnavailableError as error:
            if self._identity is not None and self._identity.replaces == run:
                raise  # by the broker it would be a second delivery of what it was to replace
            rule = call.plan.unique
            raises = rule.on_outage == "raise" if rule else call.plan.settings.on_outage == "fail"
            if raises and not call.by_celery:  # else it fails itself, if the store is still away
                raise
            logger.warning(
                "%s[%s] is sent by the broker, the lock store is away: %s",
                call.task.name,
                headers["id"],
                error,
            )
            # The store may have it all the same: then the second one is recognised.
            return self._publish(content, how, self._in_time(headers), by_broker)
        if sent is Sent.CHANGED:
            raise _ChangedError
        if sent is Sent.GO:
            self._start(run, content, how, {**headers}, header)
        return None

    def _start(
        self,
        run: str,
        content: Content,
        how: Mapping[str, Any],
        headers: dict[str, Any],
        header: LockHeader,
    ) -> None:
        """Publish what may start; if that fails, the next sweep does."""
        call = self._call
        try:
            self._publish(content, how, headers, header)
        except Exception as error:
            if not isinstance(error, broker_errors(self.connection)):
                raise
            logger.warning(
                "%s[%s] is accepted, and a worker sends it later, the broker does not take it: %s",
                call.task.name,
                headers["id"],
                broker_reason(error),
            )
        else:
            call.runtime.published.note(WokenTask(call.name, run, b""))

    def _publish(
        self,
        content: Content,
        how: Mapping[str, Any],
        headers: dict[str, Any],
        header: LockHeader | None = None,
    ) -> Any:
        if header is not None:
            headers[HEADER] = header.to_header(headers.get("retries") or 0)
        return self._real.publish(
            content.body,
            **{
                **how,
                "headers": headers,
                "content_type": content.kind,
                "content_encoding": content.encoding,
            },
        )

    def _in_time(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return *headers* with the time that the store would have kept."""
        delay = self._call.delay
        return {**headers, "eta": when(delay)} if delay else {**headers}
