"""A small Django project with SQLite, run in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock.testing import die_with_parent
from tests import servers
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("django", reason="NO DJANGO: install it to test the Django app")

PROJECT = Path(__file__).parent / "project"
ROOT = Path(__file__).parents[3]
# Celery's own; a warning is an error otherwise.
WARNINGS = ("-W", "error", "-W", "ignore:Call to deprecated setex:DeprecationWarning")


class Project:
    """The project, over one database and one store."""

    def __init__(self, folder: Path, url: str, prefix: str) -> None:
        self.url, self.prefix = url, prefix
        self.env = {
            **os.environ,
            **servers.environment(url, prefix),
            "SHOP_DATABASE": str(folder / "db.sqlite3"),
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def manage(
        self, *args: str, status: int = 0, settings: dict[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``manage.py`` with *args*, which must end with *status*."""
        return self._run("manage.py", *args, status=status, settings=settings)

    def printed(self, code: str, settings: dict[str, Any] | None = None) -> list[Any]:
        """Run *code* in the project; return the JSON documents that it prints."""
        start = "import django, json; django.setup()\n"
        done = self._run("-c", f"{start}{code}", settings=settings)
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def served(self, log: Path) -> Iterator[str]:
        """Run ``manage.py runserver`` on a free port; gives its URL."""
        args = ["runserver", "--noreload", "--insecure", "127.0.0.1:0"]  # insecure: with its styles
        with log.open("wb") as output:
            process = subprocess.Popen(
                die_with_parent([sys.executable, *WARNINGS, "manage.py", *args], signal.SIGTERM),
                cwd=PROJECT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

        def printed() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r"at (http://\S+:\d+)/", log.read_text())

        try:
            yield wait_until(printed, timeout=100.0, what="the site to be served")[1]
        finally:
            process.terminate()
            process.wait(30)
            print("---- site", log.read_text(), sep="\n")  # noqa: T201

    def _run(
        self, *args: str, status: int = 0, settings: dict[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *WARNINGS, *args],
            cwd=PROJECT,
            env={**self.env, "SHOP_SETTINGS": json.dumps(settings or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def shared_project(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("shop"), redis_url, servers.new_prefix())
    project.manage("migrate", "--run-syncdb")
    return project


@pytest.fixture
def project(shared_project: Project) -> Iterator[Project]:
    """The project, with an empty store and the database that other tests have left."""
    yield shared_project
    servers.delete_keys(shared_project.url, shared_project.prefix)
