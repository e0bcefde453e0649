"""Agents for monitoring patch Celery and kombu: every way to send goes on, locked as ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.patching import AGENTS, VARIABLE
from tests.workers import ROOT

APP = "tests.apps.instrumented"

# What of it each of them replaces, or hears of, where calls are sent.
ALL = {"publish", "_publish", "apply_async", "send_task", "apply", "__call__", "apply_entry"}
SEEN = {
    "bare": ALL,
    "like": ALL,
    "proxied": ALL,
    "sentry": {"publish", "apply_async", "send_task", "apply_entry", "__call__"},
    "newrelic": {"publish", "__call__"},
    "datadog": {"_publish", "apply_async", "apply_entry", "before_task_publish"},
    "signalled": {"before_task_publish"},
}
OTHERS = [each for each in AGENTS if each not in ("sentry", "datadog")]


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "agent",
    # One of functions, and one of object proxies and signals.
    ["sentry", "datadog", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in OTHERS)],
)
def test_every_way_to_send_still_works(agent, when, worker, celery_env, load_app):
    """In a web process and in a worker, patched before this package is imported, or after."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests/sitecustomize")))
    env = {**celery_env, VARIABLE: f"{agent} {when}", "PYTHONPATH": path}
    staff = worker(APP, concurrency=4, env=env)
    tasks = load_app(APP)
    from_worker = tasks.send_from_worker.delay()

    web = subprocess.run(
        [sys.executable, "-c", f"from {APP} import main; main()"],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert web.returncode == 0, web.stderr
    assert json.loads(web.stdout).keys() >= SEEN[agent]
    assert from_worker.get(timeout=120) == []
    assert tasks.patched.delay().get(timeout=30)
    errors = [line for line in staff.log().splitlines() if "ERROR/" in line]
    assert [line for line in errors if ".loses[" not in line] == []
