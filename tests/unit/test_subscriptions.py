"""One connection carries the grants for all waiters of a process."""

from __future__ import annotations

import threading

import pytest

from celery_distlock.stores.redis.subscriptions import PubSubInbox, WaiterSubscriptions
from celery_distlock.stores.redis.topology import PushTarget


class Deaf:
    """The connection of a server that never says anything."""

    def __init__(self):
        raise ConnectionRefusedError


@pytest.mark.usefixtures("quick_turns")
def test_threads_that_come_and_go_do_not_disturb_a_search_for_a_waiter():
    post = WaiterSubscriptions(Deaf)
    post._connection.is_subscribed = lambda channel: True
    disturbed = []

    def come_and_go(name):
        try:
            for number in range(1000):
                inbox = PubSubInbox(
                    f"{name}-{number}", lambda: (post, PushTarget("channel", False))
                )
                post._on_confirmed(number % 2 == 0)
                inbox.close()
        except RuntimeError as error:
            disturbed.append(error)

    threads = [threading.Thread(target=come_and_go, args=[name]) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert disturbed == []
    assert not post._inboxes


class ClosedMeanwhile:
    """A connection that another thread closes during a read; hiredis then raises this error."""

    def __init__(self):
        self.post = WaiterSubscriptions(lambda: self)
        self.is_stale = lambda *_: False

    def connect(self):
        pass

    def disconnect(self):
        pass

    def send_command(self, *words, **options):
        pass

    def can_read(self, timeout):
        self.post.close()
        raise TypeError("argument must be an int, or have a fileno() method.")


def test_a_reader_survives_when_another_thread_closes_its_connection():
    post = ClosedMeanwhile().post

    post._read(1.0)

    assert post._broken_until, "the connection does not count as broken"
