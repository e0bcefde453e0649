"""One execution of a locked task: take its keys, run it and give them up, or say why not."""

import contextlib
import datetime
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from celery import Task as _Task
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError

from celery_distlock import clock, policies
from celery_distlock.engine.abort import Guard
from celery_distlock.engine.acquisition import acquire, acquire_all, held_here, release, release_by
from celery_distlock.engine.lease import Hold, Lease
from celery_distlock.engine.pending_releases import release_later
from celery_distlock.errors import (
    LockConflictError,
    LockLostError,
    StoreError,
    StoreUnavailableError,
)
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.policies import Conflict, Decision
from celery_distlock.settings import MAX_LEASE
from celery_distlock.stores import Store
from celery_distlock.stores.base import (
    Completion,
    ParkRequest,
    Reply,
    Route,
    Status,
    WokenTask,
    new_owner,
)
from celery_distlock.stores.several_keys import begin_at_first_key
from celery_distlock.telemetry import events

from . import hold_times
from .app import Plan, Runtime
from .messages import LockHeader, execution_id_of, publish, seal, with_eta
from .received import HEADER, Received
from .reporting import Report

__all__ = [
    "PARKED",
    "Execution",
    "Postponed",
    "forget_woken",
    "lease_of",
    "seconds_until",
    "unlocked",
]

if TYPE_CHECKING:
    Task: TypeAlias = _Task[Any, Any]
else:
    Task = _Task  # takes parameters only from Celery 5.7 on

PARKED = "PARKED"  # the state of a task that waits for its key

# Seconds; no longer, so that a store that is back does not wait for its tasks.
OUTAGE = policies.Retry(delay=1.0, max_delay=8.0)
TURN_PATIENCE = 1.0  # seconds that the store has to say when a task is to come again
# Seconds; RabbitMQ's consumer timeout. Redis's visibility timeout is twice that if it is not set.
BROKERS_PATIENCE = 1800.0
BROKER_PAUSE = 1.0  # seconds between attempts to send a task while the broker is away, too

_here = threading.local()


class Postponed(Ignore):
    """The task has not run, and is on its way to run later."""


def lease_of(task: Task) -> Lease:
    """Return what the innermost execution of *task* in this thread holds."""
    for execution in reversed(getattr(_here, "stack", ())):
        if execution.task is task:
            return execution.lease  # type: ignore[no-any-return]
    return Lease((), wanted=task not in getattr(_here, "unlocked", ()))


@contextlib.contextmanager
def unlocked(task: Task) -> Iterator[None]:
    """Let *task* run without a lock, as it was told to."""
    before = getattr(_here, "unlocked", ())
    _here.unlocked = (*before, task)
    try:
        yield
    finally:
        _here.unlocked = before


