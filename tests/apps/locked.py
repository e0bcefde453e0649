"""Locked tasks of every kind. Nearly all take their key first."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

from celery import Task, chain, current_task
from celery.contrib.abortable import AbortableTask
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request
from pydantic import BaseModel

from celery_distlock import Key, Lock, LockedTask, Order, install, policies, signals
from celery_distlock.errors import LockConflictError, LockLostError
from celery_distlock.runtime.message_facts import Received
from celery_distlock.unique import Debounce, Throttle, Unique
from tests.apps import make_app
from tests.apps.bodies import go_on
from tests.apps.journal import Journal

LEASE = 3.0  # seconds: a busy machine can take two of them away
SHORT_LEASE = 1.0  # of tasks that are to see its end

app = make_app(
    __name__,
    distlock_lease=LEASE,
    distlock_sweep_interval=0.5,
    distlock_via=os.environ.get("DISTLOCK_TEST_VIA", "broker"),
    result_extended=True,
    # A free process takes the next task, instead of one worker sitting on it.
    worker_prefetch_multiplier=1,
)
install(app)
journal = Journal.of_environment()


def locked(**options: Any) -> Any:
    """Declare a bound task that is locked by its `key`, and not shared with other tests' apps."""
    options = {"lock_key": "{key}", "shared": False, **options}
    return app.task(base=LockedTask, bind=True, **options)


# What reports of itself


@app.task(shared=False)
def add(x: int, y: int) -> int:
    """The one task here that is not locked."""
    return x + y


class OwnRequest(Request):
    """What Celery is to make of a task's messages."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        journal.write(self.id, "received")


def work(self: Any, key: str, note: Any = None, gate: str = "") -> Any:
    """Enter the key's journal, wait at the gate, and return the number of retries so far."""
    journal.write(key, note)
    if gate:
        journal.pass_gate(gate)
    return self.request.retries


work_requeue = locked(name="work_requeue")(work)
work_by_own_request = locked(name="work_by_own_request", Request=f"{__name__}:OwnRequest")(work)
work_silently = locked(name="work_silently", ignore_result=True)(work)
work_without_events = locked(name="work_without_events", send_events=False)(work)
work_fail = locked(name="work_fail", lock_on_conflict="fail")(work)
work_of_two, work_of_two_or_full, work_of_two_or_later = (
    locked(name=name, lock_on_conflict=policies.Requeue(max_waiting=2, then=then))(work)
    for name, then in [
        ("work_of_two", "fail"),
        ("work_of_two_or_full", policies.Skip("full")),
        ("work_of_two_or_later", policies.Retry(delay=0.1, factor=1.0, turns=False)),
    ]
)
work_for_a_second, work_for_a_second_or_late, work_for_a_second_or_later = (
    locked(name=name, lock_on_conflict=policies.Requeue(timeout=1.0, then=then))(work)
    for name, then in [
        ("work_for_a_second", "fail"),
        ("work_for_a_second_or_late", policies.Skip("late")),
        ("work_for_a_second_or_later", policies.Retry(delay=0.1, factor=1.0, turns=False)),
    ]
)
work_for_a_minute = locked(
    name="work_for_a_minute", lock_on_conflict=policies.Requeue(timeout=60.0)
)(work)
work_once_for_a_while = locked(
    name="work_once_for_a_while",
    lock_on_conflict=policies.Requeue(timeout=4.0),
    lock_unique="finished",
)(work)
work_with_two_for_a_second = locked(
    name="work_with_two_for_a_second",
    lock_key=["{key}:a", "{key}:b"],
    lock_on_conflict=policies.Requeue(timeout=1.0),
)(work)


class AskWhetherItHasWaited(policies.Policy):
    """Park a task for a second; then it has its result."""

    needs = policies.Requeue.needs

    def decide(self, conflict: policies.Conflict) -> policies.Decision:
        if conflict.waited >= 1.0:
            return policies.Answer(round(conflict.waited, 3))
        return policies.Park(timeout=1.0)


