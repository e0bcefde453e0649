"""`LockedTask`: the base class of locked tasks."""

import functools
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.app.task import Context
from celery.signals import task_prerun

from .engine.lease import Lease
from .errors import ConfigurationError, LockKeyError
from .key import Key
from .runtime import call_rules, sending
from .runtime.app import Runtime
from .runtime.current import Unlocked, hand_on, here, is_in_before_start, lease_of
from .runtime.declaration import declared_names, detour, refuse_strategy
from .runtime.execution import Execution
from .runtime.message_facts import (
    HEADER,
    Received,
    receive_of_call,
    receive_of_request,
    without_ours,
)
from .runtime.plans import UNSET, take_call_options
from .runtime.repairs import at_former_key, drop_reservations
from .runtime.requeueing import Postponed
from .worker import install
from .worker.start import as_start_error

__all__ = ["LockedTask"]

if TYPE_CHECKING:
    _Task = Task[Any, Any]
else:
    _Task = Task


class Sending(_Task):
    """
    Sends the calls of locked tasks, as the last class before Celery's.

    So a base that changes a call, or defers it until a transaction is committed, comes before,
    wherever it is among the bases of a task.
    """

    abstract = True

    if not TYPE_CHECKING:  # it has the types of Celery's

        def apply_async(  # noqa: PLR0917  # Celery's order
            self,
            args=None,
            kwargs=None,
            task_id=None,
            producer=None,
            link=None,
            link_error=None,
            shadow=None,
            **options,
        ):
            """Send a call by the broker or through the lock store, according to ``lock_via``."""
            options.update(task_id=task_id, link=link, link_error=link_error, shadow=shadow)
            apply = super().apply_async
            result = sending.apply_async(self, apply, args, kwargs, producer, options)
            return call_rules.with_joined(result)

        def apply(self, *args, **options):
            """Run a call here, as Celery's `apply` does; nothing is sent."""
            take_call_options(self, options, by_celery=False)
            return super().apply(*args, **options)


