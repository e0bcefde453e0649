"""Runs `suite` in a pytest of its own, since pytest-celery takes the names of other fixtures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from celery_distlock.testing import die_with_parent
from tests.acceptance.smoke.suite.containers import SHOP, Project
from tests.waiting import wait_until

SUITE = Path(__file__).with_name("suite")
ROOT = SUITE.parents[3]
TESTS = 5
DECIDED = """
import os, sqlite3
found = sqlite3.connect(os.environ["SHOP_DB"]).execute("SELECT order_id FROM decisions")
print(*(order for order, in found))
"""


def run_suite(way: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(SUITE / "pytest.ini"), str(SUITE)]
    done = subprocess.run(
        die_with_parent(command),
        cwd=ROOT,
        env={**os.environ, "DISTLOCK_SMOKE": way, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture
def engine() -> None:
    """Skip where Docker is not asked for, and fail where it is and cannot be had."""
    if os.environ.get("DISTLOCK_SMOKE") != "compose":
        pytest.skip("it builds and pulls images: set DISTLOCK_SMOKE=compose")
    assert shutil.which("docker"), "DISTLOCK_SMOKE is compose, and there is no docker"
    for question in (["docker", "version"], ["docker", "compose", "version"]):
        done = subprocess.run(question, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(question)} fails: {done.stderr}"


@pytest.mark.timeout(600)
def test_the_suite_passes_with_processes():
    output = run_suite("processes")

    assert f"\n{TESTS} passed in " in output, output


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("engine")
def test_the_suite_passes_with_containers():
    output = run_suite("compose")

    assert f"\n{TESTS} passed in " in output, output


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("engine")
def test_the_shop_does_with_containers_what_its_file_says():
    shop = Project(SHOP)

    def in_worker(*command: str) -> str:
        return shop.compose("exec", "-T", "worker", *command)

    try:
        shop.up()
        order = '[100001, "RING-L", 1]'
        in_worker("celery", "-A", "shop", "call", "shop.reserve", "--args", order)
        wait_until(lambda: in_worker("python", "-c", DECIDED) == "100001", timeout=60.0)
        assert "granted and released a lock" in in_worker(
            "celery", "-A", "shop", "locks", "doctor", "--allow-doubts"
        )
        sold = shop.compose("run", "--rm", "-T", "demo", "python", "demo.py", "--orders", "400")
        assert "locked: exactly right" in sold
    finally:
        shop.down()
