"""Senders of what a store has woken: apps come and go, in any thread and in finalizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from celery_distlock.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable


class Publisher:
    """One that has something done, once, while it is compared with another."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.meanwhile = meanwhile

    def __call__(self, wake: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return self is other

    __hash__ = None


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("memory://", "test")


def test_one_that_is_added_while_another_is_removed_is_asked(store):
    added = Publisher()
    stays, goes = Publisher(lambda: store.publishers.add(added)), Publisher()
    store.publishers.known = (stays, goes)

    store.publishers.remove(goes)

    assert store.publishers.known == (added, stays)


def test_one_that_is_removed_while_another_is_added_is_not(store):
    goes, added = Publisher(), Publisher()
    stays = Publisher(lambda: store.publishers.remove(goes))
    store.publishers.known = (goes, stays)

    store.publishers.add(added)

    assert store.publishers.known == (added, stays)
