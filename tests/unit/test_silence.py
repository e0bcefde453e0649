"""How long calls wait for a server that has not answered those before them."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores.redis.connections import TIMEOUT
from celery_distlock.stores.redis.silence import HURRY, LONG, REMEMBERED, Silence


class Server:
    """Answers after some seconds, which pass at once."""

    def __init__(self) -> None:
        self.now = 100.0
        self.needs = math.inf
        self.silence = Silence()

    def call(self) -> float:
        """Return how long one has waited."""
        began = self.now
        with suppress(StoreUnavailableError), self.silence.patience() as patience:
            self.now += min(self.needs, patience)
            if self.needs > patience:
                raise StoreUnavailableError("no answer")
        return self.now - began

    def stay_silent(self, seconds: float = LONG) -> None:
        until = self.now + seconds
        while self.now < until:
            assert self.call() == TIMEOUT


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(clock, "monotonic", lambda: server.now)
    return server


def test_calls_wait_in_full_for_as_long_as_a_failover_takes_and_hurry_then(server: Server) -> None:
    server.stay_silent(LONG)

    assert [server.call() for _ in range(3)] == [HURRY] * 3


def test_what_fails_in_a_hurry_does_not_have_later_calls_hurry(server: Server) -> None:
    server.stay_silent()
    hurried = [server.call() for _ in range(int(REMEMBERED / HURRY))]

    assert set(hurried) == {HURRY}
    assert server.call() == TIMEOUT


def test_one_that_is_slow_is_waited_for_after_an_answer(server: Server) -> None:
    server.stay_silent()
    server.needs = HURRY / 2
    server.call()
    server.needs = 2 * HURRY

    assert [server.call() for _ in range(3)] == [2 * HURRY] * 3


def test_what_is_refused_is_no_silence(server: Server) -> None:
    for _ in range(100):
        with suppress(StoreUnavailableError), server.silence.patience() as patience:
            server.now += 0.3  # the pauses between three attempts
            raise StoreUnavailableError("refused")
        assert patience == TIMEOUT


def test_one_silence_is_not_the_next_one(server: Server) -> None:
    server.call()
    server.now += REMEMBERED

    server.stay_silent(LONG)
