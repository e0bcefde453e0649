"""A site of its own, see tests/worker/conftest.py: what operators do is done to real workers."""

import pytest

from tests.integration.operations.listener import Listener
from tests.worker.conftest import _show_logs, bare_site, crew, key, site

__all__ = ["_show_logs", "bare_site", "crew", "key", "site"]


@pytest.fixture
def listener(site):
    listener = Listener(site.app)
    yield listener
    listener.stop()
