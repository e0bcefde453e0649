"""Suggests keys in use that are spelled like a key that is not in use."""

import contextlib
import heapq
from collections.abc import Iterator
from difflib import SequenceMatcher

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.stores import Ability, ListingStore, Store

MOST = 3
LIKE = 0.75  # difflib ratio: allows for most typos and for different case
PATIENCE = 1.0  # longest search, in seconds


def similar_keys(store: Store, key: str) -> list[str]:
    """
    Return at most `MOST` keys in use that are spelled like *key*, the most similar first.

    The search stops after `PATIENCE` seconds. A store that cannot list keys yields none.
    """
    if Ability.LIST not in store.abilities:
        return []
    found: dict[str, float] = {}
    with contextlib.suppress(StoreError):  # suggestions are optional
        found.update(_similar(ListingStore.of(store), key))
    return heapq.nlargest(MOST, found, key=lambda each: (found[each], each))


def _similar(store: ListingStore, key: str) -> Iterator[tuple[str, float]]:
    until = clock.monotonic() + PATIENCE
    matcher = SequenceMatcher(b=key.casefold(), autojunk=False)
    for keys in store.find_keys():
        for each in keys:
            matcher.set_seq1(each.casefold())
            likely = each != key and matcher.real_quick_ratio() >= LIKE <= matcher.quick_ratio()
            if likely and (ratio := matcher.ratio()) >= LIKE:
                yield each, ratio + SequenceMatcher(None, each, key, autojunk=False).ratio() / 100
            if clock.monotonic() >= until:
                return
        if clock.monotonic() >= until:
            return
