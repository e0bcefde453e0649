"""
What users' own tests need: a real server, and the contract that every lock store keeps.

Nothing in the package imports this. Only `StoreContract` needs pytest.
"""

import sys
from typing import TYPE_CHECKING, Any

from .server import EmbeddedServer, die_with_parent

if TYPE_CHECKING:
    from .contract import StoreContract

__all__ = ["EmbeddedServer", "StoreContract", "die_with_parent"]

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.contract")  # failures show values


def __getattr__(name: str) -> Any:
    if name == "StoreContract":
        from .contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
