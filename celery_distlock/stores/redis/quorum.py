"""
Ask several servers concurrently, so that a server that hangs delays no caller.

Each server has a thread that talks to it over one connection, so that it executes requests in the
order in which they were made: a release follows the request that it undoes, even if that request
was given up. A node that does not answer is silent from then on: no caller waits for it until its
thread has had an answer from it again.
"""

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.urls import host_and_port

from .connections import ANSWERLESS, Command, NodeSettings, Server, command

logger = logging.getLogger(__name__)

# Seconds. Redlock's page (redis.io, "Distributed locks") wants 5 to 50 ms for a lease of 10 s,
# because it asks the nodes one after another. Here they are asked at once, so that a node that
# hangs costs this much once, and later callers nothing.
ANSWER = 0.5
CONNECTION = 2.0  # seconds after which a node that hangs is connected to again
GRACE = 0.005  # the least seconds that the others get once there are enough answers
PROBES = (0.05, 2.0)  # seconds between the first and between the last probes of a silent node
IDLE = 30.0  # seconds after which a thread without requests ends
OWED, OWED_FOR = 1000, 60.0  # how many releases a silent node may get late, and how late (seconds)
BATCH = 100  # requests per round trip


class _Request(NamedTuple):
    """A request to a node; not sent after *until*, when no caller waits for its answer."""

    calls: Sequence[Command]
    until: float
    deliver: Callable[["_Response"], None]
    owed: bool = False  # send it in any case, even if the node is back only after a while
    urgent: bool = False  # try a silent node immediately: without it there is no majority


class _Response(NamedTuple):
    """A node's answers: None, or one answer for each call, which may be a refusal."""

    worker: "_NodeWorker"
    answers: list[Any] | None
    answered_at: float = 0.0
    repeated: bool = False  # it may have been executed before, and its answer lost


_END = _Request((), math.inf, lambda _: None, owed=True)
_PROBE = _Request((command(b"", "PING"),), math.inf, lambda _: None)


