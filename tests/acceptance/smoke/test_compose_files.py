"""What can be said of docker-compose.yml without Docker."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from celery_distlock.settings import Settings

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SMOKE = yaml.safe_load((ROOT / "tests/acceptance/smoke/suite/compose.yml").read_text())
SERVICES = COMPOSE["services"]
PINNED = re.compile(r"[a-z]+:\d+\.\d+\.\d+(-[a-z]+)+")
KNOWN = {  # of the compose specification, what these files use
    *("build", "command", "depends_on", "environment", "healthcheck", "hostname", "image", "ports"),
    *("profiles", "stop_grace_period", "volumes", "working_dir"),
}

each_service = pytest.mark.parametrize("name", SERVICES)


def test_there_are_the_servers_a_worker_and_the_demo():
    assert set(SERVICES) == {"redis", "rabbitmq", "worker", "demo"}
    assert set(SMOKE["services"]) <= set(SERVICES)


@pytest.mark.parametrize("services", [SERVICES, SMOKE["services"]], ids=["all", "smoke"])
def test_services_say_only_what_compose_knows(services):
    assert set().union(*services.values()) <= KNOWN


@each_service
def test_images_are_pinned_or_built_here(name):
    service = SERVICES[name]
    base = re.search(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)

    assert PINNED.fullmatch(base[1] if "build" in service else service["image"])


@each_service
def test_what_stays_up_has_a_health_check(name):
    service = SERVICES[name]

    assert "profiles" in service or service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}


@each_service
def test_a_service_waits_until_what_it_needs_is_healthy(name):
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[needed]


def test_the_worker_and_its_broker_are_as_the_documentation_advises():
    worker = SERVICES["worker"]

    assert int(worker["stop_grace_period"].removesuffix("s")) > 2 * Settings().lease
    assert "inspect" not in " ".join(worker["healthcheck"]["test"])
    assert SERVICES["rabbitmq"]["image"].startswith("rabbitmq:4.")


@each_service
def test_ports_are_published_on_loopback_alone(name):
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@each_service
def test_volumes_are_declared(name):
    mounted = {volume.partition(":")[0] for volume in SERVICES[name].get("volumes", [])}

    assert mounted <= set(COMPOSE["volumes"])


def test_every_command_in_the_worker_s_container_finds_the_locks_that_it_uses():
    worker = SERVICES["worker"]
    code = "import shop; print(shop.app.conf.distlock_url)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "examples",
        env={**os.environ, **worker["environment"]},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "--distlock" not in worker["command"]
    assert done.stdout == "redis://redis:6379/0\n"


def test_the_image_copies_what_is_there_and_not_ignored():
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    copied = {source for line in copies for source in shlex.split(line)}

    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_scripts_that_are_run_exist():
    words = shlex.split(SERVICES["demo"]["command"])

    assert (ROOT / "examples" / words[-1]).exists()
    assert (ROOT / "examples" / "shop.py").exists()
