"""What ``make test-oldest`` installs: the lower bounds in pyproject.toml, all of them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version

import pytest

from tests.oldest import PYPROJECT, oldest, pinned

PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0]


def test_each_dependency_of_users_has_an_oldest_version():
    of_users = [EXTRAS[extra] for extra in EXTRAS if extra not in ("bench", "dev")]
    needed = {name_of(each) for each in sum(of_users, PROJECT["dependencies"])}

    assert {name_of(pin) for pin in oldest(PROJECT)} == needed
    assert {"celery", "redis", "starlette", "kazoo", "pytest"} <= needed
    assert all(version(name) for name in needed)


def test_development_has_the_same_lower_bounds():
    bounds = {name_of(pin): pin.replace("==", ">=") for pin in oldest(PROJECT)}

    for requirement in EXTRAS["dev"]:
        assert requirement == bounds.get(name_of(requirement), requirement)


@pytest.mark.parametrize("requirement", ["click", "click==8", "click>=8,<9", "click~=8.1"])
def test_a_dependency_without_a_lower_bound_is_refused(requirement):
    with pytest.raises(SystemExit, match="must name the oldest version"):
        pinned(requirement)


def test_the_lower_bound_is_the_version():
    assert pinned("celery[redis]>=5.5") == "celery[redis]==5.5"
