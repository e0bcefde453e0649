"""Whether what the broker was given may still be in its queue."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from amqp.exceptions import AccessRefused, NotFound

from celery_distlock.runtime.routing import Backlog


class Broker:
    """A connection to a broker, and its channel."""

    connection_errors = (ConnectionError,)

    def __init__(self):
        self.says = 0
        self.looks = 0

    @contextmanager
    def connection_or_acquire(self):
        yield self

    @contextmanager
    def channel(self):
        yield self

    def queue_declare(self, queue, passive):
        assert (queue, passive) == ("celery", True)
        self.looks += 1
        if isinstance(self.says, Exception):
            raise self.says
        return SimpleNamespace(message_count=self.says)


@pytest.fixture
def broker():
    return Broker()


@pytest.mark.parametrize(
    ("says", "may_be_there"),
    [
        (0, False),
        (3, True),
        (NotFound("there is no such queue"), False),
        (AccessRefused("it must not look"), False),
        (ConnectionError("it is unreachable"), True),
    ],
)
def test_a_message_may_be_in_a_queue_that_has_some_or_cannot_be_asked(broker, says, may_be_there):
    broker.says = says

    assert Backlog(broker).is_in(["celery"]) is may_be_there


@pytest.mark.parametrize("says", [0, 3])
def test_many_questions_are_one_look(broker, says):
    broker.says, backlog = says, Backlog(broker)

    assert len({backlog.is_in(["celery"]) for _ in range(100)}) == 1
    assert broker.looks == 1
