"""One lock store, its workers, senders of tasks and observers; and what happens to them."""

from __future__ import annotations

import json
import os
import random
import threading
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.stores import Ability, open_store
from celery_distlock.testing import EmbeddedServer
from tests.apps import make_app
from tests.chaos import broker
from tests.chaos.caller import Caller
from tests.chaos.calls import Call
from tests.chaos.judge import Fault, History, Look, Run
from tests.chaos.terms import KEYS, LANED, LEASE, RATED, SHARES
from tests.waiting import wait_until
from tests.workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.chaos.places import Place

APP = "tests.chaos.app"
WORKERS = 3
SLOTS = 3  # of each worker
RATE = 16.0  # tasks a second
MOST_WAITING = 80  # tasks that were sent and have not run, at most
BURST = 0.1  # of all that is sent: several tasks for one key at once
CONTROL = 0.15  # the same: tasks without a lock
CALLER_DIES = 0.03  # of the calls through the store, or bursts of them
DELAYED = 0.2  # of the calls through the store
TWO = {"pair", "mixed"}  # tasks that need two keys
KEYS_OF = {"rated": RATED, "laned": [*LANED], "requeue": [*KEYS, *LANED]}
LOOK_EVERY = 0.2  # seconds
PAUSES = (1.0, 3.0)  # seconds between faults
QUIET = 7.0  # seconds, now and then, in which a key that is idle can be seen to be
BACKLOG = 10.0  # seconds after which workers have received all that the broker has not lost
DRAIN = 80.0  # seconds for all that was sent to run; a message that got lost is sent again after 60


MORE = (
    "units",
    "capacity",
    "asked",
    "entered",
    "rated",
    "argument",
    "lane",
    "most",
)  # if it had a lock


class Sent(NamedTuple):
    """A task that was sent."""

    name: str
    at: float


