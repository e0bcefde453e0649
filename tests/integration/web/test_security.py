"""What the page's server refuses to any client."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner
from starlette.responses import JSONResponse

from celery_distlock.ops.cli import locks
from celery_distlock.ops.web import guard
from celery_distlock.ops.web.command import web
from celery_distlock.ops.web.views import FILES
from celery_distlock.stores import Ability
from celery_distlock.stores.redis.store import RedisStore
from tests.integration.web.page_process import CSRF

TOKEN = "correct horse battery staple"
CHANGES = [
    *(
        "/api/recall",
        "/api/release",
        "/api/wake",
        "/api/drop",
        "/api/limit",
        "/api/pause",
        "/api/resume",
    ),
    *("/api/login", "/api/logout"),
]
PATHS = [
    "/",
    "/static/page.js",
    "/api/session",
    "/api/locks",
    "/api/lock?name=a",
    "/api/actions",
    "/nothing",
]
# With some of these a URL made of Host and path has another path than the one that is served.
NO_NAMES = [
    *("localhost/x?", "localhost?", "localhost#", "localhost/", "localhost\\x?", "localhost//"),
    *("x@localhost/y?", "x@localhost", "localhost:80/x?", "localhost:", "localhost:x"),
    *("localhost:-1", "127.0.0.1/x?", "[::1]/x?", "[::1", "::1", "localhost,localhost"),
    *("localhost;", "local\thost", "localhost%2fx", "%6cocalhost", "", "?", "#"),
    "localhost\u0131".encode().decode("latin-1"),
]


@pytest.fixture(scope="module")
def shared_closed_page(start_shared):
    return start_shared(DISTLOCK_WEB_TOKEN=TOKEN)


@pytest.fixture
def closed_page(shared_closed_page):
    """A page that demands the token, of a user who has not logged in."""
    shared_closed_page.client.cookies.clear()
    return shared_closed_page


@pytest.fixture
def held(page_process, hold):
    hold("mine")
    return page_process.find("mine")


@pytest.fixture
def still_held(admin):
    yield
    assert admin.show("mine").state == "held"


def test_every_answer_has_the_headers(page_process):
    for path in PATHS:
        headers = page_process.client.get(path).headers

        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "changes",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://[::1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "none"},
        {"Origin": None, "Sec_Fetch_Site": None},
        {CSRF: None},
        {CSRF: "guessed"},
        {CSRF: ""},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Host": "evil.example"},
    ],
    ids=str,
)
def test_a_change_that_the_page_has_not_sent_is_refused(page_process, held, still_held, changes):
    assert page_process.release(held, **changes).status_code in (403, 415, 421)


def test_no_get_changes_anything(page_process, held, still_held):
    query = {"name": held["name"], "token": held["token"]}

    for path in CHANGES:
        answer = page_process.client.get(path, params=query, headers=page_process.headers())
        assert answer.status_code == 405


def test_a_name_that_is_not_ours_is_not_served(page_process):
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[", "localhost."):
        for path in PATHS:
            answer = page_process.client.get(path, headers={"Host": host})
            assert answer.status_code in (400, 421), (host, path)


def test_a_host_that_is_no_name_opens_nothing(start_page, held, still_held):
    page = start_page("--read-only", DISTLOCK_WEB_TOKEN=TOKEN)
    body = {"name": held["name"], "token": held["token"]}

    for host in NO_NAMES:
        headers = {"Host": host.encode("latin-1")}
        for path in ("/api/locks", "/api/lock?name=mine", "/", "/static/page.js"):
            answer = page.client.get(path, headers=headers)
            assert answer.status_code in (400, 421), (host, path)
        answer = page.client.post("/api/release", json=body, headers=headers)
        assert answer.status_code in (400, 421), host


def test_whatever_is_not_open_by_name_needs_the_log_in(closed_page):
    for path in (
        *("/nothing", "/metrics", "/favicon.ico", "/static", "/static/", "/static/nothing"),
        *("/static/../api/locks", "/static/%2e%2e/api/locks", "//api/locks", "/api/locks/"),
        *("/API/locks", "/api", "/x/../api/locks", "/%61pi/locks", "/api/session/", "/api/login/"),
    ):
        target = httpx.URL(closed_page.url).copy_with(raw_path=path.encode())
        assert closed_page.client.get(target).status_code == 401, path
        assert closed_page.client.post(target, json={}).status_code == 401, path
    for path in ("/", "/static/page.js", "/api/locks"):
        assert closed_page.client.post(path, json={}).status_code == 401, path


def test_all_of_the_page_itself_is_open(closed_page):
    names = {f"/static/{file.name}" for file in FILES.iterdir()} - {"/static/index.html"}

    assert {"/", *names} == guard.THE_PAGE
    for path in guard.THE_PAGE:
        assert closed_page.client.get(path).status_code == 200, path
        assert closed_page.client.head(path).status_code == 200, path


def test_the_path_that_is_served_is_the_one_that_is_guarded(monkeypatch):
    """Also by a Starlette that builds its URLs from the header Host."""
    monkeypatch.setattr(guard, "_HOST", re.compile(r"(?P<name>[a-z]+).*"))
    sessions = guard.Sessions(TOKEN, cookie="c")
    guarded = guard.RequestGuard(_serve_anything, sessions, ["localhost"], read_only=False)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/locks",
        "query_string": b"",
        "headers": [(b"host", b"localhost/static/page.js?")],
        "server": ("127.0.0.1", 80),
    }

    assert asyncio.run(_status(guarded, scope)) == 401


async def _serve_anything(scope, receive, send):
    await JSONResponse({})(scope, receive, send)


async def _status(app, scope) -> int:
    sent = []

    async def send(message) -> None:
        sent.append(message)

    await app(scope, None, send)
    return sent[0]["status"]


def test_local_names_are_served_at_any_port_of_a_tunnel(page_process):
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1:9", "[::1]:80"):
        answer = page_process.client.get("/api/locks", headers={"Host": host})
        assert answer.status_code == 200, host


def test_an_allowed_name_is_served(start_page):
    page = start_page("--allowed-host", "locks.example")

    for name, status in (("locks.example", 200), ("evil.example", 421)):
        assert page.client.get("/api/locks", headers={"Host": name}).status_code == status


def test_another_site_reads_nothing(page_process):
    for site in ("cross-site", "same-site"):
        answer = page_process.client.get("/api/locks", headers={"Sec-Fetch-Site": site})
        assert answer.status_code == 403


def test_a_read_only_page_refuses_changes(start_page, held, still_held):
    page = start_page("--read-only")

    assert page.get("/api/session")["readOnly"] is True
    assert page.release(held).status_code == 403
    for path in CHANGES[:3]:
        assert page.post(path, {"name": "mine", "token": "1", "task_id": "a"}).status_code == 403


def test_nothing_is_shown_without_the_token(closed_page):
    for path in ("/api/locks", "/api/lock?name=a"):
        assert closed_page.client.get(path).status_code == 401
    assert set(closed_page.get("/api/session")) == {"login", "csrf"}
    for path in CHANGES[:3]:
        assert closed_page.post(path, {"name": "a"}).status_code == 401


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer {TOKEN}"])
def test_the_token_as_a_header_is_let_in(closed_page, given):
    answer = closed_page.client.get("/api/locks", headers={"Authorization": given})

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "given", ["Bearer wrong", "Bearer", "Bearer \u00e9", TOKEN, f"Basic {TOKEN}"]
)
def test_a_wrong_token_as_a_header_is_not(closed_page, given):
    headers = {"Authorization": given.encode("latin-1")}

    assert closed_page.client.get("/api/locks", headers=headers).status_code == 401


def test_a_login_opens_a_session_until_the_logout(closed_page):
    answer = closed_page.post("/api/login", {"token": TOKEN})

    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    closed_page.get("/api/locks")
    closed_page.post("/api/logout", {})
    again = {"Cookie": cookie.partition(";")[0]}
    assert closed_page.client.get("/api/locks", headers=again).status_code == 401


def test_a_wrong_token_opens_none(closed_page):
    answer = closed_page.post("/api/login", {"token": "wrong"})

    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers
    assert closed_page.client.get("/api/locks").status_code == 401


def test_a_login_from_another_site_is_refused(closed_page):
    answer = closed_page.post("/api/login", {"token": TOKEN}, Origin="http://evil.example")

    assert answer.status_code == 403


def test_a_session_ends_with_its_time(monkeypatch):
    sessions = guard.Sessions(TOKEN, cookie="c")
    request = SimpleNamespace(headers={}, cookies={"c": sessions.log_in(TOKEN)})
    assert sessions.admits(request)

    later = guard.clock.monotonic() + guard.SESSION_TIME
    monkeypatch.setattr(guard.clock, "monotonic", lambda: later)

    assert not sessions.admits(request)


def test_sessions_do_not_pile_up():
    sessions = guard.Sessions(TOKEN, cookie="c")
    names = [sessions.log_in(TOKEN) for _ in range(guard.MOST_SESSIONS + 1)]

    admitted = [sessions.admits(SimpleNamespace(headers={}, cookies={"c": name})) for name in names]

    assert admitted == [False] + [True] * guard.MOST_SESSIONS


def test_the_token_is_not_in_the_log(closed_page):
    before = len(closed_page.log())
    closed_page.post("/api/login", {"token": TOKEN})
    closed_page.post("/api/login", {"token": "a wrong one"})
    closed_page.client.get("/api/locks", headers={"Authorization": f"Bearer {TOKEN}"})

    assert "has logged in" in closed_page.log()[before:]
    assert "gave a wrong token" in closed_page.log()[before:]
    assert TOKEN not in closed_page.log()
    assert "a wrong one" not in closed_page.log()


def test_a_token_that_is_made_is_printed_and_good(start_page):
    page = start_page("--token", "auto", "--host", "0.0.0.0")
    url = f"http://127.0.0.1:{page.port}/api/locks"
    token = page.printed_token()

    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": f"Bearer {token}"}).status_code == 200


def test_a_name_in_the_log_cannot_break_its_line(page_process, hold):
    hold("two\nlines")

    page_process.release(page_process.find("two\nlines"))

    assert r"released 'two\nlines'" in page_process.log()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "locks.example"])
def test_a_network_is_not_let_in_without_a_token(host, locked):
    done = CliRunner().invoke(web, ["--host", host], obj=SimpleNamespace(app=locked.app))

    assert done.exit_code == 2
    assert "DISTLOCK_WEB_TOKEN" in done.output
    assert "--token auto" in done.output


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("given", ["option", "environment"])
def test_an_empty_token_is_refused(locked, host, given):
    args = ["--token", ""] if given == "option" else []
    env = {"DISTLOCK_WEB_TOKEN": ""} if given == "environment" else {}

    done = CliRunner(env=env).invoke(
        web, ["--host", host, *args], obj=SimpleNamespace(app=locked.app)
    )

    assert done.exit_code == 2
    assert "the token is empty" in done.output
    assert "--token auto" in done.output


@pytest.mark.parametrize("name", ["http://a.example", "a.example:8750", "a/b", "", "a b", "[::1]"])
def test_an_allowed_name_that_no_request_can_have_is_refused(locked, name):
    done = CliRunner().invoke(web, ["--allowed-host", name], obj=SimpleNamespace(app=locked.app))

    assert done.exit_code == 2
    assert "is not a host name" in done.output


def test_a_token_that_can_be_guessed_is_refused(locked):
    done = CliRunner().invoke(web, ["--token", "secret"], obj=SimpleNamespace(app=locked.app))

    assert done.exit_code == 2
    assert "shorter than 16" in done.output


def test_a_port_that_is_taken_is_said(locked):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(web, ["--port", port], obj=SimpleNamespace(app=locked.app))

    assert done.exit_code == 2
    assert "in use" in done.output


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b"])
def test_a_host_that_there_is_not_is_said(locked, host):
    args = ["--port", "0", "--host", host, "--token", "x" * 16]
    done = CliRunner().invoke(web, args, obj=SimpleNamespace(app=locked.app))

    assert done.exit_code == 2
    assert f"cannot listen on {host}:0" in done.output


def test_a_store_that_cannot_list_is_said(load_app, monkeypatch):
    monkeypatch.setattr(RedisStore, "abilities", RedisStore.abilities - {Ability.LIST})
    obj = CLIContext(app=load_app("tests.apps.basic").app, no_color=True, workdir=None)

    done = CliRunner().invoke(locks, ["web", "--port", "0"], obj=obj)

    assert done.exit_code == 2
    assert "cannot list its keys" in done.output


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_what_is_not_installed_is_said(celery_env, missing):
    code = (
        f"import runpy, sys; sys.modules[{missing!r}] = None;"
        " sys.argv[1:] = ['tests.apps.locked', '--port', '0'];"
        " runpy.run_module('tests.integration.web.serve', run_name='__main__')"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    assert f"needs {missing}: pip install 'celery-distlock[web]'" in done.stderr


def test_the_command_imports_nothing_of_the_web():
    code = (
        "import sys, celery_distlock.ops.web.command;"
        " sys.exit(bool({'starlette', 'uvicorn'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