work_or_waited = locked(name="work_or_waited", lock_on_conflict=AskWhetherItHasWaited())(work)
work_of_any_keys = locked(
    name="work_of_any_keys",
    lock_key=lambda key, note=1, gate="": [f"{key}:{each}" for each in range(note)],
    lock_on_conflict=policies.Requeue(max_waiting=2),
)(work)
work_retry_conflicts = locked(
    name="work_retry_conflicts",
    lock_on_conflict="fail",
    autoretry_for=(LockConflictError,),
    retry_backoff=True,
    max_retries=None,
)(work)
work_retry_conflicts_once = locked(
    name="work_retry_conflicts_once",
    lock_on_conflict=policies.Wait(0.1, then="fail"),
    autoretry_for=(Exception,),
    retry_kwargs={"max_retries": 1, "countdown": 0.1},
)(work)
work_retry_other_errors = locked(
    name="work_retry_other_errors",
    lock_on_conflict="fail",
    autoretry_for=(Exception,),
    dont_autoretry_for=(LockConflictError,),
)(work)
work_skip = locked(name="work_skip", lock_on_conflict="skip")(work)
work_skip_with_result = locked(
    name="work_skip_with_result", lock_on_conflict=policies.Skip(result={"busy": True})
)(work)


# Acknowledged late, so that no worker fetches more than it has slots for.
work_shared = locked(name="work_shared", lock_key=Key("{key}", capacity=5), acks_late=True)(work)


# In a lane of its note.
in_lanes = Key("{key}", order=Order("{note}"))
work_in_lanes = locked(name="work_in_lanes", lock_key=in_lanes)(work)
work_newest_in_lanes = locked(
    name="work_newest_in_lanes",
    lock_key=in_lanes,
    lock_unique=Unique(duplicate="update", by="{task}"),
)(work)
work_in_shares = {
    via: locked(
        name=f"work_in_shares_{via}",
        lock_via=via,
        lock_key=lambda key, note=None, gate="": Key(
            key, order=Order(str(note), share=3 if note == "three" else 1)
        ),
    )(work)
    for via in ("store", "broker")
}


work_once = {
    name: locked(name=f"work_once_{name}", lock_unique=rule)(work)
    for name, rule in (
        ("started", "started"),
        ("finished", "finished"),
        ("seconds", 60.0),
        ("two seconds", 2.0),
        ("update", Unique(duplicate="update", by="{task}")),
        ("update until finished", Unique("finished", duplicate="update", by="{task}")),
        ("raise", Unique(duplicate="raise")),
        ("result", Unique(until="finished", result="there was one")),
        ("debounce", Debounce(1.0)),
        ("bounded", Debounce(1.0, max_delay=2.0)),
        ("leading", Debounce(1.0, leading=True)),
    )
}


once_for_all = locked(
    name="once_for_all",
    lock_key="{task}",
    lock_unique=Unique("finished", duplicate="raise", by="{task}"),
)(work)


work_once_split = locked(
    name="work_once_split",
    lock_key=lambda key, note=None, gate="": key.split(),
    lock_unique="started",
)(work)


