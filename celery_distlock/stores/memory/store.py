"""
A store within one process: for eager mode, for users' own tests, and for workers that do not fork.

It is the Redis store over a server in this process, so it keeps the whole contract. Its records are
lost when the process ends, and a forked child starts with an empty store. ``memory://`` and
``memory://name`` are different stores.
"""

import threading
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.channels import DeliveryChannel, EventInbox, Inbox
from celery_distlock.stores.findings import Finding
from celery_distlock.stores.redis.connections import Command, ConnectionFactory
from celery_distlock.stores.redis.delivery import RedisChannels
from celery_distlock.stores.redis.delivery_channel import CLOSING, Pushes
from celery_distlock.stores.redis.inboxes import Inboxes
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.redis.topology import PushTarget, Topology
from celery_distlock.stores.redis.urls import Location
from celery_distlock.stores.urls import redact
from celery_distlock.stores.values import Ability, WokenTask

from .server import Server


class _MemoryInboxes(Inboxes):
    _servers: "_InProcess"

    def inbox(self, stem: str, owner: str) -> Inbox:
        return _MemoryInbox(owner, self._servers.server)


class _MemoryChannels(RedisChannels):
    _servers: "_InProcess"

    def open_channel(self, receive: Callable[[WokenTask], object]) -> DeliveryChannel:
        address = f"{self._records.prefix}:channel:{uuid.uuid4().hex}"
        return _MemoryChannel(address, self._servers.server, receive)


class MemoryStore(RedisStore):
    """A store in memory, see the module; *url* only names the store."""

    abilities = RedisStore.abilities - {Ability.SHARE}
    _inboxes_class, _channels_class = _MemoryInboxes, _MemoryChannels
    _servers: "_InProcess"

    def _locate(self, url: str, options: Mapping[str, str]) -> Location:
        if "?" in url or options:
            given = f" ({', '.join(options)})" if options else f", as in {redact(url)!r}"
            raise ConfigurationError(f"a store in memory has no options{given}")
        return Location(_InProcess(url), 0)

    def start_over(self, name: str) -> None:
        """Become another, empty store; all its holds and waiters are dropped."""
        self.address = self._servers.address = name.partition("#")[0]
        self.identity = name
        self._servers.server = Server()
        self._compose()

    def check(self) -> list[Finding]:
        return []

    def describe(self) -> Iterator[Finding]:
        yield from ()


class _InProcess(Topology):
    """The server in this process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.server = Server()

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        return [self.server.execute(call) for call in calls]

    def place(self, key: bytes, channel: str) -> PushTarget:
        return PushTarget(None, channel)

    def connect(self, node: Hashable) -> ConnectionFactory:
        raise NotImplementedError("there is nothing to connect to")

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def after_fork(self) -> None:
        self.server = Server()


class _MemoryInbox(EventInbox):
    """An inbox with its own channel."""

    def __init__(self, owner: str, server: Server) -> None:
        super().__init__(owner)
        self._keys = server.keys
        self._keys.subscribe(owner.encode(), self._take)

    def _take(self, _: bytes) -> None:
        self.call()

    def wait(self, timeout: float) -> None:
        if clock.wait(self.event, timeout):
            self.event.clear()

    def close(self) -> None:
        self._keys.unsubscribe(self.address.encode(), self._take)


class _MemoryChannel(DeliveryChannel):
    """A delivery channel that a thread reads, as in other stores."""

    def __init__(
        self, address: str, server: Server, receive: Callable[[WokenTask], object]
    ) -> None:
        self.address = address
        self._keys = server.keys
        self._pushes = Pushes(address, receive)
        self._payloads: SimpleQueue[bytes | None] = SimpleQueue()
        self._keys.subscribe(address.encode(), self._payloads.put)
        self._thread = DaemonThread("distlock-delivery", self._run)
        self._thread.start()

    def _run(self) -> None:
        while (payload := self._payloads.get()) is not None:
            self._pushes.take(payload)

    def close(self) -> None:
        self._keys.unsubscribe(self.address.encode(), self._payloads.put)
        self._payloads.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSING)
