"""The README's code is the quickstart's, and it works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_distlock import LockedTask

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "examples" / "quickstart.py").read_text()


@pytest.fixture
def quickstart(redis_url, prefix):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {"__name__": "quickstart"}
    exec(compile(code, "README.md", "exec"), names)
    names["app"].conf.update(distlock_url=redis_url, distlock_prefix=prefix)
    names["app"].set_current()
    yield names
    names["app"].close()


def test_readme_shows_the_quickstart():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

    assert code == QUICKSTART


def test_readme_code_runs_its_task_under_the_lock(quickstart):
    reserve = quickstart["reserve"]
    assert isinstance(reserve, LockedTask)

    first, second = (reserve.apply(args=("A-1", 2)).get() for _ in range(2))

    assert 0 < first < second


def test_readme_code_locks_from_other_code(quickstart):
    quickstart["restock"]("A-1", 5)

    assert not quickstart["Lock"]("stock:A-1").locked()


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_readme_names_every_setting():
    from celery_distlock.settings import APP_ONLY, TASK_OPTIONS

    missing = [f"lock_{name}" for name in TASK_OPTIONS if f"lock_{name}" not in README]
    missing += [f"distlock_{name}" for name in APP_ONLY if f"distlock_{name}" not in README]

    assert not missing
