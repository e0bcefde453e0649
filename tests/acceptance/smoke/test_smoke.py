"""Runs `suite` in a pytest of its own, since pytest-celery takes the names of other fixtures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from celery_distlock.testing import die_with_parent

SUITE = Path(__file__).with_name("suite")
ROOT = SUITE.parents[3]
TESTS = 5


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


def why_not_compose() -> str:
    """What is missing for containers; empty if nothing is."""
    if shutil.which("docker") is None:
        return "there is no docker"
    for question in (["docker", "version"], ["docker", "compose", "version"]):
        done = subprocess.run(question, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"`{' '.join(question)}` fails: {done.stderr.strip().splitlines()[0]}"
    if os.environ.get("DISTLOCK_SMOKE") != "compose":
        return "it builds and pulls images: set DISTLOCK_SMOKE=compose"
    return ""


@pytest.mark.timeout(600)
def test_the_suite_passes_with_processes():
    output = run_suite("processes")

    assert f"\n{TESTS} passed in " in output, output


@pytest.mark.timeout(1800)
def test_the_suite_passes_with_containers():
    reason = why_not_compose()
    if reason:
        pytest.skip(reason)

    output = run_suite("compose")

    assert f"\n{TESTS} passed in " in output, output
