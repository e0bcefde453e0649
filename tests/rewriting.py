"""Scripts with other lines than they have, for tests."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from celery_distlock.stores.memory.server import Server

if TYPE_CHECKING:
    from celery_distlock.stores.redis.connections import Command
    from celery_distlock.stores.redis.scripts import Script

__all__ = ["RewrittenServer", "rewritten"]

Changes = tuple[tuple[str, str], ...]  # each a text, and what it becomes


@cache
def rewritten(script: Script, changes: Changes) -> Script:
    """Return *script* with *changes* made."""
    source = script.source
    for old, new in changes:
        source = source.replace(old, new)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return replace(script, source=source, sha=sha)


class RewrittenServer(Server):
    """A server in this process with other lines in its scripts."""

    def __init__(self, *changes: tuple[str, str]) -> None:
        super().__init__()
        self._changes = changes
        self._left = {old for old, _ in changes}

    def _executed(self, call: Command) -> Any:
        if call.script is not None:
            self._left -= {old for old in self._left if old in call.script.source}
            call = call._replace(script=rewritten(call.script, self._changes))
        return super()._executed(call)

    def check(self) -> None:
        """Fail if a text was in no script that was called."""
        assert not self._left
