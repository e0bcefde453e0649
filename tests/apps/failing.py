"""
Locked tasks in processes that are killed at a chosen point.

Wherever a process touches the outside world (a request to the lock store, a message to or from the
broker, a result) it crosses a point, before and after. Crossings are counted in Redis, over all
processes of a role: the pool's `child`, the worker's `main` process, and a `client` that is no
worker. The process that makes the armed crossing is killed there and then; a crossing is made once,
so it fires once, however many processes come later.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from billiard.util import set_pdeathsig
from celery.backends.base import Backend
from celery.worker.request import Request
from kombu.message import Message
from kombu.transport.redis import QoS

from celery_distlock import Key, LockedTask, Order, install
from celery_distlock.runtime import app as runtime_app
from celery_distlock.runtime import requeueing, store_producer
from celery_distlock.stores.redis.connections import ConnectionPool
from celery_distlock.worker import delivery
from tests import processes
from tests.apps import make_app
from tests.apps.journal import Clients, Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEASE = 3.0  # seconds: a busy machine can take two of them away
LONG_LEASE = 60.0
NOW_AND_THEN = ("channels", "count", "register", "delay_resend")  # by threads of their own
OPTIONS: dict[str, Any] = {
    "late": True,  # late acknowledgement, and a lost process's message goes back
    "channel": True,  # woken tasks are pushed to the worker, past the broker
    "at_receipt": True,  # the main process parks what it can
    **json.loads(os.environ.get("DISTLOCK_TEST_FAILING", "{}")),
}

app = make_app(
    __name__,
    distlock_lease=OPTIONS.get("lease", LEASE),
    distlock_sweep_interval=0.3,
    task_acks_late=OPTIONS["late"],
    task_reject_on_worker_lost=OPTIONS["late"],
    worker_prefetch_multiplier=1,
    worker_soft_shutdown_timeout=OPTIONS.get("soft", 0.0),
    worker_enable_soft_shutdown_on_idle=False,
)
app.conf.broker_transport_options.update(
    visibility_timeout=OPTIONS.get("visibility", 2),
    unacked_restore_interval=OPTIONS.get("restore", 1),
    unacked_restore_throttle=1,
    unacked_mutex_expire=2,
    # By which the server knows the connections of one worker: its main process's pid.
    client_name=f"{os.environ['DISTLOCK_TEST_PREFIX']}:broker:{os.getpid()}",
)
install(app)
if not OPTIONS["channel"]:
    app.steps["consumer"].discard(delivery.DeliveryStep)
journal = Journal.of_environment()


# Points


class Points:
    """Counts crossings, and ends the process at one of them."""

    def __init__(self) -> None:
        self._main = os.getpid()
        self._clients = Clients(os.environ["DISTLOCK_TEST_BROKER"])
        self._stem = f"{os.environ['DISTLOCK_TEST_PREFIX']}:points"

    @property
    def role(self) -> str:
        given = os.environ.get("DISTLOCK_TEST_ROLE")
        return given or ("main" if os.getpid() == self._main else "child")

    def cross(self, place: str, when: str) -> None:
        point = f"{self.role}:{place}:{when}"
        with self._clients.mine().pipeline() as pipeline:
            pipeline.hincrby(f"{self._stem}:counts", point, 1)
            pipeline.mget(f"{self._stem}:armed", f"{self._stem}:signal")
            count, (armed, signum) = pipeline.execute()
        made = f"{point}:{count}"
        if made in (armed or "").split(","):
            victims = [os.getpid()]
            if self.role == "main":
                victims += processes.children(os.getpid())
            journal.write("hits", {"point": made, "victims": victims})
            os.kill(os.getpid(), int(signum))

    def wrap(self, owner: Any, name: str, place: Callable[..., str]) -> None:
        """Let the function *name* of *owner* cross the point that *place* makes of its call."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def crossing(*args: Any, **kwargs: Any) -> Any:
            where = place(*args, **kwargs)
            if where in NOW_AND_THEN:
                return original(*args, **kwargs)
            self.cross(where, "before")
            result = original(*args, **kwargs)
            self.cross(where, "after")
            return result

        setattr(owner, name, crossing)


def _request_kind(_wire: Any, calls: Any) -> str:
    """What is asked of the store; `claim` is what a woken or redelivered task does."""
    sends = (each for each in calls if each.script is not None and each.script.name == "send")
    call = next(sends, calls[-1])
    script, arguments = call.script, call.arguments
    if script is None:
        return str(call.head.split(b"\r\n")[1].decode().lower())
    kind = str(script.name)
    if kind == "acquire":
        given = json.loads(arguments[5]) if any(arguments[5:6]) else {}
        kind = given.get("mode") or ("claim" if given.get("repeated") else "acquire")
    return kind


def _noting_ends(exchange: Any) -> Any:
    """Let *exchange* write down for which runs the lock store knows that all is done."""

    @functools.wraps(exchange)
    def noting(self: Any, calls: Any) -> Any:
        answers = exchange(self, calls)
        if _request_kind(self, calls) == "drop":
            run = calls[0].arguments[0]
            journal.write("settled", [run.partition(":")[0], os.getpid()])
        return answers

    return noting


def _noting_arrivals(append: Any) -> Any:
    """Let *append*, by which a message becomes one that can be restored, write down whose it is."""

    @functools.wraps(append)
    def noting(self: Any, message: Any, delivery_tag: Any) -> None:
        append(self, message, delivery_tag)
        journal.write("arrived", message.properties["correlation_id"])

    return noting