class Execution:
    """See the module; runs once, by :meth:`run`."""

    def __init__(self, task: Task, plan: Plan, store: Store, keys: tuple[str, ...]) -> None:
        request = task.request
        if not hasattr(_here, "stack"):
            _here.stack = []
        self.task = task
        # Called by other code, in eager mode, or inside a locked task: no message of its own.
        self.message = not (request.called_directly or request.is_eager or _here.stack)
        self._request = request
        self._report = Report(task, request.id, store)
        self._plan = plan
        self._store = store
        self._keys = sorted(keys)  # one order for all, so that no two wait for each other
        self._received = Received.of(request)
        self._passage = LockHeader.of(request.__dict__) if self.message else LockHeader()
        self._run = self._run_id(request.retries or 0) if self.message else ""
        if self.message:
            events.switch(task.app, self._received.events)
            Runtime.of(task.app).relay.near = self._received.delivery_address
        self._wanted: list[str] = []  # those of the keys that are not held here already
        self._missing: list[str] = []  # and have not been taken yet
        self._taken: list[Hold] = []
        self._entered: list[Hold] = []
        self._ended = Completion.NO
        self._parking = False  # the store has been asked to park it
        self._keep_for: tuple[str, float] | None = None
        self._around = sys.exc_info()[1]  # what is being handled anyway, where the task is called

    @property
    def lease(self) -> Lease:
        """What is held."""
        return Lease(tuple(self._entered + self._taken), wanted=False)

    def run(self, body: Callable[[], Any]) -> Any:
        """
        Run *body* under the lock and return its result, or a policy's instead of it.

        Raises:
            Ignore: The task is parked, sent again, or was a second delivery.
            LockConflictError: The key is taken, and the policy or the call is for failing then.
            LockLostError: The lock was lost while the body ran.
            StoreUnavailableError: The store is away, and `lock_on_outage` is for failing then.
        """
        _here.stack.append(self)
        try:
            decision = self._take_all()
            if decision is not None:
                return self._settle(decision)
            began = clock.monotonic()
            try:
                return self._run_body(body)
            finally:
                hold_times.note(str(self.task.name), clock.monotonic() - began)
        finally:
            self.give_up()

    # Taking

    def _take_all(self) -> Decision | None:
        """Take every key; or return what the policy says of the first that is taken."""
        if (found := self._found_on_arrival) is not None:
            return self._on_conflict(*found)
        self._wanted = wanted = [key for key in self._keys if not self._enter(key)]
        if len(wanted) > 1 and not self._repeated and self._take_at_once(wanted):
            return None
        self._missing = list(wanted)
        while self._missing:
            decision = self._take(self._missing[0])
            if decision is not None:
                return decision
        if self._passage.woken or self._received.shown or self._parking:
            self._show_running()
        return None

    @property
    def _found_on_arrival(self) -> tuple[str, Reply] | None:
        """The key that was taken when the message came, if that is to count."""
        taken = self._received.taken if self.message else None
        if taken is None or taken.key not in self._keys or taken.run == self._run:
            return None
        return taken.key, Reply(
            Status.BUSY,
            self._received.received_at or 0.0,
            holder=taken.holder,
            holder_run=taken.run,
            remaining=taken.remaining,
        )

    def _enter(self, key: str) -> bool:
        """Whether *key* is held here already; then it is entered once more."""
        held = held_here().get((self._store.identity, key))
        if held is None:
            return False
        held.ensure_held()
        held.depth += 1
        self._entered.append(held)
        return True

    def _take_at_once(self, keys: list[str]) -> bool:
        """Whether all of *keys* were free and are taken now; if not, none was."""
        hold_times = [self._new_hold(key) for key in keys]
        try:
            if not acquire_all(hold_times):
                return False
        except StoreUnavailableError as error:
            self._on_outage(error)
            return True
        for hold in hold_times:
            self._keep(hold)
        return True

    def _take(self, key: str) -> Decision | None:
        hold, reply = self._ask(key)
        if hold is not None and reply.status is Status.BUSY:
            decision = self._on_conflict(key, reply)
            if not isinstance(decision, policies.Park):
                return decision
            if not self._returns:
                hold, reply = self._wait_here(key)
            elif len(self._wanted) > 1 and not self._is_second_delivery(reply):
                key, reply = self._stand(key, reply)
                if reply.status is Status.RESERVED:
                    return None  # all are, and are there to be taken
            else:
                hold, reply = self._park(key, reply)
        if hold is None:
            self._missing.remove(key)
            return None
        if reply.status is Status.PARKED:
            if self._is_second_delivery(reply):
                self._report.info("set aside: the first delivery has not ended", key=key)
            else:
                self._report.parking(key, reply)
            raise Postponed(f"parked until {shown(key)!r} is free")
        if reply.status is Status.DONE:
            self._report.info("dropped: a second delivery, the first has ended", key=key)
            raise Ignore("a second delivery")
        return None

    def _ask(self, key: str) -> tuple[Hold | None, Reply]:
        settings, policy = self._plan.settings, self._plan.policy
        patience = policy.patience(settings.wait) if self.message else self._direct_patience
        return self._obtain(key, timeout=patience)

    @property
    def _direct_patience(self) -> float:
        policy, wait = self._plan.policy, self._plan.settings.wait
        says_itself = isinstance(policy, policies.Skip | policies.Fail | policies.Wait)
        return policy.patience(wait) if says_itself else wait

    def _obtain(self, key: str, **how: Any) -> tuple[Hold | None, Reply]:
        """Ask for *key*; the hold is None if the task is to go on, locked or by `on_outage`."""
        hold = self._new_hold(key)
        try:
            reply = acquire(hold, repeated=self._repeated, keep=self._kept_by_store, **how)
        except StoreUnavailableError as error:
            self._on_outage(error)
            return None, Reply(Status.GRANTED, 0.0)
        if reply.status is not Status.GRANTED:
            return hold, reply
        self._keep(hold)
        if self._passage.woken:
            self._tell_woken(key, hold.waited)
        return None, reply

    def _tell_woken(self, key: str, waited: float) -> None:
        """Tell it at the key that it was parked at; of several, the others are on its way."""
        if self._passage.parked_at == slot_name(key):
            self._report.event("task_woken", key=key, waited=waited)

    def _new_hold(self, key: str) -> Hold:
        hold = Hold(
            self._store,
            key,
            self._plan.terms,
            label=self._report.name,
            run=self._run,
            waited=max(0.0, time.time() - self._passage.since) if self._passage.since else 0.0,
            on_event=self._report.event,
        )
        hold.arrival = (self._received.arrival or 0) if self.message else 0
        return hold

    def _keep(self, hold: Hold) -> None:
        self._taken.append(hold)
        held_here()[self._store.identity, hold.key] = hold

    @property
    def _repeated(self) -> bool:
        delivery = self._request.delivery_info or {}
        passage = self._passage
        again = passage.woken or passage.attempts or passage.outages or delivery.get("redelivered")
        return self.message and bool(again or self._is_overdue)

    @property
    def _is_overdue(self) -> bool:
        """
        Whether a worker had the message for so long that the broker may have delivered it again.

        Then the second delivery may have come and gone elsewhere before this, the first, begins.
        """
        received_at = self._received.received_at
        if received_at is None or not self.task.acks_late:
            return False
        options = self.task.app.conf.broker_transport_options or {}
        patience = options.get("visibility_timeout", BROKERS_PATIENCE)
        return bool(clock.monotonic() - received_at > 0.9 * float(patience))

    @property
    def _kept_by_store(self) -> bool:
        # With early acknowledgement Celery lets a task end with its process, and so do we.
        return self._received.pushed and bool(self.task.acks_late)

    @property
    def _returns(self) -> bool:
        """Whether the queue of the message is one that it would be sent to when it is woken."""
        return self._received.returns

    def _on_conflict(self, key: str, reply: Reply) -> Decision:
        self._report.conflict(self._request.__dict__, key, reply)
        if self._is_second_delivery(reply):
            return policies.Park()  # dropped when the first succeeds, run when it dies
        conflict = Conflict(key, reply.holder, reply.remaining, self._passage.attempts)
        decision = self._plan.policy.decide(conflict)
        if isinstance(decision, policies.Refuse) or (
            not self.message and not isinstance(decision, policies.Answer)
        ):
            raise LockConflictError(key, holder=reply.holder, remaining=reply.remaining)
        if isinstance(decision, policies.Answer):
            self._report.info("skipped: {key!r} is held by {holder}", key=key, holder=reply.holder)
        elif isinstance(decision, policies.Resend):
            decision = self._in_turn(key, decision)
            words = "is sent again in {delay:.1f} s: {key!r} is held by {holder}"
            self._report.info(words, delay=decision.delay, key=key, holder=reply.holder)
            self._show_parked(key, reply.holder, None)
        return decision

    def _in_turn(self, key: str, resend: policies.Resend) -> policies.Resend:
        """Let the store say when the task is to come again, if that is asked for and it can."""
        if resend.within is None:
            return resend
        usual, most = hold_times.usual(str(self.task.name)), resend.within[1]
        try:
            turn = self._store.turn(key, usual, resend.within, TURN_PATIENCE)
        except StoreError:
            return resend
        if turn is None:
            return resend
        return policies.Resend(turn if turn <= most else most * clock.jitter(0.5, 1.0))

    def _is_second_delivery(self, reply: Reply) -> bool:
        return bool(self._run) and reply.holder_run == self._run

    def _park(self, key: str, reply: Reply) -> tuple[Hold | None, Reply]:
        parcel = self._seal(key)
        if not self._is_second_delivery(reply):
            # Before it is parked: from then on it may run elsewhere and end before we write.
            self._show_parked(key, reply.holder, reply.place)
        self._parking = True
        hold, parked = self._obtain(key, park=parcel)
        self._leave_places(slot_name(key))
        return hold, parked

    def _seal(self, key: str, *names: str) -> ParkRequest:
        """Return what is parked at *key*, for a run that needs the others of those *names*, too."""
        passage = replace(
            self._passage,
            woken=True,
            run=self._run,
            parked_at=slot_name(key),
            names=names,
            since=self._passage.since or time.time(),
        )
        return self._parcel(self._sign(key, self._run, seal(self._request, passage)))

    def _stand(self, key: str, reply: Reply) -> tuple[str, Reply]:
        """
        Have the run stand at its keys until it has them all, and keep what it has of them.

        Returns:
            The last key at which it stands now, and what it is told there.
        """
        route = self._route(self._wanted)
        parcel: ParkRequest | None = self._seal(self._wanted[0], *route.names)
        self._show_parked(key, reply.holder, reply.place)  # before, as in `_park`
        self._parking = True
        arrival = self._received.arrival or 0
        for here in self._wanted:
            reply, key = self._stand_at(here, route, arrival, parcel), here
            parcel, arrival = None, reply.arrival
            self._store.dispatch(reply.wake)
            if reply.status is not Status.RESERVED:
                break
        self._leave_places(*route.names[: 1 + self._wanted.index(key)])
        self._missing = list(self._wanted)
        return key, reply

    def _stand_at(self, key: str, route: Route, arrival: int, parcel: ParkRequest | None) -> Reply:
        name, store = slot_name(key), self._store
        hold = next((hold for hold in self._taken if hold.key == key), None)
        try:
            if hold is None:
                return store.stand(name, self._run, route, arrival=arrival, parcel=parcel)
            stand = functools.partial(store.stand, name, self._run, route, owner=hold.owner)
            reply = release_by(hold, lambda: stand(arrival=arrival, parcel=parcel))
            self._taken.remove(hold)  # not before: until then it is to be given up in any case
            held_here().pop((store.identity, key), None)
            if reply.status not in (Status.RESERVED, Status.PARKED):  # it stands nowhere
                release_later(store, key, hold.owner, run=self._run)
            return reply
        except StoreUnavailableError as error:
            self._on_outage(error)
            raise

    def _route(self, keys: Iterable[str]) -> Route:
        return Route(tuple(map(slot_name, keys)), str(self.task.name))

    def _parcel(self, envelope: bytes) -> ParkRequest:
        return ParkRequest(envelope, self._received.delivery_address, str(self.task.name))

    def _wait_here(self, key: str) -> tuple[Hold | None, Reply]:
        """Wait for *key* in this process: were the task parked, nobody would send it again."""
        where = self._request.delivery_info or {}
        self._report.warning(
            "waits for {key!r} in its process and is not parked: it came by exchange {exchange!r}"
            " with routing key {routing_key!r}, which leads to no queue that this worker knows;"
            " name that in task_queues",
            key=key,
            exchange=where.get("exchange"),
            routing_key=where.get("routing_key"),
        )
        return self._obtain(key, timeout=None)

    def _sign(self, key: str, run: str, envelope: bytes) -> bytes:
        return Runtime.of(self.task.app).trust.sign(slot_name(key), run, envelope)

    def _leave_places(self, *names: str) -> None:
        """Free the keys that we were woken for, but for those *names*, at which we wait again."""
        passage = self._passage
        for name in set(passage.places).difference(names) if passage.woken else ():
            with contextlib.suppress(StoreError):  # it lapses by itself
                _drop(self._store, name, self._run, mark=False)

    # Running

    def _run_body(self, body: Callable[[], Any]) -> Any:
        sealed = self._seal_to_requeue()
        late = self.message and bool(self.task.acks_late)
        ended = Completion.YES_AND_MAY_COME_AGAIN if self._repeated or late else Completion.YES
        with_result = Completion.UNSETTLED if late else ended
        try:
            result = self._guard().run(body)
        except Retry as retry:
            self._ended = ended
            self._keep_key(retry)
            raise
        except Reject as reject:
            self._ended = Completion.NO if getattr(reject, "requeue", False) else ended
            raise
        except (Ignore, MemoryError) as error:
            self._ended = ended if isinstance(error, Ignore) else Completion.NO
            raise
        except Exception as error:
            self._ended = ended
            lost = isinstance(error, LockLostError) and error.key in self.lease.keys
            if sealed is not None and self._goes_back(lost=lost):
                self._requeue(sealed, error)
            # A run that lost its lock has not ended: a second delivery of it that waits may run.
            self._ended = Completion.NO if lost else with_result
            raise
        self._ended = with_result
        return result

    def _guard(self) -> Guard:
        aborts = self._plan.settings.on_lost != "warn"
        return Guard(tuple(self._entered + self._taken) if aborts else ())

    def _keep_key(self, retry: Retry) -> None:
        if not (self._plan.settings.hold_on_retry and self.message):
            return
        seconds = min(MAX_LEASE, seconds_until(retry.when) + self._plan.settings.lease)
        self._keep_for = self._run_id((self._request.retries or 0) + 1), seconds

    def _goes_back(self, *, lost: bool) -> bool:
        """Whether a task that has failed, or has *lost* its lock, is requeued."""
        settings = self._plan.settings
        return settings.on_failure == "requeue" or (lost and settings.on_lost == "requeue")

    def _seal_to_requeue(self) -> bytes | None:
        """Return what is requeued if it comes to that; made before the body changes anything."""
        settings = self._plan.settings
        if not self._goes_back(lost=True) or not self.message or not self._taken:
            return None
        if not self._returns:
            return None  # as in `_wait_here`
        if self._passage.requeues >= settings.max_requeues:
            return None
        number = self._passage.requeues + 1
        run = self._run_id(self._request.retries or 0, number)
        route = self._route(hold.key for hold in self._taken)
        names = route.names if len(route.names) > 1 else ()
        passage = LockHeader(
            woken=True, run=run, parked_at=route.names[0], names=names, requeues=number
        )
        return self._sign(self._taken[0].key, run, seal(self._request, passage))

    def _requeue(self, sealed: bytes, error: Exception) -> None:
        """Park the failed task at the end of its key's queue, as another run."""
        key = self._taken[0].key
        number = self._passage.requeues + 1
        self._report.warning("failed and is requeued ({n})", error, key=key, n=number)
        self._show_parked(key, self._taken[0].owner, None)
        run = self._run_id(self._request.retries or 0, number)
        try:
            if len(self._taken) == 1:
                self._requeue_at(key, run, sealed)
            else:
                route = self._route(hold.key for hold in self._taken)
                begin_at_first_key(self._store, run, route, self._parcel(sealed))
        except StoreUnavailableError:
            self._send_again(sealed, OUTAGE.delay)
        raise Postponed("requeued after a failure")

    def _requeue_at(self, key: str, run: str, sealed: bytes) -> None:
        hold = Hold(self._store, key, self._plan.terms, label=self._report.name, run=run)
        reply = acquire(hold, park=self._parcel(sealed))
        if reply.status is Status.GRANTED:  # ours was lost meanwhile: the new run gets the key
            release(hold)
            self._send_again(sealed, 0.0)

    # Giving up

    def give_up(self) -> None:
        """Give every key up, the last one first; may be called again if it was interrupted."""
        while self._entered:
            self._entered.pop().depth -= 1
        wakes: list[WokenTask | None] = []
        with contextlib.ExitStack() as releases:
            releases.callback(self._dispatch_all, wakes)  # not before the last one is given up
            for hold in self._taken:
                held_here().pop((self._store.identity, hold.key), None)
                releases.callback(release, hold, self._ended, self._keep_for, wakes.append)
                if self._ended is Completion.UNSETTLED:
                    unsettled = getattr(_here, "unsettled", ())
                    _here.unsettled = [*unsettled, (hold, self._around)]
        if self in _here.stack:
            _here.stack.remove(self)

    def _dispatch_all(self, wakes: list[WokenTask | None]) -> None:
        for wake in wakes:
            self._store.dispatch(wake)

    # What else can become of it

    def _settle(self, decision: Decision) -> Any:
        if isinstance(decision, policies.Answer):
            return decision.result
        if isinstance(decision, policies.Resend):
            passage = replace(
                self._passage,
                woken=False,
                attempts=self._passage.attempts + 1,
                outages=0,
                since=self._passage.since or time.time(),
            )
            self._send_again(seal(self._request, passage), decision.delay)
            raise Postponed(f"sent again in {decision.delay:.1f} s")
        raise TypeError(f"{self._plan.policy!r} decided {decision!r}, which is no decision")

    def _on_outage(self, error: StoreUnavailableError) -> None:
        what = self._plan.settings.on_outage
        # A message that the store or the broker may have, too, would run beside itself.
        if what == "run" and not (self._repeated or self._parking):
            self._report.warning("runs UNLOCKED, the lock store is away: {why}", why=error)
            return
        if what == "fail" or not self.message:
            self._strike_parked()
            raise error
        outages = self._passage.outages
        delay = OUTAGE.decide(Conflict("", "", 0.0, outages)).delay  # type: ignore[union-attr]
        words = "is sent again in {delay:.1f} s, the lock store is away: {why}"
        self._report.warning(words, delay=delay, why=error)
        passage = replace(self._passage, outages=outages + 1)
        self._send_again(seal(self._request, passage), delay)
        raise Postponed("the lock store is away") from error

    def _strike_parked(self) -> None:
        """Let what fails now not run later: a request without an answer may have parked it."""
        for key in self._keys if self._run else ():
            owner = new_owner(self._report.name)
            release_later(self._store, key, owner, run=self._run, ended=Completion.YES)

    def _send_again(self, envelope: bytes, delay: float) -> None:
        envelope = with_eta(envelope, delay) if delay else envelope
        while True:
            try:
                return publish(self.task.app, envelope)
            except OperationalError as error:
                # Only this process knows the task now, so it must not give up.
                self._report.warning("waits, the broker is away too: {why}", why=error)
                time.sleep(BROKER_PAUSE)

    # Telling

    def _run_id(self, retries: int, requeues: int | None = None) -> str:
        number = self._passage.requeues if requeues is None else requeues
        nesting = self._request.replaced_task_nesting or 0
        return execution_id_of(str(self._request.id), retries, number, nesting)

    @property
    def _stores_results(self) -> bool:
        ignored = self._request.__dict__.get("ignore_result")
        return not (self.task.ignore_result if ignored is None else ignored)

    def _show_parked(self, key: str, holder: str, place: int | None) -> None:
        if self._stores_results:
            info = {"key": shown(key), "holder": shown(holder), "place": place}
            self._store_state(PARKED, info)

    def _show_running(self) -> None:
        if self._stores_results and not self.task.track_started:
            self._store_state("STARTED", None)

    def _store_state(self, state: str, info: Any) -> None:
        identity: Any = self._request.id
        try:
            self.task.backend.store_result(identity, info, state, request=self._request)
        except Exception as error:  # noqa: BLE001  # only a state to look at: the task matters more
            words = "goes on, though its state {state} was not stored: {why}"
            self._report.warning(words, state=state, why=error)


