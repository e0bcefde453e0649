"""What a shell gets when a user presses the tab key."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.cli.conftest import environment
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
        # A slow store completes nothing, so that the user does not wait for it.
        wait_until(
            lambda: sorted(complete(word, key)) == [f"{key}-1", f"{key}-2"], what="the two keys"
        )


def test_what_a_pattern_would_mean_is_meant_literally(bare_site, complete, key):
    with bare_site.held(f"{key}1"):
        wait_until(lambda: complete("show", key) == [f"{key}1"], what="the one key")

        for pattern in (f"{key}*", f"{key}[1]"):
            assert complete("show", pattern) == []


OBEYED = [
    ";id",
    "$(id)",
    "`id`",
    "|id",
    "&id",
    ">f",
    "<f",
    "'",
    '"',
    "\\",
    "*",
    "?",
    "[1]",
    "{a,b}",
]


def test_nothing_is_offered_that_a_shell_would_obey(bare_site, complete, key):
    keys = [
        f"{key}{text}" for text in [*OBEYED, "${IFS}f", "!!", "#", "~", "^a", " a", "\ta", "(a)"]
    ]
    harmless = sorted(
        f"{key}{text}" for text in ("", ":a/b.c", "-1_2", "@a=b+c,d%", "\u00e9\u4e2d")
    )
    with ExitStack() as held:
        for each in [*keys, *harmless]:
            held.enter_context(bare_site.held(each))
        wait_until(lambda: key in complete("show", key), what="the keys")

        assert sorted(complete("show", key)) == harmless


def test_a_key_like_an_option_is_not_offered(bare_site, complete, key):
    with bare_site.held("--url=redis://elsewhere"), bare_site.held(key):
        wait_until(lambda: key in complete("show", ""), what="the keys")

        assert [each for each in complete("show", "") if each.startswith("-")] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_line_that_bash_has_completed_runs_nothing_of_a_key(bare_site, key, tmp_path):
    """As an operator does it: the tab key, then the line that came of it."""
    script = """
        eval "$(_CELERY_COMPLETE=bash_source celery)"
        COMP_WORDS=(celery -A "$1" locks show "$2"); COMP_CWORD=5
        _celery_completion celery
        printf '%s\\n' "${COMPREPLY[@]}"
        for word in "${COMPREPLY[@]}"; do bash -c ": $word"; done
    """
    env = environment(bare_site)
    env["PATH"] = f"{CELERY.parent}:{env['PATH']}"
    words = ["bash", "-c", script, "bash", bare_site.tasks.__name__, key]
    with bare_site.held(f"{key};touch${{IFS}}{tmp_path}/made"), bare_site.held(f"{key}1"):

        def offered() -> str:
            return subprocess.run(
                words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
            ).stdout

        wait_until(lambda: f"{key}1" in offered(), what="the keys")

    assert not (tmp_path / "made").exists()


def test_the_group_s_options_count_for_keys_too(bare_site, complete, key):
    with bare_site.held(key):
        assert complete("--prefix", "other", "show", key) == []


@pytest.mark.parametrize("words", [["--url", "redis://127.0.0.1:1/0"], ["--url", "nonsense"]])
def test_an_unreachable_store_completes_nothing_and_says_nothing(complete, words):
    assert complete(*words, "show", "k") == []


def test_an_app_that_is_not_there_completes_nothing_and_says_nothing(complete):
    assert complete("show", "k", app="no.such.app") == []
