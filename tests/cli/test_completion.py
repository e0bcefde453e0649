"""What a shell is told when somebody presses the tab key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.waiting import wait_until
from tests.workers import ROOT

CELERY = Path(sys.executable).with_name("celery")


@pytest.fixture
def complete(bare_site):
    def run(*words: str, app: str = bare_site.tasks.__name__) -> list[str]:
        line = ["celery", "-A", app, "locks", *words]
        asked = {
            "_CELERY_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(line),
            "COMP_CWORD": str(len(line) - 1),
        }
        done = subprocess.run(
            [CELERY],
            env={**environment(bare_site), **asked},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == ""
        return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]

    return run


def test_commands_are_completed(complete):
    assert {"list", "show", "release", "doctor"} <= set(complete(""))
    assert complete("rel") == ["release"]


def test_options_are_completed(complete):
    assert "--older-than" in complete("list", "--")
    assert complete("list", "--sort", "wa") == ["waiting"]
    assert "--prefix" in complete("--")


@pytest.mark.parametrize("word", ["show", "queue", "release", "wake", "list"])
def test_keys_are_completed_from_the_store(bare_site, complete, key, word):
    with bare_site.held(f"{key}-1"), bare_site.held(f"{key}-2"), bare_site.held(f"{key}\n-3"):
        # A slow store completes nothing, so that nobody waits for it.
        wait_until(
            lambda: sorted(complete(word, key)) == [f"{key}-1", f"{key}-2"], what="the two keys"
        )


def test_what_a_pattern_would_mean_is_meant_literally(bare_site, complete, key):
    with bare_site.held(f"{key}[1]"), bare_site.held(f"{key}1"):
        wait_until(lambda: complete("show", f"{key}[") == [f"{key}[1]"], what="the one key")


def test_the_group_s_options_count_for_keys_too(bare_site, complete, key):
    with bare_site.held(key):
        assert complete("--prefix", "other", "show", key) == []


@pytest.mark.parametrize("words", [["--url", "redis://127.0.0.1:1/0"], ["--url", "nonsense"]])
def test_an_unreachable_store_completes_nothing_and_says_nothing(complete, words):
    assert complete(*words, "show", "k") == []


def test_an_app_that_is_not_there_completes_nothing_and_says_nothing(complete):
    assert complete("show", "k", app="no.such.app") == []
