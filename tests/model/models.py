"""What is explored: executions, what they want, and what may happen to them."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_distlock.stores.values import ALONE, Completion, Want, WokenTask

__all__ = ["Event", "Execution", "Fault", "Model", "Place", "Plan"]


class Plan(NamedTuple):
    """
    What an execution wants.

    Attributes:
        keys: Its keys, a letter each.
        want: How much of each.
        how: ``parks``, ``blocks`` in its process, or ``is sent`` through the store.
        ends: What may be said of its end.
        newest: Whether it asks those of this kind to leave that were sent before it.
    """

    keys: str = "a"
    want: Want = ALONE
    how: str = "parks"
    ends: tuple[Completion, ...] = (Completion.YES_AND_MAY_COME_AGAIN,)
    newest: bool = False


class Model(NamedTuple):
    """
    What is explored.

    Attributes:
        plans: Of each execution; those that are alike begin in their order.
        faults: How many requests may be broken off or lose their answer, and processes die.
        copies: How many messages the broker may deliver a second time.
        acts: What an operator may do, each once; ``leave``, of a blocked caller that gives up; and
            ``put back``, of a process that is ended and gives its message back.
        delays: How often time may pass though an execution could go on.
        pushes: Whether a worker takes what is pushed.
        sweeps: Whether there are sweeps.
        ticks: Whether there is a ticker.
        memory: Seconds for which it matters how long ago something was.
        claims_ask: Whether a run that was admitted may not enter a key that was paused since.
        changes: Texts of the scripts, and what they become.
    """

    plans: tuple[Plan, ...]
    faults: int = 0
    copies: int = 0
    acts: frozenset[str] = frozenset()
    delays: int = 0
    pushes: bool = False
    sweeps: bool = True
    ticks: bool = False
    memory: float = 0.0
    claims_ask: bool = False
    changes: tuple[tuple[str, str], ...] = ()


class Place(NamedTuple):
    """
    Where an execution is, outside of the store.

    Attributes:
        kind: A ``message`` of the broker; ``asking``, ``reserving``, ``blocked``, ``running``,
            ``ending``, ``settling`` or ``sending`` in a process; or that a process has to send
            (``waking``) or to note (``noting``) what was woken.
        owner: Of what it asks for, or holds.
        again: It may have been delivered before, or asked before.
        kept: Only the store has its message.
        called: It blocks and was called.
        ended: How it ends.
        wake: What was woken.
    """

    kind: str
    owner: str = ""
    again: bool = False
    kept: bool = False
    called: bool = False
    ended: Completion = Completion.NO
    wake: WokenTask | None = None

    @property
    def has_message(self) -> bool:
        """Whether the execution is not lost while it is here."""
        return not self.kept and self.kind not in ("waking", "noting")

    @property
    def is_moving(self) -> bool:
        """Whether it goes on by itself, and soon."""
        return self.called or self.kind not in ("running", "blocked")

    def __str__(self) -> str:
        marks = {"again": self.again, "kept": self.kept, "called": self.called}
        words = [self.kind, self.owner, *(word for word, holds in marks.items() if holds)]
        return " ".join(filter(None, [*words, self.ended.name if self.kind == "ending" else ""]))


class Execution(NamedTuple):
    """
    What is known of one.

    Attributes:
        has_begun: It was sent.
        is_over: It need not run again.
        may_repeat: A process has died with it.
        has_turn: Others have let it in.
        arrival: What the store has answered.
        owners: How many it has had.
        places: Where it is.
        is_superseded: A newer one was sent, and no request has failed before.
    """

    has_begun: bool = False
    is_over: bool = False
    may_repeat: bool = False
    has_turn: bool = False
    arrival: int = 0
    owners: int = 0
    places: tuple[Place, ...] = ()
    is_superseded: bool = False


class Event(NamedTuple):
    """What happens, by its name; to which execution, key or act; and at which place."""

    verb: str
    subject: Any = ""
    place: Place | None = None

    def __str__(self) -> str:
        subject = f"r{self.subject}" if type(self.subject) is int else self.subject
        return f"{self.verb} {subject} {f'({self.place})' if self.place else ''}".strip()


class Fault(NamedTuple):
    """What befalls a request of an event: it ends before a write, or (0) loses its answer."""

    request: int
    write: int

    def __str__(self) -> str:
        what = f"ended before write {self.write + 1}" if self.write else "lost its answer"
        return f"request {self.request + 1} {what}"
