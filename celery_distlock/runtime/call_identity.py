"""What makes calls of one task alike, as its ``lock_unique`` says."""

from collections.abc import Mapping, Sequence
from typing import Any

from celery_distlock.keys import KeyRule, Receive, slot_name

__all__ = ["CallIdentity"]


class CallIdentity:
    """
    How the identity of one task's calls is made from their arguments.

    Args:
        rule: How the task's keys are made.
        by: The template of what is alike; None: equal arguments are, or all calls.
        all_are: All calls are alike.
    """

    def __init__(self, rule: KeyRule, by: KeyRule | None, *, all_are: bool) -> None:
        self._rule = rule
        self._by = by
        self._all_are = all_are

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive | None = None
    ) -> str:
        """
        Return the identity of one call: no other task's is the same.

        The arguments are those of :meth:`KeyRule.keys <celery_distlock.keys.KeyRule.keys>`.

        Raises:
            LockKeyError: None can be made of these arguments.
        """
        parts = [self._rule.task.replace("%", "%25").replace(":", "%3A")]  # the first : ends it
        if self._by is not None:
            parts.append(self._by.keys(args, kwargs, receive)[0].template)
        elif not self._all_are:
            parts.append(self._rule.digest(args, kwargs, receive))
        return slot_name(":".join(parts))
