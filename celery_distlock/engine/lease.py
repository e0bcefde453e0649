"""What is held, as the code under it sees it."""

from collections.abc import Callable
from typing import NoReturn

from celery_distlock.errors import LockError, LockNotOwnedError
from celery_distlock.key import MAX_REST
from celery_distlock.naming import shown
from celery_distlock.settings import MAX_LEASE

from .hold import Hold
from .upgrading import downgrade_all, upgrade_all

__all__ = ["Lease", "PostponeRequest"]


class PostponeRequest(BaseException):
    """
    Ends a task's run that is to run again; see :meth:`Lease.postpone`.

    No :exc:`Exception`: it is no error that the task's code has to do with.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"to run again in {seconds:g} s")
        self.seconds = seconds


class Lease:
    """
    What a task or a :class:`~celery_distlock.Lock` holds, as the code under it sees it.

    Attributes are local: no round trip. The lease of a task which runs unlocked because it was told
    to (``distlock_enabled=False``, a key of None, ``lock_on_outage="run"``) has no keys, is false,
    has the token 0, and its :meth:`ensure_held` passes.
    """

    def __init__(
        self,
        holds: tuple[Hold, ...],
        *,
        wanted: bool = True,
        why_not_postpone: Callable[[], str] | None = None,
    ) -> None:
        self._holds = holds
        self._wanted = wanted  # false: whoever runs here was told to run unlocked
        self._why_not_postpone = why_not_postpone

    def __bool__(self) -> bool:
        return bool(self._holds)

    @property
    def key(self) -> str:
        """The key; the first of several."""
        return self._holds[0].key if self._holds else ""

    @property
    def keys(self) -> tuple[str, ...]:
        """All the keys."""
        return tuple(hold.key for hold in self._holds)

    @property
    def token(self) -> int:
        """
        The fencing token of `key`.

        Of who has the key alone: strictly greater than that of every earlier grant; a re-entry
        keeps it. Of those who hold it beside each other: one token for all, from the first who
        enters until nobody has the key any more, so that they do not refuse each other, and
        strictly greater than those of before. An upgrade and a downgrade bring a new one.
        """
        return self._holds[0].token if self._holds else 0

    @property
    def slot(self) -> int | None:
        """
        Which one of the units of `key` this is, from 0; nobody else has it meanwhile.

        For one unit of a capacity from 2 to 1024; None for everything else.
        """
        return self._holds[0].slot if self._holds else None

    @property
    def units(self) -> int:
        """How many units of `key` are taken: 1 where it is held alone; 0 without a lock."""
        return self._holds[0].want.counted() if self._holds else 0

    @property
    def shared(self) -> bool:
        """Whether others may hold `key` as well, as readers do, or by a capacity."""
        return bool(self._holds) and not self._holds[0].want.alone

    @property
    def held(self) -> bool:
        """Whether all the keys are held, by the local clock. What a parent has, no child has."""
        return bool(self._holds) and all(hold.held for hold in self._holds)

    @property
    def remaining(self) -> float:
        """Seconds that all the keys are held for if no renewal succeeds; 0 when one is lost."""
        return min((hold.remaining for hold in self._holds), default=0.0)

    @property
    def suspect(self) -> bool:
        """
        Whether a key is held and its renewal overdue, so that it may soon be lost.

        The watchdog renews after a third of the lease and tries again after every ninth; from two
        thirds on, without an answer of the store, this is true. A good moment not to begin
        anything.
        """
        return any(hold.suspect for hold in self._holds)

    def ensure_held(self) -> None:
        """
        Raise :exc:`~celery_distlock.errors.LockLostError` unless all the keys are held now.

        Worth calling before what cannot be undone. It says nothing about a moment later: only a
        resource that compares fencing tokens is safe against a process that stops right here.

        Raises :exc:`~celery_distlock.errors.LockNotOwnedError` where nothing is held and the code
        was not told to run unlocked: outside of its task, say.
        """
        if self._wanted and not self._holds:
            raise LockNotOwnedError("no lock is held here: this does not run as a locked task")
        for hold in self._holds:
            hold.ensure_held()

    def extend(self, seconds: float) -> None:
        """
        Make the lease last at least *seconds* from now, with or without a watchdog.

        Raises:
            ValueError: *seconds* is not a positive number, or more than 30 days.
            LockLostError: A key was lost before.
            StoreError: The store did not confirm it; the lease is as long as it was.
        """
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_LEASE:
            raise ValueError(f"extend() takes a positive number of seconds, not {seconds!r}")
        for hold in self._holds:
            hold.extend(float(seconds))

    def upgrade(self, timeout: float | None = None) -> None:
        """
        Have all of what is held beside others: from now on alone, with a new token.

        At once if nobody else has the key. Else it waits, before all that are in the queue, until
        the others have left; nobody enters meanwhile. It lasts until :meth:`downgrade` or the end.

        In a coroutine it would block the event loop: there
        ``async with AsyncLock(key)`` inside the lock that is shared does the same.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            LockConflictError: Others still have the key; or another one who shares it waits for
                having it alone already, so that both would wait for each other: that is said at
                once. What was held is still held as before.
            LockError: It is called in a coroutine.
            LockLostError: The key was lost.
            StoreError: The store cannot do it, or did not answer; what was held is still held.
            ValueError: *timeout* is no number, or negative.
        """
        upgrade_all(self._holds, timeout)

    def downgrade(self) -> None:
        """
        Share what is held alone with any number of others that share; one round trip a key.

        Never refused, and without a gap in which others have the key alone. There is a new token.
        Of several keys, those that the task declares exclusive stay so, unless all are.

        Raises:
            LockLostError: The key was lost.
            StoreUnavailableError: The store did not answer, and may have done it: from now on the
                key counts as shared. Another call asks again; until one is answered, others may
                be kept out, `token` may be that of before, and `slot` is None.
            StoreError: The store cannot do it, or refuses; the key is still held alone.
        """
        downgrade_all(self._holds)

    def cool_down(self, seconds: float) -> None:
        """
        Let nobody enter for *seconds* from now, whether this task or block has ended or not.

        Who has the key goes on; of one that several may hold, all of it rests, also if this process
        dies meanwhile. In a store that does not count units the rest begins when the key is given
        up, and not if its process dies.

        Raises:
            ValueError: *seconds* is not a positive number, or more than 30 days.
            LockLostError: The key was lost.
            StoreError: The store did not confirm it, or cannot do it where several have the key.
        """
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_REST:
            raise ValueError(f"cool_down() takes a positive number of seconds, not {seconds!r}")
        for hold in self._holds:
            hold.cool_down(float(seconds))

    def postpone(self, seconds: float) -> NoReturn:
        """
        End this run of a locked task unfinished, and have it run again after *seconds*.

        For a service that says "too many requests" and when to come again. Meanwhile nobody enters
        the task's keys; then it begins anew, under the same id, before all that wait for them. It
        is no failure, no retry and no requeue; its start counts for the rate. What it has done so
        far is done: there is no way back into the middle of a function.

        It ends the body by an exception, as ``self.retry()`` does, but by none that ``except
        Exception`` catches, nor `autoretry_for`. A body that catches :exc:`BaseException` and does
        not raise it on goes on, with its keys resting.

        Raises:
            ValueError: *seconds* is not a positive number, or more than 30 days.
            LockError: There is no message to put back, as this is no locked task, or one that was
                called without one (directly, by ``apply()``, or eagerly); or the store cannot keep
                tasks until a key is free.
            LockLostError: The key was lost.
            StoreError: The store did not confirm that the key rests.
        """
        why = "this is not the lock of a locked task that runs under one"
        if self._holds and self._why_not_postpone is not None:
            why = self._why_not_postpone()
        if why:
            raise LockError(f"postpone() cannot put this run back: {why}")
        self.cool_down(seconds)
        raise PostponeRequest(seconds)

    def __repr__(self) -> str:
        state = f"{self.remaining:.1f} s left" if self.held else "not held"
        keys = ", ".join(repr(shown(key)) for key in self.keys)
        return f"<Lease {keys} token {self.token}: {state}>"
