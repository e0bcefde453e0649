"""Fixtures of the contract: stores, and the passing of time."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import ClassVar

import pytest

from celery_distlock.stores.base import Store

__all__ = ["Given"]


class Given:
    """Provide tests with stores; see `StoreContract`."""

    shortest_lease: ClassVar[float] = 0.3
    longest_lease: ClassVar[float] = 30 * 86400.0
    hands_over: ClassVar[bool] = False

    @pytest.fixture
    def open_store(self) -> Callable[[str], Store]:
        """Open a store; stores of one name share records. To be defined for each store."""
        raise NotImplementedError("a StoreContract needs a fixture open_store: see its docstring")

    @pytest.fixture
    def pass_time(self) -> Callable[[float], None]:
        """Let seconds pass for the store's records."""
        return time.sleep

    @pytest.fixture
    def store(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """The store under test."""
        with closing(open_store("here")) as opened:
            yield opened

    @pytest.fixture
    def another(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """The same store, as opened by another process."""
        with closing(open_store("here")) as opened:
            yield opened

    @pytest.fixture
    def elsewhere(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """A store with separate records."""
        with closing(open_store("elsewhere")) as opened:
            yield opened
