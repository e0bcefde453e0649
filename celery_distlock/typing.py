"""
`locked_task`: declares a locked task so that type checkers keep its function's signature.

::

    @locked_task(app, lock_key="stock:{sku}")
    def reserve(sku: str, quantity: int) -> int: ...

    reserve.delay("TEE", "many")  # a type error
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from celery import shared_task
from celery.result import AsyncResult

from .errors import ConfigurationError
from .key import Key
from .policies import Policy
from .task import LockedTask
from .unique import CallRule

if TYPE_CHECKING:
    import kombu
    from celery import Celery, Signature
    from celery.result import EagerResult

__all__ = ["CallOptions", "CallResult", "TaskOptions", "TypedTask", "locked_task"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Base = TypeVar("Base", bound=LockedTask)

OnConflict = Literal["requeue", "retry", "wait", "skip", "fail"]


class TaskOptions(TypedDict, total=False):
    """
    The options of a locked task: its lock, see :class:`LockedTask`, and Celery's own options.

    A type checker cannot compare a callable `lock_key` with the task's parameters, because it would
    infer the parameters from the key; the declaration does that at run time.
    """

    lock_key: (
        str | Key | Sequence[str | Key] | Callable[..., str | Key | Sequence[str | Key] | None]
    )
    lock_on_conflict: OnConflict | Policy
    lock_wait: float
    lock_lease: float
    lock_watchdog: bool
    lock_max_hold: float | None
    lock_on_lost: Literal["abort", "requeue", "warn"]
    lock_on_failure: Literal["release", "requeue"]
    lock_max_requeues: int
    lock_on_outage: Literal["retry", "fail", "run"]
    lock_hold_on_retry: bool
    lock_via: Literal["broker", "store"]
    lock_unique: Literal["started", "finished", "latest"] | float | CallRule | None

    name: str
    shared: bool
    lazy: bool
    typing: bool
    queue: str
    exchange: str
    routing_key: str
    priority: int | None
    expires: float | datetime | None
    serializer: str
    compression: str | None
    rate_limit: str | float | None
    time_limit: float | None
    soft_time_limit: float | None
    ignore_result: bool
    store_errors_even_if_ignored: bool
    store_eager_result: bool
    resultrepr_maxsize: int
    track_started: bool
    trail: bool
    send_events: bool
    acks_late: bool
    acks_on_failure_or_timeout: bool
    reject_on_worker_lost: bool
    max_retries: int | None
    default_retry_delay: float
    throws: tuple[type[BaseException], ...]
    autoretry_for: Sequence[type[BaseException]]
    dont_autoretry_for: Sequence[type[BaseException]]
    retry_kwargs: dict[str, Any]
    retry_backoff: bool | int
    retry_backoff_max: int
    retry_jitter: bool
    pydantic: bool
    pydantic_strict: bool
    pydantic_context: dict[str, Any] | None
    pydantic_dump_kwargs: dict[str, Any] | None
    before_start: Callable[..., Any]
    on_success: Callable[..., Any]
    on_failure: Callable[..., Any]
    on_retry: Callable[..., Any]
    after_return: Callable[..., Any]


class CallOptions(TypedDict, total=False):
    """The options of one call for `TypedTask.apply_async`, in addition to its first parameters."""

    countdown: float
    eta: datetime
    expires: float | datetime
    retry: bool
    retry_policy: Mapping[str, Any]
    queue: "str | kombu.Queue"
    exchange: "str | kombu.Exchange"
    routing_key: str
    priority: int
    serializer: str
    compression: str
    add_to_parent: bool
    publisher: "kombu.Producer"
    headers: dict[str, Any]
    ignore_result: bool
    time_limit: float
    soft_time_limit: float
    lock_via: Literal["broker", "store"]
    lock_unique: None


if TYPE_CHECKING:

    class CallResult(AsyncResult[R_co]):
        """What a call returns: `joined` is whether it is the result of another, equal call."""

        joined: bool

    class TypedTask(LockedTask, Generic[P, R_co]):
        """
        A :class:`LockedTask` whose function takes the parameters P and returns R.

        For annotations, as in ``TypedTask[[str, int], None]``; at run time it is `LockedTask`.
        `s()` takes any arguments, because those of a chain come later. `key_for()` does so because
        those that the key does not name may be left out.
        """

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
        def run(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
        def delay(self, *args: P.args, **kwargs: P.kwargs) -> CallResult[R_co]: ...
        def apply_async(  # noqa: PLR0917  # Celery's order
            self,
            args: Sequence[Any] | None = ...,
            kwargs: dict[str, Any] | None = ...,
            task_id: str | None = ...,
            producer: kombu.Producer | None = ...,
            link: Signature[Any] | list[Signature[Any]] | None = ...,
            link_error: Signature[Any] | list[Signature[Any]] | None = ...,
            shadow: str | None = ...,
            **options: Unpack[CallOptions],
        ) -> CallResult[R_co]: ...
        def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
        def apply_async_on_commit(
            self,
            args: Sequence[Any] | None = ...,
            kwargs: dict[str, Any] | None = ...,
            **options: Any,
        ) -> None: ...
        def apply(  # noqa: PLR0917  # Celery's order
            self,
            args: Sequence[Any] | None = ...,
            kwargs: dict[str, Any] | None = ...,
            link: Signature[Any] | list[Signature[Any]] | None = ...,
            link_error: Signature[Any] | list[Signature[Any]] | None = ...,
            task_id: str | None = ...,
            retries: int | None = ...,
            throw: bool | None = ...,
            logfile: str | None = ...,
            loglevel: str | None = ...,
            headers: Mapping[str, Any] | None = ...,
            **options: Any,
        ) -> EagerResult[R_co]: ...
        def key_for(self, *args: Any, **kwargs: Any) -> str | Key: ...
        def keys_for(self, *args: Any, **kwargs: Any) -> list[str | Key]: ...
        def s(self, *args: Any, **kwargs: Any) -> Signature[R_co]: ...
        def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R_co]: ...
        def signature(
            self,
            args: Sequence[Any] | None = ...,
            kwargs: dict[str, Any] | None = ...,
            **options: Any,
        ) -> Signature[R_co]: ...
        def AsyncResult(self, task_id: str, **options: Any) -> AsyncResult[R_co]: ...  # noqa: N802

else:
    CallResult = GenericAlias(AsyncResult, R_co)
    TypedTask = GenericAlias(LockedTask, (P, R_co))


@overload
def locked_task(
    app: "Celery[Any] | None" = None,
    *,
    bind: Literal[True],
    base: type[Base],
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[Concatenate[Base, P], R]], TypedTask[P, R]]: ...
@overload
def locked_task(
    app: "Celery[Any] | None" = None,
    *,
    bind: Literal[True],
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[Concatenate[TypedTask[P, R], P], R]], TypedTask[P, R]]: ...
@overload
def locked_task(
    app: "Celery[Any] | None" = None,
    *,
    bind: Literal[False] = False,
    base: type[LockedTask] = LockedTask,
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[P, R]], TypedTask[P, R]]: ...
def locked_task(
    app: "Celery[Any] | None" = None, *, base: type[LockedTask] = LockedTask, **options: Any
) -> Callable[[Any], Any]:
    """
    Declare a locked task: ``@app.task(base=LockedTask, ...)``, but with types.

    Calls, ``delay()`` and ``si()`` are checked against the function's parameters, and results have
    its type. The task is the same that ``@app.task`` makes. With ``bind=True`` the function's first
    parameter is the task, a `LockedTask` or the *base*.

    Args:
        app: None declares it for every app, as Celery's `shared_task` does.
        base: A subclass of `LockedTask`. What it adds is known of the first parameter only.
        options: See :class:`TaskOptions`. Others are passed on as well, but a type checker reports
            them: an attribute for a *base* of your own is better set in a subclass.

    Raises:
        ConfigurationError: *app* or *base* is something else, or an option is wrong.
    """
    if isinstance(app, type) or (app is not None and not hasattr(app, "task")):
        raise ConfigurationError(
            f"locked_task takes a Celery app, not {app!r}: write @locked_task(app, ...), or"
            " @locked_task() for a shared task"
        )
    if not isinstance(base, type) or not issubclass(base, LockedTask):
        raise ConfigurationError(
            f"base of a locked task must be LockedTask or a subclass of it, not {base!r}: let your"
            " class inherit from LockedTask instead of celery.Task"
        )
    declare: Any = shared_task if app is None else app.task
    decorate: Callable[[Any], Any] = declare(base=base, **options)
    return decorate
