"""What any client may publish on a delivery channel."""

from __future__ import annotations

from contextlib import closing

from redis import Redis

from celery_distlock.stores.redis.store import RedisStore
from tests.waiting import wait_until

GARBAGE = [
    *(b"", b"x", b"1 2", b"9 9 0 0 x", b"-5 -5 0 0 xxx", b"5 3 p:{k}run{}"),
    *(b"5 3 9 0 p:{k}run{}", b"5 3 -1 0 p:{k}run{}", b"5 3 0 soon p:{k}run{}"),
    *(b"\xff \xff 0 0 \xff", b"5 1 0 0 \xff\xff\xff\xff\xffrun{}"),
]


def test_garbage_on_a_delivery_channel_costs_a_line_in_the_log_and_no_more(
    redis_url, prefix, caplog
):
    taken = []
    with closing(RedisStore(redis_url, prefix)) as store, Redis.from_url(redis_url) as client:
        channel = store.channels.open_channel(taken.append)
        for payload in GARBAGE:
            client.publish(channel.address, payload)
        client.publish(channel.address, b"5 3 0 0 p:{k}run{}")
        wait_until(lambda: taken, what="the run that is one")
        channel.close()

    assert [(wake.name, wake.run, wake.envelope) for wake in taken] == [("k", "run", b"{}")]
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "not a task" in line]) == len(GARBAGE)
    assert not [line for line in lines if "subscription broke" in line]
