"""Per-app state of locked tasks: settings, store, and a plan for each task."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, finalize, ref

from celery import Celery, _state
from celery.app.task import Context
from kombu.message import Message

from celery_distlock import signals
from celery_distlock.arguments import forms
from celery_distlock.engine.acquisition import defaults
from celery_distlock.errors import ConfigurationError, LockConflictError
from celery_distlock.policies import may_refuse
from celery_distlock.process.forks import ForkStage, at_fork
from celery_distlock.settings import TASK_ONLY, TASK_OPTIONS, Layer, Settings, meant
from celery_distlock.stores import (
    Ability,
    NotOursError,
    QueueStore,
    Store,
    UnsendableError,
    open_store,
)
from celery_distlock.stores.queue_store import AwaitedError
from celery_distlock.stores.values import WokenTask

from .location import StoreLocation, derive_store_location, mask_urls
from .message_facts import LockHeader, Received
from .messages import MalformedError, destination_of
from .plans import OPTIONS, UNSET, Plan, hint_for, make_plan
from .publishing import Published, publish
from .relay import Relay
from .routing import Backlog, queue_names
from .trust import Reason, RefusedError, Trust

__all__ = ["Runtime", "spelt"]

logger = logging.getLogger(__name__)

_SETTINGS = frozenset(Settings.__dataclass_fields__)
WORKER_FLAG = "worker flag --distlock-*"


class Runtime:
    """Hold what the locked tasks of one app share; :meth:`of` returns an app's."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._flags = Layer(WORKER_FLAG, {})
        self.plans: dict[str, Plan | None] = {}
        self.detours: dict[str, str] = {}  # by task: a class whose __call__ seems to take no lock
        self.pending: set[str] = set()  # tasks reported for returning an unfinished awaitable
        # Set by the worker's bootsteps while it consumes:
        self.delivery_address = ""  # of its delivery channel; empty: it has none
        self.delivery_queues: Collection[str] = ()  # broker queues whose tasks come by that channel
        # Drops reserved runs from the store, in a thread that also calls the argument to find them.
        self.drop_reserved: Callable[[Callable[[], Iterable[WokenTask]]], None] | None = None
        # Called with each woken task that the broker delivered to this worker, and its message.
        self.fetched: Callable[[WokenTask, Message], None] | None = None
        self.parking_thread: Any = None  # parks messages that arrive for a taken key
        self.inspection_thread: Any = None  # inspects the keys of messages that are not parked
        self.trust = Trust(app, self.plans, lambda: self.settings.secret)
        self.relay = Relay(app, lambda: self.store)
        self._backlog = Backlog(app)
        self._imported = False
        self._settled = False  # the settings were read for good
        # Reentrant: a signal handler may take a lock, or call a task, while its thread holds this.
        self._settling = threading.RLock()

    @classmethod
    def of(cls, app: Celery) -> "Runtime":
        """Return the runtime of *app*."""
        real = _real(app)
        runtime: Runtime | None = vars(real).get(_RUNTIME)
        if runtime is None:
            runtime = vars(real).setdefault(_RUNTIME, cls(real))
            _runtimes.add(runtime)
        return runtime

    @classmethod
    def known(cls, app: Celery) -> "Runtime | None":
        """Return the runtime of *app* if it has one."""
        runtime: Runtime | None = vars(_real(app)).get(_RUNTIME)
        return runtime

    @functools.cached_property
    def settings(self) -> Settings:
        """The app-wide settings."""
        return Settings.from_layers(*self._layers)

    @functools.cached_property
    def store(self) -> Store:
        """
        The lock store.

        Raises:
            ConfigurationError: No URL is set, and neither broker nor result backend is a Redis.
        """
        self._settle()
        store = self._open(self.settings.prefix)
        if Ability.QUEUE in store.abilities:
            publisher, publishers = _Publisher(ref(self)), QueueStore.of(store).publishers
            publishers.add(publisher)
            finalize(self, publishers.remove, publisher).atexit = False
        return store

    @functools.cached_property
    def published(self) -> Published:
        """The runs that this process published and must report to the store."""
        return Published(QueueStore.of(self.store))

    @functools.cached_property
    def turns(self) -> Store:
        """The store whose locks decide which of all workers executes a broadcast command."""
        return self._open(f"{self.settings.prefix}:turns")

    def _open(self, prefix: str) -> Store:
        url, replicas = self.settings.url, self.settings.replicas
        location = StoreLocation(url, {}) if url else derive_store_location(self._app.conf)
        wanted = {"replicas": str(replicas)} if replicas else {}
        return open_store(location.url, prefix, {**location.options, **wanted})

    def send(self, woken: WokenTask) -> bool:
        """
        Send a woken task.

        A task that was published before is published again, never pushed, so that it does not
        overtake earlier messages.

        Returns:
            Whether the store knows of it already: it was pushed to a worker, or published again.
            In the latter case it is reported first, so that no unreported copy exists.

        Raises:
            AwaitedError: The task may still be in the broker's queue.
            NotOursError: This process may not send it.
            UnsendableError: No process can send it: its envelope is malformed.
        """
        try:
            message = self.trust.check(woken)
            if woken.published:
                self._ensure_missing(message)
                QueueStore.of(self.store).parking.mark_published(woken)
            elif self.relay.push(woken, message):
                return True
            publish(self._app, woken.envelope, returned=woken.returned)
            return woken.published
        except MalformedError as error:
            raise UnsendableError(str(error)) from error
        except RefusedError as refusal:
            if refusal.reason is Reason.MALFORMED:
                raise UnsendableError(str(refusal)) from refusal
            report = functools.partial(self.trust.refuse, woken, refusal)
            raise NotOursError(str(refusal), report) from refusal

    def push_together(self, woken: Iterable[WokenTask]) -> set[str]:
        """Push those of *woken* that may be pushed; return the runs that workers accepted."""
        checked = []
        for each in woken:
            with contextlib.suppress(RefusedError):  # `send` reports it
                if not each.published:
                    checked.append((each, self.trust.check(each)))
        return self.relay.push_together(checked)

    def keep_fetched(self, message: Message, header: LockHeader) -> None:
        """Keep a woken task from being sent again: the broker has delivered its *message*."""
        if self.fetched is not None and not Received.noted_on(message).pushed:
            self.fetched(WokenTask(header.parked_at, header.run, b""), message)

    def _ensure_missing(self, message: Mapping[str, Any]) -> None:
        """Raise `AwaitedError` if the broker may still have *message*."""
        where = message["exchange"], message["routing_key"]
        if self._backlog.is_in(queue_names(self._app, *where)):
            raise AwaitedError(destination_of(*where))

    def import_tasks(self) -> None:
        """
        Import all modules with tasks of the app, as a worker does when it starts; only once.

        Raises:
            ConfigurationError: A module of ``include``, ``imports`` or of an autodiscovery cannot
                be imported.
        """
        if self._imported:
            return
        if not self._app.loader.worker_initialized:
            try:
                self._app.loader.import_default_modules()
            except Exception as error:
                raise ConfigurationError(
                    f"the app's tasks cannot be imported: {error!r}; see include and imports"
                ) from error
        self._app.finalize()
        self._imported = True

    def use_flags(self, flags: Mapping[str, Any], named: str = WORKER_FLAG) -> None:
        """
        Override the app's configuration by flags, and plan all tasks again.

        Args:
            flags: Settings, by name.
            named: How messages refer to them, with ``*`` for the name.

        Raises:
            ConfigurationError: A flag, or a task's plan under these flags, is wrong.
        """
        self._flags = Layer(named, dict(flags))
        self._settled = True
        self._read_again()
        self._app.finalize(auto=True)  # declares the remaining tasks

    def _read_again(self) -> None:
        for name in ("settings", "store", "published", "turns", "_layers"):
            self.__dict__.pop(name, None)
        # Not `tasks`, which finalizes the app: receivers of that signal may call a task.
        for task in list(self._app._tasks.values()):  # type: ignore[attr-defined]
            if task.name in self.plans:
                self.declare(type(task), task.name)

    def plan_of(self, task: Any) -> Plan | None:
        """
        Return the plan of *task*, a locked task, for a call of it; None: it has none.

        Raises:
            ConfigurationError: An option of the task, or a setting read since, is wrong.
        """
        if not self._settled:
            self._settle()
        # Celery registers a task even if its declaration raised here, or was interrupted.
        if task.name is not None and task.name not in self.plans:
            self.declare(type(task), task.name)
        return self.plans.get(str(task.name))

    def _settle(self) -> None:
        """
        Read the settings for good, at their first use.

        An early declared task may have read them before the app was configured. Workers read them
        again when they start, and other processes must use the same store and prefix.
        """
        if self._settled:
            return
        with self._settling:
            known = self.__dict__.get("_layers")
            if known is not None and not self._settled and self._read_layers() != known:
                try:
                    self._read_again()
                except BaseException:
                    self.__dict__["_layers"] = known  # so that the next use raises it again
                    self._settled = False  # a reentrant call may have set it
                    raise
            self._settled = True

    def after_fork(self) -> None:
        """Replace the mutexes: in a child, no thread would release them."""
        self._settling = threading.RLock()
        self.relay.after_fork()

    def declare(self, task: type[Any], name: str) -> None:
        """
        Make the plan of the class *task*, registered as *name*.

        Raises:
            ConfigurationError: An option is unknown or invalid; the message names it.
        """
        if name.startswith("celery."):
            self.plans[name] = None
            return
        # Celery sets annotations on the class as well, so its own options are not known then.
        annotated = bool(self._app.conf.task_annotations)
        self.plans[name] = plan = make_plan(task, name, *self._layers, annotated=annotated)
        if may_refuse(plan.policy):
            _expect_conflicts(task)

    def without_base(self, tasks: Iterable[Any]) -> Iterator[str]:
        """Yield the names of *tasks* that have ``lock_`` options but are no `LockedTask`."""
        ours = [f"lock_{option}" for option in OPTIONS]
        for task in tasks:
            if task.name not in self.plans and any(hasattr(task, option) for option in ours):
                yield task.name

    def without_results(self, tasks: Iterable[Any]) -> Iterator[str]:
        """Yield the names of *tasks* whose joined calls cannot get a result."""
        # With rpc:// the result is a message to the process that made the first call.
        if str(self._app.conf.result_backend or "").partition(":")[0] != "rpc":
            return
        for task in tasks:
            plan = self.plans.get(task.name)
            joins = plan is not None and plan.unique and plan.unique.duplicate != "raise"
            if joins and not task.ignore_result:
                yield task.name

    @functools.cached_property
    def _layers(self) -> tuple[Layer, Layer]:
        return self._read_layers()

    def _read_layers(self) -> tuple[Layer, Layer]:
        _refuse_unknown(self._app)
        values = {name: self._app.conf.get(f"distlock_{name}", UNSET) for name in _SETTINGS}
        configured = {name: value for name, value in values.items() if value is not UNSET}
        return (
            self._flags,
            Layer("setting distlock_*", configured),
        )


