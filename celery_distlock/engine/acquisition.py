"""Acquire, wait for and release keys: what locks and locked tasks have in common."""

import logging
from collections.abc import Callable, Sequence

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError, StoreError, StoreUnavailableError
from celery_distlock.naming import shown
from celery_distlock.process.forks import ForkStage, begin_anew
from celery_distlock.stores import AcquireRequest, ReleaseRequest, Store
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.identities import ExecutionId
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    ParkRequest,
    Reply,
    Status,
    Want,
    WokenTask,
)

from .hold import GLANCE, Hold, HoldState
from .owners import held_here
from .pending_releases import release_later
from .shared_holds import SharedHolds
from .watchdog import watchdog

logger = logging.getLogger(__name__)

__all__ = [
    "Waiter",
    "acquire",
    "acquire_all",
    "ask",
    "conclude",
    "defaults",
    "give_back",
    "give_up",
    "held_here",
    "record",
    "release",
    "release_by",
]

BACKSTOP = 1.0  # seconds, times the position in the queue, after which a waiter asks without a push
PATIENCE = 30.0  # seconds for which a queued waiter tolerates a store that does not answer
OUTAGE_PAUSE = 0.25  # seconds between its attempts


def _reset_shared_holds() -> None:
    if defaults.shared_holds is not None:
        defaults.shared_holds.after_fork()


begin_anew(_reset_shared_holds, ForkStage.HOLDS)


def acquire(
    hold: Hold,
    *,
    timeout: float | None = 0.0,
    park: ParkRequest | None = None,
) -> Reply:
    """
    Ask for the key of *hold*; begin to hold and to renew it if it is granted.

    Args:
        hold: A new hold.
        timeout: Seconds to wait for the key; 0 does not wait, None waits for ever.
        park: Leave the execution in the key's queue instead of waiting.

    Returns:
        The store's last answer. If it is not ``GRANTED``, nothing is left in the store except a
        parked execution.

    Raises:
        StoreError: What the store may have granted is released in the background.
    """
    deadline = float("inf") if timeout is None else clock.monotonic() + timeout
    try:
        waits = park is None and timeout != 0
        while True:
            if defaults.shared_holds is not None:
                defaults.shared_holds.record(hold, at_once=not waits)
            # One request either gets the key or joins the queue.
            if waits and hold.store.subscribed(hold.key):
                reply = _wait(hold, deadline, answered=False)
            else:
                reply = ask(hold, park)
                if waits and reply.status is Status.BUSY:
                    reply = _wait(hold, deadline, answered=True)
            concluded = conclude(hold, reply, deadline if park is None else float("inf"))
            if concluded is not None:
                return concluded
    except BaseException:
        # No answer, a time limit, a KeyboardInterrupt: the key may be ours, or become ours.
        _release_all_later([hold])
        raise


def conclude(hold: Hold, reply: Reply, deadline: float) -> Reply | None:
    """Return the caller's answer, once the waiter has left the queue; None: ask again."""
    if hold.state is HoldState.HELD:
        if defaults.shared_holds is not None:
            defaults.shared_holds.record(hold)
        return reply
    hold.end()
    if reply.status is not Status.GRANTED:
        _erase(hold)
        return reply
    _release_later(hold)  # granted too late to rely on
    if clock.monotonic() >= deadline:
        return reply._replace(status=Status.BUSY)
    hold.start_over()
    return None


def acquire_all(holds: Sequence[Hold]) -> bool:
    """
    Ask for the keys of *holds*, of one store and execution, in one step; hold all or none.

    False: not all of them are available, or this store takes only one at a time.

    Raises:
        StoreError: What the store may have granted is released in the background.
    """
    first = holds[0]
    try:
        for hold in holds:
            record(hold, at_once=True)
        replies = first.store.acquire_all(
            [hold.key for hold in holds],
            [hold.owner for hold in holds],
            first.terms.lease,
            run=first.run,
            redelivered=first.redelivered,
            retain=first.retain,
            **_wants_of(holds),
        )
        if replies is None:
            for hold in holds:
                _erase(hold)
            return False
        taken = [hold.take(reply) for hold, reply in zip(holds, replies, strict=True)]
        for hold in holds:
            watchdog(hold.store).watch(hold)
            record(hold)
        for reply in replies:
            first.store.dispatch(reply.wake)
        if all(taken):
            return True
    except BaseException:
        _release_all_later(holds)
        raise
    _release_all_later(holds)  # granted too late to rely on
    return False


