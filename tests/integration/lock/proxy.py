"""A proxy before a server, that loses or holds back what a test asks."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import redis

from celery_distlock.stores.redis import scripts
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

SCRIPTS = ("acquire", "acquire_all", "renew", "release")
SIZE = 1 << 20


class Held:
    """A request that is held back."""

    def __init__(self, script: str, *, executed: bool) -> None:
        self.script = script
        self.executed = executed
        self._came = threading.Event()
        self._may_go = threading.Event()
        self._went = threading.Event()

    def wait(self) -> None:
        """Wait until it is here."""
        assert self._came.wait(60), f"{self.script} was not sent"

    def let_go(self) -> None:
        """Let it, or its answer, go on; return when it has been executed."""
        self._may_go.set()
        assert self._went.wait(60)

    def keep(self) -> None:
        self._came.set()
        self._may_go.wait(60)

    def done(self) -> None:
        self._went.set()


class Proxy:
    """
    Listens on a port of its own, and passes on to *url* and back all that it is not asked to lose.

    A request is known by the name of its script; `passed_on` counts those that went straight on.

    Attributes:
        delay: Seconds that each answer is kept.
    """

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._listen)]
        self._losses: list[tuple[str, bool, Callable[[], object] | None]] = []
        self._held: Held | None = None
        self.passed_on: Counter[str] = Counter()
        self.delay = 0.0

    @property
    def url(self) -> str:
        userinfo, at, _ = self._to.netloc.rpartition("@")
        netloc = f"{userinfo}{at}127.0.0.1:{self._listener.getsockname()[1]}"
        return self._to._replace(netloc=netloc).geturl()

    def __enter__(self) -> Self:
        # Else what is held back and then let go is not executed but refused as unknown.
        with redis.Redis.from_url(self._to.geturl()) as client:
            for script in SCRIPTS:
                client.script_load(scripts.load(script).source)
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        wait_until(self._ended, timeout=60.0, what="the connections to end")
        self._listener.close()

    def _ended(self) -> bool:
        """Shut all connections, new ones, too; return whether all have ended."""
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        return not any(thread.is_alive() for thread in list(self._threads))

    def lose(
        self,
        script: str,
        *,
        executed: bool,
        times: int = 1,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """
        Cut the connection at each of the next *times* requests for *script*.

        If *executed* it is passed on and its answer is lost, else it is lost itself. The client
        notices after *meanwhile* was called.
        """
        self._losses += [(script, executed, meanwhile)] * times

    @property
    def lost(self) -> bool:
        """Whether all that was to be lost has been."""
        return not self._losses

    def lead_to(self, url: str) -> None:
        """Pass on to *url* what comes over new connections; the old ones stay."""
        self._to = urlsplit(url)

    @contextmanager
    def holding(self, script: str, *, executed: bool) -> Iterator[Held]:
        """Hold back the next request for *script* or, if *executed*, its answer."""
        held = self._held = Held(script, executed=executed)
        try:
            yield held
        finally:
            self._held = None
            held._may_go.set()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            server = socket.create_connection((self._to.hostname, self._to.port or 6379))
            with server:
                self._sockets |= {client, server}
                try:
                    while self._pass_on(client, server):
                        pass
                finally:
                    self._sockets -= {client, server}

    def _pass_on(self, client: socket.socket, server: socket.socket) -> bool:
        """Pass something on; false at the connection's end."""
        readable, _, _ = select.select([client, server], [], [])
        if server in readable:
            answer = server.recv(SIZE)
            time.sleep(self.delay)
            client.sendall(answer)
            return bool(answer)
        request = client.recv(SIZE)
        held, loss = self._held, self._losses[0] if self._losses else None
        if held is not None and _asks_for(held.script, request):
            self._held = None
            return self._hold(held, request, client, server)
        if loss is None or not _asks_for(loss[0], request):
            server.sendall(request)
            self.passed_on.update(script for script in SCRIPTS if _asks_for(script, request))
            return bool(request)
        return self._lose(request, client, server)

    def _lose(self, request: bytes, client: socket.socket, server: socket.socket) -> bool:
        _, executed, meanwhile = self._losses[0]
        if executed:
            server.sendall(request)
            answer = server.recv(SIZE)
            assert not answer.startswith(b"-"), answer
        if meanwhile is not None:
            meanwhile()
        self._losses.pop(0)
        return False

    def _hold(
        self, held: Held, request: bytes, client: socket.socket, server: socket.socket
    ) -> bool:
        answer = b""
        if held.executed:
            server.sendall(request)
            answer = server.recv(SIZE)
        held.keep()
        if not held.executed:
            server.sendall(request)
            answer = server.recv(SIZE)
        assert not answer.startswith(b"-"), answer
        held.done()
        client.sendall(answer)
        return True


def _asks_for(script: str, request: bytes) -> bool:
    return scripts.load(script).sha.encode() in request
