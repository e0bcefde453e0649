"""What a store in memory tells of its keys, and counts: see :mod:`.listing`."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from celery_distlock.keys import key_of, slot_name
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.listing import CountingStore
from celery_distlock.stores.values import ALONE, KeyState, Waiter
from tests.oracle.memory_key import MemoryKey, since_of
from tests.oracle.memory_sending import count_identities

__all__ = ["MemoryInspection"]


class MemoryInspection(CountingStore):
    """See the module. What it needs is set by the class that inherits from it."""

    _mutex: threading.RLock
    _keys: dict[str, MemoryKey]
    _counts: Counter[str]
    _epoch: float

    def _known(self, name: str) -> MemoryKey:
        raise NotImplementedError

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        with self._mutex:
            state = self._known(slot_name(key))
            return state.look(self._epoch)._replace(identities=count_identities(state))

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        with self._mutex:
            names = [name for name, state in self._keys.items() if state.prune().in_use]
        yield [key for key in map(key_of, names) if fnmatchcase(key, pattern)]

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        with self._mutex:
            state = self._known(slot_name(key))
            travelling = (state.parked_waiter(run, self._epoch) for run in state.travelling)
            woken = [waiter._replace(envelope=b"", route=None) for waiter in travelling]
            queue = []
            for waiter in state.queue[first : first + limit]:
                kind, _, who = waiter.member.partition(":")
                since = since_of(waiter.arrival, self._epoch)
                want = state.wants.get(waiter.member, ALONE)
                if kind == "p":
                    task = state.names.get(who, "")
                    queue.append(Waiter("", who, since, task=task, want=want))
                else:
                    queue.append(Waiter(who, "", since, want=want))
            return woken[first : first + limit] + queue

    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        with self._mutex:
            found = [
                (key_of(name), run)
                for name, state in self._keys.items()
                for run in state.envelopes
                if task_id_of(run) == task_id and key in (None, key_of(name))
            ]
        yield from found

    def parked(self, key: str, run: str) -> Waiter | None:
        with self._mutex:
            state = self._known(slot_name(key))
            return state.parked_waiter(run, self._epoch) if run in state.envelopes else None

    def count(self, counts: Mapping[str, float]) -> None:
        with self._mutex:
            self._counts.update(counts)

    def counts(self) -> dict[str, float]:
        with self._mutex:
            return dict(self._counts)
