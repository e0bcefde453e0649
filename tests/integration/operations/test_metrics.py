"""Counts, the exporter that reads them, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from celery_distlock.errors import QueueFullError, StoreError
from celery_distlock.keys import slot_name
from celery_distlock.ops import prometheus
from celery_distlock.ops.cli import locks
from celery_distlock.ops.cli.exporter import only_metrics
from celery_distlock.ops.prometheus import StoreCollector, described
from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import ALONE, Limit, Want
from celery_distlock.telemetry import counters
from celery_distlock.telemetry.observer import flush
from tests.waiting import wait_until
from tests.worker.recalling import recall

WORKERS = [{"concurrency": 2}]
DASHBOARD = Path(__file__).parents[3] / "docs" / "howto" / "grafana-dashboard.json"


def read(app):
    """What the exporter says now: values by metric and task or queue."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(app, every=0.0))

    def reading():
        found = parsed(generate_latest(registry).decode())
        return found if ("distlock_read_seconds", None, None) in found else None

    return wait_until(reading, timeout=60, what="a reading")


def parsed(text):
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            of = labels.get("task", labels.get("queue"))
            more = [labels["for"]] if "for" in labels else []
            found[sample.name, of, labels.get("le"), *more] = sample.value
    return found


def test_what_tasks_go_through_is_counted(site, key):
    before = read(site.app)
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        site.wait_queued(key)
        now = read(site.app)
        assert now["distlock_waiting", "celery", None] == 1
        assert now["distlock_held", "", None] == 1
        assert now["distlock_oldest_waiter_seconds", None, None] > 0
    result.get(timeout=30)
    site.tasks.work_requeue.delay(f"{key}:free").get(timeout=30)

    def rise(name, *more):
        place = (f"distlock_{name}", "work_requeue", *(more or [None]))
        return read(site.app).get(place, 0) - before.get(place, 0)

    once = ("conflicts_total", "parked_total", "woken_total")
    # Each process reports at its own time: that which parked it perhaps after that which ran it.
    wait_until(
        lambda: rise("released_total") == 2 and all(map(rise, once)),
        what="the workers to report",
        timeout=60,
    )
    assert rise("acquired_total") == 2
    assert [rise(name) for name in once] == [1, 1, 1]
    assert rise("lost_total") == 0
    assert rise("hold_seconds_count") == rise("hold_seconds_bucket", "+Inf") == 2
    for what in ("holder", "nothing"):
        assert rise("wait_seconds_count", None, what) == 1
        assert rise("wait_seconds_bucket", "+Inf", what) == 1
    assert rise("wait_seconds_sum", None, "holder") > 0


def test_units_and_limits_are_added_up_over_keys(site, key):
    names = ("units_held", "units_limit", "limited", "paused", "resting")

    def gauges():
        metrics = read(site.app)
        return [metrics[f"distlock_{name}", None, None] for name in names]

    assert gauges() == [0, 0, 0, 0, 0]
    owners = {}
    wants = {"a": Want(2, 5), "b": Want(1, 5), "readers": Want(1, 0), "alone": ALONE}
    for name, want in wants.items():
        owners[name] = new_owner(f"shop.f[{name}]")
        where = f"{key}:{name}"
        site.store.acquire(AcquireRequest(where, owners[name], 60.0, run=name, want=want))
    assert gauges() == [3, 10, 0, 0, 0]
    assert read(site.app)["distlock_held", "shop.f", None] == 4

    site.store.units.set_limit(f"{key}:a", Limit(3))
    site.store.units.set_limit(f"{key}:nobody", Limit(0))
    site.store.units.rest(f"{key}:b", owners["b"], 60.0)

    assert gauges() == [3, 8, 2, 1, 1]
    for name, owner in owners.items():
        site.store.units.set_limit(f"{key}:{name}", None)
        site.store.release(ReleaseRequest(f"{key}:{name}", owner))
    site.store.units.set_limit(f"{key}:nobody", None)


def test_what_is_due_is_shown_and_whether_a_worker_looks_after_it(site):
    def gauge(name):
        return read(site.app)[f"distlock_{name}", None, None]

    wait_until(lambda: gauge("ticker") == 1, what="a ticker", timeout=60)
    before = gauge("due")
    site.store.timetable.note_due({slot_name(f"due:{n}"): 3600.0 for n in range(3)})

    assert gauge("due") == before + 3
    assert gauge("ticker_lag_seconds") < 60


