"""``manage.py locks``."""

from __future__ import annotations

import json
import re

CALL = """
import contextlib, os
from django.core.management import call_command

with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    try:
        call_command("locks", "pause", "stock:A", "--idle", "--reason", "INC-1")
    except SystemExit as ended:
        status = ended.code
print(status)
"""


def test_it_has_all_commands_of_celery_locks(project):
    from celery_distlock.ops.cli import _COMMANDS

    said = project.manage("locks", "--help").stdout

    assert "Usage: manage.py locks" in said
    assert [name for name in _COMMANDS if f"\n  {name} " not in said] == []


def test_it_takes_the_options_of_the_group_and_those_of_django(project):
    args = ["--prefix", f"{project.prefix}:other", "show", "--settings", "shop.settings"]

    shown = project.manage("locks", *args, "--json", "--", "--key", status=1)

    assert json.loads(shown.stdout)["key"] == "--key"


def test_an_error_is_a_line_with_the_status_of_celery_locks(project):
    nowhere = {"CELERY_BROKER_URL": "amqp://", "CELERY_RESULT_BACKEND": None}
    done = project.manage("locks", "list", settings=nowhere, status=2)

    assert re.fullmatch("Error: .*distlock_url.*\n", done.stderr)
    assert "no app was named" not in done.stderr


def test_a_program_may_call_it(project):
    assert project.printed(CALL) == [0]
    shown = json.loads(project.manage("locks", "show", "stock:A", "--json", status=1).stdout)

    assert shown["limit"]["capacity"] == 0
    assert shown["actions"][0]["reason"] == "INC-1"
