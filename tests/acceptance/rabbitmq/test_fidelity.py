"""A task that had to wait arrives as it was sent, by RabbitMQ too."""

from __future__ import annotations

import pytest

from tests import fidelity

APP = "tests.apps.echoes"
ENV = {"C_FORCE_ROOT": "1"}  # Celery's leave to read pickles as root, as tests in a container are
WORKERS = [{"concurrency": 2}]


@pytest.mark.parametrize("way", ["channel", "broker"])
@pytest.mark.parametrize("parked_by", fidelity.PARK)
def test_a_task_that_was_parked_arrives_as_one_that_did_not_wait(site, parked_by, way):
    straight = fidelity.send_straight(site, plain=parked_by == "main process")
    parked = fidelity.PARK[parked_by](site, way)

    assert fidelity.table(site, straight, parked) == {}
    assert fidelity.came_by(site, parked) == (parked_by, way)


def test_a_task_that_was_sent_again_arrives_as_one_that_did_not_wait(site):
    straight = fidelity.send_straight(site, "echo_retry")
    again = fidelity.wait_for_a_key_of_ours(site, "retry", "echo_retry")

    assert fidelity.table(site, straight, again) == {}
