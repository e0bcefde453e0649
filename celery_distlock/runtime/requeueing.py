"""Postpones an invocation that cannot run now: parks it in the store, or sends it again."""

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError

from celery_distlock import clock, policies
from celery_distlock.engine.acquisition import acquire
from celery_distlock.engine.hold import Hold, want_of
from celery_distlock.engine.pending_releases import release_later
from celery_distlock.engine.several import release_by
from celery_distlock.errors import LockKeyError, StoreError, StoreUnavailableError
from celery_distlock.key import Key
from celery_distlock.keys import slot_name
from celery_distlock.policies import Conflict
from celery_distlock.stores import Ability, QueueStore, ReleaseRequest, StandRequest, Store
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.queue_store import reserve_or_queue_and_send
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.values import (
    ALONE,
    FIRST,
    Completion,
    ParkRequest,
    Route,
    Status,
    WokenTask,
)

from .invocation import Invocation
from .message_facts import LockHeader, is_let_in
from .messages import (
    addressed,
    arguments_that_came,
    destination_of,
    leaves_in,
    seal,
    with_eta,
)
from .publishing import broker_reason, is_refusal, publish

__all__ = ["Postponed", "Requeueing", "drop", "drop_at", "route_of"]

# Short, so that tasks come back soon after the store does.
OUTAGE = policies.Retry(delay=1.0, max_delay=8.0)
BROKER_PAUSE = 1.0  # seconds between attempts to send a task while the broker does not accept it
# Seconds after which a message that the broker refuses, but still has, is rejected to it, so that a
# worker can be stopped.
GIVE_BACK_AFTER = 30.0


class Postponed(Ignore):
    """The task has not run, and was parked or sent again to run later."""


