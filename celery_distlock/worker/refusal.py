"""
Finds out when its message arrives whether a task has to be skipped, or has to fail.

``"skip"`` and ``"fail"`` say what becomes of a task whose key is taken. One that begins at once
finds that out by itself, where it runs. One that has to wait until the pool has a place for it
would look too late: what had the key when it came is over by then. So its key is looked at when it
comes, and what is found goes with it through the pool, where its policy is applied to that as to
any conflict: by Celery's own ways, with its links, its chord and its signals.

A key is taken then if somebody has it, or if it is that of an earlier task which waits for a place
in this pool itself. As in `celery_distlock.worker.parking`, the store is asked in a thread, and
the keys of large messages, and those that users' code makes, are left to the pool.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from celery.worker import state
from celery.worker.strategy import default

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.policies import Fail, Skip
from celery_distlock.runtime.app import Plan, Runtime
from celery_distlock.runtime.messages import LockHeader
from celery_distlock.runtime.received import Received, Taken

from . import parking
from .in_flight import in_flight
from .parking import LARGE, MOST_HELD, PATIENCE, PLAIN_CONTENT, REST, Arrival, run_of

__all__ = ["strategy"]

logger = logging.getLogger(__name__)


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return what Celery calls with every message for *task*."""
    runtime = Runtime.of(app)
    plan = runtime.plans.get(task.name)
    if plan is None or not runtime.settings.enabled or not _decides(task, plan):
        return parking.strategy(task, app, consumer, **options)
    handle: Callable[..., Any] = default(task, app, consumer, **options)
    judge = _EarlyRefusal(task, plan, runtime, consumer)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any
    ) -> Any:
        def go_on(ack: Any = ack, reject: Any = reject) -> Any:
            return handle(message, body, ack, reject, callbacks, **more)

        return judge.receive(message, _Way(go_on, ack, reject)) if body is None else go_on()

    return on_message


def _decides(task: Any, plan: Plan) -> bool:
    # Others first do something else; and rate limits are for Celery to keep.
    is_final = type(plan.policy) in (Skip, Fail)
    return is_final and plan.rule.runs_no_code and not task.rate_limit


class _Way(NamedTuple):
    """On to the pool; and what Celery says there of the message when it leaves its place."""

    go_on: Callable[..., Any]
    acknowledge: Callable[..., Any]
    reject: Callable[..., Any]


class _EarlyRefusal:
    """Tells which messages for one task come too late for their key. Used by the event loop."""

    def __init__(self, task: Any, plan: Plan, runtime: Runtime, consumer: Any) -> None:
        self._task = task
        self._plan = plan
        self._runtime = runtime
        self._consumer = consumer
        self._rests_until = 0.0

    def receive(self, message: Any, way: _Way) -> Any:
        """Hand *message* to the pool: at once, or when its key has been looked at."""
        keys, looking = self._keys(message), self._runtime.inspection_thread
        if not keys or looking is None:
            return way.go_on()
        if not self._waits():
            return self._let_run(message, keys, way)
        if (elder := _elder(message, keys)) is not None:
            return self._convict(elder, way, message)
        question = _Question(self, message, keys, way)
        arrival = Arrival(
            self._task, message, (keys[0],), _nothing, question.settle, look=question.look
        )
        return looking.take(arrival)

    def _keys(self, message: Any) -> Sequence[str]:
        """Return the keys of *message*; nothing, if it is for the pool to find out."""
        headers = message.headers
        if (
            headers.get("eta")  # who knows what is then
            or (message.delivery_info or {}).get("redelivered")  # it may have the key itself
            or LockHeader.of(headers).woken
            or len(message.body) > LARGE
            or message.content_type not in PLAIN_CONTENT
        ):
            return ()
        try:
            args, kwargs, _ = message.payload
            return sorted(self._plan.rule.keys(args, kwargs))
        except Exception:  # noqa: BLE001  # whatever is wrong with it, the task is to fail with it
            return ()

    def _waits(self) -> bool:
        """Whether a task that comes now waits for others to end."""
        return len(state.reserved_requests) >= int(self._consumer.pool.num_processes)

    def _let_run(self, message: Any, keys: Sequence[str], way: _Way) -> Any:
        for key in keys:
            in_flight.add(slot_name(key), message.headers["id"])
        return way.go_on()

    def _convict(self, taken: Taken, way: _Way, message: Any) -> Any:
        """Hand *message* on with what was found; it takes no place from others meanwhile."""
        Received.note(message, taken=taken)
        narrow = _widen(self._consumer.qos)

        def after(call: Callable[..., Any]) -> Callable[..., Any]:
            def narrow_and_call(*args: Any, **options: Any) -> Any:
                narrow()
                return call(*args, **options)

            return narrow_and_call

        return way.go_on(ack=after(way.acknowledge), reject=after(way.reject))

    # In the thread

    def look(self, message: Any, keys: Sequence[str]) -> Taken | None:
        """Return what of *keys* is taken, as far as the store answers."""
        if clock.monotonic() < self._rests_until:
            return None
        try:
            for key in keys:
                now = self._runtime.store.inspect(key, PATIENCE)
                if now.token and now.run != run_of(message.headers):
                    return Taken(key, now.owner, now.run, now.remaining)
        except Exception as error:  # noqa: BLE001  # the pool asks again, and says what is wrong
            words = "for %g s no key is looked at when a task comes, but when it begins: %s"
            logger.info(words, REST, error)
            self._rests_until = clock.monotonic() + REST
        return None

    # In the event loop again

    def settle(self, question: "_Question") -> Any:
        """Hand the message to the pool, with what was found."""
        # An elder may have been in the thread, too, when this one came.
        taken = question.found or _elder(question.message, question.keys)
        if taken is not None:
            return self._convict(taken, question.way, question.message)
        return self._let_run(question.message, question.keys, question.way)


class _Question:
    """What the store is asked about one message, and what it has answered."""

    def __init__(self, judge: _EarlyRefusal, message: Any, keys: Sequence[str], way: _Way) -> None:
        self._judge = judge
        self.message = message
        self.keys = keys
        self.way = way
        self.found: Taken | None = None

    def look(self) -> None:
        """Ask; in the thread."""
        self.found = self._judge.look(self.message, self.keys)

    def settle(self) -> Any:
        """Go on, in the event loop."""
        return self._judge.settle(self)


def _elder(message: Any, keys: Sequence[str]) -> Taken | None:
    """Return whose key *message* wants too, of those that wait for a place in the pool."""
    for key in keys:
        for identity in in_flight.of(slot_name(key)):
            request = state.requests.get(identity)
            if request is None or identity == message.headers["id"]:
                continue
            if request in state.reserved_requests and request not in state.active_requests:
                name = f"{request.name}[{identity}], which waits for a process"
                return Taken(key, name, run_of(request.request_dict), 0.0)
    return None


_widened = 0
_widening = threading.Lock()


def _widen(qos: Any) -> Callable[[], None]:
    """
    Have one more message fetched, and return what ends that; see `MOST_HELD`.

    What only waits to be skipped would else keep away what comes behind it, from its key too.
    """
    global _widened  # noqa: PLW0603  # a worker has one pool
    with _widening:
        before = qos.value
        wider = _widened < MOST_HELD and qos.increment_eventually() > before
        _widened += wider
    left = [None] * wider

    def narrow() -> None:
        global _widened  # noqa: PLW0603
        with _widening:
            if left:
                left.pop()
                _widened -= 1
                qos.decrement_eventually()

    return narrow


def _nothing() -> None:
    """Acknowledge nothing: the pool does."""
