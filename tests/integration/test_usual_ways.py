"""The short ways through the scripts do what the long ones would."""

from __future__ import annotations

import json
import random
import re
from functools import partial

import pytest
import redis

from celery_distlock.stores.redis import scripts
from celery_distlock.stores.redis.connections import fields
from tests.waiting import wait_until

RECORDS = ("lock", "queue", "tasks", "woken", "fence", "done", "rate", "later", "calls")
SHORT = {  # what begins a short way, and what it is without one
    "acquire": ("come_for_it(owner, run, lease_ms, mode == 'wait' and member or '')", "nil"),
    "release": ("hand_to_first(owner, run)", "nil"),
    "sweep": ("hand_to_first(false, '')", "nil"),
}
RUNS = ("r1", "r2", "r3", "r4")
OWNERS = ("a", "b", "c")
BEGAN = 1_000_000_000_000_000  # µs; long before now


def short_and_long(name):
    source = scripts.load(name).source
    call, instead = SHORT[name]
    assert source.count(f"= {call}") == 1
    return source, source.replace(f"= {call}", f"= {instead}")


OTHERS = {
    "rest": scripts.load("rest").source,
    "limit": scripts.load("limit").source,
    "send": scripts.load("send").source,
    "expire": "return redis.call('DEL', KEYS[1])",
    "be late": """
        for _, run in ipairs(redis.call('ZRANGE', KEYS[4], 0, -1)) do
            redis.call('ZADD', KEYS[4], 1, run)
        end
    """,
}
SOURCES = {
    **{name: (source, source) for name, source in OTHERS.items()},
    **{name: short_and_long(name) for name in SHORT},
}


