"""What the parts of a store over Redis have in common."""

from collections.abc import Sequence
from typing import NamedTuple

from redis.exceptions import RedisError

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores.base import Complaints

from .answers import text
from .connections import TIMEOUT, Command, command
from .records import Records
from .request_runner import RequestRunner
from .topology import PushTarget, Topology

SWEEP_BATCH = 100  # keys per round trip
LONGEST_MS = 3_600_000  # of a role's lease; a longer one was not written by this package


class Reach(NamedTuple):
    """How a part reaches the servers, and the records there."""

    servers: Topology
    records: Records
    requests: RequestRunner
    complaints: Complaints


class Part:
    """A part of a store that makes its own requests."""

    def __init__(self, reach: Reach) -> None:
        self._servers, self._records, self._requests, self._complaints = reach

    def _leader(self, role: str, first: Sequence[Command] = ()) -> tuple[str, float]:
        """
        Return what the record *role* says, and its seconds left; 0: only the role's script knows.

        Two plain commands, after those in *first*: most processes find that another one has the
        role, and that costs a server less than a script does.
        """
        name = role.encode()
        look = [*first, command(name, "GET", name), command(name, "PTTL", name)]
        *_, leader, left_ms = self._requests.attempt(look, TIMEOUT).answers
        if isinstance(leader, bytes) and isinstance(left_ms, int) and 0 < left_ms <= LONGEST_MS:
            return text(leader), left_ms / 1000
        return "", 0.0

    def _place_of(self, stem: str, channel: str) -> PushTarget:
        """Return where pushes about the records of *stem* go, for a subscriber to *channel*."""
        try:
            return self._servers.place(stem.encode(), channel)
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"{self._servers.address} cannot serve: {error}") from error
