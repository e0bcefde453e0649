from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from celery_distlock.testing import die_with_parent
from tests import processes
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def follow(tmp_path):
    """Reads a page in an empty folder; returns what was said if anything went wrong."""
    started = []

    def read(page, port=6379, patience=45):
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of what is installed here by chance
        }
        reader = [sys.executable, "-W", "error", "-m", "tests.acceptance.docs.reader"]
        process = subprocess.Popen(
            die_with_parent([*reader, str(page), str(port), str(patience)], signal.SIGTERM),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        said, _ = process.communicate(timeout=230)
        return said if process.returncode else ""

    yield read
    for process in started:
        processes.signal_session(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        wait_until(lambda process=process: not processes.session(process.pid))
