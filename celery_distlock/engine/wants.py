"""Convert a `Key` to a request for a store, and check that the store can serve it."""

from collections.abc import Iterable

from celery_distlock.errors import ConfigurationError
from celery_distlock.key import Key
from celery_distlock.stores import Store
from celery_distlock.stores.values import ALONE, Want


def want_of(key: Key) -> Want:
    """Return the amount of *key* that is asked for."""
    if key.alone and not key.rate:
        return ALONE
    capacity = 0 if key.shared or key.capacity is None else key.capacity
    return Want(key.weight, capacity, key.rates, key.cost)


def key_wanting(text: str, want: Want) -> Key:
    """Return the key *text* with the capacity, weight, rates and cost of *want*."""
    weight = want.units if want.capacity > 1 else 1
    capacity, cost = want.capacity or None, want.cost if want.rates else 1
    return Key(text, capacity=capacity, weight=weight, rate=want.rates or None, cost=cost)


def ensure_able(store: Store, keys: Iterable[Key], where: str) -> None:
    """
    Raise :exc:`ConfigurationError` if *store* cannot do what one of *keys* needs.

    Args:
        store: The store.
        keys: What is asked for.
        where: The name of the caller, for the message.
    """
    for key in keys:
        want = want_of(key)
        needed = None if want is ALONE else want.needs
        if needed is not None and needed not in store.abilities:
            raise ConfigurationError(
                f"{where}: {key!r} needs a store that can {needed.value}; {store.address} cannot"
            )
