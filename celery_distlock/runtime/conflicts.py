"""Applies the policy of an invocation whose key is taken."""

from typing import Any

from celery.app.autoretry import add_autoretry_behaviour

from celery_distlock import clock, policies
from celery_distlock.errors import LockConflictError, QueueFullError, StoreError
from celery_distlock.policies import Conflict, Decision
from celery_distlock.stores import Ability
from celery_distlock.stores.values import Reply, Status

from .current import Task
from .invocation import Invocation
from .requeueing import Requeueing

__all__ = ["Conflicts"]

SPREAD = 1.0  # seconds over which the retries of tasks that a rate refused are spread
TURN_TIMEOUT = 1.0  # seconds that the store has to suggest a retry delay
# For a retry whose message came before the attempt that sent it has ended.
EARLY = policies.Retry(delay=0.2, max_delay=30.0, turns=False)
# For a second delivery, where it cannot be parked until the first has ended.
DEFERRED = policies.Retry(delay=1.0, max_delay=30.0, turns=False)


class Conflicts:
    """Reports that a key is taken, and applies the policy of *invocation*."""

    def __init__(self, invocation: Invocation, requeueing: Requeueing) -> None:
        self._invocation = invocation
        self._report = invocation.report
        self._requeueing = requeueing

    def found_on_arrival(self) -> tuple[str, Reply] | None:
        """Return the key that was taken on arrival, for policies that decide by that."""
        received = self._invocation.received
        taken = received.taken if self._invocation.has_message else None
        if taken is None or taken.run == self._invocation.execution_id:
            return None
        if taken.key not in [key.template for key in self._invocation.keys]:
            return None
        return taken.key, Reply(
            Status.BUSY,
            received.received_at or 0.0,
            holder=taken.holder,
            holder_run=taken.run,
            remaining=taken.remaining,
        )

    def follow(self, decision: Decision) -> Any:
        """
        Apply *decision*, and return the task's result.

        Raises:
            Ignore: The task is sent again.
        """
        if isinstance(decision, policies.Answer):
            self.forget_parked()
            return decision.result
        if isinstance(decision, policies.Resend):
            return self._requeueing.resend(decision)
        policy = self._invocation.plan.policy
        raise TypeError(f"{policy!r} decided {decision!r}, which is no decision")

    def note_failure(self, error: LockConflictError | StoreError) -> None:
        """
        Fail the task with *error*, and drop its parked message, if any, after a conflict.

        Raises:
            Retry: ``autoretry_for`` names the error.
            Exception: *error* itself, unless other code has called the task.
        """
        if isinstance(error, LockConflictError):
            self.forget_parked()
        if not self._invocation.nested:
            _fail(self._invocation.task, error)

    def forget_parked(self) -> None:
        """Drop its parked message and what is reserved for it, as it does not run later."""
        # It was parked under another policy, such as that of the previous release.
        if self._invocation.redelivered:
            self._requeueing.leave_reservations(mark=True)
            self._requeueing.drop_parked()

    def decide(self, key: str, reply: Reply, full_at: int | None = None) -> Decision:
        """
        Return the policy's decision.

        *full_at*: It has decided to park the task, and that many wait.

        Raises:
            LockConflictError: The policy refuses, or there is no message to send again.
        """
        invocation, policy = self._invocation, self._invocation.plan.policy
        invocation.waits_for = reply.waits_for
        if full_at is None:
            self._report.conflict(invocation.request.__dict__, key, reply)
        if invocation.is_second_delivery(reply):
            return self._defer(key, reply)
        attempts = invocation.header.attempts
        is_full, waited = full_at is not None, invocation.waited
        conflict = Conflict(key, reply.holder, reply.remaining, attempts, is_full, waited)
        decision = policy.decide(conflict)
        is_final = isinstance(decision, policies.Refuse | policies.Answer)
        if is_final and invocation.is_held_by_an_earlier_attempt(key, reply):
            decision = EARLY.decide(conflict)
        if isinstance(decision, policies.Refuse) or (
            not invocation.has_message and not isinstance(decision, policies.Answer)
        ):
            if full_at is not None:
                self._report.event("task_refused", key=key)
                raise QueueFullError(key, reply.holder, reply.remaining, full_at)
            raise LockConflictError(key, reply.holder, reply.remaining, reply.wait)
        if isinstance(decision, policies.Answer):
            self._report.conflict_ended("skipped", key, reply)
        elif isinstance(decision, policies.Resend):
            decision = self._when_due(reply, decision) or self._in_turn(key, decision)
            words = "is sent again in {delay:.1f} s"
            self._report.conflict_ended(words, key, reply, delay=decision.delay)
            invocation.states.parked(key, reply.holder, None, reply.wait)
        return decision

    def _defer(self, key: str, reply: Reply) -> Decision:
        """Defer a second delivery until the first is over; it is dropped if that succeeded."""
        invocation = self._invocation
        if Ability.QUEUE in invocation.store.abilities:
            return policies.Park()
        attempts = invocation.header.attempts
        self._report.deferred(key)
        return DEFERRED.decide(Conflict(key, reply.holder, reply.remaining, attempts))

    def _when_due(self, reply: Reply, resend: policies.Resend) -> policies.Resend | None:
        """Return the delay until time alone opens the key, if the store knows that."""
        if not reply.due or resend.within is None:
            return None
        spread = clock.jitter(0.0, min(SPREAD, reply.due))  # others got the same time
        return policies.Resend(min(reply.due + spread, resend.within[1]))

    def _in_turn(self, key: str, resend: policies.Resend) -> policies.Resend:
        """Return the delay that the store suggests, if the policy asks for that and it can."""
        if resend.within is None:
            return resend
        usual, most = self._invocation.usual_hold_time, resend.within[1]
        try:
            turn = self._invocation.store.retry_delay(key, usual, resend.within, TURN_TIMEOUT)
        except StoreError:
            return resend
        if turn is None:
            return resend
        return policies.Resend(turn if turn <= most else most * clock.jitter(0.5, 1.0))


def _fail(task: Task, error: Exception) -> None:
    """
    Fail the execution of *task* with *error*, raised before its body.

    Raises:
        Retry: ``autoretry_for`` names the error, as for one that the body raises.
        Exception: *error* itself.
    """
    attempt = _Attempt(task, error)
    add_autoretry_behaviour(attempt)
    attempt.run()


class _Attempt:
    """Substitute for *task* in Celery's automatic retries; its body raises *error*."""

    def __init__(self, task: Task, error: Exception) -> None:
        self._task = task
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_run":  # Celery sets it on tasks that have automatic retries already
            raise AttributeError(name)
        return getattr(self._task, name)

    def __delattr__(self, name: str) -> None:
        delattr(self._task, name)

    def run(self) -> None:
        raise self._error
