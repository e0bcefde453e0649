"""Tells the store what is with the broker, beside other requests or soon: nobody waits for it."""

import logging
import os
import time

from celery_distlock.errors import StoreError
from celery_distlock.process.background import BackgroundNotifier
from celery_distlock.stores import QueueStore, WokenTask

__all__ = ["Published"]

logger = logging.getLogger(__name__)

PAUSE = 0.2  # seconds in which there may be another request; in ten times that a sweep sends again


class Published:
    """
    What was published and *store* does not know yet.

    What a process that dies has not told is sent again, and recognised as a second delivery.
    """

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._notifier = BackgroundNotifier("distlock-published")
        self._waiting: list[WokenTask] = []
        self._process = os.getpid()
        self._comes = False

    def note(self, wake: WokenTask) -> None:
        """Have it told soon."""
        if self._process != os.getpid():  # what waited when it was forked, the parent tells
            self._waiting, self._comes, self._process = [], False, os.getpid()
        self._waiting.append(wake)
        if not self._comes:
            self._comes = True
            self._notifier.submit(self._tell)

    def take(self) -> list[WokenTask]:
        """Return what is to be told, for the caller to tell."""
        if not self._waiting or self._process != os.getpid():
            return []
        waiting, self._waiting = self._waiting, []
        return waiting

    def _tell(self) -> None:
        time.sleep(PAUSE)
        self._comes = False
        try:
            self._store.parking.mark_all_published(self.take())
        except StoreError as error:
            logger.debug("that messages are with the broker was not noted: %s", error)
