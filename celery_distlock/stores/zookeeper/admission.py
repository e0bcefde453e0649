"""
Who of a queue has the key.

The first has it. Whoever else is not alone was let in: its node then says the token and its slot.
Those are the next ones of the queue without a gap, for nobody is let in before all who were there
earlier. A node that goes makes room, so whoever has the key keeps it, however old the look is in
which that was found.
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from celery_distlock.stores.values import MOST_SLOTS

from .node_data import Facts, Record

__all__ = ["Entry", "free_slot", "holders"]


class Entry(NamedTuple):
    """One that has the key; `facts` with its token and slot, whether its node says them or not."""

    facts: Facts
    record: Record

    @property
    def noted(self) -> bool:
        """Whether the node says so."""
        return bool(self.record.facts.token)


def holders(records: Sequence[Record]) -> list[Entry]:
    """
    Return those who have the key, of the first *records* of its queue.

    The last of them may have to be told yet. It takes the places one after another, each by its
    own capacity, and stops at the first that does not fit, so nobody overtakes. One whose run has
    the key already stands as if it did not fit; it leaves when it finds that.
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
    """Return the lowest slot that none of *held* has; -1 where there are none."""
    if not 1 < facts.capacity <= MOST_SLOTS:
        return -1
    taken = {entry.facts.slot for entry in held}
    return next(slot for slot in count() if slot not in taken)
