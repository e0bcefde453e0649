"""What a store can do for operators: list its keys and who waits for them, and count."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from .base import Store
from .values import Ability, Waiter

__all__ = ["CountingStore", "ListingStore"]


class ListingStore(Store):
    """
    A store that knows its keys.

    Attributes:
        left_out: How often so far a look at the keys went without some of them, whose servers did
            not answer while others did.
    """

    _ability: ClassVar[Ability | None] = Ability.LIST
    left_out = 0

    @abstractmethod
    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        """
        Find the keys that are held or waited for, in batches and in no order; some may be empty.

        Harmless to a server with many keys, and not a snapshot: what changes meanwhile may be there
        or not. A key that its name does not tell comes as a :class:`~celery_distlock.keys.Name`.
        Those of a server that is away are left out, and counted by `left_out`, where there are
        others.

        Args:
            pattern: As :mod:`fnmatch` has it, case counts.

        Raises:
            StoreUnavailableError: No server answers.
        """

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        """
        Return who waits for *key*, from place *first* on; before them those on their way.

        They are numbered, too, and of them likewise *limit* are told from number *first* on: so
        nobody is left when a page has none of both.

        Without their envelopes. Nobody where the store does not know them: its waiters look again
        and again.
        """
        return []


class CountingStore(Store):
    """A store that adds up what is counted, for all processes."""

    _ability: ClassVar[Ability | None] = Ability.COUNT

    @abstractmethod
    def count(self, counts: Mapping[str, float]) -> None:
        """
        Add to the store's counters, for :meth:`counts`, which keeps them for thirty days.

        Asked once only: after an outage a count may be short.
        """

    @abstractmethod
    def counts(self) -> dict[str, float]:
        """Return what was ever counted."""
