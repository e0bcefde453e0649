"""A server in this process that executes the oracle's scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_distlock.stores.memory.server import Server
from tests.oracle import scripts

if TYPE_CHECKING:
    from celery_distlock.stores.redis.connections import Command

__all__ = ["OracleServer"]


class OracleServer(Server):
    """See the module; called as the present scripts are."""

    def _executed(self, call: Command) -> Any:
        if call.script is not None:
            call = call._replace(script=scripts.load(call.script.name))
        return super()._executed(call)
