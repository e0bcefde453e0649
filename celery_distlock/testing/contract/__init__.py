"""What every store promises, as tests: `StoreContract`, and a class for each ability."""

from celery_distlock.stores.base import Store

from .acquiring import Acquiring, Tokens
from .any_text import AnyText
from .inspection import Inspection
from .listing import CountContract, ListContract
from .queueing import OrderContract
from .recognising import RecogniseContract
from .refusing import Refusing
from .releasing import Releasing
from .renewing import Renewing
from .second_deliveries import SecondDeliveries
from .several import SeveralContract
from .sharing import Sharing
from .waiting import Waiting

__all__ = [
    "CountContract",
    "ListContract",
    "OrderContract",
    "RecogniseContract",
    "SeveralContract",
    "StoreContract",
]

ABILITIES = (RecogniseContract, ListContract, CountContract, SeveralContract)


class StoreContract(
    Acquiring,
    Renewing,
    Releasing,
    Tokens,
    Refusing,
    SecondDeliveries,
    AnyText,
    Inspection,
    Sharing,
    Waiting,
):
    """
    Hold a store to what every :class:`~celery_distlock.stores.Store` promises.

    A store that passes keeps locks as this package's own stores do. Inherit the tests in a test
    module, with those of each ability that the store has, and say how to open the store::

        import pytest
        from celery_distlock.testing import StoreContract

        from shop.locks import SQLiteStore


        class TestSQLiteStore(StoreContract):
            @pytest.fixture
            def open_store(self, tmp_path):
                return lambda name: SQLiteStore(f"sqlite://{tmp_path}/locks", prefix=name)

    A test fails if an ability of the store has tests that the class does not inherit. A test that
    does not fit the store can be overridden in the class; say there why.

    Fixtures:
        open_store: Must be written. A callable that opens a store: those with one name share their
            records, as in two processes, those with different names do not. Each test starts
            with no records and closes what was opened.
        pass_time: May be written. A callable that lets seconds pass for what the store has
            recorded, by changing its records or its clock. Without it, tests wait: up to 6 s.

    Attributes:
        shortest_lease: Seconds. A lease that the tests see to its end; within it, some requests
            must be answered. More for a store that is slow or whose leases are coarse.
        longest_lease: Seconds, 30 at least: the longest that the store grants, if that is less than
            a month.
        hands_over: A release grants the key to the first blocked waiter at once. False: the waiter
            takes it when it looks.
    """

    def test_the_class_inherits_the_tests_of_each_ability(self, store: Store) -> None:
        inherited = {each.ability for each in ABILITIES if isinstance(self, each)}

        assert inherited == store.abilities & {each.ability for each in ABILITIES}
