"""Acquires keys that are not simply free: entered ones, several, taken or reserved ones."""

from dataclasses import replace
from typing import Any

from celery.exceptions import Ignore

from celery_distlock import policies
from celery_distlock.engine.acquisition import acquire
from celery_distlock.engine.hold import Hold, want_of
from celery_distlock.engine.pending_releases import release_later
from celery_distlock.engine.several import acquire_all, release_by
from celery_distlock.engine.upgrading import conflict, upgrade, wants_upgrade
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.policies import Decision
from celery_distlock.stores import QueueStore, StandRequest
from celery_distlock.stores.queue_store import reserve_or_queue
from celery_distlock.stores.values import Reply, Status

from .call_rules import answer_second_call
from .conflicts import Conflicts
from .invocation import Invocation
from .plans import ensure_one_queue
from .recalls import answer_recalled
from .requeueing import Postponed, Requeueing

__all__ = ["Contention"]


class Contention:
    """
    Acquires keys of *invocation*, or parks it.

    Its methods raise:

    - Ignore: The task is parked, was sent again, or is a second delivery that may not run.
    - LockConflictError: The policy refuses.
    - StoreUnavailableError: The store is unreachable, and `lock_on_outage` is ``"fail"``.
    """

    def __init__(
        self, invocation: Invocation, conflicts: Conflicts, requeueing: Requeueing
    ) -> None:
        self._invocation = invocation
        self._store = invocation.store
        self._report = invocation.report
        self._conflicts = conflicts
        self._requeueing = requeueing

    def decide_at_once(self) -> Decision | None:
        """Return what is decided before any key is requested: on arrival, or for a second call."""
        invocation = self._invocation
        if (found := self._conflicts.found_on_arrival()) is not None:
            return self._conflicts.decide(*found)
        if invocation.plan.unique is None or len(invocation.keys) != 1:
            return None
        try:
            return answer_second_call(invocation, invocation.keys[0])
        except StoreUnavailableError as error:
            self._requeueing.on_outage(error)
            return None

    def take_together(self) -> Decision | None:
        """Upgrade what was entered; acquire what is missing in one step, where that is possible."""
        invocation = self._invocation
        where = f"task {invocation.task.name}"
        ensure_one_queue(where, invocation.plan.policy, len(invocation.keys), "returned")
        if invocation.entered and (refusal := self._upgrade_entered()) is not None:
            return refusal
        if len(invocation.missing) > 1 and self._take_at_once(invocation.missing):
            invocation.missing = []
        return None

    def _upgrade_entered(self) -> Decision | None:
        """
        Upgrade entered holds from shared to exclusive, where the task asks for that.

        Raises:
            LockConflictError: An upgrade is refused, and the policy has no answer.
        """
        wants = {key.template: want_of(key) for key in self._invocation.keys}
        for hold in self._invocation.entered:
            if not wants_upgrade(hold, wants[hold.key]):
                continue
            reply = upgrade(hold, self._invocation.patience)
            if reply.status is not Status.GRANTED:
                decision = self._conflicts.decide(hold.key, reply)
                if isinstance(decision, policies.Answer):
                    return decision
                raise conflict(hold.key, reply)  # no retry can succeed while it is held here
            hold.upgraded_at = hold.depth - 1
        return None

    def _take_at_once(self, keys: list[Key]) -> bool:
        """Acquire all of *keys* in one step if they are free or reserved; else return false."""
        invocation = self._invocation
        if invocation.redelivered and not invocation.header.woken:  # nothing is reserved for it
            return False
        holds = [invocation.new_hold(key) for key in keys]
        try:
            if not acquire_all(holds):
                return False
        except StoreUnavailableError as error:
            self._requeueing.on_outage(error)
            return True
        for hold in holds:
            invocation.keep(hold)
        return True

    def take_woken(self, key: Key, timeout: float) -> Decision | None:
        """Request *key*, then wait for it; the store does not resend a run that waits."""
        hold, reply = self._acquire(key, timeout=0.0)
        if hold is not None and not self._invocation.is_second_delivery(reply):
            if reply.status is Status.BUSY:
                self._requeueing.leave_store()
                hold, reply = self._acquire(key, reply.arrival, timeout=timeout)
            else:
                hold, reply = self._acquire(key, timeout=timeout)
        return self.resolve(key, hold, reply)

    def resolve(self, key: Key, hold: Hold | None, reply: Reply) -> Decision | None:
        """
        Do what the policy says of *key*, for which *hold* was refused by *reply*.

        Returns:
            The decision; None if the key is acquired: then *hold* is none.
        """
        invocation = self._invocation
        if hold is not None and reply.status is Status.BUSY:
            decision = self._conflicts.decide(key.template, reply)
            if not isinstance(decision, policies.Park):
                return decision
            if not invocation.received.returns:
                hold, reply = self._wait_here(key)
            elif len(self._wanted) > 1 and not invocation.is_second_delivery(reply):
                key, reply = self._park_at_all(key, reply, decision)
                if reply.status is Status.RESERVED:
                    return None  # all keys are reserved for it, and acquired next
            else:
                hold, reply = self._park(key, reply, decision)
                if reply.status is Status.FULL:
                    decision = self._conflicts.decide(key.template, reply, decision.max_waiting)
                    if not isinstance(decision, policies.Park):
                        return decision
                    hold, reply = self._park(key, reply, replace(decision, max_waiting=None))
        if hold is None:
            invocation.missing.remove(key)
            return None
        if reply.status is Status.PARKED:
            self._report_parked(key, reply)
            raise Postponed(f"parked until {shown(key.template)!r} is free")
        if reply.status in {Status.DONE, Status.RECALLED}:
            return self._answer_second_delivery(key, reply)
        return None

    def _answer_second_delivery(self, key: Key, reply: Reply) -> Decision:
        """
        Return the answer to a second delivery, which must not run.

        Raises:
            Ignore: There is none: the first one has ended, or the task is revoked now.
        """
        if reply.status is Status.RECALLED:
            try:
                return answer_recalled(self._invocation, key.template)
            finally:  # not before its end is stored
                self._conflicts.forget_parked()
        words = "dropped: a second delivery of its message; the first one has ended"
        self._report.info(words, key=key.template)
        raise Ignore("a second delivery")

    def _report_parked(self, key: Key, reply: Reply) -> None:
        if self._invocation.is_second_delivery(reply):
            self._report.deferred(key.template)
        else:
            rated = bool(want_of(key).rates)
            self._report.parking(key.template, reply, rated=rated, begun=True)

    @property
    def _wanted(self) -> list[Key]:
        """Those of the keys that were not held here already."""
        entered = {hold.key for hold in self._invocation.entered}
        return [key for key in self._invocation.keys if key.template not in entered]

    def _acquire(self, key: Key, arrival: int = 0, **how: Any) -> tuple[Hold | None, Reply]:
        """
        Request *key*; the hold is None if the task may continue, locked or by `lock_on_outage`.

        *arrival* is its place in the queue, if an earlier reply contained it.
        """
        hold = self._invocation.new_hold(key)
        hold.arrival = arrival or hold.arrival
        try:
            reply = acquire(hold, **how)
        except StoreUnavailableError as error:
            self._requeueing.on_outage(error)
            return None, Reply(Status.GRANTED, 0.0)
        if reply.status is not Status.GRANTED:
            return hold, reply
        self._invocation.keep(hold)
        return None, reply

    def _wait_here(self, key: Key) -> tuple[Hold | None, Reply]:
        """Wait for *key* in this process: if the task were parked, no process could send it."""
        where = self._invocation.request.delivery_info or {}
        self._report.warning(
            "waits for {key!r} in its process and is not parked: it came by exchange {exchange!r}"
            " with routing key {routing_key!r}, which leads to no queue that this worker knows;"
            " add the queue to task_queues",
            key=key.template,
            exchange=where.get("exchange"),
            routing_key=where.get("routing_key"),
        )
        return self._acquire(key, timeout=None)

    def _park(self, key: Key, reply: Reply, terms: policies.Park) -> tuple[Hold | None, Reply]:
        name = slot_name(key.template)
        request = self._requeueing.park_request(name, terms=terms)
        if not self._invocation.is_second_delivery(reply):
            # Before it is parked: after that it may run and end elsewhere before we write.
            self._show_parked(key, reply)
        self._invocation.asked_to_park = True
        hold, parked = self._acquire(key, reply.arrival, park=request)
        self._requeueing.leave_reservations(name)
        return hold, parked

    def _show_parked(self, key: Key, reply: Reply) -> None:
        self._invocation.states.parked(key.template, reply.holder, reply.place, reply.wait)

    def _park_at_all(self, key: Key, reply: Reply, terms: policies.Park) -> tuple[Key, Reply]:
        """
        Release the acquired keys, and park the run at the key that refuses it now.

        Returns:
            That key, and the store's reply. Status RESERVED: all keys are reserved for the run.
        """
        wanted, taken = self._wanted, list(self._invocation.taken)
        route = self._requeueing.route(wanted)
        park_request = self._requeueing.park_request(*route.names, terms=terms)
        self._show_parked(key, reply)  # as in `_park`
        self._invocation.asked_to_park = True
        arrival = reply.arrival or self._invocation.received.arrival or 0
        owners = {hold.key: hold.owner for hold in taken}
        run = self._invocation.execution_id
        request = StandRequest(run, route, arrival, park_request, comes=True)
        request = request._replace(owners=[owners.get(each.template, "") for each in wanted])
        reply = self._reserve_or_queue(request, taken)
        self._store.dispatch(reply.wake)
        self._requeueing.leave_reservations(*route.names)
        self._invocation.missing = list(wanted)
        at = [slot_name(each.template) for each in wanted].index(reply.at)
        return wanted[at], reply

    def _reserve_or_queue(self, request: StandRequest, taken: list[Hold]) -> Reply:
        store = QueueStore.of(self._store)
        try:
            reply = release_by(taken, lambda: reserve_or_queue(store, request))
        except StoreUnavailableError as error:
            self._requeueing.on_outage(error)
            raise
        for hold in taken:  # not earlier: until here it must be released after an error
            self._invocation.taken.remove(hold)
            self._invocation.owned.pop((store.identity, hold.key), None)
            if reply.status not in (Status.RESERVED, Status.PARKED):  # it waits nowhere
                release_later(store, hold.release_request())
        return reply
