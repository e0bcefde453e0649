"""`Key`: what a task or a `Lock` takes, and how much of it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from .errors import ConfigurationError

__all__ = ["MAX_CAPACITY", "MAX_REST", "Key"]

MAX_CAPACITY = 1_000_000
MAX_REST = 30 * 86400.0  # seconds


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """
    What is taken, and how much of it; a plain text is a key of which everybody wants all.

    Of one key, different tasks and calls may want different things: each is judged by its own
    capacity when it is granted, and one who is alone excludes everybody. Who comes first goes
    first, whether others behind would fit or not: so no reader, no writer and no heavy task
    starves.

    Args:
        template: As `lock_key` takes it; for a :class:`~celery_distlock.Lock`, and where a callable
            returns it, the key itself.
        capacity: How many units there are: 1, and it is held alone; N, and so many units are held
            at once; None: any number.
        weight: How many units this taker needs. More than the capacity counts as all of it, so it
            runs when nobody else does.
        shared: True is ``capacity=None``: beside all others that share, never beside one who is
            alone, as a reader beside other readers.
        min_hold: Seconds from the grant for which what was taken stays taken, though its task has
            ended. Not if its process dies.
        cooldown: Seconds from the end of a task that succeeded for which what it has taken stays
            taken.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range, or two of them
            contradict each other.
    """

    template: str
    capacity: int | None = 1
    weight: int = 1
    shared: bool = False
    min_hold: float = 0.0
    cooldown: float = 0.0

    def __post_init__(self) -> None:
        given: Mapping[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        if not isinstance(given["template"], str) or not self.template:
            raise ConfigurationError(f"Key() takes a text that is not empty, not {self.template!r}")
        self._check_counts(given)
        if not isinstance(given["shared"], bool):
            raise ConfigurationError(self._wrong("shared must be True or False", "shared"))
        if self.shared and self.capacity != 1:
            raise ConfigurationError(
                f"Key({self.template!r}): shared=True is for any number at once, and"
                f" capacity={self.capacity!r} is another number; give one of them"
            )
        if self.weight != 1 and (self.shared or self.capacity in (None, 1)):
            raise ConfigurationError(
                f"Key({self.template!r}): weight={self.weight} needs a capacity to be a part of, as"
                f" in capacity={2 * self.weight}"
            )
        for name in ("min_hold", "cooldown"):
            seconds = given[name]
            if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_REST:
                words = f"{name} is from 0 to {MAX_REST:.0f} seconds"
                raise ConfigurationError(self._wrong(words, name))

    def _check_counts(self, given: Mapping[str, Any]) -> None:
        capacity = given["capacity"]
        if capacity == 0 and type(capacity) is int:
            words = "capacity is 1 or more; `celery locks pause` lets nobody enter"
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
        """Whether its taker has it alone."""
        return self.capacity == 1 and not self.shared

    def of(self, text: str) -> Self:
        """Return the same of the key *text*."""
        made = object.__new__(type(self))  # what else it says was checked: this is for each call
        for name in self.__slots__:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "template", text)
        return made

    def __repr__(self) -> str:
        said = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        defaults = {each.name: each.default for each in fields(self)}
        more = [f"{name}={value!r}" for name, value in said.items() if value != defaults[name]]
        return f"Key({', '.join([repr(self.template), *more])})"


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_CAPACITY