class Notebook:
    """What the tasks have written down; read by the sender and, in the end, for the judge."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._read = 0
        self._mutex = threading.Lock()
        self._begun: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self.finished: set[str] = set()  # tasks that have run to an end, or failed
        self.failed: set[str] = set()
        self.calls: list[Call] = []

    def refresh(self) -> None:
        with self._mutex, self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                note = json.loads(line)
                if "call" in note:
                    self.calls.append(Call(note.pop("call"), **note))
                    continue
                if "failed" in note:
                    self.failed.add(note["failed"])
                    self.finished.add(note["failed"])
                    continue
                (self._ended if "end" in note else self._begun)[note["owner"]] = note
                if note.get("ended") == "done":
                    self.finished.add(self._begun[note["owner"]]["id"])

    def runs(self, deaths: dict[int, float]) -> Iterator[Run]:
        """All that ran; *deaths* says when those that were killed were last known to live."""
        self.refresh()
        for owner, note in self._begun.items():
            end = self._ended.get(owner)
            if end is not None:
                until, outcome = end["end"], end["ended"]
            else:  # a process of which it is unknown when it died has lived until here at least
                until = max(note["begin"], min(deaths.get(note["pid"], 0.0), note["until"]))
                outcome = "killed" if note["pid"] in deaths else "?"
            facts = (note[name] for name in ("token", "owner", "run", "execution"))
            more = {name: note[name] for name in MORE if name in note}
            yield Run(note["id"], note["key"], note["begin"], until, *facts, outcome, **more)


class Stage:
    """
    Workers over one place for locks, with a broker of their own that nothing happens to.

    Args:
        place: Where the locks are, running.
        folder: For logs and notes.
        choose: Chooses what is sent and what happens.
        pairs: Send tasks, too, that need two keys.
        breakage: What shall be wrong with the locks, see `breakages`.
    """

    def __init__(
        self,
        place: Place,
        folder: Path,
        choose: random.Random,
        *,
        pairs: bool = False,
        breakage: str = "",
    ) -> None:
        self._place = place
        self._folder = folder
        self._choose = choose
        self._pairs = pairs
        self._breakage = breakage
        self._broker = EmbeddedServer()
        self._workers: list[WorkerProcess] = []
        self._deaths: dict[int, float] = {}
        self._sent: dict[str, Sent] = {}
        self._looks: list[Look] = []
        self._faults: list[Fault] = []
        self._stops = threading.Event()
        self._sends = True
        self.died: list[str] = []  # workers that ended and were not killed
        self.callers_killed = 0
        self.notebook = Notebook(folder / "notes")

    def __enter__(self) -> Self:
        self._broker.start()
        prefix = f"chaos-{uuid.uuid4().hex[:8]}"
        os.environ.update(
            DISTLOCK_TEST_BROKER=self._broker.url,
            DISTLOCK_TEST_BACKEND=self._broker.url,
            DISTLOCK_TEST_STORE=self._place.url,
            DISTLOCK_TEST_PREFIX=prefix,
            DISTLOCK_CHAOS_NOTES=os.fspath(self.notebook.path),
            DISTLOCK_CHAOS_BREAK=self._breakage,
        )
        self._app = make_app("chaos")
        self._store = open_store(self._place.url, f"{prefix}:lock")
        self._parks = Ability.QUEUE in self._store.abilities
        several = Ability.SEVERAL in self._store.abilities
        self._sharing = ["three", "read"] if several else []
        if self._parks:
            self._sharing += ["heavy"] + ["mixed"] * self._pairs
        self._calls = ["sent", "once", "newest", "laned"] if self._parks else []
        self._rated = ["rated"] if self._parks else []
        self._caller = Caller(self._folder) if self._calls else None
        for _ in range(WORKERS):
            self._start_worker()
        for worker in self._workers:
            worker.wait_ready()
        seed = self._choose.random()
        self._sender = threading.Thread(target=self._send, args=(seed,), daemon=True)
        self._threads = [self._sender, threading.Thread(target=self._look, daemon=True)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stops.set()
        for worker in self._workers:
            worker.kill(whole=True)
        for thread in getattr(self, "_threads", ()):
            thread.join(10.0)
        if caller := getattr(self, "_caller", None):
            caller.close()
        self._store.close()
        self._app.close()
        self._broker.close()

    def play(self, until: float) -> None:
        """Let faults happen until then, then let all that was sent run."""
        todo: deque[str] = deque()
        while clock.monotonic() < until:
            quiet = self._choose.random() < 0.2
            self._stops.wait(QUIET if quiet else self._choose.uniform(*PAUSES))
            if clock.monotonic() >= until:
                break
            if not todo:  # all of them, before the first comes again
                todo.extend(self._choose.sample(list(self._kinds), len(self._kinds)))
            self._happen(todo.popleft())
        self._sends = False
        self._sender.join()
        if self._caller is not None:
            self._finish(self._caller)
        if self._drained() and self._caller is not None:
            self._call_once_more()
            self._drained()

    def _drained(self) -> bool:
        """Wait for what was sent to run; return whether all has."""
        begin = clock.monotonic()
        while clock.monotonic() < begin + DRAIN:
            missing = self._tasks - self.notebook.finished
            if clock.monotonic() > begin + BACKLOG:
                missing -= self._dropped(missing)
            if not missing:
                return True
            self._stops.wait(0.5)
        return False

    def _call_once_more(self) -> None:
        """Make a call of each kind for each key: none like it is there, whatever has happened."""
        caller = self._caller = Caller(self._folder)
        for name in ("once", "newest"):
            for key in KEYS:
                caller.call(name, (key, self._choose.uniform(0.01, 0.02)), last=True)
        self._finish(caller)

    def _finish(self, caller: Caller) -> None:
        if not caller.finish():
            self.died.append("a caller did not make all of its calls, see caller.log")

    @property
    def _tasks(self) -> set[str]:
        """The ids of all that was sent."""
        self.notebook.refresh()
        return self._sent.keys() | {call.id for call in self.notebook.calls}

    def history(self) -> tuple[History, History]:
        """What became of the locked tasks, and of those without a lock."""
        runs = list(self.notebook.runs(self._deaths))
        plain = {task for task, sent in self._sent.items() if sent.name == "plain"}
        locked = History(
            self._tasks - plain,
            [run for run in runs if run.id not in plain],
            self._faults,
            self._looks,
            failed=self.notebook.failed,
            calls=self.notebook.calls,
            sent_at={task: sent.at for task, sent in self._sent.items()},
        )
        control = History(plain, [run for run in runs if run.id in plain], self._faults)
        for each in (locked, control):
            each.dropped = self._dropped(each.missing)
        return locked, control

    def _dropped(self, missing: set[str]) -> set[str]:
        sent = {task: self._sent[task].at for task in missing & self._sent.keys()}
        logs = [file.read_text(errors="replace") for file in self._folder.glob("*.log")]
        return broker.dropped(sent, self._faults, logs)

    # What happens

    @property
    def _kinds(self) -> dict[str, Callable[[random.Random], None]]:
        ours = {"child": self._kill_child, "worker": self._kill_worker, "stop": self._stop_worker}
        return {**ours, **self._place.faults}

    def _happen(self, kind: str) -> None:
        self._mourn()
        begin = clock.monotonic()
        self._kinds[kind](self._choose)
        self._faults.append(Fault(kind, begin, clock.monotonic()))

    def _kill_child(self, choose: random.Random) -> None:
        worker = choose.choice(self._ready())
        child = choose.choice(worker.children())
        self._kill(child)

    def _kill(self, pid: int) -> None:
        self._deaths[pid] = clock.monotonic()  # before: it lived until then at least
        os.kill(pid, 9)

    def _kill_worker(self, choose: random.Random) -> None:
        """All of it, or its main process alone, which leaves orphans."""
        worker = choose.choice(self._ready())
        self._workers.remove(worker)
        whole = choose.random() < 0.5
        if whole:
            now = clock.monotonic()
            self._deaths.update(dict.fromkeys(worker.children(), now))
        worker.kill(whole=whole)
        self._start_worker()

    def _stop_worker(self, choose: random.Random) -> None:
        """For longer than a lease."""
        worker = choose.choice(self._ready())
        worker.pause()
        self._stops.wait(LEASE + choose.uniform(0.3, 2.0))
        worker.resume()

    def _ready(self) -> list[WorkerProcess]:
        """The workers that serve, once they are two."""

        def ready() -> list[WorkerProcess]:
            found = [each for each in self._workers if " ready." in each.log() and each.children()]
            return found if len(found) >= WORKERS - 1 else []

        return wait_until(ready, timeout=60.0, what="workers to be ready")

    def _start_worker(self) -> None:
        worker = WorkerProcess(
            APP, folder=self._folder, concurrency=SLOTS, args=["--without-heartbeat"]
        )
        worker.start(wait=False)
        self._workers.append(worker)

    def _mourn(self) -> None:
        for worker in list(self._workers):
            if not worker.running:
                self.died.append(f"{worker.name} ended by itself: {worker.process.returncode}")
                self._workers.remove(worker)
                self._start_worker()

    # While that goes on

    def _send(self, seed: float) -> None:
        choose = random.Random(seed)
        names = ["retry", "wait"]
        if self._parks:
            names += ["requeue", "requeue"] + ["pair"] * self._pairs
            names += self._sharing + self._rated + self._calls
        while self._sends and not self._stops.wait(choose.expovariate(RATE)):
            if len(self._tasks - self.notebook.finished) > MOST_WAITING:
                continue
            name = "plain" if choose.random() < CONTROL else choose.choice(names)
            keys = choose.sample(KEYS_OF.get(name, KEYS), 2 if name in TWO else 1)
            is_laned = name == "laned"
            many = choose.randrange(6, 15) if is_laned else choose.randrange(4, 9)
            for _ in range(many if is_laned or choose.random() < BURST else 1):
                lane = [choose.choice([*SHARES])] if is_laned else []
                self._send_one(name, (*keys, *lane, choose.uniform(0.02, 0.2)), choose)
            if name in self._calls and choose.random() < CALLER_DIES:
                self._kill_caller(choose)

    def _send_one(self, name: str, arguments: Sequence[Any], choose: random.Random) -> None:
        if name not in self._calls:
            at = clock.monotonic()
            sent = self._app.send_task(f"{APP}.{name}", arguments)
            self._sent[sent.id] = Sent(name, at)
            return
        assert self._caller is not None
        late = name == "sent" and choose.random() < DELAYED
        try:
            self._caller.call(name, arguments, choose.uniform(0.1, 3.0) if late else 0.0)
        except BrokenPipeError:
            self.died.append("a caller ended by itself, see caller.log")
            self._caller.replace()

    def _kill_caller(self, choose: random.Random) -> None:
        assert self._caller is not None
        self._stops.wait(choose.uniform(0.0, 0.02))
        self._caller.replace()
        self.callers_killed += 1

    def _look(self) -> None:
        while not self._stops.wait(LOOK_EVERY):
            try:
                self._look_once()
            except StoreError:
                continue  # a fault is on

    def _look_once(self) -> None:
        begin = clock.monotonic()
        keys = [*KEYS, *LANED]
        states = self._store.inspect_many(keys)
        end = clock.monotonic()
        for key, state in zip(keys, states, strict=True):
            wanted = state.waiting + state.woken
            self._looks.append(Look(key, begin, end, wanted, ()))
        for key, state in zip(keys, states, strict=True):
            if state.waiting > 1 and key not in LANED:  # there the order is that of turns
                self._look_at_queue(key)

    def _look_at_queue(self, key: str) -> None:
        begin = clock.monotonic()
        waiters = self._store.waiters(key)
        queue = tuple(each.run or each.owner for each in waiters if not each.woken)
        self._looks.append(Look(key, begin, clock.monotonic(), len(waiters), queue))
