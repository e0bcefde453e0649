"""Sessions with a ZooKeeper ensemble over kazoo's client, and the requests in them."""

import atexit
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError, StoreError, StoreUnavailableError
from celery_distlock.naming import shown
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.channels import EventInbox

from .ensembles import Ensemble

try:
    from kazoo import exceptions
    from kazoo.client import KazooClient
    from kazoo.handlers.threading import SequentialThreadingHandler
    from kazoo.protocol.serialization import Connect, Create2
    from kazoo.protocol.states import KazooState
    from kazoo.security import OPEN_ACL_UNSAFE, make_digest_acl
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "locks in ZooKeeper need kazoo: pip install 'celery-distlock[zookeeper]'"
    ) from error

zk: Any = exceptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES = (zk.KazooException, OSError)
TIMEOUT = 5.0  # seconds for one attempt at a request; a slower server is treated as gone
PAUSES = (0.0, 0.05, 0.25)  # seconds before the first, second and third attempt
GLANCE = 0.2  # seconds between checks that a session is not lost, while waiting for an answer

# The results in a transaction of which nothing was done, since a node was not as expected.
_UNDONE = (
    zk.BadVersionError,
    zk.NoNodeError,
    zk.NodeExistsError,
    zk.RolledBackError,
    zk.RuntimeInconsistency,
)
_ANSWERLESS = (
    zk.CancelledError,
    zk.ConnectionDropped,
    zk.ConnectionLoss,
    zk.OperationTimeoutError,
    zk.RequestTimeoutError,
    zk.SessionExpiredError,
    zk.SessionMovedError,
    zk.ThrottledOpError,
    zk.ZookeeperStoppedError,
    OSError,
)


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """Creates a folder that the server deletes once it was empty for a while; not in kazoo."""

    type = 19


class WatchInbox(EventInbox):
    """An inbox that is woken by changes to the nodes it watches, and when the connection ends."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.on_wake: Callable[[], None] | None = None
        self.watched: frozenset[str] = frozenset()

    def wake(self) -> None:
        if self.on_wake is not None:
            self.on_wake()
        self.call()

    def wait(self, timeout: float) -> None:
        if self.event.wait(timeout):
            self.event.clear()

    def close(self) -> None:
        """Do nothing: without a waiter, a watch has no effect."""


class Session:
    """One session; a lost one is never used again, though kazoo's client would open another."""

    def __init__(self, ensemble: Ensemble) -> None:
        user, password = ensemble.user, ensemble.password
        self.acl = [make_digest_acl(user, password, all=True)] if user else OPEN_ACL_UNSAFE
        handler = _handler()
        self.client = KazooClient(
            hosts=ensemble.hosts,
            timeout=ensemble.session,
            handler=handler,
            default_acl=self.acl,
            auth_data=[("digest", f"{user}:{password}")] if user else None,
            connection_retry={
                "max_tries": -1,
                "delay": 0.05,
                "max_delay": 1.0,
                "sleep_func": handler.sleep_func,
            },
        )
        self.lost = False
        self.prepared = False  # the folders are there
        self.id = 0
        self.timeout = 0.0  # seconds, as agreed
        self._ahead = 0.0  # seconds by which the ensemble's clock is ahead of ours
        self._inboxes: set[WatchInbox] = set()
        self._bound_connecting()
        self.client.add_listener(self._changed)
        self.connected = self.client.start_async()

    def _bound_connecting(self) -> None:
        """
        Limit the time for connecting to a silent server, and learn the negotiated timeout.

        kazoo would wait for most of the session timeout, and does not expose the negotiated one.
        """
        connection, handler = self.client._connection, self.client.handler
        invoke, create_connection = connection._invoke, handler.create_connection

        def bounded(*arguments: Any, timeout: float, **options: Any) -> Any:
            return create_connection(*arguments, timeout=min(timeout, TIMEOUT), **options)

        def noting(timeout: float, request: Any, xid: int | None = None) -> Any:
            answer = invoke(min(timeout, TIMEOUT), request, xid)
            if isinstance(request, Connect) and answer[0].time_out > 0 and not self.lost:
                self.id, self.timeout = answer[0].session_id, answer[0].time_out / 1000
            return answer

        handler.create_connection, connection._invoke = bounded, noting

    def _changed(self, state: str) -> None:
        if state == KazooState.LOST and not self.lost:
            self._end()

    def close(self) -> None:
        """End the session, which deletes all its nodes."""
        thread = self._end()
        thread.join(TIMEOUT)
        if thread.is_alive():
            self.hang_up()

    def _end(self) -> threading.Thread:
        self.lost = True
        self._wake()
        thread = DaemonThread("distlock-session-end", self._stop)
        thread.start()
        return thread

    def _stop(self) -> None:
        try:
            self.client.stop()
            self.client.close()
        except Exception as error:  # noqa: BLE001  # nothing more can be done about any error
            logger.debug("a session did not end cleanly: %s", error)

    def abandon(self) -> None:
        """Close this process's copies of the sockets, which belong to its parent."""
        self.lost = True
        atexit.unregister(self.client.handler.stop)
        connection = self.client._connection
        for each in (connection._socket, connection._read_sock, connection._write_sock):
            with contextlib.suppress(Exception):
                each.close()

    def hang_up(self) -> None:
        """Break the connection, as kazoo would wait for most of the session timeout."""
        with contextlib.suppress(Exception):
            self.client._connection._socket.shutdown(socket.SHUT_RDWR)

    def time(self) -> float:
        """Return the approximate time of the ensemble's clock."""
        return clock.monotonic() + self._ahead

    def set_time(self, ms: int) -> None:
        self._ahead = ms / 1000 - clock.monotonic()

    def watch(self, paths: Sequence[str], inbox: WatchInbox) -> list[Any]:
        """Request the nodes' data, and wake *inbox* when one of the nodes changes."""
        inbox.watched = frozenset(paths)
        self._inboxes.add(inbox)
        # One callback for all: kazoo cannot remove a callback, so others would accumulate.
        return [self.client.get_async(path, self._noticed) for path in paths]

    def unwatch(self, inbox: WatchInbox) -> None:
        self._inboxes.discard(inbox)

    def _noticed(self, event: Any) -> None:
        self._wake(event.path)

    def _wake(self, path: str | None = None) -> None:
        """Wake the inboxes that watch *path*, or all: watches end with the connection."""
        for inbox in list(self._inboxes):
            if not path or path in inbox.watched:
                inbox.wake()


