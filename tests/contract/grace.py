"""The time that stores give one who is served to come, made longer for busy machines."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from celery_distlock.stores import memory
from celery_distlock.stores.redis import capacity, inspection, scripts, sending
from celery_distlock.stores.redis import store as redis_store

if TYPE_CHECKING:
    import pytest


def lengthen(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Give the stores in this process other constants: ``GRANT``, ``CLAIM`` or ``UNSENT``."""
    texts = {
        f"local {name}_MS = {1000 * getattr(memory, name):.0f} ": (
            f"local {name}_MS = {1000 * longer:.0f} "
        )
        for name, longer in seconds.items()
    }
    found = [
        (module, name, script)
        for module in (redis_store, inspection, capacity, sending)
        for name, script in vars(module).items()
        if isinstance(script, scripts.Script) and all(text in script.source for text in texts)
    ]
    assert found, f"no script says {list(texts)}"
    for module, name, script in found:
        monkeypatch.setattr(module, name, _replaced(script, texts))
    for name, longer in seconds.items():
        monkeypatch.setattr(memory, name, longer)


def _replaced(script: scripts.Script, texts: dict[str, str]) -> scripts.Script:
    source = script.source
    for old, new in texts.items():
        source = source.replace(old, new)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return replace(script, source=source, sha=sha)
