"""The time that stores give a waiter to claim its grant, made longer for busy machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_distlock.stores.redis import capacity, inspection, scripts, sending
from celery_distlock.stores.redis import store as redis_store
from tests.rewriting import rewritten

if TYPE_CHECKING:
    import pytest


_USUAL_MS = {"GRANT": 1000, "CLAIM": 5000, "UNSENT": 2000}


def lengthen(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Give the stores in this process other constants: ``GRANT``, ``CLAIM`` or ``UNSENT``."""
    texts = {
        f"local {name}_MS = {usual} ": f"local {name}_MS = {1000 * seconds[name]:.0f} "
        for name, usual in _USUAL_MS.items()
        if name in seconds
    }
    found = [
        (module, name, script)
        for module in (redis_store, inspection, capacity, sending)
        for name, script in vars(module).items()
        if isinstance(script, scripts.Script) and all(text in script.source for text in texts)
    ]
    assert found, f"no script says {list(texts)}"
    for module, name, script in found:
        monkeypatch.setattr(module, name, rewritten(script, tuple(texts.items())))