def _handler() -> Any:
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("socket"):
        from kazoo.handlers.gevent import SequentialGeventHandler

        return SequentialGeventHandler()
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("socket"):
        from kazoo.handlers.eventlet import SequentialEventletHandler

        return SequentialEventletHandler()
    return SequentialThreadingHandler()


def words(error: Exception) -> str:
    """Return the text of *error* with its class; many of kazoo's errors have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class SilenceError(zk.OperationTimeoutError):  # type: ignore[misc]  # kazoo has no types
    """No answer came in time."""


class Exchange:
    """One attempt at a request: a session, and the deadline for its answers."""

    def __init__(self, session: Session, deadline: float) -> None:
        self.session = session
        self.client = session.client
        self._deadline = deadline

    def connect(self) -> None:
        connected = self.session.connected
        self._wait(connected.wait, connected.is_set, "no server can be reached")

    def result(self, pending: Any) -> Any:
        """Wait for an answer, and return it."""
        self._wait(pending.wait, pending.ready, "no answer")
        answer = pending.get_nowait()
        if self.session.lost:
            raise zk.SessionExpiredError
        return answer

    def _wait(
        self, wait: Callable[[float], object], done: Callable[[], bool], otherwise: str
    ) -> None:
        # In steps, since no answer comes once the session is lost.
        left = self._deadline - time.monotonic()
        while not done() and not self.session.lost and left > 0:
            wait(min(left, GLANCE))
            left = self._deadline - time.monotonic()
        if self.session.lost:
            raise zk.SessionExpiredError
        if not done():
            raise SilenceError(otherwise)

    def found(self, pending: Any) -> Any:
        """Wait for an answer about a node, and return it; None if there is no such node."""
        try:
            return self.result(pending)
        except zk.NoNodeError:
            return None

    def get(self, path: str) -> Any:
        """Return the node's data and stat; None if there is no such node."""
        return self.found(self.client.get_async(path))

    def children(self, path: str) -> list[str]:
        return self.found(self.client.get_children_async(path)) or []

    def delete(self, path: str) -> bool:
        """Delete a node; return whether it existed."""
        return self.found(self.client.delete_async(path)) is not None

    def rewrite(self, path: str, data: bytes) -> bool:
        """Overwrite a node's data; return whether it existed."""
        return self.found(self.client.set_async(path, data)) is not None

    def watch(self, paths: Sequence[str], inbox: WatchInbox) -> list[Any]:
        """Wake *inbox* when one of the nodes changes; return their data, or [] if one is gone."""
        found = [self.found(pending) for pending in self.session.watch(paths, inbox)]
        if None not in found:
            return found
        self.session.unwatch(inbox)
        return []

    def catch_up(self, path: str) -> None:
        """Sync with the leader, so that later reads include all that other processes have done."""
        self.result(self.client.sync_async(path))

    def each(self, ask: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        """Call *ask* for all nodes at once; return the answers, None for a missing node."""
        return [self.found(pending) for pending in [ask(path) for path in paths]]

    def create_container(self, path: str) -> None:
        pending = self.client.handler.async_result()
        self.client._call(_CreateContainer(path, b"", self.session.acl, 4), pending)
        with contextlib.suppress(zk.NodeExistsError):
            self.result(pending)

    def ask_quorum(self, path: str) -> Any:
        """Start a check that the node exists, in a way that needs the quorum."""
        change = self.client.transaction()
        change.check(path, -1)
        return change.commit_async()

    def done(self, pending: Any) -> bool:
        """Wait for a transaction; false if nothing was done, as a node was not as expected."""
        errors = [answer for answer in self.result(pending) if isinstance(answer, Exception)]
        for error in errors:
            if not isinstance(error, _UNDONE):
                raise error
        return not errors

    def prepare(self, *folders: str) -> None:
        """Create the top folders, and read the ensemble's clock."""
        stat = self.found(self.client.set_async(folders[0], b""))
        if stat is None:
            for folder in folders:
                self.result(self.client.ensure_path_async(folder))
            stat = self.result(self.client.set_async(folders[0], b""))
        self.session.set_time(stat.mtime)
        self.session.prepared = True


class SessionManager:
    """
    Keeps one session with an ensemble at a time, opened when it is needed.

    Args:
        ensemble: The ensemble.
        folders: The folders to create before the first request.
    """

    def __init__(self, ensemble: Ensemble, *folders: str) -> None:
        self.ensemble = ensemble
        self._folders = folders
        self._begin()

    def _begin(self) -> None:
        self.session: Session | None = None
        self._mutex = threading.Lock()

    def ask(self, work: Callable[[Exchange], T], what: str, *, only: float | None = None) -> T:
        """
        Call *work* until all of its requests are answered, at most three times.

        Args:
            work: The requests to make; may be repeated.
            what: The key or another subject, for error messages.
            only: Make one attempt, of that many seconds.
        """
        address, failure = self.ensemble.address, None
        for pause in PAUSES if only is None else (0.0,):
            if failure is not None:
                time.sleep(pause * clock.jitter(0.5, 1.0))
            try:
                return work(self.talk(TIMEOUT if only is None else only))
            except _ANSWERLESS as error:
                failure = error
                if isinstance(error, SilenceError) and only is None and self.session:
                    self.session.hang_up()  # so that the next attempt uses another server
            except zk.NoNodeError as error:  # the folders were deleted
                failure = error
                if self.session:
                    self.session.prepared = False
            except zk.UnimplementedError as error:
                raise StoreError(f"{address} is older than ZooKeeper 3.5") from error
            except zk.KazooException as error:
                raise StoreError(f"{address} refused {shown(what)!r}: {words(error)}") from error
        assert failure is not None
        raise StoreUnavailableError(f"{address} cannot serve: {words(failure)}") from failure

    def talk(self, timeout: float) -> Exchange:
        """Return a connected exchange for one attempt of *timeout* seconds."""
        with self._mutex:
            if self.session is None or self.session.lost:
                self.session = Session(self.ensemble)
            talk = Exchange(self.session, time.monotonic() + timeout)
        talk.connect()
        if not talk.session.prepared:
            talk.prepare(*self._folders)
        return talk

    def close(self) -> None:
        """End the session; the next use opens another."""
        with self._mutex:
            session, self.session = self.session, None
        if session is not None:
            session.close()

    def after_fork(self) -> None:
        """Drop the session inherited by a fork; send nothing, since it is the parent's."""
        session = self.session
        self._begin()
        if session is not None:
            session.abandon()