class LockedTask(Sending):
    """
    A task that runs only while it holds a lock whose key is made from its own arguments.

    The options are class attributes: set them in ``@app.task(base=LockedTask, ...)``, in a
    subclass, or by ``task_annotations``. What a task does not set comes from the worker's flags,
    then from the app's configuration (``distlock_`` instead of ``lock_``), then from the defaults
    of ``celery_distlock.settings.Settings``.

    Options:
        lock_key: A template over the task's parameters, or a :class:`~celery_distlock.Key`, which
            also limits how many may hold it at once; or a list of these: all are taken, or none; or
            a callable with the task's own parameters that returns a key, a list of keys, or None to
            run unlocked.
        lock_on_conflict: ``"requeue"``, ``"retry"``, ``"wait"``, ``"skip"``, ``"fail"``, or an
            object of :mod:`celery_distlock.policies`.
        lock_wait: Seconds that ``"wait"``, and a call without a message, wait for a held key.
        lock_lease: Seconds that the lock outlives its holder's last sign of life. A longer lease
            survives longer pauses of a process; a shorter one admits others sooner after a crash.
        lock_watchdog: True: the lease is renewed while the task runs. False: never.
        lock_max_hold: Seconds after which renewal stops; None: no limit.
        lock_on_lost: ``"abort"`` raises :exc:`~celery_distlock.errors.LockLostError` inside a task
            whose lock is lost; ``"requeue"`` does the same, and then puts the task at the end of
            its key's queue; ``"warn"`` only logs and signals. An aborted execution has not
            completed: a second delivery of it that waits is executed.
        lock_on_failure: ``"release"``, or ``"requeue"``: a failed task goes back to the end of its
            key's queue.
        lock_max_requeues: How often a task that lost its lock, or failed, may go back there. Each
            attempt of ``self.retry()`` may do so as often.
        lock_on_outage: What to do if the lock store does not answer: ``"retry"`` later, ``"fail"``,
            or ``"run"`` unlocked.
        lock_hold_on_retry: True: the key stays locked between the attempts of ``self.retry()``.
        lock_via: ``"broker"``; or ``"store"``: a call joins its key's queue when it is sent, and
            goes to the broker when it may start. To set it for one call: ``apply_async(args,
            lock_via=...)``.
        lock_unique: Until when further equal calls are duplicates, which are not sent:
            ``"started"``, ``"finished"``, seconds, or a :class:`~celery_distlock.unique.Unique`;
            ``"latest"``, or a :class:`~celery_distlock.unique.Latest`: only the newest call runs.
            None: there are no duplicates. Such calls go through the store. ``apply_async(args,
            lock_unique=None)`` sends one anyway.

    Raises:
        ConfigurationError: An option is unknown or wrong; when the task is declared.
    """

    abstract = True
    Request = "celery_distlock.worker.request:LockedRequest"
    Strategy = "celery_distlock.worker.strategy:strategy"

    lock_key: Any = UNSET
    lock_on_conflict: Any = UNSET
    lock_wait: float = UNSET
    lock_lease: float = UNSET
    lock_watchdog: bool = UNSET
    lock_max_hold: float | None = UNSET
    lock_on_lost: str = UNSET
    lock_on_failure: str = UNSET
    lock_max_requeues: int = UNSET
    lock_on_outage: str = UNSET
    lock_hold_on_retry: bool = UNSET
    lock_via: str = UNSET
    lock_unique: Any = UNSET

    if TYPE_CHECKING:  # with Django only, see `_add_on_commit`
        delay_on_commit: Any
        apply_async_on_commit: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Put `Sending`, and Celery's class, behind every base that sends calls or runs them."""
        super().__init_subclass__(**options)
        if _sends_behind(cls):
            cls.__bases__ = (*cls.__bases__, Sending)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the options; Celery calls this when the task is declared."""
        super().on_bound(app)
        _add_on_commit(cls, app)
        for name in declared_names(cls, app):
            with as_start_error():
                install(app)
                runtime = Runtime.of(app)
                refuse_strategy(cls, name, LockedTask)
                _ensure_last(cls, name)
                runtime.detours[name] = detour(cls, name, LockedTask)
                runtime.declare(cls, name)

    @property
    def lock(self) -> Lease:
        """What this task holds while it runs; false, and without keys, if it holds nothing."""
        return lease_of(self)

    def key_for(self, *args: Any, **kwargs: Any) -> str | Key:
        """
        Return the key that a call with these arguments takes, as a `Lock` takes it.

        Arguments that `lock_key` does not name may be left out, unless Pydantic validates them
        (``pydantic=True``). The key is the same however the call is sent, and neither store nor
        broker is asked. It has the terms of `lock_key`, so a plain key is a text; but not the
        period of a :class:`~celery_distlock.unique.Throttle`. It does not include the prefix, which
        is the store's.

        Raises:
            TypeError: The arguments do not fit the task.
            LockKeyError: No key can be made of them; or the call takes several, or none.
        """
        keys = self.keys_for(*args, **kwargs)
        if len(keys) != 1:
            takes = f"{len(keys)} keys" if keys else "no key, and runs unlocked"
            raise LockKeyError(
                f"task {self.name}: a call with these arguments takes {takes}; use keys_for()",
                task=str(self.name),
            )
        return keys[0]

    def keys_for(self, *args: Any, **kwargs: Any) -> list[str | Key]:
        """
        Return the keys that a call with these arguments takes, in the order of their texts.

        That is also the order in which to take them one by one. Empty: the call runs unlocked. Each
        is as :meth:`key_for` returns it, and so are the errors.
        """
        plan = Runtime.of(self.app).plan_of(self)
        if plan is None:
            return []
        keys = plan.rule.own_keys(args, kwargs, receive_of_call(self))
        in_order = sorted(keys, key=lambda key: key.template)
        return [key.template if key == Key(key.template) else key for key in in_order]

    if not TYPE_CHECKING:  # it has the types of Celery's

        def retry(self, *args, **options):
            """Send another attempt, as Celery's `retry` does; a recalled run ends instead."""
            hand_on(self)
            return super().retry(*args, **options)

        def push_request(self, *args, **kwargs):
            """Push a copy of the request with the same headers: Celery makes some of attributes."""
            headers = self.request.headers
            super().push_request(*args, **kwargs)
            if headers is None:
                self.request.headers = Context(*args, **kwargs).headers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task under its lock; the worker, ``apply()`` and direct calls all come here."""
        request = self.request
        nested = _note_call(self, request)
        runtime = Runtime.of(self.app)
        plan = runtime.plan_of(self)
        keys: tuple[Key, ...] = ()
        if plan is not None and runtime.settings.enabled:
            try:
                receive = receive_of_request(self, request, nested=nested)
                keys = plan.rule.keys(args, kwargs, receive)
            except Exception:
                if not nested:
                    drop_reservations(self, runtime, ())
                raise
        body = functools.partial(super().__call__, *args, **kwargs)

        def execution() -> Execution | Unlocked:
            if plan is None or not keys:
                return Unlocked(self)
            return Execution(self, request, plan, runtime, keys, nested=nested)

        try:
            is_woken = Received.of(request).header.woken and not nested
            former = at_former_key(self, runtime, plan, keys) if is_woken else None
            if former is not None:
                return former.run(lambda: execution().run(body))
            return execution().run(body)
        except Postponed as postponed:
            # Celery would copy and format its traceback, frame by frame, without any use for it.
            raise postponed.with_traceback(None) from None


def _note_call(task: LockedTask, request: Context) -> bool:
    """
    Note that *request* of *task* has reached `LockedTask.__call__`.

    Returns:
        Whether the call is nested, that is, not the request's own: there is no request, a locked
        task runs in this thread, or one of the task's handlers (`before_start`, `on_success`,
        `after_return`) makes the call.
    """
    running = here()
    if request.called_directly or is_in_before_start(task):
        return True
    nested = running.in_a_body or request in running.called
    running.called.add(request)
    return nested


def _leave_keys(sender: Any, **_: Any) -> None:
    """
    Drop the store's reservations for an execution, before a task that is no longer locked.

    A process that knew the task as locked had put its message there.
    """
    if isinstance(sender, LockedTask):
        return
    request, runtime = sender.request, Runtime.known(sender.app)
    if runtime is None or HEADER not in vars(request):
        return
    drop_reservations(sender, runtime, ())
    del vars(request)[HEADER]
    if HEADER in (request.headers or {}):
        request.headers = without_ours(request.headers) or None


task_prerun.connect(_leave_keys, weak=False)


def _sends_behind(task: type[LockedTask]) -> bool:
    """Whether a base of *task* that sends calls, or runs them, comes after `Sending`."""
    behind = {*task.__mro__[task.__mro__.index(Sending) + 1 :]} - {Task, object}
    return any(vars(base).keys() & {"apply_async", "__call__"} for base in behind)


def _add_on_commit(task: type[LockedTask], app: Any) -> None:
    """Give *task* the last base that Celery's Django fixup gives to tasks without a base."""
    from celery.fixups.django import DjangoFixup

    if any(isinstance(fixup, DjangoFixup) for fixup in app._fixups):
        from celery.contrib.django.task import DjangoTask

        if not issubclass(task, DjangoTask):
            task.__bases__ = (*task.__bases__, DjangoTask)


def _ensure_last(task: type[LockedTask], name: str) -> None:
    """Raise if `Sending` could not be put last among the bases of *task*."""
    if _sends_behind(task):
        silent = (base for base in task.__mro__ if "__init_subclass__" in vars(base))
        raise ConfigurationError(
            f"task {name}: the __init_subclass__ of {next(silent).__qualname__} does not call"
            " super().__init_subclass__(**options), which LockedTask needs to send calls"
        )
