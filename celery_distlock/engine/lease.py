"""The view of a hold for the code that runs under it."""

import sys
from collections.abc import Callable
from typing import NoReturn

from celery_distlock.errors import LockError, LockNotOwnedError
from celery_distlock.key import MAX_REST
from celery_distlock.naming import shown
from celery_distlock.settings import MAX_LEASE

from .abort import raise_what_is_due
from .hold import Hold
from .upgrading import downgrade_all, upgrade_all


class PostponeRequest(BaseException):
    """
    Ends a task's execution that must run again; see :meth:`Lease.postpone`.

    Not an :exc:`Exception`: the task's code must not handle it as an error.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"to run again in {seconds:g} s")
        self.seconds = seconds


class Lease:
    """
    What a task or a :class:`~celery_distlock.Lock` holds, for the code that runs under it.

    Attributes are local: no round trip. A task may run unlocked on purpose
    (``distlock_enabled=False``, a key of None, ``lock_on_outage="run"``). Its lease has no keys, is
    false, has the token 0, and its :meth:`ensure_held` passes.
    """

    def __init__(
        self,
        holds: tuple[Hold, ...],
        *,
        wanted: bool = True,
        why_not_postpone: Callable[[], str] | None = None,
    ) -> None:
        self._holds = holds
        self._wanted = wanted  # false: this code runs unlocked on purpose
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

        The token of an exclusive holder is strictly greater than that of every earlier grant; a
        re-entry keeps it. Concurrent holders have one token in common, from the first of them until
        the key has no holder, so that they do not fence each other off; it is strictly greater than
        all tokens before it. An upgrade and a downgrade bring a new one.
        """
        return self._holds[0].token if self._holds else 0

    @property
    def slot(self) -> int | None:
        """
        The index of this unit of `key`, from 0; no other holder has it at the same time.

        For one unit of a capacity from 2 to 1024; None for everything else.
        """
        return self._holds[0].slot if self._holds else None

    @property
    def units(self) -> int:
        """The number of units of `key` taken: 1 where it is exclusive; 0 without a lock."""
        return self._holds[0].want.counted() if self._holds else 0

    @property
    def shared(self) -> bool:
        """Whether others may hold `key` as well, as readers do, or by a capacity."""
        return bool(self._holds) and not self._holds[0].want.alone

    @property
    def held(self) -> bool:
        """Whether all the keys are held, by the local clock. False in a forked child."""
        return bool(self._holds) and all(hold.held for hold in self._holds)

    @property
    def remaining(self) -> float:
        """Seconds that all the keys are held for if no renewal succeeds; 0 when one is lost."""
        return min((hold.remaining for hold in self._holds), default=0.0)

    @property
    def suspect(self) -> bool:
        """
        Whether a key is held and its renewal overdue, so that it may soon be lost.

        The watchdog renews after a third of the lease and tries again after every ninth. This is
        true from two thirds on, if the store has not answered. Better not begin anything then.
        """
        return any(hold.suspect for hold in self._holds)

    @property
    def recalled(self) -> bool:
        """
        Whether this run is asked to leave, as a newer call or an operator wants its key.

        It still holds all its keys. With ``Latest(running="tell")`` nothing else happens. It is
        true within about a second of the call.
        """
        return any(hold.recalled for hold in self._holds)

    def ensure_held(self) -> None:
        """
        Raise :exc:`~celery_distlock.errors.LockLostError` unless all the keys are held now.

        Call it before anything that cannot be undone. It guarantees nothing about a moment later:
        only a resource that compares fencing tokens is safe against a process that stops right
        here.

        Raises :exc:`~celery_distlock.errors.RecalledError` if the run is recalled and that was not
        raised in it before.

        Raises :exc:`~celery_distlock.errors.LockNotOwnedError` where nothing is held and the code
        does not run unlocked on purpose: outside of its task, for example.
        """
        if self._wanted and not self._holds:
            raise LockNotOwnedError("no lock is held here: this does not run as a locked task")
        for hold in self._holds:
            hold.ensure_held()
        if self.recalled:
            raise_what_is_due(sys._getframe())

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
        Upgrade every shared key to exclusive, with a new token.

        Succeeds immediately if there is no other holder. Otherwise it waits, ahead of the whole
        queue, until the other holders have left; no caller is admitted while it waits. The upgrade
        lasts until :meth:`downgrade` or the end.

        In a coroutine it would block the event loop: there, use ``async with AsyncLock(key)``
        inside the shared lock, which does the same.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            LockConflictError: There are still other holders; or another holder already waits for an
                upgrade, so that both would wait for each other, which is reported immediately. The
                keys are held as before.
            LockError: It is called in a coroutine.
            LockLostError: The key was lost.
            StoreError: The store cannot do it, or did not answer; the keys are still held.
            ValueError: *timeout* is not a number, or negative.
        """
        upgrade_all(self._holds, timeout)

    def downgrade(self) -> None:
        """
        Share exclusive keys with any number of other shared holders; one round trip a key.

        Never refused, and without a gap in which another holder has the key exclusive. There is a
        new token. Of several keys, those that the task declares exclusive stay so, unless all are.

        Raises:
            LockLostError: The key was lost.
            StoreUnavailableError: The store did not answer, and may have done it: from now on the
                key counts as shared. Another call asks again; until one is answered, other callers
                may be refused, `token` may be the earlier one, and `slot` is None.
            StoreError: The store cannot do it, or refuses; the key is still exclusive.
        """
        downgrade_all(self._holds)

    def cool_down(self, seconds: float) -> None:
        """
        Refuse all new grants for *seconds* from now, whether this task or block has ended or not.

        Current holders go on. Of a key with a capacity, all units rest, even if this process dies
        before the end. In a store that does not count units, the rest begins when the key is
        released, and not at all if its process dies.

        Raises:
            ValueError: *seconds* is not a positive number, or more than 30 days.
            LockLostError: The key was lost.
            StoreError: The store did not confirm it, or cannot do it for a shared key.
        """
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_REST:
            raise ValueError(f"cool_down() takes a positive number of seconds, not {seconds!r}")
        for hold in self._holds:
            hold.cool_down(float(seconds))

    def postpone(self, seconds: float) -> NoReturn:
        """
        End this execution of a locked task unfinished, and execute it again after *seconds*.

        For a service that answers "too many requests" and when to try again. No caller is admitted
        to the task's keys until then. The task then starts from the beginning, under the same id,
        ahead of all waiters. This is not a failure, a retry or a requeue; its start counts for the
        rate. Work that is already done stays done: execution cannot resume in the middle of a
        function.

        It ends the body by an exception, as ``self.retry()`` does, but by one that neither ``except
        Exception`` nor `autoretry_for` catches. A body that catches :exc:`BaseException` and does
        not re-raise it goes on, with its keys resting.

        Raises:
            ValueError: *seconds* is not a positive number, or more than 30 days.
            LockError: There is no message to put back: this is not a locked task, or one that was
                called without a message (directly, by ``apply()``, or eagerly); or the store cannot
                keep tasks until a key is free.
            LockLostError: The key was lost.
            RecalledError: The run is recalled, so it is not executed again.
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