def test_calls_that_come_later_are_added_up(site, key):
    def later():
        return read(site.app)["distlock_later", "celery", None]

    assert later() == 0
    task = site.tasks.work_requeue
    for number in range(3):
        task.apply_async((f"{key}:{number % 2}",), lock_via="store", countdown=600)

    assert later() == 3
    for number in range(2):
        for waiter in site.store.calls.delayed(f"{key}:{number}"):
            site.store.parking.cancel(f"{key}:{number}", waiter.run)
    assert later() == 0


@pytest.mark.parametrize(("rule", "name"), [("started", "joined"), ("update", "updated")])
def test_calls_that_are_not_sent_are_counted(site, key, rule, name):
    task, other = site.tasks.work_once[rule], {"joined": "updated", "updated": "joined"}[name]

    def total(which):
        flush()
        return read(site.app).get((f"distlock_{which}_total", task.name, None), 0)

    before = total(name), total(other)
    with site.held(key):
        results = [task.delay(key, 1) for _ in range(3)]
        assert (total(name), total(other)) == (before[0] + 2, before[1])
    results[0].get(timeout=30)


@pytest.mark.parametrize("via", ["store", "broker"])
def test_calls_and_tasks_that_a_full_queue_refuses_are_counted(site, key, via):
    task = site.tasks.work_of_two

    def total():
        flush()
        return read(site.app).get(("distlock_refused_total", task.name, None), 0)

    before = total()
    with site.held(key):
        results = []
        for number in (1, 2):
            results.append(task.apply_async((key, number), lock_via="store"))
            site.wait_queued(key, number)
        with pytest.raises(QueueFullError):
            task.apply_async((key, 3), lock_via=via).get(timeout=30)
        wait_until(lambda: total() == before + 1, what="it to be counted", timeout=60)
    for result in results:
        result.get(timeout=30)


def test_each_of_several_holders_counts_for_its_task(site, key):
    owners = [new_owner(f"shop.{name}[{n}]") for n, name in enumerate("ffg")]
    for number, owner in enumerate(owners):
        site.store.acquire(AcquireRequest(key, owner, 60.0, run=f"{number}", want=Want(1, 5)))

    metrics = read(site.app)

    assert metrics["distlock_held", "shop.f", None] == 2
    assert metrics["distlock_held", "shop.g", None] == 1
    assert metrics["distlock_longest_hold_seconds", "shop.g", None] < 30
    for owner in owners:
        site.store.release(ReleaseRequest(key, owner))


@pytest.mark.parametrize("what", ["lost", "recalled"])
def test_a_lock_that_is_lost_or_recalled_is_counted(site, key, what):
    counter = f"distlock_{what}_total", "tests.apps.locked.catch_loss", None
    before = read(site.app).get(counter, 0)
    result = site.tasks.catch_loss.delay(key)
    site.wait_held(key)
    if what == "lost":
        site.forget(key)
    else:
        recall(site, key)
    result.get(timeout=30, propagate=False)

    wait_until(
        lambda: read(site.app).get(counter, 0) == before + 1, what=f"it to be {what}", timeout=60
    )


def test_counts_of_several_processes_add_up(redis_url, prefix):
    store = open_store(redis_url, prefix)

    store.count({"acquired||t": 2, "wait|sum|t": 0.1})
    store.count({"acquired||t": 1, "wait|sum|t": 0.2})

    found = {(sample.name, sample.bucket): sample.value for sample in counters.samples(store)}
    assert found["acquired", ""] == 3
    assert found["wait", "sum"] == pytest.approx(0.3)


def test_a_store_that_is_unreachable_is_reported_as_down(private_server, site):
    server = private_server()
    app = site.app
    runtime_store = open_store(server.url, "gone")
    collector = StoreCollector(app, every=0.0)
    collector._admin = type("Admin", (), {"store": runtime_store})()
    registry = CollectorRegistry()
    registry.register(collector)
    assert parsed(generate_latest(registry).decode())["distlock_up", None, None] == 1

    server.stop()

    assert parsed(generate_latest(registry).decode())["distlock_up", None, None] == 0


