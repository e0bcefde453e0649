"""What every store promises, as tests: see `StoreContract`."""

from .acquiring import Acquiring, Tokens
from .any_text import AnyText
from .inspection import Inspection
from .listing import Listing
from .releasing import Releasing
from .renewing import Renewing
from .second_deliveries import SecondDeliveries
from .sharing import Sharing
from .waiting import Waiting
from .wants import Wants

__all__ = ["StoreContract"]


class StoreContract(
    Acquiring,
    Renewing,
    Releasing,
    Tokens,
    Waiting,
    Wants,
    SecondDeliveries,
    AnyText,
    Inspection,
    Sharing,
    Listing,
):
    """
    Tests that hold a store to the contract of :class:`~celery_distlock.stores.Store`.

    A store that passes them keeps locks as this package's own stores do. Inherit them in a test
    module, and say how to open the store::

        import pytest
        from celery_distlock.testing import StoreContract

        from shop.locks import SQLiteStore


        class TestSQLiteStore(StoreContract):
            fair = False

            @pytest.fixture
            def open_store(self, tmp_path):
                return lambda name: SQLiteStore(f"sqlite://{tmp_path}/locks", prefix=name)

    What the store's `abilities` leave out is skipped, with the reason (``pytest -rs``). A test that
    does not fit the store can be overridden in the class; say there why.

    Fixtures:
        open_store: To be written. A callable that opens a store: those that get one name share
            their records, as two processes would, those that get different names do not. Each test
            starts with no records and closes what was opened.
        pass_time: To be written where it can be. A callable that lets seconds pass for what the
            store has recorded, by changing its records or its clock. Without it, tests wait up to
            2 seconds, and those that need more are skipped.

    Attributes:
        shortest_lease: Seconds. A lease that the tests see to its end; within it, some requests
            have to be answered. More for a store that is slow or whose leases are coarse.
        longest_lease: Seconds, 30 at least: the longest that the store grants, if that is less than
            a month.
        fair: Blocked waiters are served first come, first served. False: who happens to ask first
            has the key.
        hands_over: A release grants the key to the first blocked waiter at once. False: the waiter
            takes it when it looks.
        bound: A hold is neither taken over nor renewed by another process, as where it ends with
            the session of its own. False: by any that knows the owner.
    """
