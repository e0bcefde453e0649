"""The steps of a task that `architecture.md` counts exist, and are made in that order."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import celery_distlock
from celery_distlock.testing import die_with_parent

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[3]
PACKAGE = Path(celery_distlock.__file__).parent
PAGE = ROOT / "docs/explanation/architecture.md"
SECTIONS = {"free": "One task, step by step", "held": "A parked task, step by step"}
NUMBERED = re.compile(r"^\d+\. .*(?:\n {3,}.*)*", re.MULTILINE)
STEP = re.compile(r"`([\w/]+\.(?:py:[\w.]+|lua))`")


def section_of(kind: str) -> str:
    (_, section) = PAGE.read_text().split(f"## {SECTIONS[kind]}\n")
    return section.partition("\n## ")[0]


def steps_of(kind: str) -> list[str]:
    return [step for item in NUMBERED.findall(section_of(kind)) for step in STEP.findall(item)]


def functions_of(path: Path) -> set[str]:
    """The qualified names of the functions of a module."""
    found = set()

    def visit(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if not isinstance(child, ast.ClassDef):
                    found.add(f"{within}{child.name}")
                visit(child, f"{within}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return found


@pytest.mark.parametrize("kind", SECTIONS)
def test_each_section_has_about_ten_steps(kind):
    items = NUMBERED.findall(section_of(kind))

    assert 9 <= len(items) <= 11
    assert all(map(STEP.search, items))


@pytest.mark.parametrize("kind", SECTIONS)
def test_what_a_section_names_exists(kind):
    named = STEP.findall(section_of(kind))

    for name in named:
        file, _, function = name.partition(":")
        assert (PACKAGE / file).is_file(), name
        assert not function or function in functions_of(PACKAGE / file), name


@pytest.mark.parametrize("kind", SECTIONS)
def test_the_steps_are_made_in_their_order(kind, redis_server):
    command = [sys.executable, "-m", "tests.acceptance.docs.steps", redis_server.url, kind]
    process = subprocess.run(
        die_with_parent(command, signal.SIGTERM),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=230,
        check=False,
    )
    (printed,) = re.findall(r"^\[.*\]$", process.stdout, re.MULTILINE) or [process.stdout]
    made = [step for step in json.loads(printed) if step in steps_of(kind)]

    assert made == steps_of(kind)
