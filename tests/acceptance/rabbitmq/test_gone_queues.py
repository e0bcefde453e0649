"""RabbitMQ drops what is sent to a queue that it does not have, without a word."""

from __future__ import annotations

from contextlib import suppress

from amqp.exceptions import NotFound

from tests.waiting import wait_until


def count(app, queue: str) -> int:
    """How many messages are in a queue; 0 if there is none."""
    with suppress(NotFound), app.connection_for_read() as connection:
        declared = app.amqp.queues[queue](connection.default_channel)
        return declared.queue_declare(passive=True).message_count
    return 0


def test_a_task_is_sent_to_a_queue_that_the_broker_does_not_have(bare_site, rabbit_server, key):
    queue = f"queue-{key}"  # that no connection of this process has declared

    with bare_site.held(key):
        bare_site.tasks.work_requeue.apply_async((key,), lock_via="store", queue=queue)

    wait_until(lambda: count(bare_site.app, queue) == 1, what="the task in its queue")
    rabbit_server.delete(queue)
