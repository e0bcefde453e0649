"""Lock stores: `open_store` selects the class by the scheme of a URL."""

import inspect
import threading
from collections.abc import Callable, Hashable, Mapping
from importlib import import_module
from importlib.metadata import entry_points

from celery_distlock.errors import ConfigurationError
from celery_distlock.keys import AS_TEXT
from celery_distlock.process.forks import ForkStage, PerProcess, no_fork
from celery_distlock.settings import DEFAULT_PREFIX, checked, closest

from .base import Store
from .channels import DeliveryChannel, Inbox, PollingInbox
from .findings import Finding, Severity
from .identities import new_owner
from .listing import CountingStore, ListingStore
from .queue_parts import SendReply, Sent
from .queue_store import NotOursError, Publisher, QueueStore, UnsendableError
from .requests import AcquireRequest, ReleaseRequest, SendRequest, StandRequest
from .urls import normalize, redact
from .values import (
    ALONE,
    Ability,
    Action,
    Completion,
    Holder,
    KeyState,
    Limit,
    OwnChannel,
    Ownership,
    ParkRequest,
    PeerChannel,
    Release,
    RenewOutcome,
    Reply,
    Route,
    Sending,
    Starts,
    Status,
    Waiter,
    Want,
    WokenTask,
)

__all__ = [
    "ALONE",
    "Ability",
    "AcquireRequest",
    "Action",
    "Completion",
    "CountingStore",
    "DeliveryChannel",
    "Finding",
    "Holder",
    "Inbox",
    "KeyState",
    "Limit",
    "ListingStore",
    "NotOursError",
    "OwnChannel",
    "Ownership",
    "ParkRequest",
    "PeerChannel",
    "PollingInbox",
    "Publisher",
    "QueueStore",
    "Release",
    "ReleaseRequest",
    "RenewOutcome",
    "Reply",
    "Route",
    "SendReply",
    "SendRequest",
    "Sending",
    "Sent",
    "Severity",
    "StandRequest",
    "Starts",
    "Status",
    "Store",
    "UnsendableError",
    "Waiter",
    "Want",
    "WokenTask",
    "new_owner",
    "open_store",
    "redact",
]

_SCHEMES = {
    "redis": "redis.store:RedisStore",
    "rediss": "redis.store:RedisStore",
    "unix": "redis.store:RedisStore",
    "redis+socket": "redis.store:RedisStore",
    "sentinel": "redis.store:RedisStore",
    "sentinels": "redis.store:RedisStore",
    "redis+cluster": "redis.store:RedisStore",
    "rediss+cluster": "redis.store:RedisStore",
    "redlock": "redis.redlock:RedlockStore",
    "redlocks": "redis.redlock:RedlockStore",
    "zookeeper": "zookeeper:ZooKeeperStore",
    "memory": "memory:MemoryStore",
}
_OTHERS = "celery_distlock.stores"  # the entry point group of stores in other packages
IMPORT = 5.0  # seconds that a fork waits for an import, which takes one or two on a busy machine
_open: dict[Hashable, Store] = {}
# Made again after a fork, since a thread of the parent may have held it. Reentrant, since a signal
# handler may run in the thread that holds it.
_mutex = PerProcess(threading.RLock, ForkStage.CONNECTIONS)


def open_store(
    url: str, prefix: str = DEFAULT_PREFIX, options: Mapping[str, str] | None = None
) -> Store:
    """
    Return the store at *url*; in one process, the same arguments give the same store.

    Sends nothing until the store is first used.

    Args:
        url: A URL as documented for ``distlock_url``, or one whose scheme another package provides.
        prefix: The beginning of all names of its records.
        options: Options of the URL's query that are given separately. Each may be in one place
            only.

    Raises:
        ConfigurationError: The scheme is unknown, the URL does not parse, or *prefix* or an option
            is wrong.
    """
    checked("prefix", prefix, "a prefix")
    url, options = normalize(url), options or {}
    which = url, prefix, frozenset(options.items())
    with _mutex.value:
        store = _open.get(which)
        if store is None:
            # A child could not import a module that a thread of its parent was importing.
            with no_fork(IMPORT):
                store = _open.setdefault(which, _new_store(url, prefix, options))
        return store


def _new_store(url: str, prefix: str, options: Mapping[str, str]) -> Store:
    scheme = url.partition("://")[0]
    factory: Callable[..., Store]
    if scheme in _SCHEMES:
        module, _, name = _place(scheme, url, options).partition(":")
        factory = getattr(import_module(f".{module}", __name__), name)
    else:
        factory = _installed(scheme, url)
    if options:
        _check_options(factory, url, options)
    return factory(url, prefix, **options)


def _check_options(factory: Callable[..., Store], url: str, options: Mapping[str, str]) -> None:
    try:
        inspect.signature(factory, **AS_TEXT).bind(url, DEFAULT_PREFIX, **options)
    except TypeError as error:
        raise ConfigurationError(
            f"the lock store for {redact(url)!r} does not take {', '.join(options)}: {error}"
        ) from error


def _place(scheme: str, url: str, options: Mapping[str, str]) -> str:
    named = "scripts=" in url or "scripts" in options
    if _SCHEMES[scheme] == "redis.store:RedisStore" and named:
        from .redis.urls import wants_scripts

        if not wants_scripts(url, options):
            return "redis.scriptless:ScriptlessStore"
    return _SCHEMES[scheme]


def _installed(scheme: str, url: str) -> Callable[..., Store]:
    """Return the factory that another package provides for this scheme."""
    others = entry_points(group=_OTHERS)
    if scheme not in others.names:
        if scheme in ("valkey", "valkeys"):
            right = "rediss" if scheme == "valkeys" else "redis"
            raise ConfigurationError(
                f"no lock store for {redact(url)!r}: the URL of a Valkey begins with {right}://"
            )
        raise ConfigurationError(
            f"no lock store for {redact(url)!r}, scheme {redact(scheme)!r}:"
            f" {closest(scheme, [*_SCHEMES, *others.names])}"
        )
    try:
        factory: Callable[..., Store] = others[scheme].load()
    except (AttributeError, ImportError) as error:
        raise ConfigurationError(
            f"the lock store for {redact(url)!r} cannot be loaded: {error}"
        ) from error
    return factory
