"""What Celery shows of an app's settings: the lock store's URL, and none of its passwords."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from celery import Celery

from tests.workers import ROOT

URLS = [
    "redis://user:hunter2@h:6379/2",
    "rediss://:hunter2@h/0?ssl_keyfile=key.pem&ssl_password=hunter2",
    "redis://h/0?username=user&password=hunter2",
    "unix://user:hunter2@/run/redis.sock?db=1",
    "redis+socket://:hunter2@/run/redis.sock?virtual_host=1",
    "sentinel://:hunter2@h:1,i:1/0?service=m&sentinel_password=hunter2",
    "sentinel://:hunter2@h:1?service=m&sentinel_password=hunter2;sentinel://:hunter2@i:1",
    "sentinels://:hunter2@h/0?sentinel_username=u&sentinel_password=hunter2&service=m",
    "redis+cluster://user:hunter2@h:1,i:1/0",
    "rediss+cluster://:hunter2@h:1,i:1/0?ssl_password=hunter2",
    "redlock://:hunter2@h,i,j/0",
    "redlocks://:hunter2@h,i,j/0?ssl_password=hunter2",
    "zookeeper://user:hunter2@h:1,i:1/chroot",
    "redis://h:6379/0?pasword=hunter2",
    "theirs://user:hunter2@h/?PASSWORD=hunter2&client_secret=hunter2&token=hunter2",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("namespace", [None, "CELERY"])
def test_no_password_of_the_lock_store_is_shown(url, namespace):
    app = Celery("masking", broker="memory://", set_as_current=False)
    name = f"{namespace}_DISTLOCK_URL" if namespace else "distlock_url"
    app.config_from_object(SimpleNamespace(**{name: url}), namespace=namespace)

    table, report = app.conf.table(), app.bugreport()

    assert "hunter2" not in repr(table)
    assert "hunter2" not in report
    assert table[name].startswith(url.partition("//")[0])
    assert app.conf.distlock_url == url


def test_a_url_without_a_scheme_is_shown_without_its_password():
    app = Celery("masking", broker="memory://", set_as_current=False)
    app.conf.distlock_url = "user:hunter2@h:6379/0"

    assert app.conf.table()["distlock_url"] == "user:***@h:6379/0"


def test_what_is_no_url_is_not_shown():
    app = Celery("masking", broker="memory://", set_as_current=False)
    app.conf.distlock_url = ["redis://:hunter2@h"]

    assert "hunter2" not in repr(app.conf.table())


def test_a_url_that_is_not_set_is_shown_as_that():
    app = Celery("masking", broker="memory://", set_as_current=False)
    app.conf.distlock_url = None

    assert app.conf.table()["distlock_url"] is None


def test_the_report_of_an_app_that_does_not_know_of_locks_yet_shows_none(tmp_path):
    (tmp_path / "proj.py").write_text(
        "from celery import Celery\n"
        "app = Celery('proj', broker='memory://')\n"
        "app.conf.distlock_url = 'redis://user:hunter2@h:6379/2'\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "proj", "report"]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)

    assert "redis://user:***@h:6379/2" in done.stdout
    assert "hunter2" not in done.stdout
