"""Interfaces of stores that list their keys and waiters, or add up counters, for operators."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from .base import Store
from .values import Ability, Waiter

__all__ = ["CountingStore", "ListingStore"]


class ListingStore(Store):
    """
    A store that can list its keys.

    Attributes:
        left_out: How often so far a listing lacked some keys, because their servers did not answer
            while others did.
    """

    _ability: ClassVar[Ability | None] = Ability.LIST
    left_out = 0

    @abstractmethod
    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        """
        Yield the keys that are held or waited for, in batches and in no order.

        A batch may be empty. The listing is harmless to a server with many keys, and is not a
        snapshot: a key that changes during the listing may be included or not. A key whose text
        cannot be restored from its name comes as a :class:`~celery_distlock.keys.Name`. If a server
        is down while others answer, its keys are left out, and `left_out` counts that.

        Args:
            pattern: A pattern of :mod:`fnmatch`; case-sensitive.

        Raises:
            StoreUnavailableError: No server answers.
        """

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        """
        Return the dispatched runs of *key*, then its waiters: a page of each.

        The dispatched runs are numbered separately. Up to *limit* of them and up to *limit* waiters
        are returned, each from number *first* on. So an empty page is after the last one.

        The envelopes are not included. The result is empty for a store that does not know its
        waiters, which look at the key again and again.
        """
        return []


class CountingStore(Store):
    """A store that adds up counters of all processes."""

    _ability: ClassVar[Ability | None] = Ability.COUNT

    @abstractmethod
    def count(self, counts: Mapping[str, float]) -> None:
        """
        Add *counts* to the store's counters, which are kept for thirty days.

        The request is not repeated, so after an outage a counter may be too low.
        """

    @abstractmethod
    def counts(self) -> dict[str, float]:
        """Return the counters."""
