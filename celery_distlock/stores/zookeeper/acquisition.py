"""How a key is taken in ZooKeeper: join its queue, be the first, or watch the one before."""

from dataclasses import dataclass

from celery_distlock import clock
from celery_distlock.stores.requests import AcquireRequest
from celery_distlock.stores.values import Reply, Status

from .completions import Completions
from .node_registry import NodeRegistry, RegisteredNode
from .queues import ROUNDS, Facts, Place, Queue, digest, find
from .sessions import Exchange, WatchInbox, zk

__all__ = ["GRANT", "Attempt"]

GRANT = 5.0  # seconds for a waiter of this process to take what has become its own


@dataclass
class Attempt:
    """One attempt at a request."""

    talk: Exchange
    queue: Queue
    request: AcquireRequest
    node: RegisteredNode
    registry: NodeRegistry
    marks: Completions

    def __post_init__(self) -> None:
        self.asked_at = clock.monotonic()

    def take(self) -> Reply:
        """Look at the queue until it holds still for a reply."""
        node = self.node
        catch_up = node.asked and not node.path  # for what a lost answer may have said
        if node.leftover or node.session not in (None, self.talk.session):
            self.queue.remove(node)
        node.asked = True
        for _ in range(ROUNDS):
            line = self.queue.line_up_to_date() if catch_up else self.queue.line()
            reply = self._reply(line)
            if reply is not None:
                return reply
            catch_up = False
        raise zk.OperationTimeoutError("its queue changed too often while it was looked at")

    def _reply(self, line: list[Place]) -> Reply | None:
        """Return what *line* means for the request; None if it is another by now."""
        request, node = self.request, self.node
        if line and line[0].kept:
            state = self.queue.state(line[0])
            if state is None or not state.remaining:
                self.talk.delete(line[0].path)
                return None
            if line[0].is_kept_for(request.run):
                return self._second_delivery(line[0]) or self._claim(line[0], state.token)
        own, joins = find(line, node.owner), False
        if own is None:
            node.path, joins = "", request.queue is not None or not line
            if joins:
                line = self.queue.join(node, self._facts())
                own = find(line, node.owner)
                if own is None:
                    return None
        elif node.path != own.path:  # it was made, and that not answered
            read = self.queue.read(own)
            if read is None:
                return None
            facts, stat = read
            if stat.ephemeralOwner == self.talk.session.id:
                node.found(self.talk.session, own.path, facts.token, facts.seconds)
            else:
                own = None  # another process made it, as this owner
        told = self._second_delivery()
        if told is not None:
            return told
        if own is None or line[0] != own:
            return self._busy(line, len(line) if own is None else line.index(own))
        return self._granted() if joins or self._confirm() else None

    def _confirm(self) -> bool:
        """Make sure that the node is there, by a request that no server can answer alone."""
        node, request = self.node, self.request
        if node.lease == request.lease:
            there = self.talk.done(self.talk.ask_quorum(node.path))
        else:
            there = self.talk.rewrite(node.path, self._facts(node.token).data())
        if there:
            node.lease = request.lease
        else:
            node.path = ""
        return there

    def _granted(self) -> Reply:
        self.registry.granted(self.node, self.asked_at + self.request.lease)
        return Reply(Status.GRANTED, self.asked_at, self.node.token)

    def _busy(self, line: list[Place], index: int) -> Reply | None:
        """Say who holds the key; one who waits is told when whoever is before him has gone."""
        node, inbox = self.node, self.request.queue
        if inbox is None and node.path:
            self.queue.remove(node)
        elif isinstance(inbox, WatchInbox):
            inbox.on_wake = lambda: self.registry.woken(node, clock.monotonic() + GRANT)
            node.inbox = inbox
            if not self.talk.watch(line[index - 1].path, inbox):
                return None
        seen = self.queue.state(line[0])
        if seen is None:
            return None
        left = max(seen.remaining, 0.001)
        return Reply(Status.BUSY, self.asked_at, seen.token, seen.owner, seen.run, left, index - 1)

    def _second_delivery(self, kept: Place | None = None) -> Reply | None:
        """Return what a second delivery is told, and leave the queue; None if it may run."""
        request, node = self.request, self.node
        if not request.may_have_ended:
            return None
        marks = self.marks.find(self.talk, node.name, request.run)
        if not marks or (marks[0].held_back and not marks[0].left):
            return None
        if node.path:
            self.queue.remove(node)
        if kept is not None:
            self.talk.delete(kept.path)
        status = Status.BUSY if marks[0].held_back else Status.DONE
        return Reply(status, self.asked_at, holder_run=request.run, remaining=marks[0].left)

    def _claim(self, kept: Place, token: int) -> Reply | None:
        """Put the node where the key was kept for the run."""
        node, facts = self.node, self._facts(token)
        if node.path:
            self.queue.remove(node)
        path = self.queue.replace(kept, digest(node.owner), facts, ephemeral=True)
        if not path:
            return None
        self.registry.drop(node.name, kept.nonce)  # if it was this process that kept it
        node.found(self.talk.session, path, token, facts.seconds)
        return self._granted()

    def _facts(self, token: int = 0) -> Facts:
        """Return what stands in the node."""
        return Facts(self.node.owner, self.request.run, self.request.lease, token)
