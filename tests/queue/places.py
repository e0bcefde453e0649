"""
The stores as the machine sees them: looked at whole, and with a time that passes when it is told.

Nothing in a place ends by itself: every look moves what was due in seconds to the far future. What
a record's time was before that is part of the look, so that it can be checked.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import redis

from celery_distlock.stores.base import Inbox, Store
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis import RedisStore, _RedisDesk

if TYPE_CHECKING:
    from celery_distlock.stores.base import Wake

FAR = 1e9  # seconds

_LOOK = """
local lock, queue, tasks, woken, done = unpack(KEYS)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local far = 1e12
local dues = {}
for _, run in ipairs(redis.call('ZRANGE', woken, 0, -1)) do
    local due = tonumber(redis.call('ZSCORE', woken, run))
    dues[#dues + 1] = run
    dues[#dues + 1] = string.format('%.0f', due - now_ms)
    if due > now_ms and due < now_ms + far / 2 then
        redis.call('ZADD', woken, string.format('%.0f', now_ms + far), run)
    end
end
local ttl = redis.call('PTTL', lock)
if ttl > 0 and ttl < far / 2 then
    redis.call('PEXPIRE', lock, string.format('%.0f', far))
end
return { redis.call('HMGET', lock, 'owner', 'token', 'run'), ttl,
         redis.call('ZRANGE', queue, 0, -1), redis.call('HGETALL', tasks), dues,
         redis.call('ZRANGE', done, 0, -1) }
"""


@dataclass
class Look:
    """All that a store knows of one key."""

    owner: str = ""
    token: int = 0
    run: str = ""
    lease: float = 0.0
    queue: list[str] = field(default_factory=list)  # "p:<run>" and "b:<owner>", the first one first
    envelopes: dict[str, bytes] = field(default_factory=dict)
    stray: set[str] = field(default_factory=set)  # runs of which something is kept, no envelope
    woken: dict[str, float] = field(default_factory=dict)  # seconds until it is sent again
    done: set[str] = field(default_factory=set)


class Ear(Inbox):
    """An inbox that nobody sits at: what comes is read by `Place.heard`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def wait(self, timeout: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Place(Protocol):
    """A store, and the hand of fate."""

    store: Store
    has_desks: bool

    def look(self, key: str) -> Look: ...
    def end_lease(self, key: str) -> None: ...
    def make_due(self, key: str, run: str) -> None: ...
    def sweep(self) -> list[Wake]: ...
    def inbox(self, owner: str) -> Inbox: ...
    def kill_inbox(self, inbox: Inbox) -> None: ...
    def told(self, inbox: Inbox, owner: str) -> bool:
        """Whether *owner* was told at *inbox* since this was last asked."""

    def open_desk(self) -> str: ...
    def kill_desk(self, address: str) -> None: ...
    def pushed(self, address: str) -> list[Wake]:
        """What was pushed there since this was last asked."""

    def residue(self, keys: list[str]) -> list[str]:
        """What is left of *keys* that should not be, much later."""

    def clear(self, keys: list[str]) -> None: ...


class RedisPlace:
    """Uses one connection that listens for everybody, so that nothing has to be waited for."""

    has_desks = True

    def __init__(self, url: str, prefix: str) -> None:
        self.store = RedisStore(url, prefix)
        self._prefix = prefix
        self._client = redis.Redis.from_url(url)
        self._look = self._client.register_script(_LOOK)
        self._count = itertools.count()
        self._ear = self.store._connection(30.0)()
        self._heard: dict[str, list[bytes]] = {}
        self._listen("SUBSCRIBE", f"{prefix}:nobody")

    def close(self) -> None:
        self._ear.disconnect()
        self._client.close()
        self.store.close()

    def _records(self, key: str) -> dict[str, str]:
        names = ("lock", "queue", "tasks", "woken", "fence", "done")
        return {name: f"{self._prefix}:{{{key}}}:{name}" for name in names}

    def look(self, key: str) -> Look:
        records = self._records(key)
        del records["fence"]
        held, ttl_ms, queue, tasks, dues, done = self._look(keys=list(records.values()))
        owner, token, run = (part.decode() if part else "" for part in held)
        fields: dict[str, dict[str, bytes]] = {}
        for name, value in zip(tasks[::2], tasks[1::2], strict=True):
            kind, _, who = name.decode().partition(":")
            fields.setdefault(who, {})[kind] = value
        return Look(
            owner,
            int(token or 0),
            run,
            ttl_ms / 1000,
            [_member(entry.decode()) for entry in queue],
            {who: kept["e"] for who, kept in fields.items() if "e" in kept},
            {who for who, kept in fields.items() if "e" not in kept},
            {r.decode(): int(due) / 1000 for r, due in zip(dues[::2], dues[1::2], strict=True)},
            {r.decode() for r in done},
        )

    def end_lease(self, key: str) -> None:
        self._client.delete(self._records(key)["lock"])

    def make_due(self, key: str, run: str) -> None:
        self._client.zadd(self._records(key)["woken"], {run: 0}, xx=True)

    def sweep(self) -> list[Wake]:
        self._client.delete(f"{self._prefix}:sweeper")
        return list(self.store.sweep(60.0))

    def inbox(self, owner: str) -> Inbox:
        ear = Ear(f"{self._prefix}:inbox:{next(self._count)}")
        self._listen("SUBSCRIBE", ear.address)
        return ear

    def kill_inbox(self, inbox: Inbox) -> None:
        self._listen("UNSUBSCRIBE", inbox.address)

    def told(self, inbox: Inbox, owner: str) -> bool:
        self._hear()
        return owner.encode() in self._heard.pop(inbox.address, [])

    def open_desk(self) -> str:
        address = f"{self._prefix}:desk:{next(self._count)}"
        self._listen("SUBSCRIBE", address)
        return address

    def kill_desk(self, address: str) -> None:
        self._listen("UNSUBSCRIBE", address)

    def pushed(self, address: str) -> list[Wake]:
        self._hear()
        wakes: list[Wake] = []
        desk = _RedisDesk(_Channel(address), wakes.append)
        for payload in self._heard.pop(address, []):
            desk._take(payload)
        return wakes

    def residue(self, keys: list[str]) -> list[str]:
        index = f"{self._prefix}:parked"
        indexed = self._client.zrange(index, 0, -1)
        if indexed:
            self._client.zadd(index, dict.fromkeys(indexed, 0))
        assert not self.sweep()
        self._client.delete(f"{self._prefix}:sweeper")
        left = []
        for record in self._client.scan_iter(match=f"{self._prefix}:*", count=1000):
            lasts = record.endswith((b"}:fence", b"}:done"))
            if not (lasts and 0 < self._client.pttl(record) <= 3_600_000):
                left.append(record.decode())
        return left

    def clear(self, keys: list[str]) -> None:
        self._listen("UNSUBSCRIBE")
        self._listen("SUBSCRIBE", f"{self._prefix}:nobody")
        self._heard.clear()
        records = [record for key in keys for record in self._records(key).values()]
        self._client.delete(f"{self._prefix}:parked", f"{self._prefix}:sweeper", *records)

    def _listen(self, *command: str) -> None:
        self._ear.send_command(*command)
        self._hear()

    def _hear(self) -> None:
        """Read all that was published before now."""
        self._ear.send_command("PING", check_health=False)
        while True:
            answer: Any = self._ear.read_response()
            if answer == b"PONG" or answer[0] == b"pong":
                return
            kind, channel, payload = answer
            if kind == b"message":
                self._heard.setdefault(channel.decode(), []).append(payload)


class _Channel:
    """What a desk needs of a subscription, without a thread."""

    on_message: Any = None

    def __init__(self, channel: str) -> None:
        self.channel = channel

    def start(self) -> None:
        """Listen already."""


def _member(entry: str) -> str:
    return entry if entry.startswith("p:") else f"b:{entry.rpartition(' ')[2]}"


class MemoryPlace:
    """Needs a clock that the test has in hand: see `StillClock`."""

    has_desks = False

    def __init__(self, clock: StillClock, prefix: str) -> None:
        self.store = MemoryStore("memory://", prefix)
        self._clock = clock

    def look(self, key: str) -> Look:
        state = self.store._keys.get(key)
        if state is None:
            return Look()
        now = self._clock.now
        held = bool(state.holder)
        look = Look(
            state.holder,
            state.token if held else 0,
            state.run if held else "",
            state.until - now,
            [waiter.member for waiter in state.queue],
            dict(state.envelopes),
            (set(state.arrivals) | set(state.sends)) - set(state.envelopes),
            {run: max(-FAR, due - now) for run, due in state.woken.items()},
            set(state.done),
        )
        if held and state.until < now + FAR / 2:
            state.until = now + FAR
        for run, due in state.woken.items():
            if now < due < now + FAR / 2:
                state.woken[run] = now + FAR
        return look

    def end_lease(self, key: str) -> None:
        self.store._keys[key].until = -math.inf

    def make_due(self, key: str, run: str) -> None:
        self.store._keys[key].woken[run] = -math.inf

    def sweep(self) -> list[Wake]:
        self.store._swept_at = -math.inf
        return list(self.store.sweep(60.0))

    def inbox(self, owner: str) -> Inbox:
        return self.store.inbox(owner)

    def kill_inbox(self, inbox: Inbox) -> None:
        inbox.close()

    def told(self, inbox: Any, owner: str) -> bool:
        told = inbox.event.is_set()
        inbox.event.clear()
        return bool(told)

    def open_desk(self) -> str:
        return ""

    def kill_desk(self, address: str) -> None:
        pass

    def pushed(self, address: str) -> list[Wake]:
        return []

    def residue(self, keys: list[str]) -> list[str]:
        assert not self.sweep()
        left = []
        for key in keys:
            look = self.look(key)
            if look.owner or look.queue or look.envelopes or look.stray or look.woken:
                left.append(f"{key}: {look}")
            elif key in self.store._keys and not look.done:
                left.append(f"{key}: nothing, but kept")
        return left

    def clear(self, keys: list[str]) -> None:
        self.store._keys.clear()
        self.store._inboxes.clear()


class StillClock:
    """Stands still but for a microsecond each time that somebody looks."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now
