"""
Helpers for users' own tests: assertions, a clock, a real server, the contract of lock stores.

Nothing in the package imports this. Only the contract and the fixtures, in
:mod:`celery_distlock.testing.plugin`, need pytest.
"""

import sys
from typing import TYPE_CHECKING, Any

from .assertions import assert_free, assert_locked, assert_parked, assert_units
from .fake_clock import FakeClock
from .locks import Locks
from .server import EmbeddedServer, die_with_parent

if TYPE_CHECKING:
    from .contract import (
        CountContract,
        ListContract,
        OrderContract,
        RecallContract,
        RecogniseContract,
        SeveralContract,
        StoreContract,
    )

__all__ = [
    "CountContract",
    "EmbeddedServer",
    "FakeClock",
    "ListContract",
    "Locks",
    "OrderContract",
    "RecallContract",
    "RecogniseContract",
    "SeveralContract",
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
    if name in __all__:
        from . import contract

        return getattr(contract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
