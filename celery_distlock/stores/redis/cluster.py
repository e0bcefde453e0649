"""The masters of a Redis Cluster, as one place for locks."""

import functools
import queue
import re
from collections.abc import Hashable, Sequence
from typing import Any

from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.naming import some_of
from celery_distlock.stores.findings import Finding, Severity
from celery_distlock.stores.urls import host_and_port

from .cluster_map import ClusterMap
from .cluster_nodes import ClusterNodes, named_by
from .cluster_slots import SLOTS, slot_of, tag_of
from .connections import (
    ANSWERLESS,
    ASKING,
    TIMEOUT,
    Command,
    ConnectionFactory,
    NodeSettings,
    command,
)
from .topology import HostPort, PushTarget, Topology

_OPEN = re.compile(rb"\[(\d+)-[<>]-")  # a slot that a node moves to another node, or gets from it

REDIRECTIONS = 5  # the most that one request follows, as in other clients of a cluster
BRIEF = 0.1  # seconds to wait for a silent node if other nodes were asked as well


class Cluster(Topology):
    """
    The masters of a cluster, each with its slots.

    This is not redis-py's client for clusters, which repeats requests on its own: the store has to
    know how often a request was sent.

    Requests to several nodes are made in a thread for each, so that an unreachable or silent node
    does not delay the requests to the others. Once a node is known to be silent, a caller that has
    also asked others waits for it only for a moment.
    """

    in_order = False

    def __init__(self, address: str, seeds: Sequence[HostPort], node: NodeSettings) -> None:
        self.address = address
        self._seeds = seeds
        self._settings = node
        self.after_fork()

    def after_fork(self) -> None:
        self._nodes = ClusterNodes(self._settings)
        self._map = ClusterMap(self._seeds, self._nodes)

    def close(self) -> None:
        self._nodes.close()

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        return self._exchange(calls, _Patience(timeout), REDIRECTIONS)

    def _exchange(self, calls: Sequence[Command], patience: "_Patience", turns: int) -> list[Any]:
        try:
            groups = self._by_owner(calls, patience.until)
        except ANSWERLESS as error:
            return [error] * len(calls)
        if len(groups) == 1:
            (owner,) = groups
            is_to_be_left = _are_brief(calls) and self._nodes.at(owner).silent
            if not is_to_be_left and not self._map.doubts(owner):
                return self._ask(owner, calls, patience, turns)
        return self._ask_in_threads(calls, groups, patience, turns)

    def _by_owner(self, calls: Sequence[Command], until: float) -> dict[HostPort, list[int]]:
        known = self._map.get(until)
        groups: dict[HostPort, list[int]] = {}
        for number, call in enumerate(calls):
            groups.setdefault(call.node or known.owner(call.key), []).append(number)
        return groups

    def _ask_in_threads(
        self,
        calls: Sequence[Command],
        groups: dict[HostPort, list[int]],
        patience: "_Patience",
        turns: int,
    ) -> list[Any]:
        """Ask each node in a thread; wait only a moment for those that were already silent."""
        answers: list[Any] = [None] * len(calls)
        results: queue.SimpleQueue[tuple[HostPort, Any]] = queue.SimpleQueue()
        awaited, began = set(groups), clock.monotonic()
        hopeful = {owner for owner in groups if not self._nodes.at(owner).silent}
        briefly = bool(hopeful) or _are_brief(calls)
        for owner, numbers in groups.items():
            asked = [calls[number] for number in numbers]
            work = functools.partial(self._put_answers, results, owner, asked, patience, turns)
            try:
                self._nodes.at(owner).ask_in_thread(patience.timeout, work, sparingly=briefly)
            except ANSWERLESS as error:
                results.put((owner, [error] * len(asked)))
        brief = began + min(BRIEF, patience.timeout / 4)
        while awaited:
            until = brief if briefly and not hopeful & awaited else patience.until
            try:
                owner, found = results.get(timeout=max(0.0, until - clock.monotonic()))
            except queue.Empty:
                break
            if isinstance(found, BaseException):
                raise found
            awaited.discard(owner)
            for number, answer in zip(groups[owner], found, strict=True):
                answers[number] = answer
        for owner in awaited:
            self._nodes.at(owner).fall_silent()
            self._map.doubt(owner)
            for number in groups[owner]:
                answers[number] = RedisTimeoutError(f"no answer of {host_and_port(*owner)}")
        return answers

    def _put_answers(
        self,
        results: "queue.SimpleQueue[tuple[HostPort, Any]]",
        owner: HostPort,
        calls: Sequence[Command],
        patience: "_Patience",
        turns: int,
    ) -> None:
        """Put the answers of *owner*, or of a node that replaced it, in *results*."""
        try:
            if self._map.doubts(owner) and not calls[0].node:
                found = self._ask_successors(calls, patience, turns)
            else:
                found = self._ask(owner, calls, patience, turns)
        except RedisError as error:
            found = [error.with_traceback(None)] * len(calls)  # it would keep all callers' frames
        except BaseException as error:  # noqa: BLE001  # it is raised in the thread that waits
            results.put((owner, error))
            return
        results.put((owner, found))

    def _ask_successors(
        self, calls: Sequence[Command], patience: "_Patience", turns: int
    ) -> list[Any]:
        """Ask the nodes that have the keys by a new map; without one, by the last."""
        self._map.renew(patience.until)
        answers: list[Any] = [None] * len(calls)
        for owner, numbers in self._by_owner(calls, patience.until).items():
            found = self._ask(owner, [calls[number] for number in numbers], patience, turns)
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        return answers

    def _ask(
        self, owner: HostPort, calls: Sequence[Command], patience: "_Patience", turns: int
    ) -> list[Any]:
        """Ask *owner*, and the nodes to which it redirects."""
        keys = [call.key for call in calls if call.node is None]
        confirm = functools.partial(self._map.confirm, owner, keys, patience.until)
        try:
            answers = self._nodes.at(owner).ask(calls, patience.timeout, patience.until, confirm)
        except ANSWERLESS as error:
            self._map.doubt(owner)
            return [error.with_traceback(None)] * len(calls)
        moved = []
        for number, answer in enumerate(answers):
            if isinstance(answer, MovedError):  # first: it is an AskError as well
                self._map.note_move(answer, owner)
                moved.append(number)
            elif isinstance(answer, AskError):
                answers[number] = self._send_on(owner, answer, calls[number], patience)
        if moved or any(isinstance(answer, (*ANSWERLESS, ClusterDownError)) for answer in answers):
            self._map.doubt(owner)
        if moved and turns > 1 and clock.monotonic() < patience.until:
            again = self._exchange([calls[number] for number in moved], patience, turns - 1)
            for number, answer in zip(moved, again, strict=True):
                answers[number] = answer
        return answers

    def _send_on(self, owner: HostPort, ask: AskError, call: Command, patience: "_Patience") -> Any:
        """Send *call* to the node that its slot is moving to."""
        target = self._nodes.at(named_by(ask, owner))
        try:
            return target.ask([ASKING, call], patience.timeout, patience.until)[1]
        except ANSWERLESS as error:
            return error.with_traceback(None)

    def place(self, key: bytes, channel: str) -> PushTarget:
        known, tag = self._map.get(), tag_of(slot_of(key))
        if self._map.doubts(known.owner(key)):
            known = self._map.renew()
        sharded = f"{channel}:{{{tag}}}" if known.sharded else f"{channel}:{tag}"
        return PushTarget(known.owner(key), sharded)

    def connect(self, node: Any) -> ConnectionFactory:
        return self._nodes.at(node).connect(TIMEOUT)

    def nodes(self) -> Sequence[Hashable]:
        try:
            known = self._map.renew() if self._map.is_doubted else self._map.get()
        except ANSWERLESS:
            return self._seeds[:1]  # the request reports the error
        return list(dict.fromkeys(owner for owner in known.owners if owner))

    def replicas(self) -> Sequence[Hashable]:
        try:
            known = self._map.renew()  # replicas come and go, and no other request updates them
        except ANSWERLESS:
            return ()
        return [node for node in known.nodes if node not in known.owners]

    def has(self, node: Any) -> bool:
        return self._map.has(node)

    def share(self, keys: Sequence[bytes]) -> bool:
        return len(set(map(slot_of, keys))) == 1

    def check(self) -> list[Finding]:
        found = []
        if missing := self._map.get().owners.count(None):
            message = f"{missing} of the cluster's {SLOTS} slots have no node"
            remedy = "repair the cluster: keys of those slots cannot be taken"
            figures = {"slots_without_node": missing}
            found.append(Finding(Severity.DOUBT, "server", message, remedy, figures))
        if moving := sorted(self._moving()):
            some = some_of([str(slot) for slot in moving])
            message = f"slots that are being moved: {some}; their keys cannot be taken until then"
            remedy = "if the move was interrupted, redis-cli --cluster fix completes it"
            found.append(Finding(Severity.DOUBT, "server", message, remedy))
        return found

    def _moving(self) -> set[int]:
        """Return the slots that nodes report as moving; of nodes that permit the query."""
        ask = command(b"", "CLUSTER", "NODES")._replace(brief=True)
        found = self.exchange([ask._replace(node=node) for node in self.nodes()], TIMEOUT)
        return {int(slot) for each in found if type(each) is bytes for slot in _OPEN.findall(each)}


class _Patience:
    """
    How long a caller waits.

    Attributes:
        timeout: Seconds, for one answer.
        until: When the wait ends, by the local clock.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.until = clock.monotonic() + timeout


def _are_brief(calls: Sequence[Command]) -> bool:
    """Whether callers wait only a moment for a silent node's answers to *calls*."""
    return all(call.node or call.brief for call in calls)
