"""The manifest of examples/kubernetes, by what Kubernetes knows and by what a worker does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
import yaml
from celery import Celery
from lightkube.models import apps_v1, core_v1, policy_v1

from celery_distlock.settings import Settings
from celery_distlock.testing import EmbeddedServer, die_with_parent
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFEST = EXAMPLES / "kubernetes" / "worker.yaml"
DOCUMENTS = {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}
DEPLOYMENT = DOCUMENTS["Deployment"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
(WORKER,) = POD["containers"]
COMMAND = [*WORKER["command"], *WORKER["args"]]
HEARTBEAT = "/tmp/heartbeat"


def probe(kind: str) -> list[str]:
    return WORKER[f"{kind}Probe"]["exec"]["command"]


def flag(name: str) -> float:
    return float(COMMAND[COMMAND.index(name) + 1])


def understood(model: type, document: dict) -> dict:
    """What the API of Kubernetes makes of *document*; what it does not know is not in it."""
    return msgspec.to_builtins(msgspec.convert(document, model))


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("Secret", core_v1.Secret),
        ("Deployment", apps_v1.Deployment),
        ("PodDisruptionBudget", policy_v1.PodDisruptionBudget),
    ],
)
def test_a_document_is_what_kubernetes_knows(kind, model):
    assert understood(model, DOCUMENTS[kind]) == DOCUMENTS[kind]


def test_what_kubernetes_does_not_know_would_be_seen():
    misspelt = deepcopy(DOCUMENTS["Deployment"])
    pod = misspelt["spec"]["template"]["spec"]
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")

    assert understood(apps_v1.Deployment, misspelt) != misspelt


def test_all_of_it_is_about_the_same_pods():
    labels = DEPLOYMENT["template"]["metadata"]["labels"]
    budget = DOCUMENTS["PodDisruptionBudget"]["spec"]

    assert DEPLOYMENT["selector"]["matchLabels"] == budget["selector"]["matchLabels"] == labels
    (source,) = WORKER["envFrom"]
    assert source["secretRef"]["name"] == DOCUMENTS["Secret"]["metadata"]["name"]


def test_the_grace_period_is_that_of_the_longest_task_and_a_lease():
    assert "--distlock-lease" not in COMMAND
    assert flag("--soft-time-limit") < flag("--time-limit")
    assert POD["terminationGracePeriodSeconds"] >= flag("--time-limit") + Settings().lease
    assert DEPLOYMENT["progressDeadlineSeconds"] > POD["terminationGracePeriodSeconds"]


def test_a_deploy_has_a_new_worker_before_an_old_one_goes():
    assert DEPLOYMENT["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert DEPLOYMENT["replicas"] > DOCUMENTS["PodDisruptionBudget"]["spec"]["maxUnavailable"]


def test_signals_reach_celery_which_warm_shutdown_is_left_to():
    assert COMMAND[0] == "celery"
    assert "REMAP_SIGTERM" not in MANIFEST.read_text()


def test_urls_are_in_the_secret_alone_under_the_names_that_the_app_reads():
    urls = DOCUMENTS["Secret"]["stringData"]
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', (EXAMPLES / "shop.py").read_text()))

    assert set(urls) | {each["name"] for each in WORKER["env"]} | {"SHOP_DB"} == read
    assert all("://" not in word for word in COMMAND)


class Shell:
    """Starts the manifest's commands as a container would, but for where things are."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.heartbeat = folder / "heartbeat"
        self._logs: dict[subprocess.Popen[bytes], Path] = {}

    def __call__(self, command: list[str]) -> subprocess.Popen[bytes]:
        words = [word.replace(HEARTBEAT, str(self.heartbeat)) for word in command]
        if words[0] == "celery":
            words = [sys.executable, "-m", *words]
        env = {"SHOP_BROKER": self.server.url, "SHOP_LOCKS": self.server.url}
        env["SHOP_HEARTBEAT"] = str(self.heartbeat)
        env["SHOP_DB"] = str(self.folder / "shop.sqlite")
        path = self.folder / f"{len(self._logs)}.log"
        with path.open("wb") as log:
            begun = subprocess.Popen(
                die_with_parent(words),
                cwd=EXAMPLES,
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
            )
        self._logs[begun] = path
        return begun

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return self._logs[process].read_text(errors="replace")

    def close(self) -> None:
        for process in self._logs:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._logs:
            process.wait(60)
            print(f"---- {self._logs[process]}", self.log(process)[-3000:], sep="\n")  # noqa: T201


@pytest.fixture
def shell(private_server, tmp_path):
    begun = Shell(private_server(options={"appendonly": "yes"}), tmp_path)
    yield begun
    begun.close()


@pytest.fixture
def passes(shell):
    return lambda kind: shell(probe(kind)).wait(60) == 0


@pytest.fixture
def worker(shell, passes):
    begun = shell(COMMAND)
    wait_until(lambda: passes("startup"), timeout=60.0)
    return begun


@pytest.fixture
def shop(shell, monkeypatch):
    """The books, and the orders that are not decided yet."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    books, make_orders = import_module("books"), import_module("make_orders")
    products, orders = make_orders.load()
    with closing(books.open_shop(shell.folder / "shop.sqlite", products, orders)) as db:
        yield db, orders


def test_readiness_is_that_there_can_be_locks(shell, passes):
    assert passes("readiness")

    shell.server.stop()

    assert not passes("readiness")


def test_a_busy_worker_is_alive_and_ends_its_tasks_when_its_pod_is_deleted(
    shell, shop, worker, passes
):
    db, orders = shop
    slots = int(flag("--concurrency"))
    db.execute("BEGIN EXCLUSIVE")  # a sale waits
    with Celery("client", broker=shell.server.url, set_as_current=False) as client:
        for order in orders[:slots]:
            arguments = (order.order_id, order.sku, order.quantity)
            client.send_task("shop.reserve_naive", arguments, ignore_result=True)
    wait_until(lambda: shell.log(worker).count(" received") == slots, timeout=30.0)
    beat = shell.heartbeat.stat().st_mtime_ns
    wait_until(lambda: shell.heartbeat.stat().st_mtime_ns > beat, timeout=30.0)
    assert passes("liveness")

    worker.terminate()
    wait_until(lambda: "Warm shutdown" in shell.log(worker), timeout=30.0)
    db.execute("COMMIT")

    assert worker.wait(60) == 0
    assert db.execute("SELECT count(*) FROM decisions").fetchone() == (slots,)


def test_a_suspended_worker_is_not_alive(shell, worker, passes):
    worker.send_signal(signal.SIGSTOP)
    long_ago = time.time() - 3600
    os.utime(shell.heartbeat, (long_ago, long_ago))

    assert not passes("liveness")

    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: passes("liveness"), timeout=30.0)
