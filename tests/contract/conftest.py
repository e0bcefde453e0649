"""What stores that are not one Redis need for the contract; see their own folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.stores.redlock.conftest import patience
from tests.stores.zookeeper.conftest import shared_server

if TYPE_CHECKING:
    import pytest

__all__ = ["patience", "shared_server"]

TEXTS = {"key", "run", "envelope"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Leave one of its texts to each test of a contract whose class says ``any_text = False``.

    Keys, runs and envelopes are written as on one Redis, where all of them are tried.
    """
    seen: set[Any] = set()
    kept, left = [], []
    for item in items:
        texts = TEXTS & set(getattr(getattr(item, "callspec", None), "params", {}))
        test = (getattr(item, "cls", None), getattr(item, "originalname", ""))
        again = bool(texts) and not getattr(test[0], "any_text", True) and test in seen
        seen.add(test)
        (left if again else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
