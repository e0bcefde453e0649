"""Acquires the keys of an invocation, in order; waits, parks or answers when one is taken."""

from typing import Any

from celery.exceptions import Ignore

from celery_distlock import policies
from celery_distlock.engine.acquisition import acquire, acquire_all, release_by
from celery_distlock.engine.hold import Hold, want_of
from celery_distlock.engine.lease import Lease
from celery_distlock.engine.owners import hold_here, owner_here
from celery_distlock.engine.pending_releases import release_later
from celery_distlock.engine.upgrading import conflict, upgrade, wants_upgrade
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.policies import Decision
from celery_distlock.stores import QueueStore, StandRequest
from celery_distlock.stores.queue_store import stand
from celery_distlock.stores.values import Reply, Status

from .call_rules import answer_second_call
from .conflicts import Conflicts
from .invocation import Invocation
from .requeueing import Postponed, Requeueing

__all__ = ["KeyAcquisition"]


class KeyAcquisition:
    """
    Acquires the keys of one invocation, all or none.

    Attributes:
        taken: The holds that it has acquired, in that order.
        entered: The holds of this thread that it has entered once more.
        owned: All holds of this thread.
    """

    def __init__(
        self, invocation: Invocation, keys: tuple[Key, ...], requeueing: Requeueing
    ) -> None:
        self._invocation = invocation
        self._store = invocation.store
        self._report = invocation.report
        self._requeueing = requeueing
        self._conflicts = Conflicts(invocation)
        self._keys = keys
        _, self.owned = owner_here()
        self._wanted: list[Key] = []  # the keys that this thread does not hold already
        self._missing: list[Key] = []  # those that are not acquired yet
        self.taken: list[Hold] = []
        self.entered: list[Hold] = []

    @property
    def holds(self) -> tuple[Hold, ...]:
        """All holds of the invocation."""
        return tuple(self.entered + self.taken)

    @property
    def lease(self) -> Lease:
        """The lease on the keys, as the task sees it."""
        return Lease(self.holds, wanted=False, why_not_postpone=self._why_not_postpone)

    def _why_not_postpone(self) -> str:
        if self.entered:
            return "it has entered a key that is held around it"
        return self._requeueing.why_not_postpone()

    def take_all(self) -> Decision | None:
        """
        Acquire every key, or return the policy's decision for the first one that is taken.

        Raises:
            Ignore: The task is parked, was sent again, or is a second delivery that may not run.
            LockConflictError: The policy refuses.
            StoreUnavailableError: The store is away, and `lock_on_outage` is ``"fail"``.
        """
        if (found := self._conflicts.found_on_arrival(self._keys)) is not None:
            return self._conflicts.decide(*found)
        if self._invocation.plan.unique is not None and len(self._keys) == 1:
            try:
                answer = answer_second_call(self._invocation, self._keys[0])
            except StoreUnavailableError as error:
                self._requeueing.on_outage(error)
            else:
                if answer is not None:
                    return answer
        self._wanted = wanted = [key for key in self._keys if not self._enter(key)]
        if self.entered and (refusal := self._upgrade_entered()) is not None:
            return refusal
        at_once = len(wanted) > 1 and self._take_at_once(wanted)
        self._missing = [] if at_once else list(wanted)
        while self._missing:
            decision = self._take(self._missing[0])
            if decision is not None:
                return decision
        invocation = self._invocation
        header = invocation.header
        has_waited = (header.woken and not header.sent) or header.attempts
        if has_waited or invocation.received.shown or self._requeueing.asked_to_park:
            invocation.states.running()
        return None

    def _enter(self, key: Key) -> bool:
        """Enter *key* once more if this thread holds it already; return whether it does."""
        held = hold_here(self._store.identity, key.template)
        if held is None:
            return False
        held.ensure_held()
        held.depth += 1
        self.entered.append(held)
        return True

    def _upgrade_entered(self) -> Decision | None:
        """
        Upgrade entered holds from shared to exclusive, where the task asks for that.

        Raises:
            LockConflictError: An upgrade is refused, and the policy has no answer.
        """
        wants = {key.template: want_of(key) for key in self._keys}
        for hold in self.entered:
            if not wants_upgrade(hold, wants[hold.key]):
                continue
            reply = upgrade(hold, self._conflicts.patience)
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
            self._keep(hold)
        return True

    def _take(self, key: Key) -> Decision | None:
        patience = self._conflicts.patience
        waits_woken = patience and self._invocation.header.woken
        acquire_key = self._acquire_woken if waits_woken else self._acquire
        hold, reply = acquire_key(key, timeout=patience)
        if hold is not None and reply.status is Status.BUSY:
            decision = self._conflicts.decide(key.template, reply)
            if not isinstance(decision, policies.Park):
                return decision
            if not self._invocation.received.returns:
                hold, reply = self._wait_here(key)
            elif len(self._wanted) > 1 and not self._invocation.is_second_delivery(reply):
                key, reply = self._park_at_all(key, reply)
                if reply.status is Status.RESERVED:
                    return None  # all keys are reserved for it, and acquired next
            else:
                hold, reply = self._park(key, reply)
        if hold is None:
            self._missing.remove(key)
            return None
        if reply.status is Status.PARKED:
            if self._invocation.is_second_delivery(reply):
                self._report.deferred(key.template)
            else:
                rated = bool(want_of(key).rates)
                self._report.parking(key.template, reply, rated=rated, begun=True)
            raise Postponed(f"parked until {shown(key.template)!r} is free")
        if reply.status is Status.DONE:
            words = "dropped: a second delivery of its message; the first one has ended"
            self._report.info(words, key=key.template)
            raise Ignore("a second delivery")
        return None

    def _acquire_woken(self, key: Key, *, timeout: float) -> tuple[Hold | None, Reply]:
        """Request *key*, then wait for it; the store does not resend a run that waits."""
        hold, reply = self._acquire(key, timeout=0.0)
        if hold is None or self._invocation.is_second_delivery(reply):
            return hold, reply
        if reply.status is Status.BUSY:
            self._requeueing.leave_store()
            return self._acquire(key, reply.arrival, timeout=timeout)
        return self._acquire(key, timeout=timeout)

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
        self._keep(hold)
        return None, reply

    def _keep(self, hold: Hold) -> None:
        self.taken.append(hold)
        self.owned[self._store.identity, hold.key] = hold
        # Only once: at the key that it was parked at, not at the others of several.
        header = self._invocation.header
        if header.woken and header.parked_at == slot_name(hold.key):
            self._report.event("task_woken", key=hold.key, waited=hold.waited)

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

    def _park(self, key: Key, reply: Reply) -> tuple[Hold | None, Reply]:
        request = self._requeueing.park_request(slot_name(key.template))
        if not self._invocation.is_second_delivery(reply):
            # Before it is parked: after that it may run and end elsewhere before we write.
            self._invocation.states.parked(key.template, reply.holder, reply.place)
        self._requeueing.asked_to_park = True
        hold, parked = self._acquire(key, reply.arrival, park=request)
        self._requeueing.leave_reservations(slot_name(key.template))
        return hold, parked

    def _park_at_all(self, key: Key, reply: Reply) -> tuple[Key, Reply]:
        """
        Release the acquired keys, and park the run at the key that refuses it now.

        Returns:
            That key, and the store's reply. Status RESERVED: all keys are reserved for the run.
        """
        route, taken = self._requeueing.route(self._wanted), list(self.taken)
        park_request = self._requeueing.park_request(*route.names)
        self._invocation.states.parked(key.template, reply.holder, reply.place)  # as in `_park`
        self._requeueing.asked_to_park = True
        arrival = reply.arrival or self._invocation.received.arrival or 0
        owners = {hold.key: hold.owner for hold in taken}
        run = self._invocation.execution_id
        request = StandRequest(run, route, arrival, park_request, comes=True)
        request = request._replace(owners=[owners.get(each.template, "") for each in self._wanted])
        reply = self._stand(request, taken)
        self._store.dispatch(reply.wake)
        self._requeueing.leave_reservations(*route.names)
        self._missing = list(self._wanted)
        at = [slot_name(each.template) for each in self._wanted].index(reply.at)
        return self._wanted[at], reply

    def _stand(self, request: StandRequest, taken: list[Hold]) -> Reply:
        store = QueueStore.of(self._store)
        try:
            reply = release_by(taken, lambda: stand(store, request))
        except StoreUnavailableError as error:
            self._requeueing.on_outage(error)
            raise
        for hold in taken:  # not earlier: until here it must be released after an error
            self.taken.remove(hold)
            self.owned.pop((store.identity, hold.key), None)
            if reply.status not in (Status.RESERVED, Status.PARKED):  # it waits nowhere
                release_later(store, hold.release_request())
        return reply
