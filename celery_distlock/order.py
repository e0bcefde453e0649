"""`Order`: in which order the tasks that wait for a key start."""

from dataclasses import dataclass, fields
from typing import NoReturn, Self

from .errors import ConfigurationError

__all__ = ["Order"]

LEAST_SHARE, MOST_SHARE = 0.001, 1000.0
MAX_MOST = 1_000_000
MAX_AHEAD = 30 * 86400.0  # seconds


@dataclass(frozen=True, slots=True, repr=False)
class Order:
    """
    The order in which tasks that wait for a key start.

    With a `lane`, the lanes of the key have their turns. While tasks of several lanes wait, each
    lane gets starts in proportion to its share, however many of its tasks wait. Within a lane,
    tasks start in the order of their calls. A lane that has had no waiting tasks for a while does
    not make up for that. What waits without an `Order`, such as a :class:`~celery_distlock.Lock`,
    is in a lane of its own, ``""``, with share 1.

    Args:
        lane: As `lock_key` takes a template; where a callable returns it, the lane itself. None:
            that of all tasks that name none.
        share: The lane's weight: one with 3 gets three times the units of one with 1. It is that of
            the lane's next task.
        most: The number of units that the lane's tasks may use at once; None: any number. It is
            that of the lane's next task, unless an operator sets another. What it leaves is for
            other lanes. Counts all tasks of the lane, from their dispatch on.
        ahead: The task waits as if its call had been made that many seconds earlier.
        strict: A task that was dispatched is not passed until it begins, is dropped or revoked, or
            expires, however long its message is under way. For keys that one task has at a time.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range, or has no effect
            without another.
    """

    lane: str | None = None
    share: float = 1.0
    most: int | None = None
    ahead: float = 0.0
    strict: bool = False

    def __init__(
        self,
        lane: str | None = None,
        *,
        share: float = 1.0,
        most: int | None = None,
        ahead: float = 0.0,
        strict: bool = False,
    ) -> None:
        for name, value in zip(self.__slots__, (lane, share, most, ahead, strict), strict=True):
            object.__setattr__(self, name, value)
        if lane is not None and not isinstance(lane, str):
            raise ConfigurationError(
                f"Order({lane!r}): lane is a text, such as '{{tenant}}', or str(tenant) in a"
                " callable"
            )
        if type(share) not in (int, float) or not LEAST_SHARE <= share <= MOST_SHARE:
            self._refuse(f"share is from {LEAST_SHARE:g} to {MOST_SHARE:g}, not {share!r}")
        if most is not None and not (type(most) is int and 1 <= most <= MAX_MOST):
            words = f"most is a whole number of units from 1 to {MAX_MOST}, or None for any number"
            self._refuse(f"{words}, not {most!r}")
        if type(ahead) not in (int, float) or not 0 <= ahead <= MAX_AHEAD:
            self._refuse(f"ahead is from 0 to {MAX_AHEAD:.0f} seconds, not {ahead!r}")
        if type(strict) is not bool:
            self._refuse(f"strict is True or False, not {strict!r}")
        if lane is None and (share != 1 or most is not None):
            name = "share" if share != 1 else "most"
            self._refuse(f"{name} is that of a lane; name one, as in Order('{{tenant}}', {name}=2)")
        if lane is not None:
            object.__setattr__(self, "lane", str.__str__(lane))  # the value of an enum
        object.__setattr__(self, "share", round(share, 3))

    def _refuse(self, words: str) -> NoReturn:
        raise ConfigurationError(f"{self!r}: {words}")

    def of(self, lane: str) -> Self:
        """Return the same terms for the lane *lane*."""
        terms = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        return type(self)(lane, **terms)

    def __repr__(self) -> str:
        said = [] if self.lane is None else [repr(self.lane)]
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            said += [f"{each.name}={value!r}"] if value != each.default else []
        return f"Order({', '.join(said)})"