class ContextTask(Task):
    """Has a task's function called with something around it, as Flask's application context is."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        journal.write(args[0], "in its context")
        return self.run(*args, **kwargs)


class InContext(LockedTask, ContextTask):
    """Both."""

    abstract = True


@app.task(base=InContext, shared=False, lock_key="{key}", lock_unique="finished")
def work_in_context(key: str) -> str:
    return "done"


def begin(self: Any, key: str, note: Any = None) -> list[Any]:
    """Return the note, and when it began."""
    return [note, time.time()]


throttled = {
    name: locked(name=f"throttled_{name}", lock_unique=rule)(begin)
    for name, rule in (("trailing", Throttle(2.0)), ("joined", Throttle(60.0, trailing=False)))
}


once_for_each_key = locked(
    name="once_for_each_key", lock_unique=Unique(until="finished", by="{task}")
)(work)


@locked(lock_unique="finished", time_limit=2)
def sleep_once(self: Any, key: str) -> None:
    journal.write(key, os.getpid())
    time.sleep(60)


@locked(lock_unique="finished", max_retries=2)
def retry_once(self: Any, key: str) -> int:
    journal.write(key, self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.5)
    return self.request.retries


@locked(lock_unique=Unique(duplicate="update"))
def retry_late(self: Any, key: str, note: Any) -> Any:
    """Try again after ten minutes if that is asked."""
    journal.write(key, [note, self.request.retries])
    if note == "fails":
        raise self.retry(countdown=600)
    return note


@locked(lock_unique="finished", lock_on_failure="requeue")
def fail_once_for_all(self: Any, key: str, gate: str) -> str:
    """Fail first, and then wait at the gate."""
    journal.write(key, self.request.id)
    if len(journal.read(key)) == 1:
        raise ValueError("the first time")
    journal.pass_gate(gate)
    return "done"


@locked(lock_key=Key("{key}", shared=True), lock_unique="finished", lock_on_failure="requeue")
def fail_once_where_there_is_room(self: Any, key: str, gate: str) -> str:
    """Wait at a gate for each time, and fail the first time."""
    journal.write(key, self.request.id)
    times = len(journal.read(key))
    journal.pass_gate(f"{gate}:{times}")
    if times == 1:
        raise ValueError("the first time")
    return "done"


@locked(lock_unique="finished")
def send_itself(self: Any, key: str) -> list[bool]:
    """Say of a call of its own whether that is this one."""
    result = self.delay(key)
    return [result.joined, result.id == self.request.id]


@locked(lock_unique="finished")
def postpone_once(self: Any, key: str, gate: str) -> str:
    """Put itself off first, and then wait at the gate."""
    journal.write(key, self.request.id)
    if len(journal.read(key)) == 1:
        self.lock.postpone(0.5)
    journal.pass_gate(gate)
    return "done"


@locked(lock_unique="started")
def tell(self: Any, key: str, task: str, digest: str, more: int = 0) -> list[Any]:
    """Have parameters of the names that templates know."""
    return [task, digest, more]


by_note = {
    name: locked(name=f"by_note_{name}", lock_unique=Unique(by="{note}"))(work)
    for name in ("one", "other")
}


@locked(lock_unique="started")
def square_once(self: Any, key: str, number: int) -> int:
    return number * number


@locked(lock_key="{key}:{things}")
def work_by_anything(self: Any, key: str, things: Any) -> str:
    return self.lock.key


@locked(lock_key=lambda key: None)
def work_without_key(self: Any, key: str) -> str:
    return "ran"


@locked(lock_key=lambda key: [f"{key}:1", f"{key}:2"])
def work_two_keys(self: Any, key: str) -> str:
    return "ran"


class Keyed(BaseModel):
    key: str


def validate(self: Any, about: Keyed) -> Keyed:
    journal.write(about.key, None)
    return about


validate.__annotations__ = {"about": Keyed, "return": Keyed}  # Celery 5.5 reads no strings there
work_validated = locked(name="work_validated", lock_key="{about.key}", pydantic=True)(validate)


def validate_things(self: Any, about: Keyed, things: Any) -> str:
    return self.lock.key


validate_things.__annotations__ = {"about": Keyed}
work_validated_by_anything = locked(
    name="work_validated_by_anything", lock_key="{about.key}:{things}", pydantic=True
)(validate_things)


@locked(lock_on_conflict="skip")
def nap_skip(self: Any, key: str, seconds: float) -> str:
    time.sleep(seconds)
    return "ran"


work_wait = locked(name="work_wait", lock_on_conflict="wait", lock_wait=60.0)(work)
work_wait_limited = locked(
    name="work_wait_limited", lock_on_conflict="wait", lock_wait=60.0, soft_time_limit=1
)(work)
work_wait_then = {
    then: locked(
        name=f"work_wait_then_{then}",
        lock_on_conflict=policies.Wait(then=then),
        lock_wait=0.3,
    )(work)
    for then in ("requeue", "skip", "fail", "retry")
}

QUICK_RETRY = policies.Retry(delay=0.01, factor=1.0, turns=False)


@locked(lock_on_conflict=QUICK_RETRY, max_retries=0)
def work_retry(self: Any, key: str) -> Any:
    return self.request.retries


@locked(lock_key=lambda key: f"{key}:{current_task.request.hostname}", lock_on_conflict=QUICK_RETRY)
def work_for_its_worker(self: Any, key: str) -> None:
    journal.write(key, self.request.hostname)


@locked(lock_on_conflict=QUICK_RETRY, max_retries=1)
def work_retry_and_retry_itself(self: Any, key: str) -> Any:
    """Retry once, which is all that it may."""
    if not self.request.retries:
        raise self.retry(countdown=0)
    return self.request.retries


@locked(lock_on_conflict=QUICK_RETRY, max_retries=3, default_retry_delay=0)
def use_up_retries(self: Any, key: str) -> None:
    journal.write(key, [self.request.retries, self.max_retries])
    raise self.retry()


class AskTwice(policies.Policy):
    """A policy of a user's own: sends the task again at once, but fails it the third time."""

    def decide(self, conflict: policies.Conflict) -> policies.Decision:
        return policies.Refuse() if conflict.attempts == 2 else policies.Resend(0.0)