class _NodeWorker:
    """One node, and the thread that talks to it, which is started when it is needed."""

    def __init__(self, settings: NodeSettings) -> None:
        known = settings.settings
        self.address = host_and_port(known.get("host", "localhost"), known.get("port", 6379))
        self.failure: Exception | None = None
        self._node = Server(*settings)
        self._questions: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._owed: deque[_Request] = deque(maxlen=OWED)
        # Reentrant: a signal handler may ask while its thread has this.
        self._mutex = threading.RLock()
        self._thread: threading.Thread | None = None
        self._asked_at = math.inf  # since when the thread waits for the node
        self._used_at = 0.0
        self._probe_at = math.inf
        self._pause = 0.0  # between probes; 0 while the node answers

    @property
    def silent(self) -> bool:
        return self._pause > 0 or clock.monotonic() > self._asked_at + ANSWER

    def ask(self, question: _Request) -> bool:
        """Queue *question* for sending; false if the node will hardly answer."""
        silent, self._used_at = self.silent and not question.urgent, clock.monotonic()
        if (silent and not question.owed) or self._questions.qsize() >= OWED:
            return False
        self._questions.put(question)
        if self._thread is None:
            self._begin()
        return not silent

    def _begin(self) -> None:
        with self._mutex:
            name = f"distlock-{self.address}"
            thread = DaemonThread(name, self._work)
            if self._thread is None:
                self._thread = thread
                try:
                    thread.start()
                except BaseException:  # no thread can be started: the next caller tries again
                    self._thread = None
                    raise

    def close(self) -> None:
        """Send what is queued, and close the connections."""
        thread = self._thread
        if thread is None:
            self._node.close()
            return
        self._questions.put(_END)
        if not self.silent:
            thread.join(ANSWER)

    def _work(self) -> None:
        while True:
            questions = self._next()
            if not questions:
                return
            try:
                self._serve(questions)
            except Exception as error:  # noqa: BLE001  # it is logged
                log_safely(
                    logger,
                    logging.ERROR,
                    "unexpected error while talking to %s",
                    self.address,
                    exc_info=True,
                )
                self._fall_silent(error, questions)

    def _next(self) -> list[_Request]:
        """Return what to send next; nothing if the thread must end."""
        while True:
            wait = self._probe_at - clock.monotonic() if self._pause else IDLE
            try:
                questions = [self._questions.get(timeout=max(0.0, wait))]
                with suppress(queue.Empty):
                    while len(questions) < BATCH:
                        questions.append(self._questions.get_nowait())
            except queue.Empty:
                if self._pause and clock.monotonic() < self._used_at + IDLE:
                    return [*self._still_owed(), _PROBE]
                if self._may_end():
                    return []
                continue
            if any(question is _END for question in questions):
                self._end([question for question in questions if question is not _END])
                return []
            if not self._pause:
                return questions
            if any(question.urgent for question in questions):
                return [*self._still_owed(), *questions]
            self._owe(questions)

    def _may_end(self) -> bool:
        with self._mutex:
            self._thread = None
            if self._questions.empty():
                self._pause = 0.0  # the next caller must find out itself
                return True
            self._thread = threading.current_thread()
            return False

    def _end(self, questions: list[_Request]) -> None:
        if not self._pause:
            self._serve(questions)
        self._node.close()
        self._owed.clear()
        with self._mutex:
            self._thread = None
            self._pause = 0.0
            left = not self._questions.empty()
        if left:
            self._begin()

    def _serve(self, questions: list[_Request]) -> None:
        now, wanted = clock.monotonic(), []
        for question in questions:
            if question.owed or now < question.until:
                wanted.append(question)
            else:
                question.deliver(_Response(self, None))
        if not wanted:
            return
        calls = [call for question in wanted for call in question.calls]
        self._asked_at = now
        try:
            answers, repeated = self._exchange(calls)
        except (RedisError, OSError) as error:
            self._fall_silent(error, wanted)
            return
        finally:
            self._asked_at = math.inf
        answered_at, start = clock.monotonic(), 0
        self._pause, self.failure = 0.0, None
        self._owed.clear()
        for question in wanted:
            end = start + len(question.calls)
            question.deliver(_Response(self, answers[start:end], answered_at, repeated))
            start = end

    def _exchange(self, calls: Sequence[Command]) -> tuple[list[Any], bool]:
        pool = self._node.pool(CONNECTION)
        try:
            return pool.exchange(calls), False
        except RedisTimeoutError:
            raise
        except ANSWERLESS:
            if self._pause:
                raise
            return pool.exchange(calls), True  # the connection had ended while it was idle

    def _fall_silent(self, error: Exception, questions: list[_Request]) -> None:
        self.failure = error.with_traceback(None)  # its traceback would keep all frames
        first, last = PROBES
        self._pause = min(2 * self._pause or first, last)
        self._probe_at = clock.monotonic() + self._pause * clock.jitter(0.5, 1.0)
        self._owe(questions)

    def _owe(self, questions: list[_Request]) -> None:
        known = set(map(id, self._owed))
        self._owed += [each for each in questions if each.owed and id(each) not in known]
        for each in questions:
            each.deliver(_Response(self, None))

    def _still_owed(self) -> list[_Request]:
        now = clock.monotonic()
        while self._owed and now > self._owed[0].until + OWED_FOR:
            self._owed.popleft()
        return list(self._owed)


class Answers(NamedTuple):
    """
    The answers of the nodes, in their order.

    Attributes:
        majority: The number of nodes that are a majority.
        asked_at: The local clock before the first was asked.
        of: For each node its answers, one for each call; None where there were none.
        repeated: For each node, whether it may have been asked before.
        answered_at: For each node, the local clock when its answers came.
        sent: For each node, whether it may have been asked at all.
    """

    majority: int
    asked_at: float
    of: list[list[Any] | None]
    repeated: list[bool]
    answered_at: list[float]
    sent: list[bool]

    @property
    def is_majority(self) -> bool:
        """Whether a majority has answered, even if only by refusals."""
        return len(self.of) - self.of.count(None) >= self.majority

    def are_decided(self) -> bool:
        """Whether each call has been answered by a majority without a refusal, or cannot be."""
        answered = [answers for answers in self.of if answers is not None]
        refused = [
            sum(isinstance(answer, Exception) for answer in to_one)
            for to_one in zip(*answered, strict=True)
        ]
        return bool(answered) and all(
            len(answered) - count >= self.majority or count > len(self.of) - self.majority
            for count in refused
        )

    def to(self, number: int) -> list[Any]:
        """Return the nodes' answers to one call, without refusals; None where there was none."""
        return [self.at(node, number) for node in range(len(self.of))]

    def at(self, node: int, number: int) -> Any:
        """Return one node's answer to one call, as :meth:`to` does."""
        answers = self.of[node]
        answer = None if answers is None else answers[number]
        return None if isinstance(answer, Exception) else answer

    def refuse(self, node: int, number: int, refusal: Exception) -> None:
        """Replace a node's answer to one call by a *refusal*."""
        (self.of[node] or [])[number] = refusal

    @property
    def refusals(self) -> list[Exception]:
        """The first refusal of each node that has refused something."""
        found = [[a for a in answers or () if isinstance(a, Exception)] for answers in self.of]
        return [refusals[0] for refusals in found if refusals]


