"""Every kind of place that a Redis store can be in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_distlock.stores import open_store
from celery_distlock.stores.base import Store
from tests import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def opened(prefix: str) -> Iterator[Callable[[str], Store]]:
    """Opens stores, and closes them after the test."""
    stores: list[Store] = []

    def open_it(url: str) -> Store:
        stores.append(open_store(url, prefix))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


@pytest.fixture
def prefix() -> str:
    """A prefix of this test's own. The servers are its module's, so nothing need be deleted."""
    return servers.new_prefix()
