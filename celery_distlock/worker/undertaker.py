"""Releases what the pool's processes held when they died; renews what they cannot renew."""

import functools
import logging
import threading

from celery import Celery

from celery_distlock import signals
from celery_distlock.errors import StoreError
from celery_distlock.ledger import Ledger, Neglect, Remains
from celery_distlock.runtime import Runtime
from celery_distlock.stores.base import Ownership, RenewOutcome
from celery_distlock.teller import Teller

__all__ = ["Undertaker"]

logger = logging.getLogger(__name__)

ROUND = 0.2  # seconds between looks; a look is one wait() for each process, which returns at once
PATIENCE = 1 / 6  # of a lease, for an answer

_teller = Teller("distlock-obituaries")


class Undertaker:
    """
    A thread of the worker's main process that looks whether its children are alive.

    It does not rely on Celery's being told, which can take seconds, and it never takes a key from a
    process that exists: one that is stuck, or being terminated, holds its key until it is gone. So
    it renews for such a one, too.
    """

    def __init__(self, ledger: Ledger, app: Celery) -> None:
        self._ledger = ledger
        self._app = app
        self._store = Runtime.of(app).store
        self._left: list[Remains] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distlock-undertaker", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End after a last look."""
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.wait(ROUND):
            self._look()
        self._look()

    def _look(self) -> None:
        try:
            self._left += self._ledger.bury()
            self._left = [remains for remains in self._left if not self._released(remains)]
            for neglect in self._ledger.neglected():
                self._renew(neglect)
        except Exception:
            logger.exception("the undertaker stumbled and goes on")

    def _renew(self, neglect: Neglect) -> None:
        # Those in a store of a task's own are left to it: nobody here knows its address.
        ours = {p: hold for p, hold in neglect.holds.items() if hold.store == self._store.identity}
        if not ours:
            return
        wanted = [Ownership(hold.key, hold.owner, hold.lease) for hold in ours.values()]
        outcomes = self._store.renew(wanted, min(hold.lease for hold in wanted) * PATIENCE)
        renewed = [
            place
            for place, (outcome, _) in zip(ours, outcomes, strict=True)
            if outcome is RenewOutcome.RENEWED
        ]
        if renewed:
            self._ledger.keep(neglect, renewed, min(asked_at for _, asked_at in outcomes))
            names = ", ".join(repr(ours[place].key) for place in renewed)
            logger.info("renewed %s for a busy process", names)

    def _released(self, remains: Remains) -> bool:
        """Whether there is nothing more to do about *remains*; false: try again."""
        if remains.store != self._store.identity:
            return True  # a store of the task's own: its lease ends by itself
        try:
            released = self._store.release(remains.key, remains.owner)
        except StoreError:
            return False
        if released.released:
            logger.warning(
                "freed %r, whose holder %s is gone",
                remains.key,
                remains.owner,
                extra={"lock_key": remains.key, "lock_holder": remains.owner},
            )
        self._store.dispatch(released.wake)
        if released.released:
            facts = {"key": remains.key, "holder": remains.owner, "reason": "its process is gone"}
            # By another thread: a receiver that takes its time must not keep the next key locked.
            _teller.tell(functools.partial(signals.send, "lock_freed", self._app, **facts))
        return True
