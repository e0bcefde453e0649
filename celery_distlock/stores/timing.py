"""A store that knows when time alone lets somebody enter, and has one process look then."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .channels import Inbox
from .parking import ParkingStore
from .values import WokenTask

__all__ = ["NOTHING", "Claim", "Dues", "Settled", "TimedStore"]


class Claim(NamedTuple):
    """
    What the ticker is told when it asks what is due.

    Attributes:
        leads: Whether it is the ticker; else somebody else is.
        pause: Seconds until the next name is due; where somebody else is the ticker, until that one
            has to say so again. Infinity: nothing is due.
        names: What is due, by slot names: its own to look at, for some seconds.
        late: Seconds for which the first of them has been due.
        number: Names this claim.
    """

    leads: bool
    pause: float
    names: tuple[str, ...] = ()
    late: float = 0.0
    number: str = ""


class Settled(NamedTuple):
    """
    What came of a claim.

    Attributes:
        number: Of the claim.
        again: What was looked at, with the seconds in which it is due again; None: it is not.
    """

    number: str
    again: Mapping[str, float | None]


NOTHING = Settled("", {})


class Dues(NamedTuple):
    """
    A look at what is due.

    Attributes:
        ticker: Who looks after it; empty: nobody.
        many: How many names are noted.
        first: Seconds until the first of them is due; less than 0: it has been for so long.
    """

    ticker: str
    many: int
    first: float


class TimedStore(ParkingStore):
    """
    A store that notes when its keys become due.

    A key is due when time may let somebody enter that nobody has to leave: a rest or an operator's
    limit ends, a rate allows the next start. Whoever learns of that from the store has it noted;
    of all workers' main processes one is the ticker, which looks at each key when it is due. What
    was not noted, because a process died in between, a sweep finds.
    """

    @abstractmethod
    def note_due(self, dues: Mapping[str, float]) -> None:
        """
        Note that keys, by slot names, are due in so many seconds; a ticker that sleeps is called.

        If a key is noted already, the earlier time counts. Does not raise: what is not noted is
        found by a sweep.
        """

    @abstractmethod
    def claim_due(
        self, who: str, inbox: Inbox, seconds: float, settled: Settled = NOTHING
    ) -> Claim:
        """
        Be the ticker for *seconds*, or go on being it, and claim what is due. One attempt.

        Args:
            who: The ticker, one word.
            inbox: Where it is called when something is due earlier than what was known.
            seconds: 0: be it no more.
            settled: What has come of what was claimed before.
        """

    @abstractmethod
    def ticker_inbox(self, who: str) -> Inbox:
        """Return where the ticker waits."""

    @abstractmethod
    def wake_due(self, names: Sequence[str], again: dict[str, float | None]) -> Iterator[WokenTask]:
        """
        Let those enter at keys that time lets, and yield who is to be sent.

        Puts into *again* in how many seconds each key is due next, as `claim_due` takes it.
        """

    @abstractmethod
    def dues(self) -> Dues:
        """Look at what is noted, without changing it."""
