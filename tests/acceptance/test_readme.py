"""The README's code is the quickstart's, and it works."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from celery_distlock import Lock, LockedTask

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


def test_readme_code_runs_its_task_under_the_lock(quickstart, monkeypatch):
    reserve = quickstart["reserve"]
    assert isinstance(reserve, LockedTask)
    locked = []
    monkeypatch.setattr(time, "sleep", lambda _: locked.append(Lock("stock:RING-L").locked()))

    assert reserve.apply(args=("RING-L", 1)).get() == "1 RING-L reserved"
    assert locked == [True]
    assert not Lock("stock:RING-L").locked()


def test_readme_code_is_locked_from_other_code_as_it_says(quickstart):
    (key,) = re.findall(r"`with (Lock\(.*?\)): …`", README)

    with eval(key, {"Lock": Lock, "reserve": quickstart["reserve"]}):
        assert Lock("stock:RING-L").locked()


def test_readme_shows_what_its_code_says():
    shown = re.findall(r"succeeded in \S+: '(.*)'", README)

    assert shown == ["1 RING-L reserved", "1 TANK-S reserved", "1 RING-L reserved"]


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_table_of_settings_names_every_one():
    from celery_distlock.settings import APP_ONLY, TASK_OPTIONS

    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    table, _, _ = text.partition("```{eval-rst}")
    names = [f"lock_{name}" for name in TASK_OPTIONS] + [f"distlock_{name}" for name in APP_ONLY]

    assert [name for name in names if f"`{name}`" not in table] == []
