"""The audit record of operators' actions: the action, its author and its reason."""

import getpass
import logging
import os
import socket
from collections.abc import Sequence

from celery_distlock.errors import StoreError
from celery_distlock.naming import shown
from celery_distlock.stores import Ability, Action, QueueStore, Store

logger = logging.getLogger(__name__)

MOST_TEXT = 200  # characters of a reason or an author


class Act:
    """
    One action of an operator.

    Args:
        name: The action, as in :class:`~celery_distlock.stores.Action`.
        author: The operator; empty: this process's user and host.
        reason: The reason, which may be empty.

    Raises:
        ValueError: *author* or *reason* is longer than `MOST_TEXT`.
    """

    def __init__(self, name: str, author: str, reason: str) -> None:
        self.name = name
        self.author = _checked("author", author) or this_user()
        self.reason = _checked("reason", reason)

    def __str__(self) -> str:
        return f"{self.author}{self.reason and f': {self.reason}'}"

    def record(self, store: Store, key: str, about: str = "", owners: Sequence[str] = ()) -> None:
        """Record the action in *store*; a failure is logged and does not prevent the action."""
        if Ability.QUEUE not in store.abilities:
            return
        action = Action(self.name, self.author, self.reason, about, tuple(owners))
        try:
            QueueStore.of(store).audit.record_action(key, action)
        except StoreError as error:
            text = "the action on %r, its author and its reason could not be recorded: %s"
            logger.warning(text, shown(key), error)


def _checked(what: str, text: str) -> str:
    """Return *text* on one line; raise :exc:`ValueError` if it is too long."""
    if len(text) > MOST_TEXT:
        raise ValueError(
            f"{what} has {len(text)} characters, the limit is {MOST_TEXT}: refer to a ticket, as in"
            " 'INC-4711: the import hangs'"
        )
    return " ".join(text.split())


def this_user() -> str:
    """Return this process's user and host: ``user@host``."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # users in containers may have no name
        user = f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"[:MOST_TEXT]