_RUNTIME = "_distlock_runtime"  # in an app's attributes: it lives as long as the app
_runtimes: WeakSet[Runtime] = WeakSet()


def _free_in_child() -> None:
    """Replace mutexes that a thread of the parent may have held at the fork."""
    for runtime in list(_runtimes):
        runtime.after_fork()
    for cached in (each for owner in (Runtime, Trust) for each in vars(owner).values()):
        if isinstance(cached, functools.cached_property) and hasattr(cached, "lock"):
            cached.lock = threading.RLock()  # Python 3.11 has one for all instances


at_fork(_free_in_child, ForkStage.IDENTITY)


@dataclass(frozen=True, slots=True)
class _Publisher:
    """Sends by an app while that is alive; has no strong reference, since stores live for ever."""

    runtime: "ref[Runtime]"

    def __call__(self, woken: WokenTask) -> bool:
        runtime = self.runtime()
        if runtime is None:
            raise NotOursError("the app that sent tasks of this store no longer exists")
        return runtime.send(woken)

    def push_together(self, woken: list[WokenTask]) -> set[str]:
        runtime = self.runtime()
        return set() if runtime is None else runtime.push_together(woken)


def _refuse_unknown(app: Celery) -> None:
    """Raise `ConfigurationError` for a setting whose name is unknown or misspelt."""
    known = [f"distlock_{name}" for name in _SETTINGS]
    namespace = str(getattr(app, "namespace", None) or "")
    prefix = f"{namespace}_" if namespace else ""
    for key in map(str, app.conf):
        name = key.lower().removeprefix(prefix.lower())
        if name.removeprefix("dist").removeprefix("lock_") in TASK_ONLY:
            raise ConfigurationError(
                f"the setting {key} is not read: it is an option of tasks, without a default"
                " for the whole app"
            )
        if name.removeprefix("lock_") in TASK_OPTIONS and name.startswith("lock_"):
            raise ConfigurationError(
                f"the setting {key} is not read: it is an option of tasks; for the whole app"
                f" write {spelt(f'dist{name}', namespace)}"
            )
        if not name.startswith("distlock_"):
            continue
        if name not in known:
            names = [spelt(each, namespace) for each in known]
            hint = hint_for(name.removeprefix("distlock_")) or meant(spelt(name, namespace), names)
            raise ConfigurationError(f"unknown setting {key}; {hint}")
        right = spelt(name, namespace)
        if key not in (name, right):
            raise ConfigurationError(f"the setting {key} is not read; write {right}")