work_own_policy = locked(name="work_own_policy", lock_on_conflict=AskTwice())(work)


# What would show an overlap


@locked()
def count(self: Any, key: str, pause: float = 0.002) -> None:
    """Increment a counter as one should not without a lock."""
    if journal.enter(key) > 1:
        journal.write(f"{key}:overlaps", self.request.id)
    value = journal.get(key)
    time.sleep(pause)
    journal.set(key, value + 1)
    journal.write(f"{key}:tokens", self.lock.token)
    journal.leave(key)


# How they end


@locked(max_retries=2, lock_lease=300.0)
def end(self: Any, key: str, how: str) -> str:
    journal.write(key, how)
    if how == "exception":
        raise ValueError(how)
    if how == "retry":
        raise self.retry(countdown=300)
    if how == "ignore":
        raise Ignore
    if how == "reject":
        raise Reject
    return how


@locked(soft_time_limit=1)
def sleep_past_soft_limit(self: Any, key: str) -> None:
    journal.write(key, None)
    time.sleep(60)


@locked(time_limit=1)
def sleep_past_hard_limit(self: Any, key: str) -> None:
    journal.write(key, None)
    time.sleep(60)


@locked(acks_late=True)
def reject_once(self: Any, key: str) -> str:
    if journal.write(key, None) == 1:
        raise Reject(requeue=True)
    return "done"


@locked(autoretry_for=(KeyError,), max_retries=2, default_retry_delay=0)
def fail_by_autoretry(self: Any, key: str) -> None:
    journal.write(key, self.request.retries)
    raise KeyError(key)


@locked(max_retries=2, default_retry_delay=0)
def fail_by_retry(self: Any, key: str) -> None:
    journal.write(key, self.request.retries)
    raise self.retry(exc=KeyError(key))


@locked(lock_hold_on_retry=True, max_retries=2)
def hold_on_retry(self: Any, key: str, note: str) -> None:
    attempts = journal.write(key, note)
    if attempts < 3:
        raise self.retry(countdown=0.5)


@locked(lock_hold_on_retry=True, lock_lease=300.0, max_retries=1)
def hold_for_a_retry(self: Any, key: str) -> None:
    raise self.retry(countdown=2.0)