ConnectionPool.exchange = _noting_ends(ConnectionPool.exchange)  # type: ignore[method-assign]
QoS.append = _noting_arrivals(QoS.append)

points = Points()
points.wrap(ConnectionPool, "exchange", _request_kind)
points.wrap(runtime_app, "publish", lambda *_, **__: "publish")
points.wrap(requeueing, "publish", lambda *_: "republish")
points.wrap(store_producer.StoreProducer, "_publish", lambda *_: "start")
points.wrap(delivery.DeliveryStep, "_take", lambda *_: "take")
points.wrap(Message, "ack", lambda *_, **__: "ack")
points.wrap(Request, "acknowledge", lambda *_: "acknowledge")
points.wrap(Request, "reject", lambda *_, **__: "reject")
points.wrap(Backend, "store_result", lambda _self, _id, _result, state, *_, **__: state.lower())


# Tasks


@contextmanager
def turn(task: Any, key: str, name: Any) -> Iterator[int]:
    """
    Write down that *name* begins and ends, and which others run then, which must be none.

    Yields how often *name* has begun by now.
    """
    before = journal.read(key)
    open_turns = {note["pid"]: note["name"] for note in before if note["what"] == "begin"}
    for note in before:
        if note["what"] == "end":
            open_turns.pop(note["pid"], None)
    facts = {"name": name, "id": task.request.id, "pid": os.getpid(), "token": task.lock.token}
    others = [other for pid, other in open_turns.items() if processes.alive(pid)]
    at = time.monotonic()
    journal.write(key, {"what": "begin", **facts, "at": at, "others": others})
    try:
        yield 1 + sum(note["what"] == "begin" and note["name"] == name for note in before)
    finally:
        journal.write(key, {"what": "end", **facts, "at": time.monotonic()})


def locked(**options: Any) -> Any:
    options = {"lock_key": "{key}", "shared": False, **options}
    return app.task(base=LockedTask, bind=True, **options)


def key_of_work(key: str, name: Any, gate: str = "") -> str:
    """A key function, which runs where the task does: the main process does not know the key."""
    return key


@locked(lock_key="{key}" if OPTIONS["at_receipt"] else key_of_work)
def work(self: Any, key: str, name: Any, gate: str = "") -> Any:
    with turn(self, key, name):
        if gate:
            journal.pass_gate(gate)
        else:
            time.sleep(0.02)
    return name


work_once = locked(name="work_once", lock_unique="finished")(work.run.__func__)
work_strict = locked(name="work_strict", lock_key=Key("{key}", order=Order(strict=True)))(
    work.run.__func__
)

BY_POLICY = {
    "requeue": work,
    **{
        policy: locked(name=f"work_{policy}", lock_on_conflict=policy, **more)(work.run.__func__)
        for policy, more in (
            ("retry", {}),
            ("wait", {"lock_wait": 60.0}),
            ("skip", {}),
            ("fail", {}),
        )
    },
}


@locked()
def outlive_the_worker(self: Any, key: str, name: Any, gate: str) -> Any:
    """Go on without the main process, as on a system that does not kill its children with it."""
    set_pdeathsig(0)
    with turn(self, key, name):
        journal.pass_gate(gate)
    return name


@locked(lock_hold_on_retry=True, max_retries=2)
def retry_and_keep_the_key(self: Any, key: str, name: Any) -> Any:
    with turn(self, key, name) as times:
        if times == 1:
            raise self.retry(countdown=6.0)  # in which workers are killed
    return name


def hold(self: Any, key: str, how: str) -> str:
    """The first time, never end by itself; the second time, do."""
    with turn(self, key, how) as times:
        if times > 1:
            return "again"
        if how == "regex":  # has the GIL, and looks for signals now and then
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif how == "not at all":
            return "ended"
        elif how == "sum":  # has the GIL, and looks for nothing
            sum(range(10**13))
        else:
            time.sleep(300)
    return "ended"


hold_early = locked(name="hold_early", lock_lease=LONG_LEASE, acks_late=False)(hold)
hold_late = locked(
    name="hold_late", lock_lease=LONG_LEASE, acks_late=True, reject_on_worker_lost=True
)(hold)
hold_late_and_briefly = locked(
    name="hold_late_and_briefly", acks_late=True, reject_on_worker_lost=True
)(hold)
hold_limited = locked(
    name="hold_limited",
    lock_lease=LONG_LEASE,
    acks_late=False,
    time_limit=1,
)(hold)


@locked(acks_late=False, lock_lease=LONG_LEASE)
def hold_shortly(self: Any, key: str) -> None:
    with turn(self, key, "shortly"):
        pass


@locked(acks_late=False)
def fork_a_holder(self: Any, key: str, other: str) -> int:
    """Leave a process behind that holds *other* until its gate is open; return its pid."""
    from celery_distlock import Lock

    pid = os.fork()
    if pid:
        journal.wait(other)
        return pid
    try:
        with Lock(other, lease=LONG_LEASE):
            journal.write(other, os.getpid())
            journal.pass_gate(other)
            journal.write(other, "released")
    finally:
        os._exit(0)


# A client


def main() -> None:
    """As a process: hold the key that is named, until a line comes, and then let go."""
    import sys

    from celery_distlock import Lock

    lock = Lock(sys.argv[1], lease=LEASE)
    lock.acquire()
    print("held", flush=True)  # noqa: T201
    sys.stdin.readline()
    lock.release()


if __name__ == "__main__":
    main()
