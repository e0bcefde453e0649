"""The page's server, as an operator starts it: a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from celery_distlock.testing import die_with_parent
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

CSRF = "X-Distlock-CSRF"


class PageProcess:
    """``locks web`` for `tests.apps.locked`, on a free port unless *args* say otherwise."""

    def __init__(self, folder: Path, args: Sequence[str], env: dict[str, str]) -> None:
        self._log = folder / f"page-{os.urandom(4).hex()}.log"
        self._forgotten = 0
        command = [sys.executable, "-m", "tests.integration.web.serve", "tests.apps.locked"]
        args = args if "--port" in args else ["--port", "0", *args]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                die_with_parent([*command, "--interval", "0.2s", *args], signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            )
        self.url = self._printed(r"shown at (http://\S+/) until")
        self.port = httpx.URL(self.url).port
        self.client = httpx.Client(base_url=self.url, timeout=300.0)

    def log(self) -> str:
        return self._log.read_bytes()[self._forgotten :].decode(errors="replace")

    def forget_log(self) -> None:
        self._forgotten = self._log.stat().st_size

    def printed_token(self) -> str:
        return self._printed(r"Token: (\S+)")

    def _printed(self, pattern: str) -> str:
        def printed() -> re.Match[str] | None:
            ended = self.process.poll()
            found = re.search(pattern, self.log())
            assert found or ended is None, self.log()
            return found

        return wait_until(printed, timeout=60.0, what=f"the page to print {pattern}")[1]

    def get(self, path: str, **query: Any) -> Any:
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def keys(self, **query: Any) -> list[str]:
        return [lock["key"] for lock in self.get("/api/locks", **query)["locks"]]

    def find(self, key: str) -> dict[str, Any]:
        """Wait until *key* is listed, and return what is said of it."""

        def listed() -> Any:
            locks = self.get("/api/locks", limit=1000)["locks"]
            return next((lock for lock in locks if lock["key"] == key), None)

        return wait_until(listed, timeout=60.0, what=f"{key!r} to be listed")

    def headers(self, **changes: str | None) -> dict[str, str]:
        """What the page itself sends with a change, but for *changes*; None: not sent."""
        headers = {
            "Origin": self.url.rstrip("/"),
            "Sec-Fetch-Site": "same-origin",
            CSRF: self.get("/api/session")["csrf"],
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        return {name: value for name, value in headers.items() if value is not None}

    def post(self, path: str, body: Any, **changes: str | None) -> httpx.Response:
        return self.client.post(path, json=body, headers=self.headers(**changes))

    def release(
        self, lock: dict[str, Any], *, holder: str = "", **changes: str | None
    ) -> httpx.Response:
        """Ask for the release of what `find` has returned, of several by that *holder*."""
        body = {"name": lock["name"], "token": lock["token"]}
        body |= {"holder": holder} if holder else {}
        return self.post("/api/release", body, **changes)

    def stop(self) -> int:
        if hasattr(self, "client"):
            self.client.close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self.process.send_signal(signum)
            try:
                return self.process.wait(30)
            except subprocess.TimeoutExpired:
                continue
        return self.process.wait()


@contextmanager
def pages(folder: Path, env: dict[str, str]) -> Iterator[Callable[..., PageProcess]]:
    """Start pages for the app that *env* names; arguments are those of the command line."""
    started: list[PageProcess] = []

    def start(*args: str, **more: str) -> PageProcess:
        page = PageProcess(folder, args, {**env, **more})
        started.append(page)
        return page

    yield start
    for page in started:
        page.stop()
        print("---- page", page.log(), sep="\n")  # noqa: T201
