"""What a store over Redis does with keys that several hold, beyond granting and releasing them."""

import logging
from typing import Any

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.naming import shown
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.queue_parts import Units
from celery_distlock.stores.values import (
    Limit,
    Release,
    Reply,
    write_rates,
)

from . import scripts
from .answers import Answer
from .connections import milliseconds
from .parts import Part, Reach
from .replies import Replies

__all__ = ["RedisUnits"]

logger = logging.getLogger(__name__)


class RedisUnits(Part, Units):
    """See the module."""

    def __init__(self, reach: Reach, replies: Replies) -> None:
        super().__init__(reach)
        self._replies = replies

    def upgrade(self, key: str, owner: str, lease: float, inbox: Inbox | None = None) -> Reply:
        address = inbox.address if inbox is not None else ""
        answer, asked_at = self._change(_UPGRADE, key, owner, milliseconds(lease), address)
        with self._requests.reading(_UPGRADE, answer):
            return self._replies.reply(key, answer, asked_at)

    def downgrade(self, key: str, owner: str, lease: float) -> Reply:
        answer, asked_at = self._change(_DOWNGRADE, key, owner, milliseconds(lease))
        with self._requests.reading(_DOWNGRADE, answer):
            return self._replies.reply(key, answer, asked_at)

    def rest(self, key: str, owner: str, seconds: float) -> bool:
        answer, _ = self._change(_REST, key, owner, milliseconds(seconds))
        return bool(answer)

    def set_limit(self, key: str, limit: Limit | None) -> Release:
        terms: tuple[Any, ...] = ("", 0, "", "")
        unlisted: StoreUnavailableError | None = None
        if limit is not None:
            unlisted = self._list(key)
            capacity = "-" if limit.capacity is None else limit.capacity
            until = milliseconds(limit.until) if limit.until else 0
            terms = (capacity, until, limit.author, write_rates(limit.rates))
        answer, _ = self._change(_LIMIT, key, *terms)
        if unlisted is not None:
            text = "the limit of %r is set, but no list shows it until somebody waits there: %s"
            logger.warning(text, shown(key), unlisted)
        with self._requests.reading(_LIMIT, answer):
            wake = self._replies.wakes(slot_name(key), Answer(answer)) if answer != 1 else None
            return Release(True, wake)

    def _list(self, key: str) -> StoreUnavailableError | None:
        """Have lists show *key*; return why not, if a cluster's node with the index is away."""
        try:
            self._requests.ask([self._records.index("add", slot_name(key))], key)
        except StoreUnavailableError as error:
            return error
        return None

    def _change(self, script: scripts.Script, key: str, *arguments: Any) -> tuple[Any, float]:
        call = self._records.call(script, slot_name(key), *arguments, confirmed=True)
        asked = self._requests.ask([call], key)
        return asked.answers[0], asked.asked_at


_UPGRADE, _DOWNGRADE, _REST, _LIMIT = map(scripts.load, ("upgrade", "downgrade", "rest", "limit"))
