"""
What users' own tests need: assertions, a clock, a real server, the contract of every lock store.

Nothing in the package imports this. Only `StoreContract` needs pytest, and so does
:mod:`celery_distlock.testing.plugin`, which has the fixtures.
"""

import sys
from typing import TYPE_CHECKING, Any

from .assertions import assert_free, assert_locked, assert_parked, assert_units
from .fake_clock import FakeClock
from .locks import Locks
from .server import EmbeddedServer, die_with_parent

if TYPE_CHECKING:
    from .contract import StoreContract

__all__ = [
    "EmbeddedServer",
    "FakeClock",
    "Locks",
    "StoreContract",
    "assert_free",
    "assert_locked",
    "assert_parked",
    "assert_units",
    "die_with_parent",
]

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.contract")  # failures show values


def __getattr__(name: str) -> Any:
    if name == "StoreContract":
        from .contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
