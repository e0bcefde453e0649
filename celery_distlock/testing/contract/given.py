"""Fixtures of the contract: stores, and time that passes."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import ClassVar

import pytest

from celery_distlock.stores.base import Store

__all__ = ["Given"]


class Given:
    """Give stores to tests; see `StoreContract`."""

    shortest_lease: ClassVar[float] = 0.3
    longest_lease: ClassVar[float] = 30 * 86400.0
    hands_over: ClassVar[bool] = False

    @pytest.fixture
    def open_store(self) -> Callable[[str], Store]:
        """Open a store; those of one name share their records. Each store's author writes it."""
        raise NotImplementedError("a StoreContract needs a fixture open_store: see its docstring")

    @pytest.fixture
    def pass_time(self) -> Callable[[float], None]:
        """Let seconds pass for what the store has recorded."""
        return time.sleep

    @pytest.fixture
    def store(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """The store that is tested."""
        with closing(open_store("here")) as opened:
            yield opened

    @pytest.fixture
    def another(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """The same store as another process opens it."""
        with closing(open_store("here")) as opened:
            yield opened

    @pytest.fixture
    def elsewhere(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """A store that has other records."""
        with closing(open_store("elsewhere")) as opened:
            yield opened
