"""Tasks that several at once may run under one key, and what a judge has to know of each."""

from __future__ import annotations

import os
import signal
import time
import traceback
from typing import Any

from celery_distlock import Key, LockedTask, Order, Rate, clock, install
from tests.apps import make_app
from tests.apps.journal import Journal

LEASE = 3.0  # seconds: a busy machine can take two of them away

app = make_app(
    __name__,
    distlock_lease=LEASE,
    distlock_sweep_interval=float(os.environ.get("DISTLOCK_TEST_SWEEP", "0.5")),
    worker_prefetch_multiplier=4,
)
install(app)
journal = Journal.of_environment()

THREE = Key("{key}", capacity=3)
TWO = Key("{key}", capacity=2)


ONLY = os.environ.get("DISTLOCK_TEST_ONLY")  # the one task that is locked, if any is named


def locked(lock_key: Any, **options: Any) -> Any:
    if ONLY and options.get("name") != ONLY:
        return app.task(bind=True, shared=False)
    return app.task(base=LockedTask, bind=True, shared=False, lock_key=lock_key, **options)


def note(task: Any, pause: float, gate: str = "") -> None:
    """Wait for *pause*, or until the gate is open; write down what it had of each key, and when."""
    begin = clock.monotonic()
    time.sleep(pause)
    if gate:
        journal.write(f"begun:{gate}", [os.getpid(), task.request.id])
        journal.pass_gate(gate)
    task.lock.ensure_held()
    held = [
        {
            "key": hold.key,
            "begin": begin,
            "end": clock.monotonic(),
            "token": hold.token,
            "units": hold.want.units,
            "capacity": hold.want.capacity,
            "slot": hold.slot,
            "lane": hold.want.lane,
            "most": hold.want.most,
            "task": task.request.id,
        }
        for hold in task.lock._holds
    ]
    journal.write("held", held)


def stay(self: Any, key: str, pause: float = 0.05, gate: str = "") -> None:
    note(self, pause, gate)


use = locked(THREE, name="use")(stay)
use_two = locked(Key("{key}", capacity=3, weight=2), name="use_two")(stay)
use_all = locked(Key("{key}", capacity=3, weight=9), name="use_all")(stay)
read = locked(Key("{key}", shared=True), name="read")(stay)
write = locked("{key}", name="write")(stay)
write_waiting = locked("{key}", name="write_waiting", lock_on_conflict="wait", lock_wait=60.0)(stay)
write_again = locked("{key}", name="write_again", lock_on_conflict="retry")(stay)
use_by_code = locked(lambda key, *_, **__: Key(key, capacity=3), name="use_by_code")(stay)
use_waiting = locked(THREE, name="use_waiting", lock_on_conflict="wait", lock_wait=60.0)(stay)
use_or_skip = locked(TWO, name="use_or_skip", lock_on_conflict="skip")(stay)
use_late = locked(TWO, name="use_late", acks_late=True)(stay)


IN_LANES = Key("{key}", capacity=3, order=Order("{lane}", most=2))


@locked(IN_LANES)
def use_in_lane(self: Any, key: str, lane: str, pause: float = 0.02, gate: str = "") -> None:
    note(self, pause, gate)


@locked(IN_LANES)
def die_in_lane(self: Any, key: str, lane: str, gate: str) -> None:
    journal.write(f"begun:{gate}", [os.getpid(), self.request.id])
    journal.pass_gate(gate)


@locked([Key("{a}", capacity=2), Key("{b}", shared=True), "{c}"])
def use_mixed(self: Any, a: str, b: str, c: str, pause: float = 0.02) -> None:
    note(self, pause)


@locked(lambda keys, *_, **__: [Key(key, **terms) for key, terms in keys.items()])
def use_any(self: Any, keys: dict[str, dict[str, Any]], pause: float = 0.02) -> None:
    note(self, pause)


@locked(TWO)
def slot_of(self: Any, key: str, gate: str) -> int:
    note(self, 0.0, gate)
    return int(self.lock.slot)


@locked(TWO)
def die(self: Any, key: str, gate: str) -> None:
    journal.write(f"begun:{gate}", [os.getpid(), self.request.id])
    journal.pass_gate(gate)
    os.kill(os.getpid(), signal.SIGKILL)


@locked(TWO, lock_hold_on_retry=True, max_retries=1)
def retry_once(self: Any, key: str, countdown: float) -> None:
    journal.write(f"{key}:attempts", clock.monotonic())
    if not self.request.retries:
        raise self.retry(countdown=countdown)
    note(self, 0.0)


@locked(TWO, lock_on_conflict="skip", max_retries=1)
def retry_early_or_skip(self: Any, key: str, gate: str) -> str:
    journal.write(f"begun:{gate}", [self.request.retries, self.request.id])
    if not self.request.retries:
        journal.pass_gate(f"{gate}:retry")
        retry = self.retry(countdown=0, throw=False)
        journal.pass_gate(gate)
        raise retry
    return "ran"


