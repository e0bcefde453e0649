"""Counts, the exporter that reads them, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_distlock import tally
from celery_distlock.exporter import StoreCollector
from celery_distlock.stores import open_store
from tests.waiting import wait_until

WORKERS = [{"concurrency": 2}]
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def read(app):
    """What the exporter says now: values by metric and task."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(app, every=0.0))
    return parsed(generate_latest(registry).decode())


def parsed(text):
    return {
        (sample.name, sample.labels.get("task"), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_tasks_go_through_is_counted(site, key):
    before = read(site.app)
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        site.wait_queued(key)
        now = read(site.app)
        assert now["distlock_waiting", None, None] == 1
        assert now["distlock_held", "", None] == 1
        assert now["distlock_oldest_waiter_seconds", None, None] > 0
    result.get(timeout=30)
    site.tasks.work_requeue.delay(key).get(timeout=30)

    def rise(name, le=None):
        place = (f"distlock_{name}", "work_requeue", le)
        return read(site.app).get(place, 0) - before.get(place, 0)

    once = ("conflicts_total", "parked_total", "woken_total")
    # Each process tells when its time has come: who parked it perhaps after who ran it.
    wait_until(
        lambda: rise("released_total") == 2 and all(map(rise, once)),
        what="the workers to tell",
        timeout=60,
    )
    assert rise("acquired_total") == 2
    assert [rise(name) for name in once] == [1, 1, 1]
    assert rise("lost_total") == 0
    assert rise("wait_seconds_count") == rise("hold_seconds_count") == 2
    assert rise("wait_seconds_bucket", "+Inf") == 2
    assert rise("wait_seconds_sum") > 0


def test_a_lost_lock_is_counted(site, key):
    lost = "distlock_lost_total", "tests.apps.locked.catch_loss", None
    before = read(site.app).get(lost, 0)
    result = site.tasks.catch_loss.delay(key)
    site.wait_held(key)
    site.forget(key)
    result.get(timeout=30)

    wait_until(
        lambda: read(site.app).get(lost, 0) == before + 1, what="the loss to be told", timeout=60
    )


def test_counts_of_several_processes_add_up(redis_url, prefix):
    store = open_store(redis_url, prefix)

    store.count({"acquired||t": 2, "wait|sum|t": 0.1})
    store.count({"acquired||t": 1, "wait|sum|t": 0.2})

    found = {(sample.name, sample.bucket): sample.value for sample in tally.samples(store)}
    assert found["acquired", ""] == 3
    assert found["wait", "sum"] == pytest.approx(0.3)


def test_a_store_that_is_away_is_told_as_down(private_server, site):
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


def test_the_exporter_serves_until_it_is_stopped(site, key):
    command = [sys.executable, "-m", "celery", "-A", site.tasks.__name__, "locks", "exporter"]
    exporter = subprocess.Popen(
        [*command, "--port", "0", "--every", "0"],
        env=site.workers[0].env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = exporter.stdout.readline()
        url = re.search(r"http://\S+", said)[0]
        with site.held(key), urllib.request.urlopen(url, timeout=60) as answer:
            metrics = parsed(answer.read().decode())
        assert metrics["distlock_held", "", None] == 1
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(60) == 0
    finally:
        exporter.kill()
        exporter.wait()
        exporter.stdout.close()


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
