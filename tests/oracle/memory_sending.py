"""How a store in memory takes in calls: see :class:`.sending.QueueStore`."""

import math
from itertools import islice

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.queue_parts import Bearer, Calls, SendReply, Sent, Where
from celery_distlock.stores.requests import Identity, SendRequest
from celery_distlock.stores.values import ALONE, Waiter
from tests.oracle.memory_key import Call, MemoryKey, microseconds
from tests.oracle.memory_rates import counts_for
from tests.oracle.memory_timing import MemoryTiming

__all__ = ["MemorySending", "count_identities", "forget_ended_calls", "free_identity"]

MOST_CALLS = 50  # identities that are looked at one by one


class MemorySending(MemoryTiming, Calls):
    """See the module. What it needs is set by the class that inherits from it."""

    def peek(self, key: str, identity: str) -> Bearer | None:
        with self._mutex:
            return _bearer(self._known(slot_name(key)), identity)

    def inherit(self, key: str, identity: Identity, run: str) -> None:
        with self._mutex:
            state = self._entered(slot_name(key))
            call = state.calls.get(identity.name)
            if call is not None and task_id_of(call.run) == task_id_of(run):
                state.calls[identity.name] = call._replace(run=run)
            elif _bearer(state, identity.name) is None:  # it was struck meanwhile
                _take(state, identity, run)

    def bearers(self, key: str, limit: int = 100) -> dict[str, Bearer]:
        with self._mutex:
            state = self._known(slot_name(key))
            found = ((name, _bearer(state, name)) for name in state.calls)
            named = ((name, Bearer(*bearer[:2])) for name, bearer in found if bearer)
            return dict(islice(named, limit))

    def delayed(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        now = clock.monotonic()
        with self._mutex:
            state = self._known(slot_name(key))
            runs = sorted(state.later, key=state.later.__getitem__)
            return [
                Waiter(
                    "",
                    run,
                    0.0,
                    task=state.names.get(run, ""),
                    want=state.wants.get(f"p:{run}", ALONE),
                    due=max(0.0, state.later[run] - now),
                )
                for run in runs[first : first + limit]
            ]

    def send(self, request: SendRequest) -> SendReply:
        name, run, identity = slot_name(request.key), request.run, request.identity
        with self._mutex:
            self.mark_all_published(request.published)
            state = self._entered(name)
            if identity is not None:
                bearer = _bearer(state, identity.name)
                if identity.replaces == run:
                    if bearer is not None and bearer[:2] == (run, Where.WAITING):
                        return self._update(name, state, request, identity)
                    return SendReply(Sent.CHANGED)
                if bearer is not None and task_id_of(bearer.run) != task_id_of(run):
                    if identity.replaces == "*":
                        identity = None
                    elif bearer.run != identity.replaces or (
                        bearer.where is Where.WAITING and not identity.beside
                    ):
                        return SendReply(Sent.CHANGED)
            if (before := _answered(state, run)) is not None:
                return SendReply(before)
            state.done.pop(run, None)
            state.leave(f"parked:{run}")
            if identity is not None:
                _take(state, identity, run)
            due = _joins_at(state, request)
            if not due and request.paced and _some_have_come(state):
                due = clock.monotonic()  # after those whose time has come
            if due:
                self._join_later(name, state, request, due)
                return SendReply(Sent.LATER)
            state.park(run, request.park_request, 0, request.want, came=False)
            return self._let_in(name, state, run, Sent.QUEUED)

    def _update(
        self, name: str, state: MemoryKey, request: SendRequest, identity: Identity
    ) -> SendReply:
        """Replace the message of a run that waits."""
        run = request.run
        first = state.calls[identity.name].first
        state.keep(run, request.park_request)
        state.wants[f"p:{run}"] = request.want
        _take(state, identity, run, first)
        if run in state.later:
            most = math.inf if identity.most is None else first + identity.most
            if (due := min(_joins_at(state, request), most)) > clock.monotonic():
                self._join_later(name, state, request, due)
                return SendReply(Sent.UPDATED)
            del state.later[run]
            state.arrivals[run] = state.join(f"p:{run}")
        return self._let_in(name, state, run, Sent.UPDATED)

    def _join_later(self, name: str, state: MemoryKey, request: SendRequest, due: float) -> None:
        """Have the run join the queue then, behind those that were called before."""
        run = request.run
        state.keep(run, request.park_request)
        state.wants[f"p:{run}"] = request.want
        if state.later.get(run) != due:
            state.later.pop(run, None)
            state.later[run] = due
        self.note_due({name: due - clock.monotonic()})

    def _let_in(self, name: str, state: MemoryKey, run: str, sent: Sent) -> SendReply:
        """Give what is free to those who wait, of whom *run* is one now."""
        wake = self._hand_on(name, state)[1]
        self._note_opening(name, state)
        woken = [wake._replace(also=()), *wake.also] if wake else []
        others = [each for each in woken if each.run != run]
        besides = others[0]._replace(also=tuple(others[1:])) if others else None
        return SendReply(sent if len(others) == len(woken) else Sent.GO, besides)


def forget_ended_calls(state: MemoryKey) -> None:
    """Strike the identities that nobody has any more."""
    state.calls = {name: call for name, call in state.calls.items() if _bearer(state, name)}


def count_identities(state: MemoryKey) -> int:
    """Return how many have one; of many, with those that nobody has any more."""
    if len(state.calls) > MOST_CALLS:
        return len(state.calls)
    return sum(_bearer(state, name) is not None for name in state.calls)


def free_identity(state: MemoryKey, run: str) -> None:
    """Have nobody have an identity by what was called as this run."""
    calls = state.calls.items()
    state.calls = {name: call for name, call in calls if task_id_of(call.run) != task_id_of(run)}


def _joins_at(state: MemoryKey, request: SendRequest) -> float:
    """Return when it joins the queue, to the millisecond; 0: at once."""
    now, wait = microseconds(), request.delay * 1e6
    if request.paced:
        opens = min(state.log.starts_in(request.want, now), state.starts_in(request.want, now))
        longest = max((counts_for(rate.microseconds) for rate in request.want.rates), default=0)
        # While one has to come, it is not known when it opens: it stands before the next.
        wait = max(wait, min(opens, longest))
    return math.ceil((now + wait) / 1e3) / 1e3 if wait > 0 else 0.0


def _some_have_come(state: MemoryKey) -> bool:
    """Whether there are some whose time has come, and who have not joined the queue yet."""
    now = clock.monotonic()
    return any(due <= now for due in state.later.values())


def _take(state: MemoryKey, identity: Identity, run: str, first: float | None = None) -> None:
    until, now = identity.until, clock.monotonic()
    lasts = until if isinstance(until, str) else now + until
    first = now if first is None else first
    expires, marks = now + identity.expires, (identity.silent, identity.fixed)
    state.calls[identity.name] = Call(run, lasts, first, expires, *marks)


def _bearer(state: MemoryKey, identity: str) -> Bearer | None:
    if identity not in state.calls:
        return None
    call, now = state.calls[identity], clock.monotonic()
    run, until = call.run, call.until
    lasts = 0.0 if isinstance(until, str) else max(0.0, until - now)
    inside, where = _inside(state, run), None
    if inside and (lasts or until == "finished"):
        where = Where.RUNNING
    elif inside == run:  # it has begun; else its next attempt waits already
        return None
    elif run in state.envelopes and now >= state.unsettled.get(run, now) and now < call.expires:
        comes = run in state.woken or run in state.came
        where = Where.COMING if comes else Where.WAITING
    else:
        where = Where.ENDED if lasts else None
    expires = call.expires - now
    return Bearer(run, where, expires, call.silent, call.fixed, lasts) if where else None


def _inside(state: MemoryKey, run: str) -> str:
    """Return the run that has the key: this one, or another attempt of its task."""
    shares, task = state.shares.items(), task_id_of(run)
    runs = [s.run for owner, s in shares if owner != f"parked:{run}"]
    return run if run in runs else next((each for each in runs if task_id_of(each) == task), "")


def _answered(state: MemoryKey, run: str) -> Sent | None:
    """Return what was answered of a run that is there; None: it is not."""
    if state.holds(run):
        return Sent.QUEUED
    if run not in state.envelopes:
        return None
    if state.share_for(run) and run in state.woken:
        return Sent.GO
    return Sent.LATER if run in state.later else Sent.QUEUED
