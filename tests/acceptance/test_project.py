"""What says how the project is built and released agrees with what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github").rglob("*.yml"))


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def targets(text):
    """The targets that are made by *text*, commands of a shell."""
    command = r"^\s*(?:\w+=\S+ )*(?:- run: |tests |make )+([a-z0-9.-]+)"
    return set(re.findall(command, text, re.MULTILINE))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_parses(form):
    assert isinstance(yaml.safe_load(form.read_text()), dict)


def test_github_runs_what_a_change_has_to_pass():
    has_to_pass = targets((ROOT / ".ci" / "run").read_text())
    jobs = workflow("ci.yml")["jobs"]
    run = targets((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    versions = {each["target"] for each in jobs["versions"]["strategy"]["matrix"]["include"]}

    assert {"lint", "test-all", "chaos"} | versions <= has_to_pass <= run | versions


def test_github_tries_the_pythons_that_are_claimed():
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))

    assert workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_a_release_is_published_without_a_token_and_only_if_it_is_built():
    jobs = workflow("release.yml")["jobs"]

    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
