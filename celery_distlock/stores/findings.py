"""Findings that a store reports about its own fitness, each with a severity and a remedy."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CLOCKS_APART", "Finding", "Severity", "clock_finding"]

CLOCKS_APART = 1.0  # seconds


class Severity(enum.Enum):
    """What a finding means for locks."""

    OK = "ok"
    DOUBT = "doubt"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """
    The result of one examination.

    Attributes:
        severity: ``BAD``: locks cannot work. ``DOUBT``: they work, but something may go wrong.
        subject: What was examined, in one word: ``server``, ``memory``, ``clock``, ...
        message: The result, for people.
        remedy: What an operator can do about it; empty if there is nothing to do.
        figures: The numbers in the message, for programs. Times are in seconds.
    """

    severity: Severity
    subject: str
    message: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def clock_finding(offset: float) -> Finding:
    """Return the finding about a server's clock that is *offset* seconds ahead of this host's."""
    apart = abs(offset) > CLOCKS_APART
    return Finding(
        Severity.DOUBT if apart else Severity.OK,
        "clock",
        f"{abs(offset) * 1000:.1f} ms {'ahead of' if offset > 0 else 'behind'} this host's",
        "let both hosts keep time by NTP; locks do not depend on it, but the ages that are shown do"
        if apart
        else "",
        {"offset": offset},
    )
