"""What is sealed of a task's request, its message alone; and what becomes of it at the broker."""

from __future__ import annotations

import inspect
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from amqp.exceptions import AccessRefused, ChannelError, MessageNacked
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Reject
from kombu import Exchange, Producer, Queue
from kombu.common import Broadcast
from kombu.exceptions import OperationalError

from celery_distlock.runtime import messages, requeueing, routing
from celery_distlock.runtime.message_facts import HEADER, LockHeader, Received, execution_id
from celery_distlock.runtime.messages import seal
from celery_distlock.runtime.publishing import broker_reason, publish
from celery_distlock.runtime.reporting import Report
from celery_distlock.runtime.requeueing import Requeueing
from celery_distlock.stores.memory import MemoryStore


def request_of(facts: dict[str, Any], **received: Any) -> Context:
    """A request such as Celery makes of a message with headers of these *facts*."""
    properties = Received(headers=dict(facts), **received).attach_to({})
    others = {"properties": properties, "hostname": "one@here", "delivery_info": {}}
    return Context({**facts, **others}, args=[1], kwargs={}, called_directly=False)


def sealed(request: Context) -> dict[str, Any]:
    headers: dict[str, Any] = json.loads(seal(request, LockHeader()))["headers"]
    del headers[HEADER]
    return headers


def test_a_message_of_sqs_keeps_its_group_and_nothing_that_would_drop_or_delay_it():
    request = request_of({"id": "1", "task": "work"})
    of_one_sending = {"MessageDeduplicationId": "order-7", "DelaySeconds": 30}
    request.properties |= {"MessageGroupId": "tenant-7", **of_one_sending}

    properties = json.loads(seal(request, LockHeader()))["properties"]

    assert properties["MessageGroupId"] == "tenant-7"
    assert not properties.keys() & of_one_sending.keys()


@pytest.mark.parametrize("put", [object(), "text"])
def test_headers_are_sealed_as_they_came_whatever_is_put_into_the_request(put):
    headers = {"id": "1", "task": "work", "_trace": "of-7", "headers": {"ids": [1]}}
    request = request_of(headers)
    request.span = request._trace = put

    assert sealed(request) == headers


def test_the_body_is_the_one_that_came_whatever_becomes_of_the_arguments():
    request = request_of({"id": "1", "task": "work"}, body="[[1], {}, {}]")
    request.args.clear()

    envelope = json.loads(seal(request, LockHeader()))

    assert envelope["text"]
    assert envelope["body"] == "W1sxXSwge30sIHt9XQ=="


REFUSALS: dict[str, BaseException] = {
    "ConnectionResetError: gone": ConnectionResetError("gone"),
    "MessageNacked": MessageNacked(),
    "AccessRefused: not for you": AccessRefused("not for you"),
}


@pytest.fixture
def app():
    """An app that tries once to publish, at a RabbitMQ which it is never connected to."""
    with Celery("messages", broker="pyamqp://", set_as_current=False) as app:
        app.conf.task_publish_retry = False
        yield app


@pytest.fixture
def refusals(monkeypatch):
    """What the next publications raise."""
    refusals: list[BaseException] = []

    def publish(_producer: Any, **_how: Any) -> None:
        if refusals:
            raise refusals.pop()

    monkeypatch.setattr(Producer, "publish", publish)
    return refusals


@pytest.fixture
def requeueing_of(app, monkeypatch):
    """Makes what sends again the message of a task, which may have been left with the broker."""
    monkeypatch.setattr(requeueing, "BROKER_PAUSE", 0.001)

    def make(**received: Any) -> Requeueing:
        task = SimpleNamespace(name="work", app=app, acks_late=received.pop("acks_late", False))
        store = MemoryStore("memory://", "messages")
        report = Report(task, "1", store)
        facts = {"task": task, "store": store, "report": report, "received": Received(**received)}
        return Requeueing(SimpleNamespace(**facts))  # type: ignore[arg-type]

    return make


@pytest.fixture
def envelope():
    return seal(request_of({"id": "1", "task": "work"}, body="[[], {}, {}]"), LockHeader())


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_the_broker_does_not_take_at_one_attempt_is_an_error_of_the_broker(
    app, refusals, envelope, reason
):
    refusals.append(REFUSALS[reason])

    with pytest.raises(OperationalError) as raised:
        publish(app, envelope)

    assert broker_reason(raised.value) == reason


def test_what_the_broker_does_not_take_is_sent_when_it_does(
    refusals, envelope, requeueing_of, caplog
):
    refusals += REFUSALS.values()

    with caplog.at_level(logging.WARNING):
        requeueing_of()._publish(envelope, 0.0)

    assert refusals == []
    assert all(each in caplog.text for each in REFUSALS)


@pytest.mark.parametrize("refusal", [MessageNacked(), AccessRefused("not for you")], ids=repr)
def test_what_the_broker_refuses_for_long_and_still_has_it_gets_back(
    refusals, envelope, requeueing_of, monkeypatch, refusal
):
    monkeypatch.setattr(requeueing, "GIVE_BACK_AFTER", 0.0)
    refusals.append(refusal)

    with pytest.raises(Reject) as raised:
        requeueing_of(acks_late=True)._publish(envelope, 0.0, may_give_back=True)

    assert raised.value.requeue