@locked(lock_hold_on_retry=True, lock_lease=300.0, lock_key=["{key}:a", "{other}:b"])
def retry_with_another_key(self: Any, key: str, other: str) -> list[str]:
    if not self.request.retries:
        raise self.retry(args=(key, f"{other}:next"), countdown=1.0)
    return list(self.lock.keys)


@locked(lock_hold_on_retry=True, lock_lease=300.0, lock_key="{key:s}")
def retry_without_a_key(self: Any, key: Any) -> None:
    raise self.retry(args=(0,), countdown=0)


@locked(lock_hold_on_retry=True, lock_lease=300.0)
def call_what_retries(self: Any, key: str) -> None:
    hold_for_a_retry(key)


def send_retry_and_stay(self: Any, key: str, note: Any = None, gate: str = "") -> int:
    """Have the retry sent, and come back from it when the gate is open; return the retries."""
    journal.write(key, [note, self.request.retries])
    if not self.request.retries:
        retry = self.retry(countdown=0, throw=False)
        journal.pass_gate(gate)
        raise retry
    return self.request.retries


class Abortable(LockedTask, AbortableTask):
    """Both."""

    abstract = True


@app.task(base=Abortable, bind=True, shared=False, lock_key="{key}")
def abortable(self: Any, key: str) -> str:
    return "aborted" if self.is_aborted() else "done"


def replace_and_stay(self: Any, key: str, depth: int, by: str, gate: str) -> str:
    """Have what replaces it sent, and come back from it when the gate is open."""
    journal.write(key, depth)
    if not depth:
        return "done"
    next_one = self.si(key, depth - 1, by, gate)
    try:
        self.replace(chain(next_one, next_one.clone()) if by == "chain" else next_one)
    finally:
        journal.pass_gate(gate)
    return ""


replace_early = {
    policy: locked(name=f"replace_early_{policy}", lock_on_conflict=policy)(replace_and_stay)
    for policy in ("requeue", "skip", "fail")
}


# None lets others in between its attempts, and no lease ends in a test.
retry_early = {
    name: locked(name=f"retry_early_{name}", lock_hold_on_retry=True, lock_lease=120.0, **options)(
        send_retry_and_stay
    )
    for name, options in (
        ("requeue", {}),
        ("retry", {"lock_on_conflict": policies.Retry(delay=0.2)}),
        ("wait", {"lock_on_conflict": "wait", "lock_wait": 60.0}),
        ("wait and skip", {"lock_on_conflict": policies.Wait(0.2, then="skip")}),
        ("skip", {"lock_on_conflict": "skip"}),
        ("fail", {"lock_on_conflict": "fail"}),
        ("two keys", {"lock_key": ["{key}:first", "{key}"]}),
        ("unique", {"lock_unique": "started"}),
    )
}


@app.task(base=LockedTask, shared=False)
def note_failure(request: Any, error: BaseException, traceback: Any) -> None:
    """An errback that Celery calls in the process where the task has failed."""
    journal.write(request.args[0], [request.id, str(error), traceback is not None])


@locked(lock_on_failure="requeue", lock_max_requeues=2)
def fail_and_requeue(self: Any, key: str, note: str, gate: str) -> None:
    journal.write(key, note)
    journal.pass_gate(gate)
    raise KeyError(key)


# Calls inside of tasks


@locked()
def call_itself(self: Any, key: str, depth: int) -> list[int]:
    token = self.lock.token
    return [token] if depth == 0 else [token, *call_itself(key, depth - 1)]


@locked()
def call_others(self: Any, key: str) -> dict[str, bool]:
    """Take the same key again in every way there is; nothing of it may block or let it go."""
    with Lock(key) as lease:
        by_lock = lease.token == self.lock.token
    return {
        "direct": look(key)["token"] == self.lock.token,
        "apply": look.apply((key,)).result["token"] == self.lock.token,
        "lock": by_lock,
        "still held": self.lock.held and Lock(key).locked(),
    }


