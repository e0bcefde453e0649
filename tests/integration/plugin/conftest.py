"""Runs tests as a user writes them, in a pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SHOP = """
from celery import Celery, shared_task
from celery_distlock import Lock, LockedTask, policies

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.distlock_url = "redis://nobody.invalid"
app.conf.task_always_eager = True


@app.task(base=LockedTask, lock_key="stock:{sku}", bind=True)
def reserve(self, sku, quantity=1):
    return self.lock.token
"""


@dataclass(frozen=True)
class Outcome:
    output: str

    @property
    def counts(self) -> dict[str, int]:
        """How many tests passed, failed, ..., by the last line that pytest writes."""
        last = re.findall(r"^=+ (.*) in [\d.]+s\b.* =+$", self.output, re.MULTILINE)[-1]
        return {what.rstrip("s"): int(n) for n, what in re.findall(r"(\d+) ([a-z]+)", last)}

    def says(self, pattern: str) -> bool:
        """Whether it is in the output, however that is broken into lines."""
        return re.search(pattern, re.sub(r"\nE? *", " ", self.output)) is not None


class RunTests(Protocol):
    def __call__(
        self, tests: str, *arguments: str, conftest: str = "", shop: str = SHOP
    ) -> Outcome: ...


@pytest.fixture
def run_tests(tmp_path: Path) -> RunTests:
    """Runs *tests* with the app `SHOP`; they see neither this project's settings nor plugins."""

    def run(tests: str, *arguments: str, conftest: str = "", shop: str = SHOP) -> Outcome:
        for name, text in {
            "shop.py": shop,
            "conftest.py": conftest,
            "test_shop.py": "import pytest\nfrom shop import *\n\n" + textwrap.dedent(tests),
            "pytest.ini": "[pytest]\nfilterwarnings = error\n",
        }.items():
            (tmp_path / name).write_text(textwrap.dedent(text))
        plugin = ["-p", "celery_distlock.testing.plugin"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return Outcome(done.stdout + done.stderr)

    return run
