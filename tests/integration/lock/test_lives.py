"""Ten thousand lives of locks leave nothing behind; ``DISTLOCK_TEST_SEED`` chooses them."""

from __future__ import annotations

import os
import random

import pytest

from tests import servers
from tests.integration.lock.processes import Script
from tests.waiting import wait_until

LIVES = 10_000

SOURCE = """
from tests.integration.lock.lives import Lives
lives = Lives(store, *sys.argv[1:3], sys.argv[4])
report(**lives.left())
ask()
lives.live(int(sys.argv[3]))
report(**lives.seen)
while ask():
    report(**lives.left())
"""


@pytest.mark.timeout(300)
def test_ten_thousand_lives_of_locks_leave_nothing_behind(private_server):
    seed = os.environ.get("DISTLOCK_TEST_SEED") or f"{random.SystemRandom().randrange(10**9)}"
    print(f"DISTLOCK_TEST_SEED={seed}")  # noqa: T201
    server = private_server()
    with (
        server.client() as client,
        Script(SOURCE, server.url, "test", f"{LIVES}", seed) as script,
    ):
        before = script.received()
        connections = len(client.client_list())
        script.say()
        seen = script.received(timeout=240)
        assert {"conflict", "timeout", "loss", "_reenter", "_stay", "_lose", "_extend"} <= {*seen}
        # As many as threads wanted one at once, the watchdog's and the subscription's.
        assert len(client.client_list()) <= connections + 8 + 10

        def left():
            script.say()
            return script.received()

        # What runs in the background goes on for a moment.
        wait_until(lambda: left()["descriptors"] == before["descriptors"], what="open files")
        wait_until(lambda: len(client.client_list()) == connections, what="connections")
        wait_until(lambda: left()["holds"] == 0, what="the holds to be gone")
        after = left()
        assert after["watched"] == 0
        assert set(after["threads"]) - set(before["threads"]) <= {
            "distlock-releases",
            "distlock-counts",
            "distlock-notifications",
            "distlock-renewals",
            "distlock-watchdog",
        }
        assert len(after["threads"]) <= len(before["threads"]) + 4
        assert client.pubsub_channels() == []
        kept = {b"fence", b"done", b"counts"}
        wait_until(lambda: records(server.url) <= kept, what="the records")
        assert all(client.ttl(key) > 0 for key in servers.keys(server.url, "test"))


def records(url: str) -> set[bytes]:
    """The kinds of records that there are."""
    return {key.rpartition(b":")[2] for key in servers.keys(url, "")}