_NOTHING: tuple[Any, ...] = (None, False, 0.0, False)


class _Poll:
    """One request to the nodes, and the answers so far."""

    def __init__(self, workers: Sequence[_NodeWorker], majority: int) -> None:
        self.asked_at = clock.monotonic()
        self.found = Answers(majority, self.asked_at, *([each] * len(workers) for each in _NOTHING))
        self._workers = workers
        self._queue: queue.SimpleQueue[_Response] = queue.SimpleQueue()
        self.deliver = self._queue.put
        self._awaited: set[_NodeWorker] = set()

    def put(self, question: _Request, workers: Sequence[_NodeWorker]) -> list[_NodeWorker]:
        """Ask *workers*; return those that will hardly answer."""
        asked = {worker for worker in workers if worker.ask(question)}
        self._awaited |= asked
        for number, worker in enumerate(self._workers):
            self.found.sent[number] |= worker in asked
        return [worker for worker in workers if worker not in asked]

    def listen(self, until: float, enough: Callable[[Answers], bool]) -> None:
        """Wait for the answers; when there are *enough*, as long again for the others."""
        settled = False
        while self._awaited:
            left = until - clock.monotonic()
            try:
                answer = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
            except queue.Empty:
                return
            if answer.worker in self._awaited:
                self._note(answer)
            if not settled and enough(self.found):
                settled, now = True, clock.monotonic()
                until = min(until, now + max(GRACE, now - self.asked_at))

    def _note(self, answer: _Response) -> None:
        self._awaited.discard(answer.worker)
        number = self._workers.index(answer.worker)
        self.found.of[number] = answer.answers
        self.found.repeated[number] = answer.repeated
        self.found.answered_at[number] = answer.answered_at


class QuorumClient:
    """All the nodes."""

    def __init__(self, settings: Sequence[NodeSettings]) -> None:
        self._workers = [_NodeWorker(each) for each in settings]
        self._mutex = threading.RLock()  # reentrant, too
        self.majority = len(settings) // 2 + 1

    def __len__(self) -> int:
        return len(self._workers)

    def ask(
        self,
        calls: Sequence[Command],
        *,
        timeout: float = ANSWER,
        owed: bool = False,
        enough: Callable[[Answers], bool] = Answers.are_decided,
        but: Sequence[int] = (),
    ) -> Answers:
        """
        Ask all nodes, *but* some, and return what they have answered within *timeout* seconds.

        When there is *enough*, the others have as long again. What is *owed* is also sent to nodes
        that do not answer now.
        """
        asked = [worker for number, worker in enumerate(self._workers) if number not in but]
        poll = _Poll(self._workers, self.majority)
        question = _Request(calls, poll.asked_at + timeout, poll.deliver, owed)
        # One order at all nodes, so that threads of one process do not split the votes.
        with self._mutex:
            silent = poll.put(question, asked)
        # Time is left for the silent nodes: they may be back, while another begins to hang.
        poll.listen(poll.asked_at + timeout / 2 if silent else question.until, enough)
        if silent and timeout and not poll.found.is_majority:
            poll.put(question._replace(urgent=True), silent)
        if silent and not enough(poll.found):
            poll.listen(question.until, enough)
        return poll.found

    def failures(self) -> list[tuple[str, Exception | None]]:
        """Return the addresses of silent nodes, each with its error."""
        return [(worker.address, worker.failure) for worker in self._workers if worker.silent]

    @property
    def addresses(self) -> list[str]:
        """The nodes' addresses, in their order."""
        return [worker.address for worker in self._workers]

    def close(self) -> None:
        """Close all connections."""
        for worker in self._workers:
            worker.close()
