"""What the thread that parks messages finds out about one."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from kombu.message import Message

from celery_distlock import Key, clock
from celery_distlock.runtime.message_facts import LockHeader, Received
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import Want
from celery_distlock.worker.arrival import Arrival
from celery_distlock.worker.parker import Parker


@pytest.fixture
def store():
    with closing(MemoryStore("memory://", "parker")) as store:
        yield store


@pytest.fixture
def parker(store):
    trust = SimpleNamespace(sign=lambda name, run, sealed: sealed)
    runtime = SimpleNamespace(store=store, delivery_address="", trust=trust)
    return Parker(runtime, stale_after=60.0, hostname="celery@web1")


class Backend:
    """One that sends results to their waiters, as Celery's RPC backend."""

    def __init__(self):
        self.stored = []

    def store_result(self, task_id, result, state, traceback=None, request=None):
        self.stored.append((task_id, state, request))


def arrive(identity: str, backend: Backend | None = None, **terms) -> Arrival:
    task = SimpleNamespace(name="use", ignore_result=backend is None, backend=backend)
    message = Message(
        body='[["a"], {"b": 1}, {}]',
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": identity, "task": "use", "group": "g", "retries": 1},
        properties={"reply_to": "caller", "correlation_id": identity},
        delivery_info={"redelivered": False},
    )
    return Arrival(task, message, (Key("k", **terms),), lambda: None, lambda: None)


@pytest.fixture
def parked(parker):
    """Has a message parked at "k"; returns its arrival."""

    def park(identity: str, **terms) -> Arrival:
        arrival = arrive(identity, **terms)
        assert parker.handle(arrival)
        return arrival

    return park


def hold(store, owner: str, want: Want) -> None:
    assert store.acquire(AcquireRequest("k", owner, 30.0, want=want)).token


def test_one_that_is_parked_without_a_holder_came_first(parked):
    assert parked("a").came_first


def test_one_that_is_parked_behind_one_that_is_alone_did_not(store, parked):
    hold(store, "holder", Want())

    assert not parked("a").came_first


def test_one_for_which_there_may_be_room_did(store, parked):
    """A task of this worker may have left the key, and not have ended."""
    for owner in ("one", "two"):
        hold(store, owner, Want(1, 3))

    assert parked("a", capacity=3).came_first
    assert not parked("b", capacity=3).came_first


def test_its_state_goes_to_the_caller_that_waits_for_the_result(parked):
    backend = Backend()

    parked("a", backend=backend)

    ((task_id, state, request),) = backend.stored
    assert (task_id, state) == ("a", "PARKED")
    assert (request.reply_to, request.correlation_id) == ("caller", "a")
    assert (request.id, request.args, request.kwargs) == ("a", ["a"], {"b": 1})
    assert (request.group, request.retries) == ("g", 1)
    assert request.hostname == "celery@web1"


class DatabaseBackend(Backend):
    """Stores results by Django's connection of the thread, as django-celery-results does."""

    def __init__(self, database):
        super().__init__()
        self._database = database

    def store_result(self, task_id, result, state, traceback=None, request=None):
        with self._database.cursor() as cursor:
            cursor.execute("SELECT 1")
        super().store_result(task_id, result, state, request=request)


@pytest.fixture
def database(tmp_path):
    django = pytest.importorskip("django")
    conf = pytest.importorskip("django.conf")
    if not conf.settings.configured:
        sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "results.db"}
        conf.settings.configure(DATABASES={"default": sqlite}, LOGGING_CONFIG=None)
        django.setup()
    db = pytest.importorskip("django.db")
    yield db.connection
    db.connection.close()


def test_states_are_stored_again_after_the_database_has_restarted(parker, parked, database):
    backend = DatabaseBackend(database)
    parked("a", backend=backend)
    database.connection.close()  # as a server does that goes
    parked("b", backend=backend)
    assert [stored[0] for stored in backend.stored] == ["a"]

    parker._backend_unreachable_until = 0.0  # the pause is over
    parked("c", backend=backend)

    assert [stored[0] for stored in backend.stored] == ["a", "c"]


def test_a_failing_backend_and_a_django_without_settings_prevent_no_parking(parked, monkeypatch):
    def close_old_connections():
        raise ValueError("settings are not configured")

    django = SimpleNamespace(close_old_connections=close_old_connections)
    monkeypatch.setitem(sys.modules, "django.db", django)

    parked("a", backend=SimpleNamespace())  # it cannot store anything


def test_of_the_keys_at_which_it_waited_before_it_names_only_where_it_is_parked_now(store, parker):
    """Its task was deployed with other keys, after the broker got what the store had kept."""
    arrival = arrive("a")
    way = LockHeader(parked_at="former", names=("former", "other"), attempts=1)
    arrival.message.headers["distlock"] = way.to_header(arrival.message.headers)

    assert parker.handle(arrival)

    ((key, run),) = store.parking.find_parked("a")
    sealed = LockHeader.of(json.loads(store.parking.parked(key, run).envelope)["headers"])
    assert (sealed.places, sealed.attempts) == (("k",), 1)


def test_one_that_another_worker_may_have_by_now_is_doubtful_and_not_redelivered(parker):
    arrival = arrive("a")
    arrival.came_at = clock.monotonic() - 61.0
    parker.stop()

    assert not parker.handle(arrival)

    assert Received.noted_on(arrival.message).doubtful
    assert not arrival.message.delivery_info["redelivered"]
