"""A hundred thousand held keys are listed, and the server hardly notices."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
import redis

from tests.integration.cli.conftest import command, environment
from tests.workers import ROOT

KEYS = 100_000
LEASE_MS = 3_600_000
SLOW_MICROSECONDS = 100_000  # that a command takes on the average, on a busy machine too

FILL = """
for number = ARGV[2], ARGV[3] do
  local lock = ARGV[1] .. ':{key-' .. string.format('%06d', number) .. '}:lock'
  local owner = 'host|' .. number .. '|task[' .. number .. ']|x1'
  local grant = string.format('%s 0 -1 h 0 0 %d %s', ARGV[5], #owner, owner)
  redis.call('HSET', lock, 'x', grant, 'token', 1700000000000000 + number)
  redis.call('PEXPIRE', lock, ARGV[4])
end
"""


@pytest.fixture
def crowded(private_server, bare_site):
    """A server with that many held keys, whose counts of commands begin now."""
    server = private_server()
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        pipeline = client.pipeline(transaction=False)
        prefix = bare_site.app.conf.distlock_prefix
        ends_ms = int(1000 * time.time()) + LEASE_MS
        for first in range(0, KEYS, 1000):
            pipeline.eval(FILL, 0, prefix, first, first + 999, LEASE_MS, ends_ms)
        pipeline.execute()
        client.config_resetstat()
        yield server, client


def commands(client: redis.Redis) -> set[str]:
    """Which commands the server has run."""
    names = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    return {name.partition("|")[0] for name in names}


def test_all_of_very_many_keys_are_listed_without_a_slow_command(bare_site, crowded, locks):
    server, client = crowded

    done = locks("--url", server.url, "list", "--json")

    assert (done.returncode, done.stderr) == (0, "")
    listed = [json.loads(line)["key"] for line in done.stdout.splitlines()]
    assert sorted(listed) == [f"key-{number:06}" for number in range(KEYS)]
    assert "scan" in commands(client)
    assert not commands(client) & {"keys", "smembers", "hgetall"}
    costs = [stat["usec_per_call"] for stat in client.info("commandstats").values()]
    assert max(costs) < SLOW_MICROSECONDS


def test_the_longest_held_of_very_many_are_found(bare_site, crowded, locks):
    server, _ = crowded

    done = locks("--url", server.url, "list", "--json", "--sort", "age", "--limit", "3")

    tasks = [json.loads(line)["holder"]["task_id"] for line in done.stdout.splitlines()]
    assert tasks == ["0", "1", "2"]


def test_a_reader_of_one_line_of_very_many_waits_for_no_more(bare_site, crowded):
    server, client = crowded
    process = subprocess.Popen(
        command(bare_site, "--url", server.url, "list"),
        env=environment(bare_site),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process.stdout, process.stderr:
        assert process.stdout.readline().startswith("KEY\t")
        assert "key-" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    process.wait(60)

    looks = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert looks < KEYS / 2
