"""What the parts of a store over Redis have in common."""

from typing import NamedTuple

from redis.exceptions import RedisError

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores.base import Complaints

from .records import Records
from .request_runner import RequestRunner
from .topology import PushTarget, Topology

SWEEP_BATCH = 100  # keys per round trip


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

    def _place_of(self, stem: str, channel: str) -> PushTarget:
        """Return where pushes about the records of *stem* go, for a subscriber to *channel*."""
        try:
            return self._servers.place(stem.encode(), channel)
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"{self._servers.address} cannot serve: {error}") from error
