"""What of the lock store's records is believed."""

from __future__ import annotations

import base64
import json
import uuid
from typing import TYPE_CHECKING

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue, binding

from celery_distlock import LockedTask
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import HEADER, LockHeader
from celery_distlock.runtime.trust import Reason, RefusedError, is_signed, is_signed_with, sign
from celery_distlock.stores import AcquireRequest, ReleaseRequest, queue_store
from celery_distlock.stores.base import Complaints
from celery_distlock.stores.values import ParkRequest, Sending, WokenTask

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET, OTHER = "correct horse battery", "staple of another kind"
WAY = LockHeader(woken=True, run="i:0:0:0", parked_at="sku").to_header({"id": "i"})
ENVELOPE = b'{"headers": {}, "body": "e30="}'


@pytest.fixture
def new_app() -> Callable[..., Celery]:
    def make(**conf) -> Celery:
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update({"distlock_url": "memory://", **conf})

        @app.task(base=LockedTask, name="reserve", lock_key="{sku}", shared=False)
        def reserve(sku): ...

        @app.task(name="unlocked", shared=False)
        def unlocked(): ...

        return app

    return make


def envelope(task="reserve", way=WAY, **other) -> bytes:
    message = {
        "headers": {"task": task, "id": "i", HEADER: way},
        "properties": {},
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "body": base64.b64encode(b"[[], {}, {}]").decode(),
        "text": True,
        "exchange": "",
        "routing_key": "celery",
        **other,
    }
    return json.dumps(message).encode()


def refusal(app, message: bytes, name="sku", run="i:0:0:0") -> Reason | None:
    try:
        Runtime.of(app).trust.check(WokenTask(name, run, message))
    except RefusedError as error:
        return error.reason
    return None


def knows(app, exchange, routing_key, task="reserve", **more) -> bool:
    return Runtime.of(app).trust.knows_route(task, exchange, routing_key, **more)


# Where it goes


QUEUES = [
    Queue("books", Exchange("media", type="topic"), "media.books.#"),
    Queue("films", Exchange("media", type="topic"), "media.*.film"),
    Queue("straight", Exchange("straight", type="direct"), "just.this"),
    Queue("all", Exchange("everybody", type="fanout")),
    Queue("two", bindings=[binding(Exchange("one"), "one"), binding(Exchange("more"), "more.two")]),
]


@pytest.mark.parametrize(
    ("exchange", "routing_key", "known"),
    [
        ("", "books", True),
        ("", "media.books.red", False),
        ("", "others", False),
        ("", "", False),
        ("media", "media.books", True),
        ("media", "media.books.red.new", True),
        ("media", "media.old.film", True),
        ("media", "media.very.old.film", False),
        ("media", "media.booksellers", False),
        ("media", "others", False),
        ("straight", "just.this", True),
        ("straight", "just.thus", False),
        ("everybody", "whatever", True),
        ("one", "one", True),
        ("more", "more.two", True),
        ("more", "one", False),
        ("others", "just.this", False),
        ("celery.pidbox", "", False),
        ("reply.celery.pidbox", "x", False),
        ("celeryev", "task.sent", False),
        ("", "worker@host.celery.pidbox", False),
        ("", "celeryev.1234", False),
        ("", "7d1e5b0c-reply-queue", False),
        ("", "b" * 256, False),
        ("celery_delayed_delivery", "0.0.1.0.just.this", True),
        ("celery_delayed_delivery", "0.0.1.0.others", False),
    ],
)
def test_a_route_is_known_if_it_leads_to_a_queue_of_the_app(new_app, exchange, routing_key, known):
    assert knows(new_app(task_queues=QUEUES), exchange, routing_key) is known


def test_asking_for_a_queue_does_not_make_it_one_of_the_app(new_app):
    app = new_app()

    assert not knows(app, "", "others")
    assert not knows(app, "", "others")
    assert set(app.amqp.queues) == {"celery"}


