"""TLS before a server that cannot speak it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from celery_distlock.testing import EmbeddedServer

_SIZE = 1 << 16
_PATIENCE = 30.0  # seconds
_SHUTDOWN = 1.0  # seconds for a client to hang up when the server did


class TlsFront:
    """
    Passes on what comes through TLS to *server*, and its answers back.

    The certificates are made again each time, by an authority of their own.

    Args:
        mutual: Ask clients for a certificate too, and refuse those that have none.
    """

    def __init__(self, server: EmbeddedServer, *, mutual: bool = False) -> None:
        self._to = urlsplit(server.url)
        self._mutual = mutual
        self._closing = ExitStack()
        self._folder = Path()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="celery-distlock-tls-")
            self._folder = Path(stack.enter_context(folder))
            self._context = self._certified()
            self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            self._listener.setblocking(False)
            self._loop = stack.enter_context(closing(asyncio.new_event_loop()))
            thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            thread.start()
            stack.callback(thread.join, _PATIENCE)
            stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            self._do(self._begin)
            stack.callback(self._do, self._end)
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()

    @property
    def ca_certs(self) -> Path:
        """The file with the authority's certificate."""
        return self._folder / "ca.pem"

    @property
    def url(self) -> str:
        """With the authority to trust and, if it is mutual, a client's certificate."""
        files = {"ssl_ca_certs": str(self.ca_certs)}
        if self._mutual:
            files["ssl_certfile"] = files["ssl_keyfile"] = str(self._folder / "client.pem")
        return f"{self.bare_url}?{urlencode(files, safe='/')}&ssl_cert_reqs=required"

    @property
    def bare_url(self) -> str:
        """For clients that neither trust the authority nor have a certificate."""
        userinfo, at, _ = self._to.netloc.rpartition("@")
        port = self._listener.getsockname()[1]
        return f"rediss://{userinfo}{at}localhost:{port}{self._to.path}"

    def cut(self) -> None:
        """Cut all connections; new ones may come."""
        self._do(self._cut)

    def _certified(self) -> ssl.SSLContext:
        import trustme  # for those alone that need it

        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca_certs)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
        if self._mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            authority.configure_trust(context)
            client = authority.issue_cert("client@example.org")
            client.private_key_and_cert_chain_pem.write_to_path(self._folder / "client.pem")
        return context

    def _do(self, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do *what* in the thread of the connections."""
        asyncio.run_coroutine_threadsafe(what(), self._loop).result(_PATIENCE)

    async def _begin(self) -> None:
        self._listening = asyncio.create_task(self._listen())

    async def _end(self) -> None:
        await _cancel(self._listening)
        await self._cut()

    async def _cut(self) -> None:
        await _cancel(*self._tasks)

    async def _listen(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            task = asyncio.create_task(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            # Not by start_server(), which does not let us end a handshake that is under way.
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, client, ssl=self._context, ssl_shutdown_timeout=_SHUTDOWN
            )
            try:
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                await self._connect(reader, writer)
                writer.close()
                await writer.wait_closed()
            finally:
                transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(self._to.hostname, self._to.port)
        ways = [
            asyncio.create_task(_pass_on(reader, to_server)),
            asyncio.create_task(_pass_on(from_server, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_server.transport.abort()
            await _cancel(*ways)


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(_SIZE):
            target.write(data)
            await target.drain()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
