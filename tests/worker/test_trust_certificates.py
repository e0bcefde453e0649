"""Tasks that their senders sign, Celery's `auth`: a task that waited has its sender's signature."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import trustme

from tests.worker.conftest import staffed
from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.worker.conftest import Site

APP = "tests.apps.trusting"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A sender's and a worker's; the sender's alone is trusted."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "trusted").mkdir()
    authority = trustme.CA(key_type=trustme.KeyType.RSA)
    for name in ("sender", "worker"):
        made = authority.issue_cert(f"{name}.test", key_type=trustme.KeyType.RSA)
        made.private_key_pem.write_to_path(folder / f"{name}.key")
        made.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    (folder / "trusted" / "sender.pem").write_bytes((folder / "sender.pem").read_bytes())
    return folder


@pytest.fixture(scope="module")
def site(bare_site: Site, certificates: Path, tmp_path_factory) -> Iterator[Site]:
    """Two workers with the worker's certificate; this process signs nothing."""
    bare_site.env |= {
        "DISTLOCK_TEST_CERTIFICATES": str(certificates),
        "DISTLOCK_TEST_ME": "worker",
    }
    with staffed(bare_site, tmp_path_factory.mktemp("workers"), [{}, {}]) as site:
        yield site


def send(site: Site, key: str) -> None:
    """Send a task as the sender, from a process of its own: the keys are the process's."""
    env = {**os.environ, **site.env, "PYTHONPATH": str(ROOT), "DISTLOCK_TEST_ME": "sender"}
    words = f"from {APP} import work; work.delay({key!r}, 'ran')"
    subprocess.run([sys.executable, "-c", words], env=env, cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_a_task_that_was_parked_is_taken_by_workers_that_trust_its_sender_alone(site, key, way):
    with site.held(key):
        send(site, key)
        site.wait_queued(key)
        if way == "broker":
            site.forget_channel(key)

    assert site.journal.wait(key) == ["ran"]
    assert "SecurityError" not in site.log()
