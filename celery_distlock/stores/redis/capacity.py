"""Operations of a store over Redis on shared keys, other than granting and releasing them."""

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
from .connections import milliseconds
from .parts import Part, Reach
from .records import Replies
from .request_runner import Answered

logger = logging.getLogger(__name__)


class RedisUnits(Part, Units):
    """See the module."""

    def __init__(self, reach: Reach, replies: Replies) -> None:
        super().__init__(reach)
        self._replies = replies

    def upgrade(self, key: str, owner: str, lease: float, inbox: Inbox | None = None) -> Reply:
        address = inbox.address if inbox is not None else ""
        return self._request(_UPGRADE, key, owner, milliseconds(lease), address)

    def downgrade(self, key: str, owner: str, lease: float) -> Reply:
        return self._request(_DOWNGRADE, key, owner, milliseconds(lease))

    def rest(self, key: str, owner: str, seconds: float) -> bool:
        return bool(self._ask(_REST, key, owner, milliseconds(seconds)).answers[0])

    def set_limit(self, key: str, limit: Limit | None, lane: str | None = None) -> Release:
        terms: tuple[Any, ...] = ("", 0, "", "")
        unlisted: StoreUnavailableError | None = None
        if limit is not None:
            unlisted = self._list(key)
            capacity = "-" if limit.capacity is None else limit.capacity
            until = milliseconds(limit.until) if limit.until else 0
            terms = (capacity, until, limit.author, write_rates(limit.rates))
        asked = self._ask(_LIMIT, key, *terms, *([] if lane is None else [slot_name(lane)]))
        if unlisted is not None:
            text = "the limit of %r is set, but lists do not show it until a caller waits there: %s"
            logger.warning(text, shown(key), unlisted)
        return self._replies.released(slot_name(key), _LIMIT, asked)

    def _list(self, key: str) -> StoreUnavailableError | None:
        """Make lists show *key*; return the error if the node with the index is unreachable."""
        try:
            self._requests.ask([self._records.index("add", slot_name(key))], key)
        except StoreUnavailableError as error:
            return error
        return None

    def _request(self, script: scripts.Script, key: str, *arguments: Any) -> Reply:
        asked = self._ask(script, key, *arguments)
        return self._replies.reply(script, key, asked.answers[0], asked.asked_at)

    def _ask(self, script: scripts.Script, key: str, *arguments: Any) -> Answered:
        call = self._records.call(script, slot_name(key), *arguments, confirmed=True)
        return self._requests.ask([call], key)


_UPGRADE, _DOWNGRADE, _REST, _LIMIT = map(scripts.load, ("upgrade", "downgrade", "rest", "limit"))
