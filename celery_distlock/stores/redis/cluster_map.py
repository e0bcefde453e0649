"""Which node of a cluster has which slots, as any of them reports it (``CLUSTER SLOTS``)."""

import functools
import math
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.stores.urls import host_and_port

from .cluster_nodes import ClusterNodes, host_of, in_new_thread, named_by
from .cluster_slots import SLOTS, slot_of
from .connections import ANSWERLESS, command
from .permissions import missing
from .reading import Reading
from .topology import HostPort

TIMEOUT = 1.0  # seconds for one node to answer
OLD = 0.1  # seconds after which a doubted map is requested again
NEXT = 0.1  # seconds after which another node is asked, too


class SlotOwners(NamedTuple):
    """
    Which node has which slots, as one of them reports it.

    Attributes:
        owners: The owner of each slot; None where it has none.
        nodes: Masters and replicas.
        by: The node that reported this.
        sharded: Whether channels may be of one slot.
        asked_at: The local clock before the request.
    """

    owners: list[HostPort | None]
    nodes: list[HostPort]
    by: HostPort
    sharded: bool
    asked_at: float

    def owner(self, key: bytes) -> HostPort:
        """Return the node that has the slot of *key*; without one, the node that reported so."""
        return self.owners[slot_of(key)] or self.by


