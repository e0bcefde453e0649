"""The manifest of examples/kubernetes/autoscaling.yaml, from no worker to one and back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import yaml
from lightkube.models import batch_v1
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_distlock.ops.prometheus import StoreCollector
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from tests.waiting import wait_until

KUBERNETES = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFEST = {
    each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / "autoscaling.yaml").read_text())
}
WORKER = {
    each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / "worker.yaml").read_text())
}
SCALED = MANIFEST["ScaledObject"]["spec"]
TRIGGERS = {each["type"]: each["metadata"] for each in SCALED["triggers"]}
JOB = MANIFEST["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
(TICK,) = JOB["containers"]
TERM = re.compile(r'sum\((\w+)\{queue="(\w+)"\}\)')
APP = "tests.apps.scaled"


def test_the_cron_job_is_what_kubernetes_knows():
    document = MANIFEST["CronJob"]

    known = msgspec.to_builtins(msgspec.convert(document, batch_v1.CronJob))

    assert known == document


def test_it_scales_the_workers_of_the_other_manifest():
    deployment = WORKER["Deployment"]

    assert SCALED["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (
        JOB["containers"][0]["envFrom"][0]["secretRef"]["name"]
        == (WORKER["Secret"]["metadata"]["name"])
    )
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    assert TICK["command"][:3] == command[:3]
    assert TICK["image"] == deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert all(isinstance(value, str) for each in TRIGGERS.values() for value in each.values())


class Cluster:
    """What the autoscaler and the cron job see and do, without Kubernetes."""

    def __init__(self, module: Any, env: dict[str, str]) -> None:
        self.app = module.app
        self._env = env
        prefix = self.app.conf.broker_transport_options["global_keyprefix"]
        self._list = f"{prefix}{TRIGGERS['redis']['listName']}"

    def in_list(self) -> int:
        """Return what the trigger `redis` reads."""
        with redis.Redis.from_url(self.app.conf.broker_url) as broker:
            return broker.llen(self._list)

    def query(self) -> bool:
        """Return what the query of the trigger `prometheus` makes of the metrics."""
        query = TRIGGERS["prometheus"]["query"]
        terms = TERM.findall(query)
        left = TERM.sub("", query).split()
        assert left == ["+"] * (len(terms) - 1) + [">", "bool", "0"]
        registry = CollectorRegistry()
        registry.register(StoreCollector(self.app, every=0.0))

        def read() -> dict[tuple[str, str | None], float]:
            served = {
                (sample.name, sample.labels.get("queue")): sample.value
                for family in text_string_to_metric_families(generate_latest(registry).decode())
                for sample in family.samples
            }
            return served if ("distlock_read_seconds", None) in served else {}

        served = wait_until(read, timeout=60, what="a reading")
        return sum(served[term] for term in terms) > 0

    def tick(self, *more: str) -> tuple[int, dict[str, Any]]:
        """Run the cron job once; return its status and what it printed."""
        words = [APP if word == "shop" else word for word in [*TICK["command"], *more]]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def cluster(load_app, celery_env):
    return Cluster(load_app(APP), celery_env)


def test_from_no_worker_to_one_and_back(cluster, worker):
    tasks = sys.modules[APP]
    store = Runtime.of(cluster.app).store
    assert not cluster.query()
    store.acquire(AcquireRequest("a", "web", 600.0))
    store.acquire(AcquireRequest("c", "web", 600.0))
    results = [tasks.book.delay("a") for _ in range(3)]
    results += [tasks.paced.delay("c") for _ in range(2)]
    results += [tasks.book.apply_async(("b",), countdown=1.0)]
    for key in "ac":  # by a process that died then
        store.release(ReleaseRequest(key, "web"))
    assert cluster.in_list() == 0
    assert cluster.query()

    sent: list[int] = []

    def three_are_sent() -> bool:
        status, report = cluster.tick("--exit-code")
        assert status == 4
        sent.append(report["sent"])
        assert report["queues"].keys() == {"celery"}
        return sum(sent) >= 3 and report["later"] == 0

    # That process may have sent what it woke: a tick sends that again some seconds later.
    wait_until(three_are_sent, timeout=200, what="the first of each key to be sent")
    # More than three if ticks are so slow that a key does not stay reserved in between.
    assert cluster.in_list() == sum(sent)
    assert cluster.query()

    worker(APP)

    assert [result.get(timeout=120) for result in results] == [*"aaa", *"cc", "b"]
    wait_until(lambda: not cluster.query(), timeout=60, what="nothing to wait")
    status, report = cluster.tick("--exit-code")
    assert (status, report["sent"], report["queues"]) == (0, 0, {})