def test_the_queue_of_a_tasks_route_is_known_for_that_task(new_app):
    app = new_app(task_routes=[{"res*": {"queue": "by-pattern"}}, lambda *args, **kwargs: None])

    assert knows(app, "", "by-pattern")
    assert not knows(app, "", "by-pattern", task="another")


@pytest.mark.filterwarnings("ignore:[^']*'queue' task attribute is deprecated")
def test_the_queue_that_a_task_itself_names_is_known_for_that_task(new_app):
    app = new_app()

    @app.task(base=LockedTask, name="own", lock_key="k", shared=False, queue="its-own")
    def own(): ...

    app.finalize()

    assert knows(app, "", "its-own", task="own")
    assert not knows(app, "", "its-own")


def test_a_process_that_has_sent_a_task_to_a_queue_knows_it(new_app):
    app = new_app()
    assert not knows(app, "", "ad-hoc")

    app.send_task("reserve", queue="ad-hoc")

    assert knows(app, "", "ad-hoc")


def test_a_queue_that_a_call_declares_is_known_for_it(new_app):
    app, declared = new_app(), [Exchange("others"), Queue("ad-hoc", Exchange("others"), "key")]

    assert knows(app, "", "ad-hoc", declared=declared)
    assert not knows(app, "", "others", declared=declared)
    assert not knows(app, "others", "key", declared=declared)  # its worker may not know that
    assert not knows(app, "", "celeryev.1", declared=[Queue("celeryev.1")])
    assert not knows(app, "", "ad-hoc")


def test_a_queue_by_its_alias_is_no_name_of_a_queue_at_the_broker(new_app):
    app = new_app(task_queues=[Queue("books", Exchange("media"), "b", alias="alias")])

    assert not knows(app, "", "alias")


def test_a_secret_vouches_for_a_queue_and_not_for_what_controls_workers(new_app):
    app = new_app()

    assert knows(app, "", "ad-hoc", signed=True)
    assert not knows(app, "", "worker@host.celery.pidbox", signed=True)
    assert not knows(app, "", "celeryev.1234", signed=True)
    assert not knows(app, "others", "ad-hoc", signed=True)


# What it is


def test_a_locked_task_of_the_app_is_sent(new_app):
    assert refusal(new_app(), envelope()) is None


@pytest.mark.parametrize("task", ["unlocked", "celery.chord_unlock", "nowhere", ""])
def test_another_task_is_not(new_app, task):
    assert refusal(new_app(), envelope(task)) is Reason.TASK


def test_celerys_own_tasks_are_not_even_where_every_task_is_a_locked_one():
    app = Celery("shop", broker="memory://", task_cls=LockedTask, set_as_current=False)
    app.conf.distlock_url = "memory://"

    assert "celery.chord_unlock" in app.tasks
    assert refusal(app, envelope("celery.chord_unlock")) is Reason.TASK


def test_a_task_that_is_declared_and_was_not_asked_for_yet_is_known():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.distlock_url = "memory://"

    @app.task(base=LockedTask, name="lazy", lock_key="k", shared=False)
    def lazy(): ...

    assert not app.finalized

    assert refusal(app, envelope("lazy")) is None


@pytest.mark.parametrize(
    ("accepted", "content_type", "reason"),
    [
        (["json"], "application/json", None),
        (["application/json"], "application/json", None),
        (["json"], "application/x-yaml", Reason.CONTENT),
        (["json"], "application/x-python-serialize", Reason.CONTENT),
        (["json", "pickle"], "application/x-python-serialize", None),
        (["json"], "application/data", None),  # kombu takes it anyway: it is not decoded
        (["json"], "", Reason.CONTENT),
        (["json"], "no/such", Reason.CONTENT),
    ],
)
def test_content_is_accepted_as_kombu_accepts_it(new_app, accepted, content_type, reason):
    app = new_app(accept_content=accepted)

    assert refusal(app, envelope(content_type=content_type)) is reason


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["headers", "properties", "body", "exchange", "task", "routing_key"]
                ),
                inner,
            )
        ),
    ).map(lambda made: json.dumps(made).encode())
)
def test_whatever_lies_there_is_refused_and_nothing_else_is_raised(message):
    app = Celery("shop", broker="memory://", set_as_current=False)

    assert refusal(app, message) is not None


