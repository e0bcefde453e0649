"""The CPU time of processes, and of the server, in seconds."""

import os
from pathlib import Path

import redis

__all__ = ["children", "cpu_of", "server_cpu"]


def children(pid: int) -> list[int]:
    """Return the ids of the processes that *pid* has started."""
    found = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(each) for text in found for each in text.split()]


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_cpu(client: redis.Redis) -> float:
    facts = client.info("cpu")
    return float(facts["used_cpu_user"] + facts["used_cpu_sys"])
