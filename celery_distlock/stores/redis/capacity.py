"""What a store over Redis does with keys that several hold, beyond granting and releasing them."""

from typing import Any

from celery_distlock.keys import slot_name
from celery_distlock.stores.capacity import CapacityStore
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.values import Limit, Release, Reply, Status, Want

from . import scripts
from .connections import milliseconds, time_left
from .inspection import wakes_of
from .records import Records
from .request_runner import RequestRunner

__all__ = ["RedisCapacity", "written_want"]


class RedisCapacity(CapacityStore):
    """See the module. What it needs is set by the class that inherits from it."""

    _records: Records
    _requests: RequestRunner

    def _token(self, key: str, value: bytes | None) -> int:
        """Return the token that a script has told."""
        raise NotImplementedError

    def upgrade(self, key: str, owner: str, lease: float, inbox: Inbox | None = None) -> Reply:
        address = inbox.address if inbox is not None else ""
        answer, asked_at = self._change(_UPGRADE, key, owner, milliseconds(lease), address)
        if not isinstance(answer, list):
            return Reply(Status.GRANTED, asked_at, self._token(key, answer))
        status, *ttl_ms = answer
        remaining = time_left(ttl_ms[0]) if ttl_ms else 0.0
        return Reply(Status(status.decode()), asked_at, remaining=remaining)

    def downgrade(self, key: str, owner: str, lease: float) -> Reply:
        answer, asked_at = self._change(_DOWNGRADE, key, owner, milliseconds(lease))
        status, *granted = answer
        if not granted:
            return Reply(Status(status.decode()), asked_at)
        token, slot, *woken = granted
        wake = wakes_of(slot_name(key), woken)
        return Reply(Status.GRANTED, asked_at, self._token(key, token), wake=wake, slot=slot)

    def rest(self, key: str, owner: str, seconds: float) -> bool:
        answer, _ = self._change(_REST, key, owner, milliseconds(seconds))
        return bool(answer)

    def set_limit(self, key: str, limit: Limit | None) -> Release:
        terms: tuple[Any, ...] = ("", 0, "")
        if limit is not None:
            self._requests.ask([self._records.index("add", slot_name(key))], key)
            terms = (limit.capacity, milliseconds(limit.until) if limit.until else 0, limit.author)
        answer, _ = self._change(_LIMIT, key, *terms)
        woken = answer if isinstance(answer, list) else ()
        return Release(True, wakes_of(slot_name(key), woken))

    def _change(self, script: scripts.Script, key: str, *arguments: Any) -> tuple[Any, float]:
        call = self._records.call(script, slot_name(key), *arguments, confirmed=True)
        asked = self._requests.ask([call], key)
        return asked.answers[0], asked.asked_at


def written_want(want: Want) -> str:
    """Return *want* as scripts read it."""
    return f"{want.units}/{want.capacity}"


_UPGRADE, _DOWNGRADE, _REST, _LIMIT = map(scripts.load, ("upgrade", "downgrade", "rest", "limit"))
