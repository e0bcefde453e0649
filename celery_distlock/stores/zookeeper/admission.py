"""
Which nodes of a queue hold the key.

The first node holds it. Any other holder shares the key and was admitted: its node then contains
the token and its slot. Admitted nodes follow the first one without a gap, because no node is
admitted before all earlier ones. A node that is deleted only makes room. So a holder that was found
in a read of the queue still holds the key, however old that read is.
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from celery_distlock.stores.values import MOST_SLOTS

from .node_data import Facts, Record


class Entry(NamedTuple):
    """A holder; `facts` includes its token and slot, even if they are not in its node yet."""

    facts: Facts
    record: Record

    @property
    def noted(self) -> bool:
        """Whether the node itself contains the token."""
        return bool(self.record.facts.token)


def holders(records: Sequence[Record]) -> list[Entry]:
    """
    Return the holders among the first *records* of a queue.

    The last of them may fit without having been admitted yet. The records are checked in order,
    each by its own capacity, up to the first that does not fit, so none overtakes. A record of a
    run that holds the key already counts as one that does not fit. Its process removes it when it
    finds that.
    """
    held: list[Entry] = []
    for record in records:
        facts = record.facts
        if not facts.token:
            if held and not _fits(facts, held):
                break
            token = held[0].facts.token if held else record.token
            facts = facts._replace(token=token, slot=free_slot(facts, held))
        held.append(Entry(facts, record))
    return held


def _fits(facts: Facts, held: Sequence[Entry]) -> bool:
    if facts.alone or held[0].facts.alone:
        return False
    if facts.capacity and len(held) >= facts.capacity:
        return False
    return not facts.run or all(facts.run != entry.facts.run for entry in held)


def free_slot(facts: Facts, held: Sequence[Entry]) -> int:
    """Return the lowest slot that none of *held* has; -1 if this capacity has no slots."""
    if not 1 < facts.capacity <= MOST_SLOTS:
        return -1
    taken = {entry.facts.slot for entry in held}
    return next(slot for slot in count() if slot not in taken)