@locked()
def start_a_child(self: Any, key: str, gate: str) -> str:
    """Start a task that needs the same key, and go on when the gate is open."""
    child = work_retry.delay(key)
    journal.pass_gate(gate)
    return child.id


@locked(lock_wait=0.1)
def call_with_another_key(self: Any, key: str, other: str) -> str:
    journal.write(key, self.lock.key)
    if not other:
        return "inner"
    try:
        return call_with_another_key(other, "")
    except LockConflictError as error:
        return f"conflict at {error.key}"


@locked(lock_key=lambda key, part="": part or None, lock_wait=0.1)
def call_for_a_part(self: Any, key: str, part: str = "") -> str:
    """Without a part run unlocked, and call itself for the one that is its key."""
    if part:
        return "inner"
    journal.write(key, bool(self.lock))
    try:
        return call_for_a_part(key, key)
    except LockConflictError as error:
        return f"conflict at {error.key}"


# What they see of the lock


@locked()
def look(self: Any, key: str) -> dict[str, Any]:
    lease = self.lock
    lease.ensure_held()
    return {
        "key": lease.key,
        "keys": lease.keys,
        "token": lease.token,
        "held": lease.held,
        "remaining": lease.remaining,
        "pid": os.getpid(),
    }


@locked()
def report_way(self: Any, key: str) -> dict[str, Any]:
    """Return which worker runs this, and whether it was pushed to that worker's channel."""
    pushed = Received.of(self.request).pushed
    return {"worker": self.request.hostname, "pushed": bool(pushed)}


@locked()
def report_time(self: Any, key: str) -> float:
    return time.time()


def keep_the_interpreter(self: Any, key: str, seconds: float) -> dict[str, Any]:
    """Be in C code that lets no other thread of this process run; then report the lease."""
    journal.write(key, self.lock.token)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ctypes.PyDLL(None).poll(None, 0, int(1000 * left) + 1)
    self.lock.ensure_held()
    return {"token": self.lock.token, "remaining": self.lock.remaining}


@locked()
def abandon(self: Any, key: str, other: str) -> None:
    """Let a thread take *other* and end without giving it back."""
    thread = threading.Thread(target=Lock(other, lease=SHORT_LEASE).acquire)
    thread.start()
    thread.join()
    journal.write(key, None)
    journal.pass_gate(key)


keep_on = locked(name="keep_on")(keep_the_interpreter)
keep_on_unwatched = locked(name="keep_on_unwatched", lock_lease=SHORT_LEASE, lock_watchdog=False)(
    keep_the_interpreter
)
keep_on_for_a_lease = locked(
    name="keep_on_for_a_lease", lock_lease=SHORT_LEASE, lock_max_hold=SHORT_LEASE
)(keep_the_interpreter)


@locked(lock_key=["a:{key}", "b:{key}"])
def look_at_two(self: Any, key: str) -> list[str]:
    return list(self.lock.keys)


@locked()
def extend(self: Any, key: str, seconds: float, gate: str) -> float:
    self.lock.extend(seconds)
    journal.write(key, self.lock.remaining)
    journal.pass_gate(gate)
    return self.lock.remaining


@locked(lock_key=lambda key: None)
def run_unlocked(self: Any, key: str) -> bool:
    self.lock.ensure_held()
    return not self.lock and self.lock.token == 0


# Losing the lock


@locked()
def sleep_long(self: Any, key: str) -> None:
    journal.write(key, self.lock.token)
    time.sleep(60)


@locked()
def turn_long(self: Any, key: str) -> None:
    """Like `sleep_long`, but in Python code all the time."""
    journal.write(key, self.lock.token)
    go_on(self.lock)


@locked()
def catch_loss(self: Any, key: str) -> dict[str, Any]:
    journal.write(key, self.lock.token)
    try:
        go_on(self.lock)
    except LockLostError as error:
        return {"key": error.key, "token": error.token, "held": self.lock.held}