@pytest.fixture
def gated(site, monkeypatch):
    """A collector of a real store; its reading waits while the gate is closed."""
    store = open_store(site.app.conf.result_backend, site.app.conf.distlock_prefix)
    gate = Gate(store, monkeypatch)
    collector = StoreCollector(site.app, every=0.0)
    collector._admin = SimpleNamespace(store=store)
    yield collector, gate
    gate.opened.set()


class Gate:
    def __init__(self, store, monkeypatch) -> None:
        self._find_keys = store.find_keys
        self.opened = threading.Event()
        self.opened.set()
        self.readings = 0
        self.error = None
        monkeypatch.setattr(store, "find_keys", self.find_keys)

    def find_keys(self):
        self.readings += 1
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        return self._find_keys()


def scrape(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return parsed(generate_latest(registry).decode())


def test_a_record_that_is_no_text_hides_no_metric(site, key, private_server):
    store = open_store(private_server().url, "spoilt")
    owner = new_owner("bad\udcff[id]")
    store.acquire(AcquireRequest("k", owner, 60.0))
    collector = StoreCollector(site.app, every=0.0)
    collector._admin = SimpleNamespace(store=store)

    assert scrape(collector)["distlock_held", "bad\\udcff", None] == 1


@pytest.mark.parametrize("record", ["{ticker}:due", "counts"])
def test_a_record_of_another_type_hides_no_other_metric(site, private_server, record, caplog):
    server = private_server()
    store = open_store(server.url, "spoilt")
    store.acquire(AcquireRequest("k", new_owner("held"), 60.0))
    with server.client() as client:
        client.set(f"spoilt:{record}", "of other software")
    collector = StoreCollector(site.app, every=0.0)
    collector._admin = SimpleNamespace(store=store)

    for _ in range(2):
        metrics = scrape(collector)
        assert metrics["distlock_up", None, None] == metrics["distlock_held", "", None] == 1
    assert caplog.text.count("metrics are left out") == 1


def test_a_reading_that_takes_long_is_no_outage(site, gated, key, monkeypatch):
    collector, gate = gated
    monkeypatch.setattr(prometheus, "PATIENCE", 0.01)
    monkeypatch.setattr(prometheus, "REST", 0.0)
    with site.held(key):
        wait_until(
            lambda: scrape(collector).get(("distlock_held", "", None)), what="a reading", timeout=60
        )
        gate.opened.clear()
        readings = gate.readings
        wait_until(lambda: (scrape(collector), gate.readings > readings)[1], what="the next one")

        seen = [scrape(collector) for _ in range(3)]

    assert [each["distlock_up", None, None] for each in seen] == [1, 1, 1]
    assert [each["distlock_held", "", None] for each in seen] == [1, 1, 1]
    ages = [each["distlock_read_age_seconds", None, None] for each in seen]
    assert 0 < ages[0] < ages[1] < ages[2]


def test_a_store_is_up_before_it_was_read_for_the_first_time(gated, monkeypatch):
    collector, gate = gated
    monkeypatch.setattr(prometheus, "PATIENCE", 0.01)
    gate.opened.clear()

    assert scrape(collector) == {("distlock_up", None, None): 1}


def test_a_store_has_rest_after_a_reading(gated, monkeypatch):
    collector, gate = gated
    monkeypatch.setattr(prometheus, "REST", 1e6)

    scrape(collector)
    scrape(collector)

    assert gate.readings == 1
    monkeypatch.setattr(collector, "_due", 0.0)
    scrape(collector)
    assert gate.readings == 2


def test_a_store_is_read_again_for_which_there_could_be_no_thread(site, key, monkeypatch):
    collector = StoreCollector(site.app, every=0.0)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            list(collector.collect())

    with site.held(key):
        metrics = {metric.name: metric.samples for metric in collector.collect()}
    assert [sample.value for sample in metrics["distlock_held"]] == [1]


@pytest.mark.parametrize("error", [StoreError("no such right"), ValueError("an odd record")])
def test_a_store_that_cannot_be_read_is_down_until_it_can(gated, error):
    collector, gate = gated
    gate.error = error
    assert scrape(collector) == {("distlock_up", None, None): 0}
    gate.error = None

    assert scrape(collector)["distlock_up", None, None] == 1


def test_a_store_that_goes_away_while_it_is_read_is_down(private_server, site, monkeypatch):
    monkeypatch.setattr(prometheus, "PATIENCE", 0.01)
    server = private_server()
    store = open_store(server.url, "gone")
    gate = Gate(store, monkeypatch)
    collector = StoreCollector(site.app, every=0.0)
    collector._admin = SimpleNamespace(store=store)
    gate.opened.clear()
    assert scrape(collector)["distlock_up", None, None] == 1

    server.stop()

    assert scrape(collector) == {("distlock_up", None, None): 0}
    gate.opened.set()


@pytest.fixture(scope="module")
def serve_metrics():
    registry = CollectorRegistry()
    registry.register(Some())
    application = only_metrics(make_wsgi_app(registry), [each.name for each in described()])

    def ask(path, query=""):
        environ = {"PATH_INFO": path, "QUERY_STRING": query, "REQUEST_METHOD": "GET"}
        said = []
        body = b"".join(application(environ, lambda status, headers: said.append(status)))
        return int(said[0][:3]), body.decode()

    return ask


class Some(Collector):
    def describe(self):
        return described()

    def collect(self):
        yield CounterMetricFamily("distlock_lost", "Lost.", value=1)
        yield GaugeMetricFamily("distlock_up", "Up.", value=1)


def test_metrics_are_chosen_by_name(serve_metrics):
    assert set(parsed(serve_metrics("/metrics")[1])) == {
        ("distlock_lost_total", None, None),
        ("distlock_up", None, None),
    }
    for name in ("distlock_lost_total", "distlock_up"):
        status, body = serve_metrics("/metrics", f"name[]={name}")
        assert (status, set(parsed(body))) == (200, {(name, None, None)})


@pytest.mark.parametrize(
    ("path", "query", "status", "words"),
    [
        ("/", "", 404, "/metrics"),
        ("/metric", "", 404, "/metrics"),
        ("/metrics/x", "", 404, "/metrics"),
        ("/metrics", "task=a", 400, "no parameter 'task'"),
        ("/metrics", "name=distlock_up", 400, "no parameter 'name'"),
        ("/metrics", "name[]=distlock_ups", 400, "did you mean 'distlock_up'"),
        ("/metrics", "name[]=", 400, "no metric ''"),
    ],
)
def test_what_the_exporter_would_not_obey_it_refuses(serve_metrics, path, query, status, words):
    answered, body = serve_metrics(path, query)

    assert answered == status
    assert words in body


def test_the_exporter_serves_until_it_is_stopped(site, key):
    command = [sys.executable, "-m", "celery", "-A", site.tasks.__name__, "locks", "exporter"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--every", "0"],
        env=site.workers[0].env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.stdout.readline()
        url = re.search(r"http://\S+", said)[0]
        with site.held(key), urllib.request.urlopen(url, timeout=60) as answer:
            metrics = parsed(answer.read().decode())
        assert metrics["distlock_held", "", None] == 1
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(url.replace("metrics", "elsewhere"), timeout=60)
        refused.value.close()  # it has the answer's file
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("where", [("--port",), ("--host", "nowhere.invalid", "--port", "0")])
def test_where_the_exporter_cannot_listen_is_said(site, where):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = [str(taken.getsockname()[1])] if where == ("--port",) else []
        obj = CLIContext(app=site.app, no_color=True, workdir=None)
        done = CliRunner().invoke(locks, ["exporter", *where, *port], obj=obj)

    assert done.exit_code == 2
    assert "cannot listen on" in done.output


def test_the_dashboard_asks_for_metrics_that_there_are(site):
    text = DASHBOARD.read_text()
    asked = set(re.findall(r"\bdistlock_\w+", " ".join(_expressions(json.loads(text)))))

    registry = CollectorRegistry()
    registry.register(StoreCollector(site.app, every=0.0))
    served = {family.name for family in registry.collect()}
    assert asked
    for name in asked:
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in served, name


def _expressions(part):
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "expr":
                yield value
            else:
                yield from _expressions(value)
    elif isinstance(part, list):
        for value in part:
            yield from _expressions(value)