class Requeueing:
    """Parks the message of *invocation*, or sends it again."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self._store = invocation.store
        self._report = invocation.report

    # At keys that are taken

    def park_request(self, *names: str, terms: policies.Park) -> ParkRequest:
        """Return the request that parks it at the first of the keys with slot names *names*."""
        invocation = self._invocation
        since, run = invocation.waiting_since, invocation.execution_id
        header = invocation.header.parked(names, run, since=since, sent=False)
        lets_in = invocation.header.woken or is_let_in(invocation.request.__dict__)
        return self._request_for(invocation.seal(header))._replace(
            max_waiting=0 if lets_in else terms.max_waiting or 0,
            leaves=leaves_in(terms.timeout, since, invocation.request.expires),
        )

    def route(self, keys: Iterable[Key]) -> Route:
        """Return the route of its run through *keys*, in their order."""
        return route_of(keys, str(self._invocation.task.name), self._destination)

    def leave_reservations(self, *names: str, mark: bool = False) -> None:
        """
        Free the keys that are reserved for it, except *names*, at which it waits again.

        *mark*: the run has ended, so a second delivery of it must be recognised.
        """
        invocation = self._invocation
        header = invocation.header
        left = set(header.places).difference(names) if header.woken else ()
        drop_at(self._store, left, invocation.execution_id, mark=mark)

    def leave_store(self) -> None:
        """
        Drop a run from the store, because it waits in this process.

        Raises:
            Postponed: The store had to retain the message until the task's end; the broker has it
                now.
            Reject: The broker did not accept it; the store keeps it.
        """
        if self._invocation.retained:
            self.move_to_broker()
        self.leave_reservations()

    def _request_for(self, envelope: bytes) -> ParkRequest:
        invocation = self._invocation
        address = invocation.received.delivery_address
        name, where = str(invocation.task.name), self._destination
        return ParkRequest(envelope, address, name, where)

    @property
    def _destination(self) -> str:
        """Where its message was sent."""
        where = self._invocation.request.delivery_info or {}
        return destination_of(where.get("exchange") or "", where.get("routing_key") or "")

    # After a failure

    def seal_for_failure(self, taken: Sequence[Hold]) -> bytes | None:
        """
        Return the envelope to requeue if the body fails; made before the body changes anything.

        None: it has no message, no key, no queue to return to, or no requeues left.
        """
        invocation, header = self._invocation, self._invocation.header
        # Without a queue to return to, no process could send it again.
        if not (invocation.has_message and taken and invocation.received.returns):
            return None
        if header.requeues >= invocation.plan.settings.max_requeues:
            return None
        return self._seal_next(header.of_next(requeues=header.requeues + 1), taken)

    def _seal_next(self, header: LockHeader, taken: Sequence[Hold]) -> bytes:
        route = self.route(hold.wanted for hold in taken)
        return self._invocation.seal(header.parked(route.names, self._next_execution_id()))

    def requeue(self, sealed: bytes, taken: Sequence[Hold], error: Exception) -> None:
        """
        Park the failed task at the end of its key's queue, as a new execution.

        Raises:
            Postponed: Always, after that.
        """
        key = taken[0].key
        number = self._invocation.header.requeues + 1
        self._report.warning(
            "failed and goes back to the end of the queue of {key!r} (requeue {n})",
            error,
            key=key,
            n=number,
        )
        self._invocation.states.parked(key, taken[0].owner, None)
        self._put_back(taken, sealed, OUTAGE.delay)
        raise Postponed("requeued after a failure")

    def _put_back(
        self, taken: Sequence[Hold], sealed: bytes, delay: float, arrival: int = 0
    ) -> None:
        """Park the next execution at its keys; if that fails, send it in *delay* seconds."""
        run, route = self._next_execution_id(), self.route(hold.wanted for hold in taken)
        request = StandRequest(run, route, arrival, self._request_for(sealed))
        try:
            if len(taken) == 1:
                self._park_at(taken[0].wanted, request)
                self._pass_identity_on(taken[0].key, run)
            else:
                reserve_or_queue_and_send(QueueStore.of(self._store), request)
        except StoreUnavailableError:
            self._publish(sealed, delay)

    def _pass_identity_on(self, key: str, run: str) -> None:
        """Let the next execution inherit this one's identity, so that calls still join it."""
        invocation, unique = self._invocation, self._invocation.plan.unique
        if unique is None or invocation.plan.identity is None:
            return
        request: Any = invocation.request
        ignored = invocation.task.ignore_result
        silent = bool(ignored if request.ignore_result is None else request.ignore_result)
        with contextlib.suppress(StoreError, LockKeyError, TypeError):  # then it has none
            name = invocation.plan.identity.of(*arguments_that_came(request), invocation.receive)
            identity = Identity(name, unique.until, silent=silent)
            QueueStore.of(self._store).calls.inherit(key, identity, run)

    def _park_at(self, key: Key, request: StandRequest) -> None:
        """Park a run at its only key; dispatch it at once if the key has room."""
        terms, run = self._invocation.plan.terms, request.run
        hold = Hold(self._store, key, terms, label=self._report.name, run=run)
        hold.arrival = request.arrival
        reply = acquire(hold, park=request.park_request)
        if reply.status is Status.GRANTED:  # our lock was lost, or there is room for both
            store, request = QueueStore.of(self._store), request._replace(owners=[hold.owner])
            release_by([hold], lambda: reserve_or_queue_and_send(store, request))

    def _next_execution_id(self) -> str:
        return self._invocation.execution_id_for(self._invocation.header.number + 1)

    # When the task asks for it

    def why_not_postpone(self) -> str:
        """Return why the task cannot be postponed; empty: it can."""
        invocation = self._invocation
        if not invocation.has_message:
            return "it was called without a message of its own: by other code, apply(), or eagerly"
        if Ability.QUEUE not in self._store.abilities:
            return f"{self._store.address} cannot {Ability.QUEUE.value}"
        if not invocation.received.returns:
            return "its message came by no queue that its worker knows; name that in task_queues"
        return ""

    def postpone(self, taken: Sequence[Hold], seconds: float) -> None:
        """
        Park the task at the front of its key's queue, as a new execution.

        Raises:
            Postponed: Always, after that.
        """
        invocation, header = self._invocation, self._invocation.header
        next_header = header.of_next(postponed=header.postponed + 1, since=time.time())
        sealed, key = self._seal_next(next_header, taken), taken[0].key
        words = "postponed for {delay:.1f} s, in which {key!r} rests"
        self._report.info(words, delay=seconds, key=key)
        invocation.states.parked(key, taken[0].owner, 0, seconds)
        self._put_back(taken, sealed, seconds, FIRST)
        raise Postponed("postponed by itself")

    # By the broker

    def resend(self, decision: policies.Resend) -> None:
        """
        Send the message again, with the delay that the policy decided.

        Raises:
            Postponed: Always, after that.
            Reject: The broker refused it, and still has the message.
        """
        header = self._header_by_broker()._replace(outages=0)
        envelope = seal(self._invocation.request, header)
        self._publish(envelope, decision.delay, may_give_back=True)
        self.leave_reservations()  # or the store, where it was parked, sends it as well
        raise Postponed(f"sent again in {decision.delay:.1f} s")

    def move_to_broker(self) -> None:
        """
        Move a message that the store can no longer retain to the broker.

        It is published first and dropped from the store after that, so that one of them always has
        it.

        Raises:
            Postponed: Always, after that.
            Reject: The broker did not accept it, so the store sends it again.
        """
        header = self._header_by_broker()  # counts an attempt: the store may send it as well
        try:
            self._publish_once(seal(self._invocation.request, header))
        except OperationalError as error:
            raise Reject(broker_reason(error), requeue=True) from error
        self._report.info("is sent again by the broker, which keeps it from now on")
        self.leave_reservations()
        raise Postponed("sent again by the broker")

    def _header_by_broker(self) -> LockHeader:
        """Return the header for sending the message again by the broker, as not woken."""
        invocation = self._invocation
        return invocation.header._replace(
            woken=False,
            attempts=invocation.header.attempts + 1,
            since=invocation.waiting_since,
            sent=False,
            for_time=invocation.waits_for == "time",
        )

    def on_outage(self, error: StoreUnavailableError) -> None:
        """
        Apply `lock_on_outage`; return only if the task may run unlocked.

        Raises:
            Postponed: The message was sent again.
            Reject: The broker refused it, and still has the message.
            StoreUnavailableError: The task must fail.
        """
        invocation = self._invocation
        what = invocation.plan.settings.on_outage
        # If the store or the broker may have the message as well, two deliveries could run at once.
        if what == "run" and not (invocation.redelivered or invocation.asked_to_park):
            self._report.warning("runs UNLOCKED, the lock store is unavailable: {why}", why=error)
            return
        if what == "fail" or not invocation.has_message:
            self.drop_parked()
            raise error
        outages = invocation.header.outages
        delay = OUTAGE.decide(Conflict("", "", 0.0, outages)).delay  # type: ignore[union-attr]
        words = "is sent again in {delay:.1f} s, the lock store is unavailable: {why}"
        self._report.warning(words, delay=delay, why=error)
        header = invocation.header._replace(outages=outages + 1)
        self._publish(seal(invocation.request, header), delay, may_give_back=True)
        raise Postponed("the lock store is unavailable") from error

    def drop_parked(self) -> None:
        """Drop the run from the store, which may have it, so that it does not run later."""
        run = self._invocation.execution_id
        for key in self._invocation.keys if run else ():
            owner, ended = new_owner(self._report.name), Completion.YES_AND_MAY_COME_AGAIN
            release_later(self._store, ReleaseRequest(key.template, owner, run, ended))

    def _publish(self, envelope: bytes, delay: float, *, may_give_back: bool = False) -> None:
        envelope = with_eta(envelope, delay) if delay else envelope
        began = clock.monotonic()
        while True:
            try:
                return self._publish_once(envelope, began + delay - clock.monotonic())
            except OperationalError as error:
                late = clock.monotonic() - began >= GIVE_BACK_AFTER
                if may_give_back and late and self._broker_has_it and is_refusal(error):
                    raise Reject(broker_reason(error), requeue=True) from error
                # Otherwise only this process has the task, so it must not stop trying.
                words = "waits, the broker does not accept it: {why}; trying again in {pause:g} s"
                self._report.warning(words, pause=BROKER_PAUSE, why=broker_reason(error))
                time.sleep(BROKER_PAUSE)

    def _publish_once(self, envelope: bytes, delay: float = 0.0) -> None:
        received = self._invocation.received
        if received.copy_of:  # the other workers have their own copies
            envelope = addressed(envelope, received.copy_of)
        app, kind = self._invocation.task.app, received.exchange_type
        publish(app, envelope, exchange_type=kind, delay=delay)

    @property
    def _broker_has_it(self) -> bool:
        """Whether the broker still has the message, because it is not acknowledged."""
        invocation = self._invocation
        return bool(invocation.task.acks_late) and not invocation.received.pushed


def route_of(keys: Iterable[Key], task: str, destination: str) -> Route:
    """Return the route of a run of *task* through *keys*, in their order."""
    keys = tuple(keys)
    wants = tuple(map(want_of, keys))
    wants = () if all(want == ALONE for want in wants) else wants
    return Route(tuple(slot_name(key.template) for key in keys), task, wants, destination)


def drop_at(store: Store, names: Iterable[str], run: str, *, mark: bool) -> None:
    """Drop a run at the keys with slot names *names*; an unreachable store lets it expire."""
    for name in names:
        with contextlib.suppress(StoreError):
            drop(store, name, run, mark=mark)


def drop(store: Store, name: str, run: str, *, mark: bool = True) -> bool:
    """
    Drop a run that is parked at the key with slot name *name*; dispatch the run that this admits.

    Returns:
        False if the store did not know the run there.
    """
    dropped = store.drop(WokenTask(name, run, b""), mark=mark)
    store.dispatch(dropped.wake)
    return dropped.released
