"""The checks of a request before it is served: host, origin, log-in, CSRF header, read-only."""

import hmac
import json
import re
import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_distlock import clock

CSRF_HEADER = "X-Distlock-CSRF"
SESSION_TIME = 12 * 3600.0  # seconds
MOST_SESSIONS = 1000

# Served without a log-in and to links from other sites: contains no data about locks.
THE_PAGE = frozenset({"/", "/static/icon.svg", "/static/page.js", "/static/style.css"})
BEFORE_LOGIN = frozenset({"/api/session", "/api/login"})
NO_CHANGES = frozenset({"/api/login", "/api/logout"})  # POSTs that change no lock

_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Json(JSONResponse):
    """A JSON response in ASCII: a key may contain characters that UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        """Return *content* as compact JSON."""
        return json.dumps(content, separators=(",", ":")).encode()


class Sessions:
    """
    The log-in sessions, and the checks of the token, the session cookie and the CSRF token.

    Attributes:
        cookie: The cookie's name. It must differ per port: browsers share cookies between the
            ports of a host.
        csrf: The CSRF token: required for changes, and not readable by a page of another origin.
    """

    def __init__(self, token: str | None, *, cookie: str) -> None:
        self._token = token
        self._ends: dict[str, float] = {}
        self.cookie = cookie
        self.csrf = secrets.token_urlsafe(24)

    def log_in(self, token: str) -> str | None:
        """Return the name of a new session, or None if the token is wrong."""
        if self._token is None or not _equal(token, self._token):
            return None
        now = clock.monotonic()
        self._ends = {name: end for name, end in self._ends.items() if end > now}
        if len(self._ends) >= MOST_SESSIONS:
            del self._ends[min(self._ends, key=self._ends.__getitem__)]
        name = secrets.token_urlsafe(32)
        self._ends[name] = now + SESSION_TIME
        return name

    def log_out(self, request: Request) -> None:
        """Forget the session of *request*."""
        self._ends.pop(request.cookies.get(self.cookie, ""), None)

    def admits(self, request: Request) -> bool:
        """Whether *request* has the token or a valid session, or needs none."""
        if self._token is None:
            return True
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return _equal(given.strip(), self._token)
        name = request.cookies.get(self.cookie, "")
        return self._ends.get(name, 0.0) > clock.monotonic()

    def is_ours(self, csrf: str) -> bool:
        """Whether *csrf* is the CSRF token of this process."""
        return _equal(csrf, self.csrf)


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), known.encode(errors="replace"))


def host_name(host: str) -> str | None:
    """Return the name or address in *host*, a Host header; None if it is malformed."""
    found = _HOST.fullmatch(host.lower())
    return found["name"].strip("[]") if found else None


class RequestGuard:
    """
    ASGI middleware that checks each request: all paths but the listed ones need a log-in.

    It checks the path that the server routes, never the URL, which depends on the Host header: a
    client could put another path there.

    Args:
        app: The page.
        sessions: The log-in sessions.
        hosts: The allowed names in the Host header. Others are refused, since DNS rebinding makes a
            browser believe that this server belongs to another site.
        read_only: Refuse all changes.
    """

    def __init__(
        self, app: ASGIApp, sessions: Sessions, hosts: Iterable[str], *, read_only: bool
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._hosts = frozenset(host.lower() for host in hosts)
        self._read_only = read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it with a reason."""
        assert scope["type"] == "http"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        responder = self._refusal(Request(scope)) or self._app
        await responder(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        path: str = request.scope["path"]
        changes = request.method not in ("GET", "HEAD")
        if not self._knows_host(request):
            return _refuse(421, "this host name is not allowed: see --allowed-host")
        if path in THE_PAGE and not changes:
            return None
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return _refuse(403, "requests from other sites are refused")
        if path not in BEFORE_LOGIN and not self._sessions.admits(request):
            return _refuse(401, "log in first")
        return self._refused_change(request, path) if changes else None

    def _refused_change(self, request: Request, path: str) -> Response | None:
        if not _same_origin(request):
            return _refuse(403, "requests from other sites are refused")
        if not self._sessions.is_ours(request.headers.get(CSRF_HEADER, "")):
            return _refuse(403, f"the header {CSRF_HEADER} is missing or out of date")
        if request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            return _refuse(415, "the content type must be application/json")
        if self._read_only and path not in NO_CHANGES:
            return _refuse(403, "this page is read-only")
        return None

    def _knows_host(self, request: Request) -> bool:
        # The port may differ behind a tunnel. A request for the bare address is allowed, too.
        host = host_name(request.headers.get("Host", ""))
        reached = request.scope.get("server") or ("",)
        return host is not None and (host in self._hosts or host == reached[0])


def _same_origin(request: Request) -> bool:
    """Whether the page itself made the request, by the headers that browsers add to changes."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
    if origin is None:
        return site == "same-origin"
    try:
        place = urlsplit(origin).netloc
    except ValueError:
        return False
    return site in (None, "same-origin") and place.lower() == request.headers["Host"].lower()


def _refuse(status: int, why: str) -> Response:
    return Json({"error": why}, status)
