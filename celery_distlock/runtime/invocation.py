"""One call of a locked task, by a message or by other code, with the facts about it."""

import time
from typing import Any

from celery_distlock import clock, policies
from celery_distlock.engine.hold import Hold
from celery_distlock.engine.owners import hold_here, owner_here
from celery_distlock.errors import StoreError
from celery_distlock.key import Key
from celery_distlock.keys import Receive, slot_name
from celery_distlock.stores import Store
from celery_distlock.stores.identities import ExecutionId, is_own
from celery_distlock.stores.values import OwnChannel, Reply

from .app import Runtime
from .current import Task
from .message_facts import LockHeader, Received, receive_of_request
from .messages import seal
from .plans import Plan
from .reporting import Report, TaskStates

__all__ = ["Invocation"]

# Seconds; RabbitMQ's consumer timeout. Redis's visibility timeout is twice that if it is not set.
BROKER_TIMEOUT = 1800.0
LOOK_TIMEOUT = 1.0  # seconds that the store has to return a key's holders
WEIGHT = 0.3  # of the newest hold in the average of a task
MOST = 1000  # averages; a program has fewer tasks

_hold_times: dict[str, float] = {}  # the average seconds for which a task holds its keys


class Invocation:
    """
    Facts that the parts of an :class:`~celery_distlock.runtime.execution.Execution` share.

    Attributes:
        keys: What it needs, in the order in which it is acquired.
        missing: Those of the keys that have not been taken yet.
        taken: The holds that it has acquired, in that order.
        entered: The holds of this thread that it has entered once more.
        owned: All holds of this thread.
        waits_for: What it waited for when its key was last refused: ``time``, or ``holder``.
        asked_to_park: The store was asked to park it, so it may have the message.
        nested: It is a call by other code, which may have no message.
        has_message: It was called by a message of its own; false for calls by other code, in eager
            mode, and inside a locked task.
        header: The lock header of the message; empty without a message.
        received: What the worker's main process recorded about the message.
        execution_id: Identifies the execution in the store; empty without a message.
    """

    def __init__(
        self,
        task: Task,
        request: Any,
        plan: Plan,
        store: Store,
        keys: tuple[Key, ...],
        *,
        nested: bool,
    ) -> None:
        self.task = task
        self.plan = plan
        self.store = store
        self.request = request
        self.keys = keys
        self.missing: list[Key] = []
        self.taken: list[Hold] = []
        self.entered: list[Hold] = []
        _, self.owned = owner_here()
        self.waits_for = ""
        self.asked_to_park = False
        self.received = Received.of(request)
        self.has_message = self.received.headers is not None and not nested
        self.report = Report(task, request.id, store)
        self.nested = nested
        self.header = self._header_that_came() if self.has_message else LockHeader()
        names = tuple(slot_name(key.template) for key in keys) if self.header.woken else ()
        if names and self.header.places[0] not in names:
            self.header = self._header_elsewhere(names)
        self.execution_id = self.execution_id_for(self.header.number) if self.has_message else ""

    @property
    def holds(self) -> tuple[Hold, ...]:
        """All holds of the invocation."""
        return tuple(self.entered + self.taken)

    def enter(self, key: Key) -> bool:
        """Enter *key* once more if this thread holds it already; return whether it does."""
        held = hold_here(self.store.identity, key.template)
        if held is None:
            return False
        held.ensure_held()
        held.depth += 1
        self.entered.append(held)
        return True

    def keep(self, hold: Hold) -> None:
        """Note that *hold* is acquired, and report the wait of a task that was woken for it."""
        self.taken.append(hold)
        self.owned[self.store.identity, hold.key] = hold
        # Only once: at the key that it was parked at, not at the others of several.
        header = self.header
        if header.woken and header.parked_at == slot_name(hold.key):
            self.report.event("task_woken", key=hold.key, waited=hold.waited)

    @property
    def patience(self) -> float:
        """Seconds to wait for a key before it counts as taken."""
        policy, wait = self.plan.policy, self.plan.settings.wait
        # Without a message nothing can be sent again: policies that would do so wait instead.
        if self.has_message or isinstance(policy, policies.Skip | policies.Fail | policies.Wait):
            return policy.patience(wait)
        return wait

    @property
    def is_shown_as_parked(self) -> bool:
        """Whether its state may say that it waits for a key."""
        header = self.header
        has_waited = (header.woken and not header.sent) or header.attempts
        return bool(has_waited or self.received.shown or self.asked_to_park)

    def note_hold_time(self, seconds: float) -> None:
        """Add the *seconds* for which its keys were held to the moving average of its task."""
        task, known = str(self.task.name), self.usual_hold_time
        if not known and len(_hold_times) >= MOST:
            _hold_times.clear()
        _hold_times[task] = known + WEIGHT * (seconds - known) if known else seconds

    @property
    def usual_hold_time(self) -> float:
        """The moving average of the seconds for which its task holds its keys; 0: not known."""
        return _hold_times.get(str(self.task.name), 0.0)

    @property
    def states(self) -> TaskStates:
        """The object that stores the states of its task."""
        return TaskStates(self.task, self.request, self.report)

    @property
    def receive(self) -> Receive | None:
        """The conversion of an argument to what a worker would receive; None: it was received."""
        return receive_of_request(self.task, self.request, nested=self.nested)

    def _header_that_came(self) -> LockHeader:
        """Return its lock header, marked as returned if the broker has delivered it before."""
        again = (self.request.delivery_info or {}).get("redelivered")
        header = self.received.header
        return header._replace(returned=True) if again else header

    def execution_id_for(self, number: int) -> str:
        """Return the id of this attempt's execution after *number* requeues."""
        retries, nesting = self.request.retries or 0, self.request.replaced_task_nesting or 0
        return str(ExecutionId(str(self.request.id), retries, number, nesting))

    def _header_elsewhere(self, names: tuple[str, ...]) -> LockHeader:
        """
        Return the header of a run that was parked at a key which is not in *names*.

        It gets an execution of its own, inside the one that was parked. So it may come back to the
        former key, where the parked execution has ended by then.
        """
        run = self.execution_id_for(self.header.number + 1)
        return self.header.parked(names, run, postponed=self.header.postponed + 1)

    @property
    def redelivered(self) -> bool:
        """Whether the same execution may have begun before, by another delivery."""
        header = self.header
        again = header.woken or header.attempts or header.outages or header.returned
        return self.has_message and bool(again or self.received.doubtful or self._is_overdue)

    @property
    def _is_overdue(self) -> bool:
        """
        Whether the worker got the message so early that the broker may have delivered it again.

        Then another worker may have run the second delivery before this first one begins.
        """
        received_at = self.received.received_at
        if received_at is None or not self.task.acks_late:
            return False
        options = self.task.app.conf.broker_transport_options or {}
        timeout = options.get("visibility_timeout", BROKER_TIMEOUT)
        return bool(clock.monotonic() - received_at > 0.9 * float(timeout))

    @property
    def retained(self) -> bool:
        """Whether the store must retain the message until the task has ended."""
        # With early acknowledgement a task is lost with its process, in Celery and here.
        return self.received.pushed and bool(self.task.acks_late)

    @property
    def waiting_since(self) -> float:
        """When it first found its key taken, in seconds since the epoch; now, if it never did."""
        return self.header.since or time.time()

    @property
    def waited(self) -> float:
        """Seconds since it first found its key taken; 0, if it never did."""
        return max(0.0, time.time() - self.header.since) if self.header.since else 0.0

    def is_second_delivery(self, reply: Reply) -> bool:
        """Whether the key is held by the same execution: by another delivery of the message."""
        return bool(self.execution_id) and reply.holder_run == self.execution_id

    def is_held_by_an_earlier_attempt(self, key: str, reply: Reply) -> bool:
        """
        Whether the key is held by, or kept for this one by, the attempt of which this is the retry.

        Also true for the task that this one replaces, which is about to end.
        """
        nesting = self.request.replaced_task_nesting or 0
        if not (self.execution_id and (self.request.retries or nesting)):
            return False
        own = [self.execution_id]
        if nesting and self.request.parent_id:  # the first link of a chain has an id of its own
            own.append(str(ExecutionId(str(self.request.parent_id), nesting=nesting)))
        if any(is_own(reply.holder_run, each) for each in own):
            return True
        try:
            now = self.store.inspect(key, LOOK_TIMEOUT)  # the reply has one, perhaps former, holder
        except StoreError:
            return False
        return any(is_own(run, each) for run in now.runs for each in own)

    def new_hold(self, key: Key) -> Hold:
        """Return a hold on *key* that is not acquired yet."""
        hold = Hold(
            self.store,
            key,
            self.plan.terms,
            label=self.report.name,
            run=self.execution_id,
            waited=self.waited,
            waited_for=self.header.waited_for,
            redelivered=self.redelivered,
            retain=self.retained,
            on_event=self.report.event,
        )
        if self.has_message:
            received = self.received
            hold.stops = self.plan.terms.stops
            hold.arrival = received.arrival or 0
            if received.destination:  # only for a worker with a channel
                hold.own_channel = OwnChannel(received.delivery_address, received.destination)
        return hold

    def seal(self, header: LockHeader) -> bytes:
        """Return its message as an envelope with *header*, signed if there is a secret."""
        trust = Runtime.of(self.task.app).trust
        return trust.sign(header.parked_at, header.run, seal(self.request, header))