class ClusterMap:
    """
    The last known owners of the slots, and the nodes whose slots must be looked up again.

    If the owner of a key fails, only callers that want that owner's keys request a new map. All
    methods may be called from any thread.

    Args:
        seeds: Nodes to ask when no other is known.
        nodes: All nodes in use.
    """

    def __init__(self, seeds: Sequence[HostPort], nodes: ClusterNodes) -> None:
        self._seeds = seeds
        self._nodes = nodes
        self._known: SlotOwners | None = None
        self._doubted: set[HostPort] = set()  # nodes whose slots may have another owner by now
        self._asked_first: list[HostPort] = []
        self._tried_at = -math.inf  # when the map was last requested, with or without an answer
        self._mutex = threading.RLock()  # reentrant: a signal handler may ask while this is taken

    def get(self, until: float | None = None) -> SlotOwners:
        """Return the known map; if there is none, one requested by *until*, or within a second."""
        return self._known or self.renew(until)

    def has(self, node: HostPort) -> bool:
        """Whether *node* is one of the cluster, as far as known."""
        return self._known is None or node in self._known.nodes

    @property
    def is_doubted(self) -> bool:
        """Whether any node is in doubt."""
        return bool(self._doubted)

    def doubts(self, owner: HostPort) -> bool:
        """Whether the slots of *owner* may have another owner by now."""
        return owner in self._doubted

    def doubt(self, owner: HostPort) -> None:
        """Require a new map before this node's keys are requested, unless the last map is new."""
        if self._known is not None and clock.monotonic() > self._known.asked_at + OLD:
            self._doubted.add(owner)

    def note_move(self, answer: MovedError, by: HostPort) -> None:
        """Record the new node of a slot, as *by* reported it."""
        target = named_by(answer, by)
        self._asked_first = [target]
        if self._known is not None and 0 <= answer.slot_id < SLOTS:
            self._known.owners[answer.slot_id] = target
            if target not in self._known.nodes:
                self._known.nodes.append(target)

    def confirm(self, owner: HostPort, keys: Sequence[bytes], until: float) -> None:
        """Raise unless another node confirms by *until* that *owner* has *keys*."""
        others = [where for where in (self._known.nodes if self._known else ()) if where != owner]
        if not others:
            return
        known = self._ask(others, until)
        self._take(known)
        if any(known.owner(key) != owner for key in keys):
            raise RedisConnectionError("the answer is from a node that may no longer be a master")

    def renew(self, until: float | None = None) -> SlotOwners:
        """
        Request the map, unless another thread has done so while this one waited.

        Without an answer, return the last map.

        Raises:
            RedisConnectionError: There is no map at all.
        """
        wanted_at = clock.monotonic()
        with self._mutex:
            before = self._known
            if self._tried_at > wanted_at:
                if before is None:
                    raise RedisConnectionError("no node of the cluster answers")
                return before
            nodes = before.nodes if before is not None else ()
            try:
                known = self._ask(
                    [*self._asked_first, *nodes, *self._seeds],
                    wanted_at + TIMEOUT if until is None else until,
                )
            except ANSWERLESS:
                if before is None:
                    raise
                return before
            finally:
                self._tried_at = clock.monotonic()
            self._asked_first = []
            self._take(known)
            return known

    def _ask(self, nodes: Iterable[HostPort], until: float) -> SlotOwners:
        """
        Return the map of the first of *nodes* that answers; a slow node does not delay the others.

        Nodes that were heard from last are asked first. Nodes that do not answer are skipped if
        there are others.
        """
        by_age = sorted(dict.fromkeys(nodes), key=lambda where: -self._nodes.at(where).answered_at)
        left = [where for where in by_age if not self._nodes.at(where).failed_lately] or by_age
        left = sorted(left, key=lambda where: where not in self._asked_first)
        results: queue.SimpleQueue[SlotOwners | Exception] = queue.SimpleQueue()
        failure: Exception = RedisTimeoutError("no time was left")
        awaited, empty = 0, None
        while (left or awaited) and (now := clock.monotonic()) < until:
            if left:
                in_new_thread(functools.partial(self._put, results, left.pop(0)))
                awaited += 1
            try:
                found = results.get(timeout=min(NEXT, until - now) if left else until - now)
            except queue.Empty:
                continue
            awaited -= 1
            if isinstance(found, Exception):
                failure = found
            elif found.nodes:
                return found
            else:  # the node is new in the cluster, or was removed from it
                empty = found
        if empty is not None:
            return empty
        raise RedisConnectionError(f"no node of the cluster answers: {failure}") from failure

    def _put(self, results: "queue.SimpleQueue[SlotOwners | Exception]", where: HostPort) -> None:
        try:
            results.put(self._read(where))
        except Exception as error:  # noqa: BLE001  # the waiting thread handles it
            results.put(error.with_traceback(None))

    def _read(self, where: HostPort) -> SlotOwners:
        questions = [command(b"", "CLUSTER", "SLOTS"), command(b"", "COMMAND", "INFO", "SPUBLISH")]
        asked_at = clock.monotonic()
        ranges, known = self._nodes.at(where).ask(questions, TIMEOUT)
        if isinstance(ranges, ResponseError):
            refused = bool(missing(str(ranges)))
            why = "refuses CLUSTER SLOTS" if refused else "is not in a cluster"
            raise RedisConnectionError(f"{host_and_port(*where)} {why}: {ranges}")
        owners: list[HostPort | None] = [None] * SLOTS
        nodes: dict[HostPort, None] = {}
        with Reading(host_and_port(*where), "CLUSTER SLOTS", ranges):
            for first, last, *served_by in ranges:
                if not 0 <= first <= last < SLOTS:
                    raise ValueError(f"there are no slots {first} to {last}")
                found = [(host_of(host, where), int(port)) for host, port, *_ in served_by]
                owners[first : last + 1] = found[:1] * (last + 1 - first)
                nodes.update(dict.fromkeys(found))
        sharded = isinstance(known, list) and known[:1] not in ([], [None])
        return SlotOwners(owners, list(nodes), where, sharded, asked_at)

    def _take(self, known: SlotOwners) -> None:
        """Use *known* from now on, and forget the nodes that are gone; ignore an older map."""
        if self._known is not None and known.asked_at < self._known.asked_at:
            return  # a late answer
        self._known, self._doubted = known, set()
        self._nodes.keep_only({*known.nodes, *self._seeds, known.by})
