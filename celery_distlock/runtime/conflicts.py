"""Applies the policy of an invocation whose key is taken."""

from collections.abc import Collection
from typing import Any

from celery.app.autoretry import add_autoretry_behaviour

from celery_distlock import clock, policies
from celery_distlock.errors import LockConflictError, StoreError
from celery_distlock.key import Key
from celery_distlock.policies import Conflict, Decision
from celery_distlock.stores import Ability
from celery_distlock.stores.values import Reply, Status

from .current import Task
from .invocation import Invocation

__all__ = ["Conflicts", "fail", "note_hold_time"]

SPREAD = 1.0  # seconds over which the retries of tasks that a rate refused are spread
TURN_TIMEOUT = 1.0  # seconds that the store has to suggest a retry delay
# For a retry whose message came before the attempt that sent it has ended.
EARLY = policies.Retry(delay=0.2, max_delay=30.0, turns=False)
# For a second delivery, where it cannot be parked until the first has ended.
DEFERRED = policies.Retry(delay=1.0, max_delay=30.0, turns=False)
WEIGHT = 0.3  # of the newest hold in the average of a task
MOST = 1000  # averages; a program has fewer tasks

_hold_times: dict[str, float] = {}


class Conflicts:
    """Reports that a key is taken, and applies the policy of *invocation*."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self._report = invocation.report

    def found_on_arrival(self, keys: Collection[Key]) -> tuple[str, Reply] | None:
        """Return the one of *keys* that was taken on arrival, for policies that decide by that."""
        received = self._invocation.received
        taken = received.taken if self._invocation.has_message else None
        if taken is None or taken.run == self._invocation.execution_id:
            return None
        if taken.key not in [key.template for key in keys]:
            return None
        return taken.key, Reply(
            Status.BUSY,
            received.received_at or 0.0,
            holder=taken.holder,
            holder_run=taken.run,
            remaining=taken.remaining,
        )

    @property
    def patience(self) -> float:
        """Seconds to wait for a key before it counts as taken."""
        policy, wait = self._invocation.plan.policy, self._invocation.plan.settings.wait
        # Without a message nothing can be sent again: policies that would do so wait instead.
        is_final = isinstance(policy, policies.Skip | policies.Fail | policies.Wait)
        return policy.patience(wait) if self._invocation.has_message or is_final else wait

    def decide(self, key: str, reply: Reply) -> Decision:
        """
        Return the policy's decision.

        Raises:
            LockConflictError: The policy refuses, or there is no message to send again.
        """
        invocation, policy = self._invocation, self._invocation.plan.policy
        self._report.conflict(invocation.request.__dict__, key, reply)
        if invocation.is_second_delivery(reply):
            return self._defer(key, reply)
        attempts = invocation.header.attempts
        conflict = Conflict(key, reply.holder, reply.remaining, attempts)
        decision = policy.decide(conflict)
        is_final = isinstance(decision, policies.Refuse | policies.Answer)
        if is_final and invocation.is_held_by_an_earlier_attempt(key, reply):
            decision = EARLY.decide(conflict)
        if isinstance(decision, policies.Refuse) or (
            not invocation.has_message and not isinstance(decision, policies.Answer)
        ):
            raise LockConflictError(key, reply.holder, reply.remaining, reply.wait)
        if isinstance(decision, policies.Answer):
            self._report.conflict_ended("skipped", key, reply)
        elif isinstance(decision, policies.Resend):
            decision = self._when_due(reply, decision) or self._in_turn(key, decision)
            words = "is sent again in {delay:.1f} s"
            self._report.conflict_ended(words, key, reply, delay=decision.delay)
            invocation.states.parked(key, reply.holder, None)
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
        usual, most = usual_hold_time(str(self._invocation.task.name)), resend.within[1]
        try:
            turn = self._invocation.store.retry_delay(key, usual, resend.within, TURN_TIMEOUT)
        except StoreError:
            return resend
        if turn is None:
            return resend
        return policies.Resend(turn if turn <= most else most * clock.jitter(0.5, 1.0))


def note_hold_time(task: str, seconds: float) -> None:
    """Add the *seconds* for which *task* held its keys to its moving average."""
    known = _hold_times.get(task)
    if known is None and len(_hold_times) >= MOST:
        _hold_times.clear()
    _hold_times[task] = seconds if known is None else known + WEIGHT * (seconds - known)


def usual_hold_time(task: str) -> float:
    """Return the moving average of the seconds for which *task* holds its keys; 0: not known."""
    return _hold_times.get(task, 0.0)


def fail(task: Task, error: Exception) -> None:
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
