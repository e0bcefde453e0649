"""What a worker makes of what is pushed to it, and where."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from celery_distlock.stores.values import WokenTask
from celery_distlock.worker.delivery import DeliveryStep, _AckWorker
from tests.unit.test_trust import envelope
from tests.waiting import wait_until


class Calls:
    def __init__(self):
        self.made = []

    def put(self, call):
        self.made.append(call)


def test_what_is_pushed_is_read_before_the_event_loop_has_it(app):
    consumer, calls = SimpleNamespace(app=app), Calls()
    step = DeliveryStep(consumer)

    step._receive(consumer, calls, WokenTask("sku", "i:0:0:0", envelope()))

    (call,) = calls.made
    _, wake, message = call.args
    assert wake == WokenTask("sku", "i:0:0:0", envelope())
    assert message.payload == [[], {}, {}]


def test_what_is_refused_does_not_come_to_the_event_loop(app, caplog):
    consumer, calls = SimpleNamespace(app=app), Calls()
    step = DeliveryStep(consumer)

    step._receive(consumer, calls, WokenTask("sku", "i:0:0:0", b"{["))
    step._receive(consumer, calls, WokenTask("sku", "i:0:0:0", envelope(content_encoding=[1])))

    assert calls.made == []
    assert "it is not a message" in caplog.text


def test_an_end_after_that_of_the_consumer_is_noted():
    noted = []
    settler = _AckWorker(SimpleNamespace(parking=SimpleNamespace(mark_returned=noted.append)))
    _, reject = settler.callbacks(WokenTask("k", "run", b""), late=True)
    reject(None, None, requeue=True)
    settler.close()
    wait_until(lambda: not settler._background._thread.is_alive(), what="the thread's end")

    reject(None, None, requeue=True)

    wait_until(lambda: len(noted) == 2, what="the second end")


def test_an_end_that_cannot_be_noted_keeps_no_other_from_being_noted(caplog):
    noted = threading.Event()

    def mark_returned(wake):
        if not wake.run:
            raise ValueError("of a record")
        noted.set()

    settler = _AckWorker(SimpleNamespace(parking=SimpleNamespace(mark_returned=mark_returned)))
    for run in ("", "run"):
        _, reject = settler.callbacks(WokenTask("k", run, b""), late=False)
        reject(None, None, requeue=True)

    wait_until(noted.is_set, what="the second one")
    settler.close()
    assert "was not recorded" in caplog.text
