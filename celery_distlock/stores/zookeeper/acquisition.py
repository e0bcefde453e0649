"""Acquires a key in ZooKeeper: join its queue, be admitted, or watch the nodes before."""

from collections.abc import Sequence
from dataclasses import dataclass

from celery_distlock import clock
from celery_distlock.stores.requests import AcquireRequest
from celery_distlock.stores.values import Reply, Status

from .admission import Entry, free_slot, holders
from .completions import Completions
from .node_data import Facts, Record
from .node_registry import NodeRegistry, RegisteredNode
from .queues import ROUNDS, Place, Queue, digest, find
from .sessions import Exchange, WatchInbox, zk

GRANT = 5.0  # seconds in which a waiter of this process must take a key that has become its own


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
        """Read the queue until it stays unchanged for long enough to reply."""
        node = self.node
        catch_up = node.asked and not node.path  # an earlier request, with no answer, may have run
        if node.leftover or node.session not in (None, self.talk.session):
            self.queue.remove(node)
        if node.path and node.capacity != self.request.want.capacity:
            self.queue.remove(node)  # the nodes behind it would not check a changed capacity
        node.asked = True
        for _ in range(ROUNDS):
            line = self.queue.line_up_to_date() if catch_up else self.queue.line()
            reply = self._reply(line)
            if reply is not None:
                return reply
            catch_up = False
        raise zk.OperationTimeoutError("its queue changed too often while it was looked at")

    def _reply(self, line: list[Place]) -> Reply | None:
        """Return the reply to the request, given *line*; None if the line has changed by now."""
        kept = [place for place in line if place.kept]
        for place, record in zip(kept, self.queue.read_all(kept), strict=True):
            if record is None or not self.queue.remaining(place, record):
                self.talk.delete(place.path)
                return None
            if place.is_kept_for(self.request.run):
                return self._second_delivery(place) or self._claim(line, place, record)
        return self._reply_in_line(line)

    def _reply_in_line(self, line: list[Place]) -> Reply | None:
        """Return the reply to a caller with or without a place in the line; None: it changed."""
        request, node = self.request, self.node
        own, joins = find(line, node.owner), False
        if own is None:
            node.path = ""
            joins = request.queue is not None or self._may_fit(line)
            if joins:
                line = self.queue.join(node, self._facts())
                own = find(line, node.owner)
                if own is None:
                    return None
        elif node.path != own.path:  # it was created, but the answer was lost
            read = self.queue.read(own)
            if read is None:
                return None
            if read.stat.ephemeralOwner == self.talk.session.id:
                node.found(self.talk.session, own.path, read.facts, read.token)
            else:
                own = None  # created by another process with the same owner
        ended = self._second_delivery()
        if ended is not None:
            return ended
        index = len(line) if own is None else line.index(own)
        if own is not None and not request.want.alone:
            return self._share(line, index, joins=joins)
        if index:
            return self._busy(line, index)
        return self._granted() if joins or self._confirm() else None

    def _may_fit(self, line: list[Place]) -> bool:
        """Whether a caller that does not wait should join the line to find out if it fits."""
        capacity = self.request.want.capacity
        if not line or (capacity and len(line) >= capacity):
            return not line
        first = self.queue.read(line[0])
        return first is not None and not first.facts.alone

    def _share(self, line: list[Place], index: int, *, joins: bool) -> Reply | None:
        """Share the key with the nodes before, and first admit those that fit but are not in."""
        node, request = self.node, self.request
        if joins and len(line) == 1:
            node.slot = free_slot(self._facts(), ())
            return self._granted()
        capacity = request.want.capacity
        if capacity and index >= capacity and not request.may_have_ended:
            return self._busy(line, index)
        records: list[Record] = []
        for record in self.queue.read_all(line[: index + 1]):
            if record is None:
                return None
            records.append(record)
        held = holders(records)
        if len(held) <= index:
            return self._kept_out(line, index, held)
        own = held[index]
        node.token, node.slot = own.facts.token, own.facts.slot
        if own.noted or len(line) == 1:
            return self._granted() if self._confirm() else None
        held[index] = own._replace(facts=own.facts._replace(seconds=request.lease))
        # The nodes behind watch for this write. The first node needs it too: they may have read the
        # line when it was not the first.
        if not self.queue.let_in(line, held):
            return None
        node.lease = request.lease
        return self._granted()

    def _kept_out(self, line: list[Place], index: int, held: Sequence[Entry]) -> Reply | None:
        """Stay in the line, unless this is another delivery of a run that holds the key."""
        run, inbox = self.request.run, self.request.queue
        first = next((n for n, each in enumerate(held) if run and each.facts.run == run), None)
        if first is None:
            return self._busy(line, index, held)
        self.queue.remove(self.node)
        if isinstance(inbox, WatchInbox):
            inbox.on_wake = None
            if not self.talk.watch([line[first].path], inbox):
                return None
        facts, record = held[first]
        left = max(self.queue.remaining(line[first], record), 0.001)
        return Reply(Status.BUSY, self.asked_at, facts.token, facts.owner, run, left)

    def _confirm(self) -> bool:
        """Check that the node exists, by a request that needs the quorum."""
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
        return Reply(Status.GRANTED, self.asked_at, self.node.token, slot=self.node.slot)

    def _busy(
        self, line: list[Place], index: int, held: Sequence[Entry] | None = None
    ) -> Reply | None:
        """
        Reply with the holder, and watch the nodes before this one.

        Args:
            line: The line.
            index: Number of nodes before this one.
            held: The holders among them, if known.
        """
        node, inbox, waits = self.node, self.request.queue, False
        if inbox is None and node.path:
            self.queue.remove(node)
        elif isinstance(inbox, WatchInbox):
            inbox.on_wake = lambda: self.registry.woken(node, clock.monotonic() + GRANT)
            node.inbox, waits = inbox, True
        if held is None:
            held = self.queue.entries(line[:index])
        if not held or (waits and not self._watch(line[:index], held)):
            return None
        seen = self.queue.state(line, held[:1])
        left = [max(seen.remaining, 0.001)]
        for place, (_, record) in zip(line, held, strict=False):
            if place.kept:  # no watch may fire at its end
                left.append(max(self.queue.remaining(place, record), 0.001))
        return Reply(
            Status.BUSY,
            self.asked_at,
            seen.token,
            seen.owner,
            seen.run,
            min(left),
            index - len(held),
        )

    def _watch(self, line: Sequence[Place], held: Sequence[Entry]) -> bool:
        """Let the inbox be notified when another look may help; false if it would help now."""
        inbox, want = self.request.queue, self.request.want
        assert isinstance(inbox, WatchInbox)
        if len(held) == len(line) and not want.alone and not held[0].facts.alone:
            # No other waiter is before this one. While all of these nodes stay, there is no room.
            return bool(self.talk.watch([place.path for place in line[: want.capacity]], inbox))
        found = self.talk.watch([line[-1].path], inbox)
        # If the node before was admitted since, it does not change again, and no watch would fire.
        return bool(found) and (len(held) == len(line) or not Record.read(found[0]).facts.token)

    def _second_delivery(self, kept: Place | None = None) -> Reply | None:
        """Return the reply to a second delivery, and leave the queue; None if it may execute."""
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

    def _claim(self, line: list[Place], kept: Place, record: Record) -> Reply | None:
        """Replace the reservation of the key for the run by the run's own node."""
        node, facts, want = self.node, self._facts(record.token), self.request.want
        if record.facts.capacity == want.capacity:
            facts = facts._replace(slot=record.facts.slot)
        else:
            held = self.queue.entries(line)
            if held is None:
                return None
            others = [each for each in held if each.facts.owner != record.facts.owner]
            if not record.facts.alone and 0 < want.capacity <= max(len(others), 1):
                if self.request.queue is None and len(line) > 1:
                    return self._busy(line, len(line), held)
                self.talk.delete(kept.path)  # an exclusive request cannot take a shared unit
                return None
            facts = facts._replace(slot=free_slot(facts, others))
        if node.path:
            self.queue.remove(node)
        path = self.queue.replace(kept, digest(node.owner), facts, ephemeral=True)
        if not path:
            return None
        self.registry.drop(node.name, kept.nonce)  # if this process had made the reservation
        node.found(self.talk.session, path, facts, facts.token)
        return self._granted()

    def _facts(self, token: int = 0) -> Facts:
        """Return the data of the node."""
        request, node = self.request, self.node
        capacity, slot = request.want.capacity, node.slot if token else -1
        return Facts(node.owner, request.run, request.lease, token, capacity, slot)
