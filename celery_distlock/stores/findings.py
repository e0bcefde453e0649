"""What a store reports about its own fitness: findings, each with its severity and its remedy."""

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
    One thing that was examined, and the result.

    Attributes:
        severity: ``BAD``: there can be no locks. ``DOUBT``: there can, but something may go wrong.
        subject: What was examined, in a word: ``server``, ``memory``, ``clock``, ...
        message: The result, for people.
        remedy: What an operator can do about it; empty where there is nothing to do.
        figures: The numbers that the message names, for programs. Times are in seconds.
    """

    severity: Severity
    subject: str
    message: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def clock_finding(offset: float) -> Finding:
    """Return what is found about a server's clock that is *offset* seconds ahead of this host's."""
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
