"""`Key`: what a task or a `Lock` takes, and how much of it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from .errors import ConfigurationError
from .order import Order
from .rate import Rate, RateLike, rates_in

__all__ = ["MAX_CAPACITY", "MAX_REST", "UNSAID", "Key"]

MAX_CAPACITY = 1_000_000
MAX_REST = 30 * 86400.0  # seconds


class _Unsaid(int):
    """The type of a capacity that was not given."""


UNSAID = _Unsaid(1)


@dataclass(frozen=True, repr=False)  # without slots, which `of` would have to set one by one
class Key:
    """
    A key and the amount to take; a plain text is a key that every caller wants exclusive.

    Different tasks and calls may ask for different amounts of one key: each request is judged by
    its own capacity when it is granted, and an exclusive holder excludes all others. Requests are
    granted in the order of arrival, whether later ones would fit or not: so no reader, no writer
    and no heavy task starves.

    Args:
        template: As `lock_key` takes it; for a :class:`~celery_distlock.Lock`, and where a callable
            returns it, the key itself.
        capacity: The number of units: 1 is exclusive; N allows N units at a time; None allows any
            number.
        weight: The number of units that this holder needs. More than the capacity counts as all of
            it, so that it runs without other holders.
        shared: True means ``capacity=None``: concurrent with all other shared holders, never with
            an exclusive one, as readers are.
        min_hold: Seconds from the grant for which the units stay taken, even if the task has ended.
            Not if its process dies.
        cooldown: Seconds from the end of a successful task for which its units stay taken.
        rate: How often the key may be taken by all holders with a rate there: ``"100/m"``,
            ``"5/10s"``, a :class:`Rate`, or up to four of them, which must all allow it. A task
            waits for its rate as it waits for a holder. Needs `shared` or a `capacity`, which may
            be 1.
        cost: The number of starts that this one counts as.
        order: In which order the tasks start that wait for it; None: in the order of arrival. Then
            the task's calls go through the store, as with ``lock_via="store"``. For tasks with one
            key and the policy ``"requeue"``.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range, or two of them
            contradict each other.
    """

    template: str
    capacity: int | None = UNSAID
    weight: int = 1
    shared: bool = False
    min_hold: float = 0.0
    cooldown: float = 0.0
    rate: RateLike | None = None
    cost: int = 1
    order: Order | None = None

    def __post_init__(self) -> None:
        is_said = self.capacity is not UNSAID
        if not is_said:
            object.__setattr__(self, "capacity", 1)
        given: Mapping[str, Any] = vars(self).copy()
        if not isinstance(given["template"], str) or not self.template:
            raise ConfigurationError(f"Key() takes a non-empty text, not {self.template!r}")
        object.__setattr__(self, "template", str.__str__(self.template))  # the value of an enum
        self._check_counts(given)
        if not isinstance(given["shared"], bool):
            raise ConfigurationError(self._wrong("shared must be True or False", "shared"))
        if self.shared and self.capacity != 1:
            raise ConfigurationError(
                f"Key({self.template!r}): shared=True is for any number at once, and"
                f" capacity={self.capacity!r} contradicts that; give one of them"
            )
        if self.weight != 1 and (self.shared or self.capacity in (None, 1)):
            raise ConfigurationError(
                f"Key({self.template!r}): weight={self.weight} needs a capacity, as"
                f" in capacity={2 * self.weight}"
            )
        for name in ("min_hold", "cooldown"):
            seconds = given[name]
            if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_REST:
                words = f"{name} is from 0 to {MAX_REST:.0f} seconds"
                raise ConfigurationError(self._wrong(words, name))
        self._check_rates(is_said=is_said)
        if self.order is not None:
            self._check_order(self.order)

    def _check_order(self, order: Any) -> None:
        if not isinstance(order, Order):
            raise ConfigurationError(
                self._wrong("order is an Order, as in Order('{user}')", "order")
            )
        if order.strict and not self.alone:
            raise ConfigurationError(
                f"Key({self.template!r}): {order!r} is strict, which is for keys that one task has"
                " at a time: several that have it begin in any order; leave strict or capacity out"
            )
        if order.most is not None and self.alone:
            raise ConfigurationError(
                f"Key({self.template!r}): {order!r} has a most, and only one at a time holds the"
                " key; give it a capacity, or shared=True for any number"
            )
        if order.most is not None and order.most < self.weight:
            raise ConfigurationError(
                f"Key({self.template!r}): weight={self.weight} is more than {order!r} allows its"
                " lane, so it would never start; raise most, or lower the weight"
            )

    def _check_rates(self, *, is_said: bool) -> None:
        rates = rates_in(self.rate, f"Key({self.template!r})")
        object.__setattr__(self, "rate", rates or None)
        if not _is_count(self.cost):
            words = f"cost is a whole number from 1 to {MAX_CAPACITY}"
            raise ConfigurationError(self._wrong(words, "cost"))
        if self.cost != 1 and not rates:
            raise ConfigurationError(
                f"Key({self.template!r}): cost={self.cost} needs a rate, as in"
                f" rate='{10 * self.cost}/m'"
            )
        lowest = min(rates, key=lambda rate: rate.limit, default=None)
        if lowest is not None and self.cost > lowest.limit:
            raise ConfigurationError(
                f"Key({self.template!r}): cost={self.cost} is more than rate {lowest} allows, so it"
                " would never start; raise the limit, or lower the cost"
            )
        if rates and not is_said and not self.shared:
            raise ConfigurationError(
                f"Key({self.template!r}): rate={str(rates[0])!r} does not set how many may run at"
                " once; add shared=True for any number, or capacity=N, with 1 for one at a time"
            )

    def _check_counts(self, given: Mapping[str, Any]) -> None:
        capacity = given["capacity"]
        if capacity == 0 and type(capacity) is int:
            words = "capacity is 1 or more; `celery locks pause` stops all new grants"
            raise ConfigurationError(self._wrong(words, "capacity"))
        if capacity is not None and not _is_count(capacity):
            words = f"capacity is a whole number from 1 to {MAX_CAPACITY}, or None for any number"
            raise ConfigurationError(self._wrong(words, "capacity"))
        if not _is_count(given["weight"]):
            words = f"weight is a whole number from 1 to {MAX_CAPACITY}"
            raise ConfigurationError(self._wrong(words, "weight"))

    def _wrong(self, words: str, name: str) -> str:
        return f"Key({self.template!r}): {words}, not {getattr(self, name)!r}"

    @property
    def alone(self) -> bool:
        """Whether it is taken exclusively."""
        return self.capacity == 1 and not self.shared

    @property
    def rates(self) -> tuple[Rate, ...]:
        """How often it may be taken."""
        return self.rate or ()  # type: ignore[return-value]  # __post_init__ has converted it

    def of(self, text: str, order: Order | None = None) -> Self:
        """Return the same terms for the key *text*, and for *order*."""
        made = object.__new__(type(self))  # the rest was checked before, and each call comes here
        vars(made).update(vars(self), template=text)
        if order is not None:
            vars(made)["order"] = order
        return made

    def at_most(self, rate: Rate) -> Self:
        """
        Return the same with one more *rate*.

        Raises:
            ConfigurationError: It has the maximum number of rates, or would never start.
        """
        where = f"Key({self.template!r})"
        if self.cost > rate.limit:
            raise ConfigurationError(
                f"{where}: cost={self.cost} is more than rate {rate} allows, so it would never"
                " start"
            )
        others = [each for each in self.rates if each.per != rate.per]
        made = self.of(self.template)
        object.__setattr__(made, "rate", rates_in([*others, rate], where))
        return made

    def __repr__(self) -> str:
        said = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        rates = [str(rate) if rate.burst == 1 else rate for rate in self.rates]
        said["rate"] = rates[0] if len(rates) == 1 else rates or None
        defaults = {each.name: each.default for each in fields(self)}
        more = [
            f"{name}={value!r}"
            for name, value in said.items()
            if value != defaults[name] or (name == "capacity" and self.rates and not self.shared)
        ]
        return f"Key({', '.join([repr(self.template), *more])})"


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_CAPACITY
