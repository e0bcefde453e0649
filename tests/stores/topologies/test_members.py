"""When an answer of a cluster's node is doubted, and what is no longer sent."""

from __future__ import annotations

from contextlib import closing

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.stores.redis.cluster_nodes import USUAL, ClusterNode
from celery_distlock.stores.redis.connections import ConnectionPool, command
from celery_distlock.stores.redis.urls import locate
from celery_distlock.testing import FakeClock

PING = [command(b"", "PING")]


@pytest.fixture
def member(redis_url):
    made = ClusterNode(locate(redis_url).servers._settings)
    with closing(made):
        yield made


@pytest.fixture
def fake():
    made = FakeClock()
    with made.running():
        yield made


@pytest.fixture
def doubts(member, fake, monkeypatch):
    """Ask the member, and take *times* for its answers; return whether each was doubted."""
    receive = ConnectionPool.receive

    def ask(*times: float, confirmed: bool = True) -> list[bool]:
        return [doubted(each, confirmed) for each in times]

    def doubted(seconds: float, confirmed: bool) -> bool:
        def take_long(*request):
            fake._now += seconds
            return receive(*request)

        found = []

        def confirm() -> None:
            found.append(True)
            if not confirmed:
                raise RedisConnectionError("another has taken its place")

        with monkeypatch.context() as patch:
            patch.setattr(ConnectionPool, "receive", take_long)
            try:
                assert member.ask(PING, 5.0, confirm=confirm) == [b"PONG"]
            except RedisConnectionError:
                assert not confirmed
        return bool(found)

    return ask


def test_an_answer_that_comes_at_once_is_believed(doubts):
    assert doubts(0.0, 0.001, 0.019) == [False] * 3


def test_an_answer_that_took_long_is_doubted(doubts):
    assert doubts(0.001, 0.03, 0.03, 0.2, 10.0) == [False] + [True] * 4


def test_the_way_to_a_far_server_is_not_counted(doubts):
    assert doubts(0.1, 0.1, 0.11, 0.119, 0.13, 0.1) == [True, False, False, False, True, False]


def test_the_way_becomes_shorter_at_once_and_longer_when_all_the_last_answers_took_longer(doubts):
    assert doubts(0.1, 0.1, 0.001, 0.1) == [True, False, False, True]
    assert doubts(*[0.1] * USUAL) == [True] * (USUAL - 1) + [False]


def test_what_is_not_confirmed_does_not_show_how_far_a_server_is(doubts):
    assert doubts(*[0.1] * 20, confirmed=False) == [True] * 20


def test_a_server_that_is_slow_for_long_is_not_believed_after_a_long_pause(doubts):
    assert doubts(*[0.2] * 20, 0.5) == [True] + [False] * 19 + [True]
    assert doubts(*[0.5] * 20) == [True] * 20


def test_an_answer_is_doubted_if_we_were_suspended_ourselves_when_it_was_asked_for(
    doubts, fake, monkeypatch
):
    send = ConnectionPool.send

    def send_and_pause(*request):
        connection = send(*request)
        fake._now += 1.0
        return connection

    monkeypatch.setattr(ConnectionPool, "send", send_and_pause)
    assert doubts(0.001) == [True]


def test_the_time_that_connecting_takes_is_not_counted(doubts, fake, monkeypatch):
    connect = ConnectionPool.connect

    def take_long(pool):
        connect(pool)
        fake._now += 1.0

    monkeypatch.setattr(ConnectionPool, "connect", take_long)
    assert doubts(0.001) == [False]


def test_nothing_is_sent_when_no_caller_waits(member, redis_url, prefix):
    with pytest.raises(RedisTimeoutError):
        member.ask([command(b"", "SET", prefix, "1")], 5.0, clock.monotonic() - 1)
    member.ask(PING, 5.0)
    with pytest.raises(RedisTimeoutError):
        member.ask([command(b"", "SET", prefix, "1")], 5.0, clock.monotonic() - 1)

    with closing(redis.Redis.from_url(redis_url)) as client:
        assert not client.exists(prefix)


def test_a_member_that_was_not_heard_from_is_silent_until_it_is(member):
    with pytest.raises(RedisTimeoutError):
        member.ask(PING, 5.0, clock.monotonic() - 1)
    assert member.silent

    member.ask(PING, 5.0)

    assert not member.silent