def spelt(name: str, namespace: str) -> str:
    """Return the setting *name* as it is written with *namespace*."""
    full = f"{namespace}_{name}" if namespace else name
    return full.upper() if namespace.isupper() else full


def _real(app: Celery) -> Celery:
    """Return the app itself: a task may refer to it by a proxy."""
    real: Celery = app._get_current_object() if hasattr(app, "_get_current_object") else app
    return real


def _current_store() -> Store:
    """Return the store of this thread's app, or of the process's, or else the only store."""
    app = _state._tls.current_app  # type: ignore[attr-defined]  # current_app would make one up
    if app is not None:
        return Runtime.of(app).store
    runtimes = list(_runtimes)
    if not runtimes:
        raise ConfigurationError(
            "no app with locks is known here: import the module that makes it (with Django, in the"
            " project's __init__.py) and calls install(app), or name a store"
        )
    if len(runtimes) == 1:
        return runtimes[0].store
    stores = _known_stores()
    if len(stores) != 1:
        raise ConfigurationError(
            "this thread has no current app: call app.set_current(), or name a store"
        )
    return stores[0]


def _known_stores() -> list[Store]:
    """Return the store of this thread's app, or of the process's; else those of all apps."""
    app = _state._tls.current_app  # type: ignore[attr-defined]  # as in _current_store
    if app is None and not _runtimes:  # as in most programs that only lock
        return []
    if app is not None:
        return _stores_of([Runtime.of(app)])
    default: Any = getattr(_state, "default_app", None)  # a worker's, in the threads of its pool
    runtime = None if default is None else Runtime.known(default)
    return (runtime and _stores_of([runtime])) or _stores_of(list(_runtimes))


def _stores_of(runtimes: list[Runtime]) -> list[Store]:
    stores = {}
    for runtime in runtimes:
        with contextlib.suppress(ConfigurationError):  # no store; its worker reports that
            stores[runtime.store.identity] = runtime.store
    return list(stores.values())


def _expect_conflicts(task: type[Any]) -> None:
    """Make Celery log a conflict of *task* in one line, as an expected error."""
    throws = task.throws if isinstance(task.throws, tuple) else (task.throws,)
    if LockConflictError not in throws:
        task.throws = (*throws, LockConflictError)


mask_urls()
forms[Context] = lambda request: [request.id, request.retries]  # Celery calls errbacks with one
defaults.store = staticmethod(_current_store)
defaults.stores = staticmethod(_known_stores)
defaults.on_event = signals.send
