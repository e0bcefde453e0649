"""What the page's server says of a look at all keys."""

from __future__ import annotations

import asyncio

from celery_distlock.ops.looks import lock_info
from celery_distlock.ops.web.snapshots import SnapshotCache
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import KeyState


class Partial(MemoryStore):
    """A store of several servers; a test counts those that are unreachable."""

    left_out = 0


class PartlyAway:
    """An admin of a store that leaves out *away* parts each time its keys are listed."""

    def __init__(self, away: int) -> None:
        self.store: ListingStore = Partial("memory://", "test")
        self._away = away

    def locks(self):
        yield lock_info("k", KeyState("owner", 1, "", 0.0, 0.0, 0))
        self.store.left_out += self._away


def looks(admin: PartlyAway) -> list[bool]:
    async def taken() -> list[bool]:
        cache = SnapshotCache(admin, 0.0)
        found = []
        for _ in range(2):
            found.append((await cache.latest()).whole)
            cache.changed()
        return found

    return asyncio.run(taken())


def test_a_look_that_leaves_out_a_part_of_the_keys_is_not_whole():
    assert looks(PartlyAway(1)) == [False, False]
    assert looks(PartlyAway(0)) == [True, True]
