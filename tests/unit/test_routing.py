"""Where a message comes to, as far as an app knows."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Queue
from kombu.common import Broadcast

from celery_distlock.runtime.routing import copied_queue, taken_queues


@pytest.mark.parametrize("chosen", [[], ["everybody", "one"]])
def test_a_worker_knows_its_queue_of_a_broadcast_by_its_name(chosen):
    own, one = Broadcast("everybody"), Queue("one")
    with Celery("routing", set_as_current=False) as app:
        app.conf.task_queues = [own, one]
        app.amqp.queues.select(chosen)  # as -Q does, by the broadcast's alias

        assert taken_queues(app) == {own.name, "one"}
        assert copied_queue(app, "everybody") == own.name
        assert copied_queue(app, one.exchange.name) == copied_queue(app, "") == ""


def test_a_worker_that_takes_no_broadcasts_gets_no_copies():
    with Celery("routing", set_as_current=False) as app:
        app.conf.task_queues = [Broadcast("everybody"), Queue("one")]
        app.amqp.queues.select(["one"])

        assert copied_queue(app, "everybody") == ""
