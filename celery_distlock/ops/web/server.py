"""The page's own server: a socket, and what subscribed at it."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import uvicorn
from celery import Celery

from celery_distlock.ops.admin import Admin

from .guard import RequestGuard, Sessions
from .snapshots import SnapshotCache
from .views import Views

__all__ = ["Options", "Page"]

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Options:
    """
    What the command line says.

    Attributes:
        host: The address to listen on.
        port: The port; 0: a free one.
        token: What one has to know to log in; None: nothing.
        allowed_hosts: Names that the page may be asked for by, besides `host` and the local ones.
        read_only: Refuse whatever changes anything.
        interval: Seconds between two looks at the store.
    """

    host: str = "127.0.0.1"
    port: int = 8750
    token: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    read_only: bool = False
    interval: float = 2.0


class Page:
    """
    The page of one app, listening from the start.

    Raises:
        ConfigurationError: The app has no store.
        OSError: The address cannot be listened on.
        UnicodeError: It is none.
    """

    def __init__(self, app: Celery, options: Options) -> None:
        admin = Admin(app)
        self._options = options
        self._socket = _listen(options.host, options.port)
        self.port: int = self._socket.getsockname()[1]
        sessions = Sessions(options.token, cookie=f"distlock_{self.port}")
        views = Views(
            admin,
            SnapshotCache(admin, options.interval),
            sessions,
            title=str(app.main or "celery"),
            read_only=options.read_only,
            interval=options.interval,
        )
        names = {*LOCAL_NAMES, options.host, *options.allowed_hosts}
        self._guard = RequestGuard(views.router(), sessions, names, read_only=options.read_only)

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"http://{host}:{self.port}/"

    def serve(self, on_start: Callable[[], object]) -> None:
        """Answer until SIGINT or SIGTERM, which end it in order from *on_start* on."""
        config = uvicorn.Config(
            self._guard,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # an address that is logged is one that was seen
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        _Server(config, on_start).run(sockets=[self._socket])

    def __enter__(self) -> Self:
        """Give it back at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the socket."""
        self._socket.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)
