"""What stores that are not one Redis need for the contract; see their own folders."""

from __future__ import annotations

from tests.stores.redlock.conftest import patience
from tests.stores.zookeeper.conftest import shared_server

__all__ = ["patience", "shared_server"]
