"""Tests of what every store promises: `StoreContract`, and a class for each ability."""

from celery_distlock.stores.base import Store

from .acquiring import Acquiring, Tokens
from .any_text import AnyText
from .inspection import Inspection
from .listing import CountContract, ListContract
from .queueing import OrderContract
from .recalling import RecallContract
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
    "RecallContract",
    "RecogniseContract",
    "SeveralContract",
    "StoreContract",
]

ABILITIES = (RecogniseContract, ListContract, CountContract, SeveralContract, RecallContract)


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
    Test what every :class:`~celery_distlock.stores.Store` promises.

    A store that passes keeps locks like this package's own stores. Inherit the tests in a test
    module, along with those of each ability that the store has, and provide a fixture that opens
    the store::

        import pytest
        from celery_distlock.testing import StoreContract

        from shop.locks import SQLiteStore


        class TestSQLiteStore(StoreContract):
            @pytest.fixture
            def open_store(self, tmp_path):
                return lambda name: SQLiteStore(f"sqlite://{tmp_path}/locks", prefix=name)

    A test fails if an ability of the store has tests that the class does not inherit. You can
    override a test that does not fit the store in the class; document the reason there.

    Fixtures:
        open_store: Required. A callable that opens a store: stores with the same name share their
            records, as in two processes; stores with different names do not. Each test starts with
            no records, and closes the stores that it has opened.
        pass_time: Optional. A callable that lets seconds pass for the store's records, by changing
            them or the store's clock. Without it, tests wait for up to 6 s.

    Attributes:
        shortest_lease: Seconds. Tests wait for such a lease to end, and the store must answer some
            requests before that. Increase it for a slow store, or one with coarse leases.
        longest_lease: Seconds, at least 30: the longest lease that the store grants, if that is
            less than a month.
        hands_over: Whether a release grants the key to the first blocked waiter at once. If false,
            the waiter takes it when it looks.
    """

    def test_the_class_inherits_the_tests_of_each_ability(self, store: Store) -> None:
        inherited = {each.ability for each in ABILITIES if isinstance(self, each)}

        assert inherited == store.abilities & {each.ability for each in ABILITIES}
