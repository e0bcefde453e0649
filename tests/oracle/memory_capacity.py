"""What a store in memory does with keys that several hold: see :class:`.capacity.QueueStore`."""

import math

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.queue_parts import Units
from celery_distlock.stores.values import Limit, Release, Reply, Status
from tests.oracle.memory_key import MemoryKey
from tests.oracle.memory_timing import MemoryTiming

__all__ = ["MemoryCapacity"]


class MemoryCapacity(MemoryTiming, Units):
    """See the module. What it needs is set by the class that inherits from it."""

    def _forget_if_idle(self, name: str, state: MemoryKey) -> None:
        raise NotImplementedError

    def upgrade(self, key: str, owner: str, lease: float, inbox: Inbox | None = None) -> Reply:
        asked_at = clock.monotonic()
        with self._mutex:
            state = self._known(slot_name(key))
            share = state.shares.get(owner)
            if share is None:
                return Reply(Status.FREE, asked_at)
            if share.alone:
                share.lengthen(lease)
                share.due = 0
            elif len(state.shares) == 1:
                state.become_alone(owner, lease)
            elif state.upgrading not in ("", owner):
                return Reply(Status.DEADLOCK, asked_at)
            else:
                state.upgrading = owner if inbox is not None else state.upgrading
                left = max(share.until for share in state.shares.values()) - asked_at
                return Reply(Status.BUSY, asked_at, remaining=left)
            return state.granted(owner, asked_at)

    def downgrade(self, key: str, owner: str, lease: float) -> Reply:
        name, asked_at = slot_name(key), clock.monotonic()
        with self._mutex:
            state = self._known(name)
            share = state.shares.get(owner)
            if share is None:
                return Reply(Status.FREE, asked_at)
            if share.alone:
                state.become_shared(owner, lease)
            elif state.upgrading == owner:
                state.upgrading = ""
            granted = state.granted(owner, asked_at)
            return granted._replace(wake=self._hand_on(name, state)[1])

    def rest(self, key: str, owner: str, seconds: float) -> bool:
        with self._mutex:
            state = self._known(slot_name(key))
            if owner not in state.shares:
                return False
            state.rest_until = max(state.rest_until, clock.monotonic() + seconds)
            return True

    def set_limit(self, key: str, limit: Limit | None) -> Release:
        name = slot_name(key)
        with self._mutex:
            state = self._entered(name)
            state.limit, state.limit_until = limit, math.inf
            if limit is not None:
                state.limit = limit._replace(since=clock.wall())
                if limit.until:
                    state.limit_until = clock.monotonic() + limit.until - clock.wall()
            wake = self._hand_on(name, state.prune())[1]
            self._note_opening(name, state)
            self._forget_if_idle(name, state)
            return Release(True, wake)