@locked(lock_on_lost="warn")
def ignore_loss(self: Any, key: str, gate: str) -> bool:
    journal.write(key, self.lock.token)
    journal.pass_gate(gate)
    return self.lock.held


@locked(lock_on_lost="requeue", lock_max_requeues=1)
def begin_again(self: Any, key: str, gate: str) -> str:
    journal.write(key, "begun")
    journal.pass_gate(gate)
    return "done"


@locked(lock_lease=SHORT_LEASE, lock_watchdog=False)
def sleep_without_watchdog(self: Any, key: str) -> None:
    journal.write(key, self.lock.token)
    time.sleep(60)


@locked(lock_lease=SHORT_LEASE, lock_max_hold=SHORT_LEASE)
def sleep_beyond_max_hold(self: Any, key: str) -> None:
    journal.write(key, self.lock.token)
    time.sleep(60)


# Keys that cannot be


@locked(lock_key=lambda key: {}[key])
def raise_for_key(self: Any, key: str) -> None:
    journal.write(key, None)


@locked(lock_key="{key.name}")
def miss_attribute(self: Any, key: str) -> None:
    journal.write(key, None)


# Dying


@locked(acks_late=True, reject_on_worker_lost=True)
def kill_itself_once(self: Any, key: str) -> str:
    if journal.write(key, None) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@locked(acks_late=True, reject_on_worker_lost=True)
def end_unless_redelivered(self: Any, key: str, how: str, gate: str = "") -> str:
    """Give up what has come before, as a guard against a task that kills its worker does."""
    journal.write(key, self.request.delivery_info["redelivered"])
    if self.request.delivery_info["redelivered"]:
        return "given up"
    if gate:
        journal.pass_gate(gate)
    if how == "reject":
        raise Reject(requeue=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@locked(acks_late=True)
def work_late(self: Any, key: str, gate: str = "") -> str:
    journal.write(key, self.request.id)
    if gate:
        journal.pass_gate(gate)
    return "done"


work_late_for_long = locked(name="work_late_for_long", acks_late=True, lock_lease=300.0)(
    work_late.run.__func__
)


@locked(lock_lease=300.0)
def die(self: Any, key: str, how: str) -> None:
    """Wait for an end by force; without it the key would be locked for five minutes."""
    journal.write(key, os.getpid())
    if how == "exit":
        os._exit(1)
    time.sleep(60)


die_by_limit = locked(name="die_by_limit", lock_lease=300.0, time_limit=1)(die.run.__func__)


# Canvas


@locked()
def square(self: Any, key: str, number: int) -> int:
    if journal.enter(key) > 1:
        journal.write(f"{key}:overlaps", self.request.id)
    time.sleep(0.01)
    journal.leave(key)
    return number * number


square_retry = locked(name="square_retry", lock_on_conflict=QUICK_RETRY)(square.run.__func__)
square_wait = locked(name="square_wait", lock_on_conflict="wait", lock_wait=60.0)(
    square.run.__func__
)
square_skip = locked(name="square_skip", lock_on_conflict="skip")(square.run.__func__)
square_fail = locked(name="square_fail", lock_on_conflict="fail")(square.run.__func__)


@locked(lock_key="{key}")
def increase(self: Any, number: int | None, key: str) -> int:
    return (number or 0) + 1


@locked()
def replace(self: Any, key: str, number: int) -> Any:
    return self.replace(chain(square.s(key, number), increase.s(key)))


@app.task(shared=False)
def total(numbers: list[int | None]) -> int:
    return sum(number or 0 for number in numbers)


# Signals: those of keys that begin with "watched" are written down


def _record(name: str) -> Any:
    def receive(sender: Any, key: str, **facts: Any) -> None:
        if key.startswith("watched"):
            facts.pop("signal")
            sender_name = getattr(sender, "name", None)
            journal.write(f"signals:{key}", {"name": name, "sender": sender_name, **facts})

    getattr(signals, name).connect(receive, weak=False)


for _name in signals.__all__:
    _record(_name)
