"""`Order`: in which order the tasks that wait for a key start."""

from dataclasses import dataclass
from typing import Self

from .errors import ConfigurationError

__all__ = ["Order"]

LEAST_SHARE, MOST_SHARE = 0.001, 1000.0
MAX_MOST = 1_000_000


@dataclass(frozen=True, slots=True, repr=False)
class Order:
    """
    The order in which tasks that wait for a key start: lanes of it have their turns.

    While tasks of several lanes wait, each lane gets starts in proportion to its share, however
    many of its tasks wait. Within a lane, tasks start in the order of their calls. A lane that has
    had no waiting tasks for a while does not make up for that. What waits without an `Order`, such
    as a :class:`~celery_distlock.Lock`, is in a lane of its own, ``""``, with share 1.

    Args:
        lane: As `lock_key` takes a template; where a callable returns it, the lane itself.
        share: The lane's weight: one with 3 gets three times the units of one with 1. It is that of
            the lane's next task.
        most: The number of units that the lane's tasks may use at once; None: any number. It is
            that of the lane's next task. What it leaves is for other lanes. Counts tasks with a
            `most`, from their dispatch on.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range.
    """

    lane: str
    share: float = 1.0
    most: int | None = None

    def __init__(self, lane: str, *, share: float = 1.0, most: int | None = None) -> None:
        if not isinstance(lane, str):
            raise ConfigurationError(
                f"Order({lane!r}): lane is a text, such as '{{tenant}}', or str(tenant) in a"
                " callable"
            )
        if type(share) not in (int, float) or not LEAST_SHARE <= share <= MOST_SHARE:
            raise ConfigurationError(
                f"Order({lane!r}): share is from {LEAST_SHARE:g} to {MOST_SHARE:g}, not {share!r}"
            )
        if most is not None and not (type(most) is int and 1 <= most <= MAX_MOST):
            raise ConfigurationError(
                f"Order({lane!r}): most is a whole number of units from 1 to {MAX_MOST}, or None"
                f" for any number, not {most!r}"
            )
        object.__setattr__(self, "lane", str.__str__(lane))  # the value of an enum
        object.__setattr__(self, "share", round(share, 3))
        object.__setattr__(self, "most", most)

    def of(self, lane: str) -> Self:
        """Return the same terms for the lane *lane*."""
        return type(self)(lane, share=self.share, most=self.most)

    def __repr__(self) -> str:
        share = f", share={self.share!r}" if self.share != 1 else ""
        most = f", most={self.most}" if self.most is not None else ""
        return f"Order({self.lane!r}{share}{most})"