def _wants_of(holds: Sequence[Hold]) -> dict[str, list[Want]]:
    wants = [hold.want for hold in holds]
    return {} if all(want == ALONE for want in wants) else {"wants": wants}


def _release_all_later(holds: Sequence[Hold]) -> None:
    for hold in holds:
        give_up(hold)


def give_up(hold: Hold, inbox: Inbox | None = None) -> None:
    """Stop holding, and stop waiting at *inbox*. Release what the store granted, now or later."""
    watchdog(hold.store).forget(hold)
    hold.end()
    _release_later(hold, inbox=inbox)


def _release_later(
    hold: Hold,
    ended: Completion = Completion.NO,
    inbox: Inbox | None = None,
    rest: tuple[str, float] | None = None,
) -> None:
    request = hold.release_request(ended, inbox=inbox, keep_for=rest)
    record(hold)  # no process may renew it from now on
    release_later(hold.store, request, lambda: _erase(hold, request.owner))


def record(hold: Hold, *, at_once: bool = False) -> None:
    """Record the state of *hold* for this worker's main process, if any; see `SharedHolds`."""
    if defaults.shared_holds is not None:
        defaults.shared_holds.record(hold, at_once=at_once)


def _erase(hold: Hold, owner: str | None = None) -> None:
    if defaults.shared_holds is not None:
        defaults.shared_holds.erase(owner or hold.owner)


def ask(hold: Hold, queue: Inbox | ParkRequest | None) -> Reply:
    """Ask for the key once; begin to hold and to renew it if it is granted."""
    reply = hold.store.acquire(
        AcquireRequest(
            hold.key,
            hold.owner,
            hold.terms.lease,
            queue=queue,
            run=hold.run,
            redelivered=hold.redelivered,
            retain=hold.retain,
            arrival=hold.arrival,
            want=hold.want,
        )
    )
    hold.arrival = reply.arrival or hold.arrival
    if hold.take(reply):
        watchdog(hold.store).watch(hold)
    if reply.wake is not None:
        hold.store.dispatch(reply.wake)
    return reply


class Waiter:
    """
    A waiter in the queue of a key: its requests between two pauses.

    Args:
        hold: The hold that waits.
        deadline: When to stop waiting, by the local clock.
        answered: Whether the store has already answered that the key is held. A store that has
            answered may stay silent for a while.

    Attributes:
        inbox: Where pushes arrive.
        pause: Seconds after which it asks again without a push.
    """

    def __init__(self, hold: Hold, deadline: float, *, answered: bool) -> None:
        self.inbox = hold.store.inbox(hold.key, hold.owner)
        self.pause = 0.0
        self._hold = hold
        self._deadline = deadline
        self._answered = answered
        self._silent_since: float | None = None

    def ask(self) -> Reply | None:
        """
        Ask once. None: the key is held, or the store silent; ask again after a push or `pause`.

        Raises:
            StoreError: The store refuses, or has been silent for too long.
        """
        hold, pause = self._hold, OUTAGE_PAUSE
        try:
            reply = ask(hold, self.inbox)
            self._silent_since, self._answered = None, True
        except StoreUnavailableError:
            if not self._answered:
                raise
            now = clock.monotonic()
            self._silent_since = self._silent_since or now
            if now > min(self._deadline, self._silent_since + PATIENCE):
                raise
        else:
            if reply.status is not Status.BUSY:
                return reply
            if clock.monotonic() >= self._deadline:
                hold.store.dispatch(hold.store.release(self.departure).wake)
                return reply
            pause = _backstop(reply, hold.run)
        self.pause = max(0.0, min(pause, self._deadline - clock.monotonic()))
        return None

    @property
    def departure(self) -> ReleaseRequest:
        """The request that removes this waiter from the queue."""
        hold = self._hold
        return ReleaseRequest(hold.key, hold.owner, inbox=self.inbox, started=hold.started)


