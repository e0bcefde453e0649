"""What a type checker makes of right and of wrong uses, which are in the files next to this one."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import pytest
from mypy import api

pytestmark = pytest.mark.timeout(300)  # for the first, which runs mypy

HERE = Path(__file__).parent
EXPECTED = re.compile(r"# E: (?P<code>[\w-]+): (?P<words>.+)$")
REPORTED = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<words>.+?)  \[(?P<code>[\w-]+)\]")


class Fault(NamedTuple):
    """A type error: in which file, on which line, and mypy's name for its kind."""

    file: str
    line: int
    code: str


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """All the errors that mypy finds in both files, with its words; it runs as for a user."""
    checked = [str(HERE / name) for name in ("right_uses.py", "wrong_uses.py")]
    cache = tmp_path_factory.mktemp("mypy")
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--no-pretty"]
    output, complaints, _ = api.run([*options, "--cache-dir", str(cache), *checked])
    assert complaints == ""
    found = [REPORTED.match(line) for line in output.splitlines() if ": error: " in line]
    assert all(found), output
    words: dict[Fault, str] = {}
    for match in found:
        fault = Fault(Path(match["file"]).name, int(match["line"]), match["code"])
        words[fault] = f"{words.get(fault, '')}\n{match['words']}"
    return words


def expected() -> dict[Fault, str]:
    lines = (HERE / "wrong_uses.py").read_text().splitlines()
    return {
        Fault("wrong_uses.py", number, match["code"]): match["words"]
        for number, line in enumerate(lines, start=1)
        if (match := EXPECTED.search(line))
    }


def test_right_uses_are_right(reported):
    assert [fault for fault in reported.items() if fault[0].file == "right_uses.py"] == []


def test_wrong_uses_are_wrong_and_nothing_else_is(reported):
    assert {fault for fault in reported if fault.file == "wrong_uses.py"} == set(expected())


@pytest.mark.parametrize(("fault", "words"), expected().items(), ids=str)
def test_the_error_says_what_is_wrong(reported, fault, words):
    assert words in reported.get(fault, "")


def test_the_package_says_that_it_is_typed():
    assert files("celery_distlock").joinpath("py.typed").is_file()
