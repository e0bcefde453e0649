"""The real store, over a wire that can lose answers, in a time that passes when it is told to."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import redis

from celery_distlock import clock
from celery_distlock.stores.redis import RedisStore, _Post, _RedisDesk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_distlock.stores.base import Wake

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
        for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
            redis.call('ZINCRBY', key, -ms, member)
        end
    end
end
"""


class Time:
    """Stands in for `clock.monotonic`."""

    def __init__(self) -> None:
        self.passed = 0.0
        self._monotonic = clock.monotonic

    def __call__(self) -> float:
        return self._monotonic() + self.passed


class UnluckyStore(RedisStore):
    """`losses` says what becomes of the next answers: those at an "x" are lost."""

    def __init__(self, url: str, prefix: str, time: Time) -> None:
        super().__init__(url, prefix)
        self.losses = ""
        self.numbers = itertools.count()
        self._time = time
        self._ear = self._connection(30.0)()  # for everybody who listens
        self._channels: dict[bytes, Channel] = {}
        self.workers = [Worker(self), Worker(self)]
        records = [record for key in KEYS for record in self._names(key)]
        self._all = [*records, self._index, f"{prefix}:sweeper".encode()]

    def close(self) -> None:
        self._ear.disconnect()
        super().close()

    def _exchange(self, wire: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
        answers = super()._exchange(wire, commands)
        fate, self.losses = self.losses[:1], self.losses[1:]
        if fate == "x":
            raise redis.ConnectionError("the answer was lost")
        return answers

    def _do(self, *command: Any) -> Any:
        return self._wire(30.0).exchange([command])[0]

    def pass_time(self, seconds: float) -> None:
        self._time.passed += seconds
        self._do("EVAL", _PASS, len(self._all), *self._all, round(seconds * 1000))

    def kept(self) -> set[str]:
        """The runs that are parked or on their way."""
        asked = [("HKEYS", self._names(key)[2]) for key in KEYS]
        fields = itertools.chain(*self._wire(30.0).exchange(asked))
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

    def subscribe(self, channel: Channel) -> None:
        self._channels[channel.channel.encode()] = channel
        self._ear.send_command("SUBSCRIBE", channel.channel)
        self.hear()

    def unsubscribe(self, channel: Channel) -> None:
        self._ear.send_command("UNSUBSCRIBE", channel.channel)
        self.hear()

    def hear(self) -> None:
        """Let all that was published before now be heard."""
        self._ear.send_command("PING", check_health=False)
        while (answer := self._ear.read_response()) not in (b"PONG", [b"pong", b""]):
            if answer[0] == b"message":
                self._channels[answer[1]].on_message(answer[2])


class Channel:
    """What a desk and a post need of a subscription, without a thread."""

    on_message: Callable[[bytes], None]

    def __init__(self, store: UnluckyStore) -> None:
        self.channel = f"{store.identity}:{next(store.numbers)}"
        self.start = lambda: store.subscribe(self)
        self.close = lambda: store.unsubscribe(self)


class Worker:
    """A worker's main process: runs are pushed to its desk, and its post tells blocked waiters."""

    def __init__(self, store: UnluckyStore) -> None:
        self.pushed: list[Wake] = []
        self._desk = _RedisDesk(Channel(store), self.pushed.append)
        self._post = _Post(Channel(store))
        self.desk = self._desk.address
        self.inbox = self._post.open

    def close(self) -> None:
        self._desk.close()
        self._post.close()