def seconds_until(when: Any) -> float:
    """Return the seconds until a retry: Celery takes a time without a zone as UTC."""
    if isinstance(when, str | datetime.datetime):
        eta = maybe_make_aware(maybe_iso8601(when) or datetime.datetime.now(datetime.UTC))
        when = (eta - datetime.datetime.now(datetime.UTC)).total_seconds()
    return max(0.0, float(when or 0))


def _drop(store: Store, name: str, run: str, *, mark: bool = True) -> bool:
    """Have a run forgotten that is parked at *name*, and whom that wakes sent."""
    dropped = store.drop(WokenTask(name, run, b""), mark=mark)
    store.dispatch(dropped.wake)
    return dropped.released


def forget_woken(task: Task, runtime: Runtime, keys: tuple[str, ...]) -> None:
    """Strike a woken task from the keys that are kept for it, if they are not its own any more."""
    request = task.request
    if HEADER not in request.__dict__ or request.called_directly or getattr(_here, "stack", None):
        return
    passage = LockHeader.of(request.__dict__)
    if not passage.woken:
        return
    for name in set(passage.places).difference(map(slot_name, keys)):
        with contextlib.suppress(StoreError):
            _drop(runtime.store, name, passage.run)


def _wind_up(sender: Task, **_: Any) -> None:
    """
    After a task: release what it still holds, and tell the store that its end is known.

    A time limit's exception can strike between any two instructions, also between a task's last
    one and its release. The result is stored and the links are sent by now, so that a second
    delivery has nothing left to do; until now it had.
    """
    if sender.request.is_eager:
        return
    for execution in reversed(getattr(_here, "stack", [])[:]):
        execution.give_up()
    unsettled, _here.unsettled = getattr(_here, "unsettled", ()), []
    for hold, around in unsettled:
        # Celery comes here with a SystemExit, too, say of SIGTERM: then nothing is known.
        if sys.exc_info()[1] is around:
            _settle(hold)


def _settle(hold: Hold) -> None:
    """Tell the store that all is done about the run of *hold*; in the background if it is away."""
    try:
        settled = _drop(hold.store, slot_name(hold.key), hold.run)
    except StoreError:
        settled = False
    if not settled:  # the release itself may not have come to the store yet
        ended = Completion.YES_AND_MAY_COME_AGAIN
        release_later(hold.store, hold.key, hold.owner, run=hold.run, ended=ended)


task_postrun.connect(_wind_up, weak=False)
