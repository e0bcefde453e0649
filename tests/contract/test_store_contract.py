"""The contract that is shipped is red for a store that does not keep it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from celery_distlock.testing import die_with_parent

EXAMPLES = Path(__file__).parents[2] / "examples"
BROKEN = {
    "test_a_taken_key_is_busy_and_names_its_holder": ("elif held.owner not in", "elif not"),
    "test_tokens_rise_with_every_grant": ("max(held.token + 1, int(now * 1e6))", "1"),
    "test_a_lease_lasts_for_as_long_as_its_holder_believes_in_it": (
        "until=now + request.lease",
        "until=now + request.lease / 2",
    ),
    "test_a_key_of_another_holder_is_not_renewed": (
        "if held.owner != hold.owner:",
        "if not held.owner:",
    ),
    "test_a_non_holder_cannot_release_it": (
        "if held.owner != request.owner:",
        "if not held.owner:",
    ),
    "test_the_class_inherits_the_tests_of_each_ability": (
        "abilities = frozenset({",
        "abilities = frozenset({Ability.RECOGNISE, ",
    ),
}


def test_stores_that_break_a_promise_fail(tmp_path):
    store, tests = (
        (EXAMPLES / name).read_text() for name in ("sqlite_store.py", "test_sqlite_store.py")
    )
    chosen = []
    for number, (test, (usual, broken)) in enumerate(BROKEN.items()):
        assert usual in store
        (tmp_path / f"store{number}.py").write_text(store.replace(usual, broken))
        module = tmp_path / f"test_store{number}.py"
        module.write_text(tests.replace("from sqlite_store", f"from store{number}"))
        chosen.append(f"{module}::TestSQLiteStore::{test}")

    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:celery", *chosen]
    ended = subprocess.run(
        die_with_parent(command),
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert f"{len(BROKEN)} failed in" in ended.stdout