@pytest.mark.parametrize(
    "way",
    [
        None,
        {},
        WAY | {"woken": False},
        WAY | {"run": "another:0:0:0"},
        WAY | {"parked_at": "another"},
        WAY | {"retries": 1},
    ],
    ids=str,
)
def test_a_message_is_believed_only_as_the_run_and_at_the_key_that_it_was_parked_as(new_app, way):
    assert refusal(new_app(), envelope()) is None
    assert refusal(new_app(), envelope(way=way)) is Reason.MALFORMED


def test_a_million_refusals_are_not_a_million_lines(new_app, caplog):
    trust = Runtime.of(new_app()).trust
    for number in range(3000):
        trust.refuse(WokenTask("k", "r", b""), RefusedError(Reason.TASK, str(number)))

    assert len(caplog.records) == 1001
    assert "celery locks doctor" in caplog.records[-1].message


# What becomes of what is not sent


@pytest.fixture
def release_one(new_app, monkeypatch):
    """Park an envelope, have its turn come, and return what was reported of it to the store."""

    def make(message: bytes, app: Celery | None = None) -> str:
        app = app or new_app()
        app.conf.distlock_prefix = str(uuid.uuid4())
        monkeypatch.setattr(queue_store, "_complaints", Complaints())
        store, noted = Runtime.of(app).store, []
        for name in ("mark_published", "mark_left"):
            monkeypatch.setattr(store.parking, name, lambda _, name=name: noted.append(name))
        store.acquire(AcquireRequest("sku", "somebody", 60.0))
        store.acquire(AcquireRequest("sku", "o", 60.0, queue=ParkRequest(message), run="i:0:0:0"))
        store.publishers.deliver(store.release(ReleaseRequest("sku", "somebody")).wake)
        return " ".join(noted)

    return make


def test_of_two_apps_with_one_store_each_sends_its_own_tasks(new_app):
    same = {"distlock_url": "memory://", "distlock_prefix": str(uuid.uuid4())}
    app, other = new_app(**same), Celery("other", broker="memory://", set_as_current=False)
    other.conf.update(**same)
    store = Runtime.of(app).store
    assert Runtime.of(other).store is store

    store.acquire(AcquireRequest("sku", "somebody", 60.0))
    store.acquire(AcquireRequest("sku", "o", 60.0, queue=ParkRequest(envelope()), run="i:0:0:0"))
    woken = store.release(ReleaseRequest("sku", "somebody")).wake

    assert store.dispatch(woken, patience=60.0) is Sending.SENT


@pytest.mark.parametrize(
    "odd",
    [
        {"content_encoding": [1]},
        {"content_encoding": "no-such-codec"},
        {"text": 1},
        {"body": "no base64"},
        {"body": base64.b64encode(b"\xff").decode()},
        {"properties": {"expiration": "x"}},
        {"properties": {"priority": "x"}},
        {"properties": {"delivery_mode": []}},
        {"properties": {"correlation_id": {}}},
        {"properties": {"retry": True}},
        {"headers": None},
    ],
    ids=str,
)
def test_an_unsendable_run_counts_as_sent_and_an_operator_is_notified(release_one, caplog, odd):
    assert release_one(envelope(**odd)) == "mark_published"
    assert "celery locks drop" in caplog.text
    assert "Traceback" not in caplog.text


def test_what_others_may_send_is_left(release_one):
    assert release_one(envelope("another")) == "mark_left"


