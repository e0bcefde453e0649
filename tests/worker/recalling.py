"""Ask the holder of a key to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.worker.conftest import Site


def recall(site: Site, key: str) -> None:
    """Ask the only holder of *key* to leave."""
    assert site.store.recall(key, site.look(key).owner)