class Twin:
    """One key, with the scripts as they are, or without their short ways."""

    def __init__(self, client: redis.Redis, stem: str, place: int) -> None:
        self.client = client
        self.keys = [f"{stem}:{{k{place}}}:{record}" for record in RECORDS]
        self._stem = stem
        self._place = place
        self._heard = client.pubsub(ignore_subscribe_messages=True)
        self._heard.subscribe(self.channel("inbox"), self.channel("channel"))
        for _confirmation in range(2):
            self._heard.get_message(timeout=10.0)

    def channel(self, name: str) -> str:
        return f"{self._stem}:{name}:{self._place}"

    def send(self, pipe: redis.client.Pipeline, name: str, *arguments: object) -> None:
        texts = [each.decode() if isinstance(each, bytes) else str(each) for each in arguments]
        name_of = partial(re.sub, r"@(\w+)", rf"{self._stem}:\1:{self._place}")
        placed = list(map(name_of, texts))
        pipe.eval(SOURCES[name][self._place], len(self.keys), *self.keys, *placed)

    def state(self) -> object:
        lock, queue, tasks, woken, fence, done, rate, *_ = self.keys
        read = self.client
        facts = [read.hgetall(lock), read.hgetall(tasks), read.exists(fence)]
        facts.append({field: starts(field, told) for field, told in read.hgetall(rate).items()})
        facts += [sorted(read.zrange(name, 0, -1)) for name in (woken, done)]
        in_order = read.zrange(queue, 0, -1, withscores=True)
        facts.append([(member, f"{arrival:.0f}") for member, arrival in in_order])
        return self.alike(facts)

    def heard(self) -> list[object]:
        self.client.publish(self.channel("inbox"), "that was all")
        said = []
        while (message := self._heard.get_message(timeout=10.0))["data"] != b"that was all":
            said.append(self.alike([message["channel"], message["data"]]))
        return said

    def alike(self, value: object) -> object:
        """Return *value* without what tells the two, or moments, from each other."""
        if isinstance(value, bytes) and value.startswith(b"{"):
            return self.alike(json.loads(value))
        if isinstance(value, bytes | str):
            text = value.decode() if isinstance(value, bytes) else value
            text = text.replace(f"k{self._place}", "k").replace(f":{self._place}", "")
            # This server's clock; what came with an arrival of its own keeps it.
            return re.sub(r"1[7-9]\d{11,14}", "now", text)
        if isinstance(value, int):  # or a time that is left
            return value if value < 10 else "for a while"
        if isinstance(value, dict):
            return {self.alike(k): self.alike(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.alike(each) for each in value]
        return value


def starts(field: bytes, told: bytes) -> object:
    """How many starts a record tells; of when, as long as it takes from one twin to the other."""
    return sum(map(int, told.split()[4::2])) if field.startswith(b"p:") else told


def run(twins: list[Twin], step: tuple[object, ...]) -> list[object]:
    """Return the answers of both, which do it at one moment."""
    with twins[0].client.pipeline() as pipe:
        for twin in twins:
            twin.send(pipe, *step)
        return [twin.alike(answer) for twin, answer in zip(twins, pipe.execute(), strict=True)]


def outlast_a_short_rest(client: redis.Redis) -> None:
    """Have it end before the next step, and not between one's and the other's."""
    (seconds, microseconds), ends = client.time(), 2000
    wait_until(
        lambda: (now := client.time())[0] > seconds or now[1] > microseconds + ends,
        what="two milliseconds to pass",
    )


def times(twins: list[Twin]) -> list[list[float]]:
    """Return of both for how long each record lives, and when what is on its way is sent again."""
    with twins[0].client.pipeline() as pipe:
        for twin in twins:
            for key in twin.keys:
                pipe.pttl(key)
            pipe.zrange(twin.keys[3], 0, -1, withscores=True)
        answers = pipe.execute()
    found = []
    for *left, woken in (answers[: len(RECORDS) + 1], answers[len(RECORDS) + 1 :]):
        found.append([*left, *sorted(at for _, at in woken)])
    return found


def any_step(chance: random.Random, number: int) -> tuple[object, ...]:
    if chance.random() < 0.1:
        return chance.choice((("sweep", 100), ("be late",)))
    if chance.random() < 0.03:
        limit = chance.choice((("-", 0, "me", "2,60000000,2"), ("", 0, "", ""), ("", 0, "", "")))
        return ("limit", *limit)
    owner, run = chance.choice(OWNERS), chance.choice(("", *RUNS))
    arrival = BEGAN + number
    lease = chance.choice((30_000, 60_000))
    if chance.random() < 0.15:
        ended = chance.choice((0, 1, 1, 1, 2, 3))
        near = any_channel(chance)
        more = () if chance.random() < 0.9 else (fields(inbox=chance.choice(("@inbox", "@gone"))),)
        return ("release", owner, run, ended, *near, *more)
    if chance.random() < 0.1:
        sent = run or "r1"
        destination = chance.choice(("", "x", "y"))
        return ("send", sent, f"envelope of {sent}", "task", destination)
    mode = chance.choice(("try", "wait", "wait", "park", "park", "line"))
    more: dict[str, object] = {"repeated": chance.random() < 0.1, "mode": mode}
    if mode == "try" and chance.random() < 0.8:
        return ("acquire", owner, lease, run, arrival, "", fields(**more))
    more["keep"], envelope = chance.random() < 0.2, ""
    if mode in ("park", "line"):
        run = run or "r1"
        more |= {"channel": chance.choice(("@channel", "@channel", "@shut", "")), "task": "task"}
        envelope = f"envelope of {run}"
    else:
        more["inbox"] = chance.choice(("@inbox", "@inbox", "@gone")) if mode == "wait" else ""
    want = chance.choice(("1/2", "1/0")) if chance.random() < 0.02 else ""
    return ("acquire", owner, lease, run, arrival, want, fields(**more), envelope)


def any_channel(chance: random.Random) -> tuple[str, str]:
    """A worker's, and the destination whose messages it takes; or nobody's."""
    return chance.choice((("", ""), ("@channel", "x"), ("@channel", "y"), ("@shut", "x")))


def next_step(chance: random.Random, number: int, twin: Twin) -> tuple[object, ...]:
    """Return what the one who has the key, or is to come for it, does next; or any step."""
    owner, run, due = (
        value.decode() if value else ""
        for value in twin.client.hmget(twin.keys[0], "owner", "run", "due")
    )
    if not owner and chance.random() < 0.5:
        return chance.choice((("sweep", 100), ("be late",)))
    if not owner or owner == "several:" or chance.random() < 0.5:
        return any_step(chance, number)
    arrival = BEGAN + number
    if owner.startswith("parked:") and chance.random() < 0.2:
        return (chance.choice(("expire", "be late")),)
    if owner.startswith("parked:"):
        more = ("", fields(mode="try", keep=True)) if chance.random() < 0.06 else ()
        return ("acquire", chance.choice(OWNERS), 30_000, run, arrival, *more)
    if due:
        waits = fields(mode="wait", inbox="@inbox")
        return ("acquire", owner, 30_000, run, arrival, "", waits)
    if chance.random() < 0.1:
        return (chance.choice(("expire", "be late")),)
    if chance.random() < 0.1:
        return ("rest", owner, chance.choice((1, 5000)))
    return ("release", owner, run, chance.choice((0, 1, 1, 1)), *any_channel(chance))


@pytest.fixture
def twins(redis_url, prefix):
    with redis.Redis.from_url(redis_url) as client:
        yield [Twin(client, prefix, place) for place in (0, 1)]


@pytest.mark.parametrize("seed", range(16))
def test_any_steps_leave_the_same_by_the_short_ways_and_the_long_ones(twins, seed):
    chance = random.Random(seed)
    steps = []
    for number in range(60):
        steps.append(next_step(chance, number, twins[0]))
        answers = run(twins, steps[-1])
        if steps[-1][0] == "rest":
            outlast_a_short_rest(twins[0].client)

        assert answers[0] == answers[1], steps
        assert twins[0].state() == twins[1].state(), steps
        lasts = times(twins)
        assert lasts[0] == pytest.approx(lasts[1], abs=500), steps  # ms
        assert twins[0].heard() == twins[1].heard(), steps