@pytest.mark.parametrize("error", [AttributeError, ValueError, KeyError, TypeError, OSError])
def test_an_error_of_the_broker_is_no_fault_of_the_message(
    new_app, release_one, monkeypatch, caplog, error
):
    def away():
        raise error("of the connection")

    app = new_app()
    monkeypatch.setattr(app, "producer_or_acquire", away)

    assert release_one(envelope(), app) == ""
    assert "the next sweep sends it" in caplog.text


def test_what_can_be_sent_is(release_one):
    assert (
        release_one(envelope(properties={"expiration": "60000", "priority": 3})) == "mark_published"
    )


# Signatures


@settings(deadline=None)
@given(st.text(), st.text(), st.binary())
def test_what_was_signed_is_known_to_be_and_stays_what_it_is(name, run, body):
    message = json.dumps({"body": base64.b64encode(body).decode()}).encode()
    signed = sign(SECRET, name, run, message)

    assert json.loads(signed)["body"] == json.loads(message)["body"]
    assert is_signed(signed)
    assert is_signed_with([OTHER, SECRET], name, run, signed)
    assert not is_signed_with([OTHER], name, run, signed)
    assert not is_signed(message)
    assert not is_signed_with([SECRET], name, run, message)


@pytest.mark.parametrize(
    ("name", "run", "message"),
    [
        ("other", "run", None),
        ("key", "other", None),
        ("ke", "yrun", None),
        ("keyr", "un", None),
        ("key", "run", b"e31="),
    ],
)
def test_a_signature_is_of_one_message_of_one_run_of_one_key(name, run, message):
    signed = sign(SECRET, "key", "run", ENVELOPE)
    moved = signed if message is None else signed.replace(b"e30=", message)

    assert not is_signed_with([SECRET], name, run, moved)


def test_a_signature_that_was_cut_or_lengthened_is_none():
    signed = sign(SECRET, "key", "run", ENVELOPE)

    for wrong in (signed[:-1], signed + b" ", signed[:-3] + b'"}', signed.upper(), b"", b"{}"):
        assert not is_signed_with([SECRET], "key", "run", wrong)


def signed_by(secret: str) -> bytes:
    return sign(secret, "sku", "i:0:0:0", envelope())


@pytest.mark.parametrize(
    ("secrets", "right", "wrong"),
    [
        (SECRET, [signed_by(SECRET)], [signed_by(OTHER), envelope()]),
        ([SECRET, OTHER], [signed_by(SECRET), signed_by(OTHER)], [envelope()]),
        ([SECRET, None], [signed_by(SECRET), envelope()], [signed_by(OTHER)]),
        (None, [envelope(), signed_by(SECRET)], []),
    ],
    ids=["one", "while it is changed", "while it is introduced", "none"],
)
def test_with_a_secret_only_what_is_signed_is_sent(new_app, secrets, right, wrong):
    app = new_app() if secrets is None else new_app(distlock_secret=secrets)

    assert [refusal(app, message) for message in right] == [None] * len(right)
    assert [refusal(app, message) for message in wrong] == [Reason.SIGNATURE] * len(wrong)


def test_the_first_secret_signs(new_app):
    trust = Runtime.of(new_app(distlock_secret=[SECRET, OTHER])).trust

    assert is_signed_with([SECRET], "k", "r", trust.sign("k", "r", ENVELOPE))


def test_celery_does_not_show_the_secret(new_app):
    app = new_app(distlock_secret=[SECRET, OTHER])

    shown = app.bugreport() + repr(app.conf.humanize(with_defaults=False)) + repr(app.conf.table())
    assert "distlock_secret" in shown
    assert SECRET not in shown
    assert OTHER not in shown


def test_django_spells_it_in_capitals_and_celery_does_not_show_it_either():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.config_from_object({"CELERY_DISTLOCK_SECRET": SECRET}, namespace="CELERY")

    assert Runtime.of(app).settings.secret == (SECRET,)
    assert SECRET not in app.bugreport()
