"""A server in this process that executes the oracle's scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_distlock.stores.memory.server import Server, _words
from celery_distlock.stores.redis.connections import script_call
from tests.oracle import scripts

if TYPE_CHECKING:
    from celery_distlock.stores.redis.connections import Command

__all__ = ["OracleServer"]


class OracleServer(Server):
    """See the module; called as the present scripts are."""

    def _executed(self, call: Command) -> Any:
        if call.script is not None:
            script = scripts.load(call.script.name)
            if script.keys != call.script.keys:  # its renewal takes one more key
                first = _words(call.head)[3].decode("utf-8", "surrogateescape")
                stem = first.removesuffix(call.script.keys[0])
                call = script_call(script, (stem,), *call.arguments)
            call = call._replace(script=script)
        return super()._executed(call)
