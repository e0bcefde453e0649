"""The real store, over a wire that can lose answers, in a time that passes on request."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import redis

from celery_distlock import clock
from celery_distlock.stores.redis import scripts
from celery_distlock.stores.redis.connections import Command, command
from celery_distlock.stores.redis.delivery_channel import PubSubChannel
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.redis.subscriptions import PubSubInbox, WaiterSubscriptions
from celery_distlock.stores.redis.topology import PushTarget
from celery_distlock.stores.values import Sending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_distlock.stores.values import WokenTask

KEYS = ("a", "b")

# Brings every time in the records nearer. Not the queue's: they only order it.
_PASS = """
local ms = tonumber(ARGV[1])
for _, key in ipairs(KEYS) do
    local ttl = redis.call('PTTL', key)
    if ttl >= 0 then
        redis.call('PEXPIRE', key, ttl - ms)
    end
    if redis.call('TYPE', key).ok == 'zset' and not string.find(key, ':queue$') then
        for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, 1, '+inf')) do
            redis.call('ZINCRBY', key, -ms, member)
        end
    end
end
"""


class Time:
    """Replaces `clock.monotonic`."""

    def __init__(self) -> None:
        self.passed = 0.0
        self._monotonic = clock.monotonic

    def __call__(self) -> float:
        return self._monotonic() + self.passed


class UnluckyStore(RedisStore):
    """`losses` says what becomes of the next answers: those at an "x" are lost."""

    def __init__(self, url: str, prefix: str, time: Time) -> None:
        super().__init__(url, prefix)
        self._requests.exchange = self._exchange
        self.losses = ""
        self.numbers = itertools.count()
        self._time = time
        self._ear = self._servers.connect(None)()  # for all subscribers
        self._channels: dict[bytes, Callable[[bytes], None]] = {}
        self.workers = [Worker(self), Worker(self)]
        records = [record for key in KEYS for record in self._records_of(key)]
        self._all = [*records, f"{prefix}:parked", f"{prefix}:sweeper"]

    def close(self) -> None:
        self._ear.disconnect()
        super().close()

    def dispatch(self, wake: WokenTask | None, **_: Any) -> Sending:
        """Send it here and now: the process that does it is the one that may die of it."""
        return Sending.LEFT if wake is None else self.publishers.deliver(wake)

    def _exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        answers = self._servers.exchange(calls, timeout)
        fate, self.losses = self.losses[:1], self.losses[1:]
        if fate == "x":
            return [redis.ConnectionError("the answer was lost")] * len(calls)
        return answers

    def _do(self, *words: Any) -> Any:
        return self._servers.exchange([command(b"", *words)], 30.0)[0]

    def _records_of(self, key: str) -> list[str]:
        return [self._records.stem(key) + record for record in scripts.load("acquire").keys]

    def pass_time(self, seconds: float) -> None:
        self._time.passed += seconds
        self._do("EVAL", _PASS, len(self._all), *self._all, round(seconds * 1000))

    def kept(self) -> set[str]:
        """The runs that are parked or in flight."""
        asked = [command(b"", "HKEYS", self._records_of(key)[2]) for key in KEYS]
        fields = itertools.chain(*self._servers.exchange(asked, 30.0))
        return {field[2:].decode() for field in fields if field.startswith(b"e:")}

    def records(self) -> list[bytes]:
        cursor, found = b"0", []
        while True:
            cursor, some = self._do("SCAN", cursor, "MATCH", f"{self._prefix}:*", "COUNT", 1000)
            found += some
            if cursor == b"0":
                return found

    def clear(self) -> None:
        self.losses = ""
        self._do("DEL", *self._all)
        self.hear()
        for worker in self.workers:
            worker.pushed.clear()

    def kill(self, worker: Worker) -> None:
        worker.close()
        self.workers[self.workers.index(worker)] = Worker(self)

    def subscribe(self, channel: str, on_message: Callable[[bytes], None]) -> None:
        self._channels[channel.encode()] = on_message
        self._ear.send_command("SUBSCRIBE", channel)
        self.hear()

    def unsubscribe(self, channel: str) -> None:
        self._ear.send_command("UNSUBSCRIBE", channel)
        self.hear()

    def hear(self) -> None:
        """Let all that was published before now be heard."""
        self._ear.send_command("PING", check_health=False)
        while (answer := self._ear.read_response()) not in (b"PONG", [b"pong", b""]):
            if answer[0] == b"message":
                self._channels[answer[1]](answer[2])


class ToldPost(WaiterSubscriptions):
    """A post that has no connection: the store that it is of hears for it."""

    def join(self, inbox: PubSubInbox, place: PushTarget) -> None:
        self._inboxes[inbox.owner] = inbox


class Worker:
    """A worker's main process: its channel gets runs, and its mailbox notifies blocked waiters."""

    def __init__(self, store: UnluckyStore) -> None:
        self._store = store
        self.pushed: list[WokenTask] = []
        self.channel = f"{store._prefix}:channel:{next(store.numbers):032x}"
        self._mailbox = f"{store.identity}:{next(store.numbers)}"
        self._post = ToldPost(store._servers.connect(None))
        channel = PubSubChannel(self.channel, store._servers, self.pushed.append)
        store.subscribe(self.channel, channel._pushes.take)
        store.subscribe(self._mailbox, self._post._call)

    def inbox(self, owner: str) -> PubSubInbox:
        return PubSubInbox(owner, lambda: (self._post, PushTarget(None, self._mailbox)))

    def close(self) -> None:
        for channel in (self.channel, self._mailbox):
            self._store.unsubscribe(channel)