@locked(TWO, lock_on_failure="requeue", lock_max_requeues=2)
def fail_once(self: Any, key: str) -> None:
    if journal.write(f"{key}:failing", None) == 1:
        raise KeyError(key)
    note(self, 0.0)


@locked(Key("{key}", min_hold=3.0), lock_on_conflict="skip")
def report(self: Any, key: str) -> str:
    journal.write(f"{key}:reports", clock.monotonic())
    return "sent"


@locked(Key("{key}", cooldown=1.5))
def call_api(self: Any, key: str, end: str = "") -> None:
    """End as is said."""
    journal.write(f"{key}:calls", [clock.monotonic(), end])
    if end == "fail":
        raise KeyError(key)
    if end == "retry" and not self.request.retries:
        raise self.retry(countdown=0)


@locked(Key("{key}", min_hold=600.0))
def hold_for_long(self: Any, key: str, gate: str) -> None:
    note(self, 0.0, gate)


@locked([Key("{a}", min_hold=600.0, cooldown=600.0), "{b}"], lock_on_conflict="fail")
def rest_at_both(self: Any, a: str, b: str) -> None:
    note(self, 0.0)


@locked(THREE)
def cool_down(self: Any, key: str, seconds: float) -> None:
    self.lock.cool_down(seconds)
    journal.write(f"{key}:cooled", clock.monotonic())
    note(self, 0.0)


@locked(Key("{key}", shared=True), lock_wait=30.0)
def read_then_write(self: Any, key: str) -> list[int]:
    """Share the key, and call what has it alone."""
    shared = self.lock.token
    inner = write_token(key)
    return [shared, inner, self.lock.token, self.lock.shared]


@locked("{key}", lock_wait=30.0)
def write_token(self: Any, key: str) -> int:
    note(self, 0.05)
    return int(self.lock.token)


@app.task(shared=False)
def collect(found: list[Any]) -> int:
    return len(found)


def begin(self: Any, key: str) -> None:
    """Write down when it begins, by this machine's clock."""
    journal.write(f"starts:{key}", time.time())


OFTEN = Rate(20, per=1.0, burst=20)
often = locked(Key("{key}", shared=True, rate="20/s"), name="often")(begin)
often_at_once = locked(Key("{key}", shared=True, rate=OFTEN), name="often_at_once")(begin)
by_two_rates = locked(
    Key("{key}", shared=True, rate=[Rate(5, per=1.0, burst=5), Rate(12, per=4.0, burst=12)]),
    name="by_two_rates",
)(begin)
seldom = locked(Key("{key}", capacity=1, rate="1/h"), name="seldom")(begin)
often_again = locked(
    Key("{key}", shared=True, rate="20/s"), name="often_again", lock_on_conflict="retry"
)(begin)


def begin_in_turn(self: Any, key: str) -> None:
    """Write down in which order it begins."""
    journal.write(f"order:{key}", self.request.id)


in_turn = locked(Key("{key}", shared=True, rate="2/s"), name="in_turn")(begin_in_turn)
waits_in_turn, comes_again_in_turn = (
    locked(Key("{key}", shared=True, rate="2/s"), name=name, lock_on_conflict=policy)(begin_in_turn)
    for name, policy in (("waits_in_turn", "wait"), ("comes_again_in_turn", "retry"))
)
few_in_turn = locked(Key("{key}", capacity=3, rate="2/s"), name="few_in_turn")(begin_in_turn)


class TooManyRequestsError(Exception):
    """A service has said 429."""


def ask_service(self: Any, key: str, answers: str, seconds: float = 1.0) -> list[int]:
    """Ask a service that says ``429`` as often as *answers* says of its first calls."""
    number = journal.write(f"asked:{key}:{self.request.id}", time.time())
    journal.write(f"order:{key}", self.request.id)
    try:
        if answers[number - 1 : number] == "4":
            raise TooManyRequestsError
    except TooManyRequestsError:
        try:
            self.lock.postpone(seconds)
        except Exception:  # noqa: BLE001  # as users' code has it
            journal.write(f"caught:{key}", repr(traceback.format_exc()))
    return [number, self.request.retries]


asks = locked(Key("{key}", capacity=2, rate="100/s"), name="asks", max_retries=0)(ask_service)
asks_alone = locked("{key}", name="asks_alone", max_retries=0, autoretry_for=(Exception,))(
    ask_service
)


@locked("{key}")
def empties(self: Any, key: str, things: list[int]) -> list[int]:
    """Be sent away the first time, after its arguments are used up; return what it got."""
    got = list(things)
    while things:
        things.pop()
    if journal.write(f"emptied:{key}", got) == 1:
        self.lock.postpone(0.1)
    return got


asks_late = locked(Key("{key}", shared=True), name="asks_late", acks_late=True)(ask_service)


@locked("{key}")
def plainly_postponed(self: Any, key: str) -> None:
    self.lock.postpone(5.0)


@locked("{key}")
def says_of_postponing(self: Any, key: str, seconds: Any) -> str:
    try:
        self.lock.postpone(seconds)
    except Exception as error:  # noqa: BLE001
        return repr(error)
    return ""
