"""The HTTP server of the page."""

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

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Options:
    """
    The options of the command line.

    Attributes:
        host: The address to listen on.
        port: The port; 0: a free one.
        token: The token for logging in; None: no log-in.
        allowed_hosts: Allowed names in the Host header, in addition to `host` and the local names.
        read_only: Refuse all changes.
        interval: Seconds between two snapshots of the store.
    """

    host: str = "127.0.0.1"
    port: int = 8750
    token: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    read_only: bool = False
    interval: float = 2.0


class Page:
    """
    The page of one app; its socket listens as soon as it is created.

    Raises:
        ConfigurationError: The app has no store.
        OSError: The address is not available.
        UnicodeError: The address is malformed.
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
        """The URL of the page."""
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"http://{host}:{self.port}/"

    def serve(self, on_start: Callable[[], object]) -> None:
        """Serve until SIGINT or SIGTERM, which shut it down in order once *on_start* is called."""
        config = uvicorn.Config(
            self._guard,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # log the address of the connection
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        _Server(config, on_start).run(sockets=[self._socket])

    def __enter__(self) -> Self:
        """Close the socket at the end of the block."""
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