def _wait(hold: Hold, deadline: float, *, answered: bool) -> Reply:
    waiter = Waiter(hold, deadline, answered=answered)
    try:
        while (reply := waiter.ask()) is None:
            waiter.inbox.wait(waiter.pause)
        return reply
    except BaseException:
        release_later(hold.store, waiter.departure)
        raise
    finally:
        waiter.inbox.close()


def _backstop(reply: Reply, run: str) -> float:
    # The first waiter asks when the holder's lease ends, the others one after another behind it. A
    # retry asks early at any position: the key may be reserved for it, and no push announces that.
    place = 0 if ExecutionId.parse(run).retries else reply.place
    return min(reply.remaining + 0.01, BACKSTOP) + BACKSTOP * place


def release(
    hold: Hold,
    ended: Completion = Completion.NO,
    keep_for: tuple[str, float] | None = None,
    dispatch: Callable[[WokenTask | None], object] | None = None,
    *,
    succeeded: bool | None = None,
) -> HoldState:
    """
    Stop holding and release the key in the store; return the state before.

    *dispatch* takes the task that this wakes, in place of the store's own dispatch. Without
    *keep_for* the key rests by its own terms: *succeeded* is whether what ran under it succeeded,
    None if nothing ran.

    Never raises because of the store: a release that is not answered is repeated in the background,
    and if that fails too the lease ends.
    """
    rest = None
    hold.begun = succeeded is not None
    if keep_for is None and succeeded is not None:
        rest = hold.rest(succeeded=succeeded)
    before = hold.end()  # A renewal in between uses an owner that no longer holds: no harm.
    return give_back(hold, before, ended, keep_for, dispatch, rest)


def give_back(
    hold: Hold,
    before: HoldState,
    ended: Completion = Completion.NO,
    keep_for: tuple[str, float] | None = None,
    dispatch: Callable[[WokenTask | None], object] | None = None,
    rest: tuple[str, float] | None = None,
) -> HoldState:
    """Release *hold*, which was *before* and has ended, in the store; the key is free or rests."""
    if before is HoldState.ENDED or hold.is_parents:
        return before  # in a forked child, the hold is the parent's
    ours = True
    try:
        request = hold.release_request(
            ended, keep_for=keep_for or rest, own_channel=hold.own_channel
        )
        released = hold.store.release(request)
        if released.wake is not None:
            (dispatch or hold.store.dispatch)(released.wake)
        ours = released.released
    except StoreError as error:
        logger.warning("%r is released later, or its lease ends: %s", shown(hold.key), error)
        _release_later(hold, ended, rest=rest)
    except BaseException:  # such as a time limit's exception, which the caller has to get soon
        _release_later(hold, ended, rest=rest)
        raise
    else:
        if defaults.shared_holds is not None:
            defaults.shared_holds.erase(hold.owner)
    finally:
        watchdog(hold.store).forget(hold)
    if before is HoldState.HELD and not ours:
        late = "the store no longer knew it when it was given up"
        hold.find_lost(hold.why_lost(late, patience=GLANCE))
        return HoldState.LOST
    if before is HoldState.HELD:
        hold.tell_released()
    return before


def release_by(holds: Sequence[Hold], ask: Callable[[], Reply]) -> Reply:
    """
    Stop holding by *ask*, a request that itself gives the keys up; return its answer.

    Raises:
        StoreError: The keys are released in the background.
    """
    before = [hold.end() for hold in holds]
    try:
        reply = ask()
    except BaseException:
        for hold in holds:
            _release_later(hold)
        raise
    finally:
        for hold in holds:
            watchdog(hold.store).forget(hold)
    for hold, state in zip(holds, before, strict=True):
        _erase(hold)
        if state is HoldState.HELD:
            hold.tell_released()
    return reply


def no_store() -> Store:
    """Replace the current app's store where there is no app: raise an error."""
    raise ConfigurationError(
        "Lock(store=None) needs a current Celery app; or name a store or a URL"
    )


def no_stores() -> list[Store]:
    """Replace the stores of the apps where there is no app: none."""
    return []


class _Defaults:
    """What the Celery side registers here, so that this module does not depend on it."""

    store: Callable[[], Store] = staticmethod(no_store)
    stores: Callable[[], list[Store]] = staticmethod(no_stores)
    on_event: Callable[..., None] | None = None
    shared_holds: SharedHolds | None = None


defaults = _Defaults()