@pytest.mark.parametrize(
    ("why", "facts"),
    [
        (ConnectionResetError("gone"), {"acks_late": True}),
        (MessageNacked(), {"acks_late": True, "pushed": True}),
        (MessageNacked(), {}),
    ],
    ids=["it is unreachable", "it was pushed", "it is acknowledged"],
)
def test_what_the_broker_cannot_get_back_is_sent_when_it_takes_it(
    refusals, envelope, requeueing_of, monkeypatch, why, facts
):
    monkeypatch.setattr(requeueing, "GIVE_BACK_AFTER", 0.0)
    refusals.append(why)

    requeueing_of(**facts)._publish(envelope, 0.0, may_give_back=True)

    assert refusals == []


@pytest.mark.parametrize("durable", [True, False])
def test_what_this_process_knows_of_an_exchange_is_left_as_it_is(durable):
    exchange = Exchange(f"orders-{durable}", "topic", durable=durable)
    queue = Queue(exchange.name, exchange, "orders.#", durable=durable)
    where = {"exchange": exchange.name, "routing_key": "orders.new"}
    request = request_of({"id": "1", "task": "work"}, body="[[], {}, {}]")
    request.delivery_info = where
    with Celery("exchanges", broker="memory://", set_as_current=False) as app:
        with app.producer_or_acquire() as producer:
            producer.publish("first", **where, declare=[queue])

        publish(app, seal(request, LockHeader()), exchange_type="topic")

        with app.connection_for_read() as connection:
            found = queue(connection.default_channel).queue_declare(passive=True)
            assert found.message_count == 2


def test_an_exchange_that_was_made_known_can_be_declared_as_kombu_does():
    exchange = Exchange("others", "topic")
    queue = Queue("others", exchange, "others.#")
    request = request_of({"id": "1", "task": "work"}, body="[[], {}, {}]")
    request.delivery_info = {"exchange": exchange.name, "routing_key": "others.new"}
    with Celery("exchanges", broker="memory://", set_as_current=False) as app:
        publish(app, seal(request, LockHeader()), exchange_type="topic")

        with app.producer_or_acquire() as producer:
            producer.publish("next", routing_key="others.new", declare=[queue])


def test_sending_a_broadcast_again_makes_no_queue_without_a_consumer():
    own, workers = Broadcast("everybody"), Broadcast("everybody")
    request = request_of({"id": "1", "task": "work"}, body="[[], {}, {}]")
    request.delivery_info = {"exchange": "everybody", "routing_key": ""}
    with Celery("broadcasts", broker="memory://", set_as_current=False) as app:
        app.conf.task_queues = [own]
        with app.connection_for_read() as connection:
            taken_from = workers(connection.default_channel)
            taken_from.declare()

            publish(app, seal(request, LockHeader()))

            assert taken_from.queue_declare(passive=True).message_count == 1
            with pytest.raises(ChannelError):
                own(connection.default_channel).queue_declare(passive=True)


def test_a_message_is_sent_while_another_thread_gives_the_app_a_queue(monkeypatch):
    request = request_of({"id": "1", "task": "work"}, body="[[], {}, {}]")
    request.delivery_info = {"exchange": "others", "routing_key": "others"}
    with Celery("queues", broker="memory://", set_as_current=False) as app:
        queues = app.amqp.queues

        def leads_to(queue: Queue, exchange: str, routing_key: str) -> bool:
            queues["another"]  # as in another thread, which sends a task there
            return False

        monkeypatch.setattr(routing, "_leads_to", leads_to)
        publish(app, seal(request, LockHeader()))

        assert set(queues) == {"celery", "another"}


def test_a_message_that_a_dead_letter_exchange_brings_back_is_another_run():
    rejected = {"reason": "rejected", "queue": "jobs", "count": 2}
    waited = {"reason": "expired", "queue": "later", "count": 2}
    first = {"id": "1", "retries": 0}
    back = {**first, "x-death": [waited, rejected]}

    assert execution_id(back) != execution_id(first)
    assert LockHeader.of(back).deaths == 2


def test_how_often_a_message_was_rejected_is_known_when_it_was_sent_again_and_is_rejected_again():
    rejected = {"reason": "rejected", "queue": "jobs", "count": 1}
    headers = {"x-death": [rejected], "x-first-death-queue": "jobs"}
    request = request_of({"id": "1", "task": "work", **headers}, body="[[], {}, {}]")
    before = LockHeader.of(request.__dict__)

    message = json.loads(seal(request, before))
    assert not headers.keys() & message["headers"].keys()
    assert execution_id(message["headers"]) == execution_id(request.__dict__)
    back = {**message["headers"], "x-death": [rejected]}  # RabbitMQ counts from 1 again
    assert LockHeader.of(back).deaths == 2


def test_every_option_of_publishing_is_known():
    """One that is not would be stored as a property of the message, and sent as one."""
    known = inspect.signature(inspect.unwrap(Producer.publish)).parameters

    assert known.keys() <= messages._OPTIONS
